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

# Top log-probs per token from which entropies are estimated: a server's default limit
NUM_LOGPROBS = 20

# Tokens in each part of a streamed response, which is also the longest delay of a branch
STREAM_INTERVAL = 8


class Engine(Protocol):
    """
    vLLM as TRL sets it up; see `vllm_weights.py`.

    Attributes:
        accelerator ([`~accelerate.Accelerator`]):
            The accelerator of these processes.
        model (`nn.Module`):
            The policy.
        top_p, top_k, min_p, repetition_penalty, generation_kwargs:
            The sampling settings that are the same for all requests.
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
    Lower bounds of entropies, in nats, from the log-probs of the most likely tokens.

    Each unknown token has at most the probability of the least likely of the top `num_logprobs` tokens, and at most the
    remaining mass. The bound assumes that smaller value for all of them.

    Args:
        logprobs (`Iterable[Iterable[float]]`):
            The known log-probs at each of L positions, in any order, at least one: those of the most likely tokens, and
            possibly of the sampled token.
        num_logprobs (`int`):
            The number of most likely tokens that were requested.

    Returns:
        `np.ndarray` of shape (L,): Entropies.
    """
    rows = [list(token_logprobs) for token_logprobs in logprobs]
    num_known = np.fromiter(map(len, rows), np.intp, len(rows))
    columns = np.arange(num_known.max(initial=0))
    known = np.full((len(rows), len(columns)), -np.inf)
    known[columns < num_known[:, None]] = np.fromiter(chain.from_iterable(rows), np.float64, num_known.sum())
    known = -np.sort(-known, axis=1)
    probs = np.exp(known)
    rest = np.maximum(1 - probs.sum(1), 0)
    least = probs[np.arange(len(rows)), np.minimum(num_known, num_logprobs) - 1]
    bound = np.minimum(rest, least)
    with np.errstate(divide="ignore", invalid="ignore"):  # no remaining mass, or a token with probability 0
        rest_term = np.where(bound > 0, rest * np.log(bound), 0)
        return (-np.where(probs > 0, probs * known, 0).sum(1) - rest_term).astype(np.float32)


class RequestQueue:
    """
    Requests to vLLM, and the requests for branches that follow from its responses.

    Where a rule selects anchors, each base trajectory is a request of its own whose response is streamed, so that
    branches are requested while the base trajectory is still being generated.

    Args:
        requests (`Sequence[SamplingRequest]`):
            The requests to sample.
        draws_branches (`bool`):
            Whether to request branches too. This needs samples with entropies.

    Attributes:
        pending (`list[SamplingRequest]`):
            All requests to vLLM, in order. It grows as samples are added.
        samples (`list[list[Sample]]`):
            The samples of each of `requests`, complete once everything was added.
    """

    def __init__(self, requests: Sequence[SamplingRequest], draws_branches: bool):
        self.pending: list[SamplingRequest] = []
        self.samples: list[list[Sample]] = [[] for _ in requests]
        self.draws_branches = draws_branches
        self._callbacks: list[Callable[[list[Sample]], None]] = []
        for i, request in enumerate(requests):
            if self.is_streamed(request):
                assert request.branching is not None
                for share in request.branching.shares:
                    sample = Sample([], [], [])
                    self.samples[i].append(sample)
                    self._append(replace(request, num_samples=1), partial(self._extend, request, sample, share, []))
            else:
                self._append(request, partial(self._store, i, request))

    def is_streamed(self, request: SamplingRequest) -> bool:
        """Whether the samples of a request arrive in parts."""
        return self.draws_branches and request.rule is not None

    def add(self, i: int, samples: list[Sample]) -> list[SamplingRequest]:
        """Add the samples of request `i`, or the next part of a streamed one, and return the requests that follow."""
        num_pending = len(self.pending)
        self._callbacks[i](samples)
        return self.pending[num_pending:]

    def _append(self, request: SamplingRequest, callback: Callable[[list[Sample]], None]) -> None:
        self.pending.append(request)
        self._callbacks.append(callback)

    def _append_branch(self, request: SamplingRequest, sample: Sample, position: int) -> None:
        self._append(branch_request(request, sample, position), partial(sample.branches.__setitem__, position))

    def _store(self, i: int, request: SamplingRequest, samples: list[Sample]) -> None:
        self.samples[i] = samples
        if self.draws_branches:
            for sample, position in anchors_of(request, samples):
                self._append_branch(request, sample, position)

    def _extend(
        self, request: SamplingRequest, sample: Any, share: int, anchors: list[int], samples: list[Sample]
    ) -> None:
        """Extend a sample, whose values are lists, by its next part, and request branches at the anchors in that."""
        (part,) = samples
        assert request.rule is not None
        new_anchors = request.rule.new_anchors(part.entropies, len(sample.token_ids), share, anchors)
        sample.token_ids.extend(part.token_ids)
        sample.logprobs.extend(part.logprobs)
        sample.entropies.extend(part.entropies.tolist())
        for position in new_anchors:
            anchors.append(position)
            self._append_branch(request, sample, position)


class VLLMSampler:
    """
    Samples with vLLM: one request for each prefix, with its own budget and temperature.

    Args:
        generation ([`Engine`]):
            vLLM.
        eos_token_ids (`list[int]`):
            Tokens that end a continuation.
        profiler (`Callable`):
            Returns a context manager that measures the time of generation.
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
        vLLM's sampling parameters for a request.

        `generation_kwargs` override the trainer's settings, but not what each request sets itself, which the trainer
        refuses there. Their `min_tokens` counts from the end of the prompt, also for branches.
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
            # 0: only that of the sampled token
            "logprobs": NUM_LOGPROBS if request.with_entropies and self.gives_entropies else 0,
        }

    @property
    def samples_whole_policy(self) -> bool:
        """Whether tokens are sampled from the policy's whole distribution, to which the log-probs then belong."""
        generation = self.generation
        is_whole = generation.top_p == 1 and generation.top_k <= 0 and not generation.min_p
        is_plain = generation.repetition_penalty == 1 and generation.generation_kwargs.keys() <= {"stop_token_ids"}
        return is_whole and is_plain

    @property
    def gives_entropies(self) -> bool:
        """Whether entropies can be estimated from vLLM's log-probs."""
        return self.samples_whole_policy


class VLLMServerSampler(VLLMSampler):
    """
    [`VLLMSampler`] that sends the requests of all processes to a server together, from the main process.

    Attributes:
        hit_rate (`float`, *optional*):
            Share of the last call's prefix tokens, counted for every sample and branch, that were in the server's
            prefix cache. Includes simultaneous requests of other clients. `None` if the server has no such metric, and
            in other processes.
    """

    hit_rate: float | None = None

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        return through_main_process(self.generation.accelerator, self._ask, requests)

    @property
    def gives_entropies(self) -> bool:
        config = self._server.config["model_config"]
        is_processed = config["logprobs_mode"] == "processed_logprobs"
        return super().gives_entropies and is_processed and not 0 <= config["max_logprobs"] < NUM_LOGPROBS

    @property
    def _server(self) -> VLLMServer:
        assert self.generation.server is not None  # in the main process
        return self.generation.server

    def _ask(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        server = self._server.abortable()
        try:
            with self.profiler():
                return self._draw(requests, server)
        except BaseException:  # an interrupt leaves requests, and threads that wait for them
            server.abort()
            raise

    def _draw(self, requests: Sequence[SamplingRequest], server: VLLMServer) -> list[list[Sample]]:
        """Sample from a server. Several threads may call this, each with its own client."""
        if not requests:
            return []
        queue = RequestQueue(requests, draws_branches=self.gives_entropies)

        def payload(request: SamplingRequest) -> dict[str, Any]:
            return {
                **self.sampling_params(request),
                "prompt": request.prefix_ids.tolist(),
                "return_tokens_as_token_ids": True,  # different tokens may have the same text
                **({"stream": True, "stream_interval": STREAM_INTERVAL} if queue.is_streamed(request) else {}),
            }

        def read(i: int, response: dict[str, Any]) -> list[Sample]:
            return [self._sample(queue.pending[i], choice) for choice in response["choices"]]

        def follow(i: int, samples: list[Sample]) -> list[dict[str, Any]]:
            return [payload(request) for request in queue.add(i, samples)]

        queries_before, hits_before = server.prefix_cache_counters()
        server.complete([payload(request) for request in queue.pending], follow, read)
        queries, hits = server.prefix_cache_counters()
        # A restart of the server resets its counters
        self.hit_rate = (hits - hits_before) / (queries - queries_before) if queries > queries_before else None
        return [[_compact(sample) for sample in samples] for samples in queue.samples]

    def _sample(self, request: SamplingRequest, choice: dict[str, Any]) -> Sample:
        logprobs = choice["logprobs"]
        entropies = None
        if request.with_entropies and self.gives_entropies:
            entropies = entropies_of(by_token.values() for by_token in logprobs["top_logprobs"])
        return Sample(choice["token_ids"], logprobs["token_logprobs"], entropies)


class VLLMColocateSampler(VLLMSampler):
    """
    [`VLLMSampler`] with the engine in this process.

    With `vllm_tensor_parallel_size` above 1, the processes that share an engine run it together for the requests of
    all of them, as in TRL. This has not been tested on GPUs yet.
    """

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        if self.generation.tensor_parallel_size == 1:
            return self._ask(requests)
        # Without what other processes do not need to continue a prefix
        own = [replace(request, branching=None, dialogue=None) for request in requests]
        # All parts of the engine must sample the same tokens, so they share a seed. It comes from the random state of
        # the first process, which checkpoints store
        own_seed = [int(np.random.randint(2**31))]
        (seed,) = through_group(self.generation.tp_group, lambda seeds: [seeds[0]] * len(seeds), own_seed)
        with _seeded(seed):
            return through_group(self.generation.tp_group, self._ask_together, own)

    def _ask_together(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        if is_peft_model(self.generation.model):
            # As in TRL: NCCL must finish with an adapter's gradients before the engine's processes communicate
            accelerator = self.generation.accelerator
            devices = [accelerator.local_process_index] if accelerator.device.type == "cuda" else None
            torch.distributed.barrier(device_ids=devices)
        return self._ask(requests)

    def _ask(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        with self.profiler():
            return self._draw(requests) if requests else []

    def _draw(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        from vllm import SamplingParams

        prompts = [self._prompt(request) for request in requests]
        # Texts are not needed, and there would be one for each log-prob
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
            # The sampled token comes first, and a second time if it is one of the most likely
            entropies = entropies_of(
                logprobs[start + (token_ids[start] in token_ids[start + 1 : end]) : end] for start, end in bounds
            )
        return Sample(list(drawn.token_ids), [logprobs[start] for start, _ in bounds], entropies)

    def _prompt(self, request: SamplingRequest) -> dict[str, Any]:
        """A prefix and its images, as TRL passes them to the engine."""
        prompt: dict[str, Any] = {"prompt_token_ids": request.prefix_ids.tolist()}
        if request.multimodal is not None:
            images = images_of(request.multimodal)
            prompt["multi_modal_data"] = {"image": images if len(images) > 1 else images[0]}
        return prompt


def _compact(sample: Sample) -> Sample:
    """A sample with arrays, which take a quarter of the memory of lists, also when sent to other processes."""
    return replace(
        sample,
        token_ids=as_ids(sample.token_ids),
        logprobs=np.asarray(sample.logprobs, np.float32),
        entropies=None if sample.entropies is None else np.asarray(sample.entropies, np.float32),
        branches={position: list(map(_compact, samples)) for position, samples in sample.branches.items()},
    )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed NumPy and torch for this context, and restore their random states afterwards."""
    state = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(state)
