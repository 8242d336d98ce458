"""Sampling with vLLM: a server, or an engine in this process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import nn

from ..method.sampling import Sample, SamplingRequest, anchors_of, branch_request, images_of
from ..method.tree import as_ids
from ..processes import through_group, through_main_process
from .vllm_server import VLLMServer

# Log-probs of a token's distribution that entropies are made of: as many as a server gives by default
NUM_LOGPROBS = 20

# Tokens of each part of a response that is streamed: a branch waits for so many at most
STREAM_INTERVAL = 8


class Engine(Protocol):
    """
    vLLM as TRL has set it up; see `vllm_weights.py`.

    Attributes:
        accelerator ([`~accelerate.Accelerator`]):
            Knows the processes.
        model (`nn.Module`):
            The policy.
        top_p, top_k, min_p, repetition_penalty, generation_kwargs:
            The sampling settings that requests do not bring.
        server ([`VLLMServer`], *optional*):
            The server, in the main process in server mode.
        llm (`vllm.LLM`):
            The engine in this process, in colocate mode.
        tensor_parallel_size (`int`), tp_group (`ProcessGroup`):
            The processes that share an engine.
    """

    accelerator: Accelerator
    model: nn.Module
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    generation_kwargs: dict[str, Any]
    server: VLLMServer | None
    llm: Any
    tensor_parallel_size: int
    tp_group: Any


def entropies_of(logprobs: Iterable[Iterable[float]], num_logprobs: int = NUM_LOGPROBS) -> np.ndarray:
    """
    Entropies of distributions, in nats, by their most likely tokens' log-probs: no more than they are.

    Each of the other tokens is as likely as the least likely of the first `num_logprobs`, or as all others together, at
    most. That is what the others are taken for. One more may be known: the one that was sampled.

    Args:
        logprobs (`Iterable[Iterable[float]]`):
            Of each of L tokens, the log-probs that are known of its distribution, in any order, at least one.
        num_logprobs (`int`):
            How many of the most likely tokens were asked for.

    Returns:
        `np.ndarray` of shape (L,): Entropies.
    """
    rows = [list(of_token) for of_token in logprobs]
    num_known = np.fromiter(map(len, rows), np.intp, len(rows))
    columns = np.arange(num_known.max(initial=0))
    known = np.full((len(rows), len(columns)), -np.inf)
    known[columns < num_known[:, None]] = np.fromiter(chain.from_iterable(rows), np.float64, num_known.sum())
    known = -np.sort(-known, axis=1)
    probs = np.exp(known)
    rest = np.maximum(1 - probs.sum(1), 0)
    least = probs[np.arange(len(rows)), np.minimum(num_known, num_logprobs) - 1]
    bound = np.minimum(rest, least)
    with np.errstate(divide="ignore", invalid="ignore"):  # where nothing is left, or a token has no probability
        of_rest = np.where(bound > 0, rest * np.log(bound), 0)
        return (-np.where(probs > 0, probs * known, 0).sum(1) - of_rest).astype(np.float32)


class RequestQueue:
    """
    What is asked of vLLM for some requests, and the branches that follow from its answers.

    Where a rule decides anchors, base trajectories are asked for one by one, and answered part by part: a branch leaves
    while its base trajectory grows.

    Args:
        requests (`Sequence[SamplingRequest]`):
            What samples are wanted of.
        draws_branches (`bool`):
            Whether branches are drawn with the samples that they leave, of which entropies are known then.

    Attributes:
        asked (`list[SamplingRequest]`):
            What is to be asked for, in order.
        samples (`list[list[Sample]]`):
            Those of each request, once all is answered.
    """

    def __init__(self, requests: Sequence[SamplingRequest], draws_branches: bool):
        self.asked: list[SamplingRequest] = []
        self.samples: list[list[Sample]] = [[] for _ in requests]
        self.draws_branches = draws_branches
        self._takers: list[Callable[[list[Sample]], None]] = []
        for i, request in enumerate(requests):
            if self.is_growing(request):
                self._ask_growing(i, request)
            else:
                self._ask(request, partial(self._take, i, request))

    def is_growing(self, request: SamplingRequest) -> bool:
        """Whether a request's samples are told part by part."""
        return self.draws_branches and request.rule is not None

    def answer(self, i: int, samples: list[Sample]) -> list[SamplingRequest]:
        """
        Take the samples of what was asked as number `i`, or further tokens of the one that grows, and return what is to
        be asked then.
        """
        num_asked = len(self.asked)
        self._takers[i](samples)
        return self.asked[num_asked:]

    def _ask(self, request: SamplingRequest, take: Callable[[list[Sample]], None]) -> None:
        self.asked.append(request)
        self._takers.append(take)

    def _take(self, i: int, request: SamplingRequest, samples: list[Sample]) -> None:
        self.samples[i] = samples
        if self.draws_branches:
            for sample, position in anchors_of(request, samples):
                self._ask(branch_request(request, sample, position), partial(sample.branches.__setitem__, position))

    def _ask_growing(self, i: int, request: SamplingRequest) -> None:
        """Ask for the samples of a request one by one. What is drawn of them is added to them as it comes."""
        assert request.branching is not None
        for share in request.branching.shares:
            sample = Sample([], [], [])
            self.samples[i].append(sample)
            self._ask(replace(request, num_samples=1), partial(self._grow, request, sample, share, []))

    def _grow(
        self, request: SamplingRequest, sample: Any, share: int, anchors: list[int], samples: list[Sample]
    ) -> None:
        """Take further tokens of a sample, whose values are lists, and ask for branches at the anchors among them."""
        (part,) = samples
        assert request.rule is not None
        found = request.rule.new_anchors(part.entropies, len(sample.token_ids), share, anchors)
        sample.token_ids.extend(part.token_ids)
        sample.logprobs.extend(part.logprobs)
        sample.entropies.extend(part.entropies.tolist())
        for position in found:
            anchors.append(position)
            further = branch_request(request, sample, position)
            self._ask(further, partial(sample.branches.__setitem__, position))


class VLLMSampler:
    """
    Draws with vLLM: one request for each prefix, with a budget and a temperature of its own.

    Args:
        generation ([`Engine`]):
            vLLM.
        eos_token_ids (`list[int]`):
            Tokens that end a continuation.
        profiler (`Callable`):
            Gives a context manager, which the time of generation is spent in.
    """

    def __init__(
        self,
        generation: Engine,
        eos_token_ids: list[int],
        profiler: Callable[[], AbstractContextManager[Any]],
    ):
        self.generation = generation
        self.eos_token_ids = eos_token_ids
        self.profiler = profiler

    def sampling_params(self, request: SamplingRequest) -> dict[str, Any]:
        """
        What a request asks of vLLM.

        The `min_tokens` of `generation_kwargs` counts from the prompt, like that of a completion drawn at once. They
        override all else but the ends and what is the request's own, which is refused when the trainer is made.
        """
        settings = self.generation.generation_kwargs
        min_tokens = settings.get("min_tokens", 0) - request.num_sampled_before
        return {
            "top_p": self.generation.top_p,
            "top_k": self.generation.top_k,
            "min_p": self.generation.min_p or 0.0,
            "repetition_penalty": self.generation.repetition_penalty,
            **settings,
            "stop_token_ids": self.eos_token_ids,
            "min_tokens": max(0, min(min_tokens, request.max_new_tokens)),  # vLLM refuses more than the budget
            "temperature": request.temperature,
            "n": request.num_samples,
            "max_tokens": request.max_new_tokens,
            # 0: the sampled token's alone
            "logprobs": NUM_LOGPROBS if request.with_entropies and self.gives_entropies else 0,
        }

    @property
    def draws_of_policy(self) -> bool:
        """Whether tokens are drawn from the policy's whole distribution, and log-probs are of it."""
        generation = self.generation
        is_whole = generation.top_p == 1 and generation.top_k <= 0 and not generation.min_p
        is_plain = generation.repetition_penalty == 1 and generation.generation_kwargs.keys() <= {"stop_token_ids"}
        return is_whole and is_plain

    @property
    def gives_entropies(self) -> bool:
        """Whether entropies can be made of vLLM's log-probs."""
        return self.draws_of_policy


class VLLMServerSampler(VLLMSampler):
    """
    [`VLLMSampler`] that asks a server, from the main process, for the requests of all processes at once: the server
    batches them.

    Attributes:
        hit_rate (`float`, *optional*):
            Of the prefix tokens of the last call, each counted for every sample, how many the server had in its prefix
            cache, those of branches included. Other clients' requests at the same time count too. `None` if the server
            does not say, and in other processes.
    """

    hit_rate: float | None = None

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        return through_main_process(self.generation.accelerator, self._ask, requests)

    @property
    def gives_entropies(self) -> bool:
        config = self._server.config["model_config"]
        are_of_draws = config["logprobs_mode"] == "processed_logprobs"
        return super().gives_entropies and are_of_draws and not 0 <= config["max_logprobs"] < NUM_LOGPROBS

    @property
    def _server(self) -> VLLMServer:
        assert self.generation.server is not None  # the main process has it
        return self.generation.server

    def _ask(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        with self.profiler():
            return self._draw(requests, self._server)

    def _draw(self, requests: Sequence[SamplingRequest], server: VLLMServer) -> list[list[Sample]]:
        """Draw from a server. Several threads may, each with a client of its own."""
        if not requests:
            return []
        queue = RequestQueue(requests, draws_branches=self.gives_entropies)

        def payload(request: SamplingRequest) -> dict[str, Any]:
            return {
                **self.sampling_params(request),
                "prompt": request.prefix_ids.tolist(),
                "return_tokens_as_token_ids": True,  # two tokens may have one text
                **({"stream": True, "stream_interval": STREAM_INTERVAL} if queue.is_growing(request) else {}),
            }

        def read(i: int, response: dict[str, Any]) -> list[Sample]:
            return [self._sample(queue.asked[i], choice) for choice in response["choices"]]

        def follow(i: int, samples: list[Sample]) -> list[dict[str, Any]]:
            """Go on with what follows from the samples of a request."""
            return [payload(request) for request in queue.answer(i, samples)]

        queries_before, hits_before = server.prefix_cache_counters()
        server.complete([payload(request) for request in queue.asked], follow, read)
        queries, hits = server.prefix_cache_counters()
        # Counters begin anew when the server is restarted
        self.hit_rate = (hits - hits_before) / (queries - queries_before) if queries > queries_before else None
        return [[_compact(sample) for sample in samples] for samples in queue.samples]

    def _sample(self, request: SamplingRequest, choice: dict[str, Any]) -> Sample:
        logprobs = choice["logprobs"]
        entropies = None
        if request.with_entropies and self.gives_entropies:
            entropies = entropies_of(of_token.values() for of_token in logprobs["top_logprobs"])
        return Sample(choice["token_ids"], logprobs["token_logprobs"], entropies)


class VLLMColocateSampler(VLLMSampler):
    """
    [`VLLMSampler`] that asks the engine in this process.

    An engine that is shared out over several processes (`vllm_tensor_parallel_size`) runs in all of them together, for
    the requests of all, as by TRL. That has not been run on GPUs yet.
    """

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        if self.generation.tensor_parallel_size == 1:
            return self._ask(requests)
        # What is not needed to continue a prefix does not travel
        own = [replace(request, branching=None, dialogue=None) for request in requests]
        # Parts of the engine draw by the random numbers of their processes, and must draw the same token. The seed is
        # by those of the first process, which a checkpoint keeps
        drawn = [int(np.random.randint(2**31))]
        (seed,) = through_group(self.generation.tp_group, lambda seeds: [seeds[0]] * len(seeds), drawn)
        with _seeded(seed):
            return through_group(self.generation.tp_group, self._ask_together, own)

    def _ask_together(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        if is_peft_model(self.generation.model):
            # As TRL does: NCCL must be through with an adapter's gradients before the engine's processes talk
            accelerator = self.generation.accelerator
            devices = [accelerator.local_process_index] if accelerator.device.type == "cuda" else None
            torch.distributed.barrier(device_ids=devices)
        return self._ask(requests)

    def _ask(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        queue = RequestQueue(requests, draws_branches=False)
        num_answered = 0
        with self.profiler():
            while num_answered < len(queue.asked):
                asked = queue.asked[num_answered:]
                for i, samples in enumerate(self._draw(asked), num_answered):
                    queue.answer(i, samples)
                num_answered += len(asked)
        return queue.samples

    def _draw(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        """The samples of requests that are asked for as they are."""
        from vllm import SamplingParams

        prompts = [self._prompt(request) for request in requests]
        # Nobody reads its texts, of which each of the log-probs asked for would have one
        own = {"detokenize": False, "flat_logprobs": True}
        params = [SamplingParams(**self.sampling_params(request) | own) for request in requests]
        outputs = self.generation.llm.generate(prompts, sampling_params=params, use_tqdm=False)
        return [
            [self._sample(request, drawn) for drawn in output.outputs]
            for request, output in zip(requests, outputs, strict=True)
        ]

    def _sample(self, request: SamplingRequest, drawn: Any) -> Sample:
        token_ids, logprobs = drawn.logprobs.token_ids, drawn.logprobs.logprobs
        bounds = list(zip(drawn.logprobs.start_indices, drawn.logprobs.end_indices, strict=True))
        entropies = None
        if request.with_entropies and self.gives_entropies:
            # The token that was drawn comes first, and again if it is one of the most likely
            entropies = entropies_of(
                logprobs[start + (token_ids[start] in token_ids[start + 1 : end]) : end] for start, end in bounds
            )
        return Sample(list(drawn.token_ids), [logprobs[start] for start, _ in bounds], entropies)

    def _prompt(self, request: SamplingRequest) -> dict[str, Any]:
        """A prefix and its images, as TRL hands them to the engine."""
        prompt: dict[str, Any] = {"prompt_token_ids": request.prefix_ids.tolist()}
        if request.multimodal is not None:
            images = images_of(request.multimodal)
            prompt["multi_modal_data"] = {"image": images if len(images) > 1 else images[0]}
        return prompt


def _compact(sample: Sample) -> Sample:
    """A sample in arrays, a quarter of what lists take in memory, and on their way to other processes."""
    return replace(
        sample,
        token_ids=as_ids(sample.token_ids),
        logprobs=np.asarray(sample.logprobs, np.float32),
        entropies=None if sample.entropies is None else np.asarray(sample.entropies, np.float32),
        branches={position: list(map(_compact, samples)) for position, samples in sample.branches.items()},
    )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw by this seed, and put back the random numbers of NumPy and torch."""
    state = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(state)
