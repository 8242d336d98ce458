"""How completions are drawn: one small interface, and the backends behind it."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .distributed import in_shares, on_main_process

if TYPE_CHECKING:
    from .vllm_sync import FR3EVLLMGeneration


@dataclass(frozen=True)
class SamplingRequest:
    """
    A prefix to be continued.

    Args:
        prefix_ids (`list[int]`):
            Token ids to continue: a prompt, or a prompt and the first tokens of a completion.
        num_samples (`int`):
            How many continuations to draw.
        max_new_tokens (`int`):
            Token budget of each of them. It is this request's own: requests of one call differ in it.
        temperature (`float`):
            Sampling temperature.
    """

    prefix_ids: list[int]
    num_samples: int
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True)
class Sample:
    """
    A continuation, without its prefix.

    Args:
        token_ids (`list[int]`):
            At least one token id, ending with EOS unless the budget ended it.
        logprobs (`list[float]`, *optional*):
            Log-probability of each token under the distribution that it was drawn from, where the backend has them.
    """

    token_ids: list[int]
    logprobs: list[float] | None = None


class Sampler(Protocol):
    """Draws continuations of prefixes."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        """
        Draw the continuations that `requests` ask for, all in flight together as far as the backend can.

        Returns:
            `list[list[Sample]]`: For each request, in order, its `num_samples` continuations.
        """
        ...


# Enters generation mode, as TRL does, and yields the model to generate with.
GenerationModel = Callable[[], AbstractContextManager[Any]]


class GenerateSampler:
    """
    Draws with transformers' `generate`: all requests of a temperature as one left-padded batch.

    Args:
        generation_model (`GenerationModel`):
            Context manager that yields the model.
        generation_config (`~transformers.GenerationConfig`):
            Sampling settings; temperature and budget are taken from the requests. Its `eos_token_id` must be a list.
    """

    def __init__(self, generation_model: GenerationModel, generation_config: GenerationConfig):
        self.generation_model = generation_model
        self.generation_config = generation_config

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        for temperature in dict.fromkeys(request.temperature for request in requests):
            rows = [
                i
                for i, request in enumerate(requests)
                for _ in range(request.num_samples)
                if request.temperature == temperature
            ]
            for i, token_ids in zip(rows, self._generate([requests[i] for i in rows], temperature), strict=True):
                samples[i].append(Sample(token_ids))
        return samples

    def _generate(self, rows: list[SamplingRequest], temperature: float) -> list[list[int]]:
        """One continuation for each row."""
        config = copy.deepcopy(self.generation_config)
        config.temperature = temperature
        budgets = torch.tensor([row.max_new_tokens for row in rows])
        config.max_new_tokens = int(budgets.max())
        width = max(len(row.prefix_ids) for row in rows)
        with self.generation_model() as model:
            input_ids = torch.tensor(
                [[config.pad_token_id] * (width - len(row.prefix_ids)) + row.prefix_ids for row in rows],
                device=model.device,
            )
            attention_mask = torch.tensor(
                [[0] * (width - len(row.prefix_ids)) + [1] * len(row.prefix_ids) for row in rows], device=model.device
            )
            output_ids = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([_RowBudgets(width + budgets.to(model.device))]),
            )
        new_ids = output_ids[:, width:].cpu()
        is_eos = torch.isin(new_ids, torch.tensor(config.eos_token_id))
        # A row ends with its first EOS, or where its budget does; what follows is padding.
        first_eos = torch.where(is_eos.any(1), is_eos.int().argmax(1), new_ids.shape[1])
        lengths = torch.minimum(first_eos + 1, budgets).tolist()
        return [ids[:length] for ids, length in zip(new_ids.tolist(), lengths, strict=True)]


class _RowBudgets(StoppingCriteria):
    """Stops each row of a batch at its own total length, `max_lengths` (B,)."""

    def __init__(self, max_lengths: torch.Tensor):
        self.max_lengths = max_lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.max_lengths


class ContinuousBatchingSampler:
    """
    Draws with transformers' continuous batching: every continuation enters the batch as soon as there is room.

    Args:
        generation_model (`GenerationModel`):
            Context manager that yields the model.
        generation_config (`~transformers.GenerationConfig`):
            Sampling settings; temperature and budget are taken from the requests.
        continuous_batching_config (`~transformers.generation.ContinuousBatchingConfig`):
            Settings of the engine.
    """

    def __init__(
        self, generation_model: GenerationModel, generation_config: GenerationConfig, continuous_batching_config: Any
    ):
        self.generation_model = generation_model
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        for temperature in dict.fromkeys(request.temperature for request in requests):
            config = copy.deepcopy(self.generation_config)
            config.temperature = temperature
            with (
                self.generation_model() as model,
                model.continuous_batching_context_manager(
                    generation_config=config, continuous_batching_config=self.continuous_batching_config, timeout=5
                ) as manager,
            ):
                pending = {
                    manager.add_request(request.prefix_ids, max_new_tokens=request.max_new_tokens): i
                    for i, request in enumerate(requests)
                    for _ in range(request.num_samples)
                    if request.temperature == temperature
                }
                while pending:
                    result = manager.get_result(timeout=1)
                    if result is None:
                        if not manager.is_running():
                            raise RuntimeError(
                                f"transformers' continuous batching stopped with {len(pending)} completions open. "
                                "Its error is in the log above; set use_transformers_continuous_batching=False to "
                                "generate without it."
                            )
                    elif result.error is not None:
                        raise RuntimeError(f"transformers' continuous batching failed on a request: {result.error}")
                    elif result.is_finished():
                        samples[pending.pop(result.request_id)].append(Sample(result.generated_tokens))
        return samples


class VLLMSampler:
    """
    Draws with vLLM: one request for each prefix, with a budget and a temperature of its own.

    Args:
        generation ([`FR3EVLLMGeneration`]):
            vLLM as TRL has set it up, and the sampling settings that requests do not bring.
        eos_token_ids (`list[int]`):
            Tokens that end a continuation.
        profiler (`Callable`):
            Gives a context manager, which the time of generation is spent in.
    """

    def __init__(
        self,
        generation: "FR3EVLLMGeneration",
        eos_token_ids: list[int],
        profiler: Callable[[], AbstractContextManager[Any]],
    ):
        self.generation = generation
        self.eos_token_ids = eos_token_ids
        self.profiler = profiler

    def sampling_params(self, request: SamplingRequest) -> dict[str, Any]:
        """What a request asks of vLLM. `generation_kwargs` may override all but what is the request's own."""
        return {
            "top_p": self.generation.top_p,
            "top_k": self.generation.top_k,
            "min_p": self.generation.min_p or 0.0,
            "repetition_penalty": self.generation.repetition_penalty,
            **self.generation.generation_kwargs,
            "stop_token_ids": self.eos_token_ids,
            "temperature": request.temperature,
            "n": request.num_samples,
            "max_tokens": request.max_new_tokens,
            "logprobs": 0,  # the sampled token's alone
        }


class VLLMServerSampler(VLLMSampler):
    """
    [`VLLMSampler`] that asks a server, from the main process, for all requests at once: the server batches them.

    Attributes:
        hit_rate (`float`, *optional*):
            Of the prefix tokens of the last call, each counted for every sample, how many the server had in its prefix
            cache. Other clients' requests at the same time count too. `None` if the server does not say, and in other
            processes.
    """

    hit_rate: float | None = None

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        return on_main_process(self.generation.accelerator, lambda: self._ask(requests))

    def _ask(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        server = self.generation.server
        assert server is not None
        payloads = [{**self.sampling_params(request), "prompt": request.prefix_ids} for request in requests]
        with self.profiler():
            queries_before, hits_before = server.prefix_cache_counters()
            responses = server.complete(payloads)
            queries, hits = server.prefix_cache_counters()
        # Counters begin anew when the server is restarted
        self.hit_rate = (hits - hits_before) / (queries - queries_before) if queries > queries_before else None
        return [
            [Sample(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in response["choices"]]
            for response in responses
        ]


class VLLMColocateSampler(VLLMSampler):
    """[`VLLMSampler`] that asks the engine in this process."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.prefix_ids} for request in requests]
        params = [SamplingParams(**self.sampling_params(request)) for request in requests]
        with self.profiler():
            outputs = self.generation.llm.generate(prompts, sampling_params=params, use_tqdm=False)
        return [
            [
                Sample(
                    list(sample.token_ids),
                    [of_token[i].logprob for i, of_token in zip(sample.token_ids, sample.logprobs, strict=True)],
                )
                for sample in output.outputs
            ]
            for output in outputs
        ]


class SharedSampler:
    """
    Shares requests, the same in every process, out between the samplers of all of them.

    The samples of one request may be drawn in several processes. What they cost is taken to be their budgets.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Knows the processes.
        sampler ([`Sampler`]):
            This process's.
        in_step (`bool`):
            Whether the samplers must draw equally many, see [`in_shares`].
    """

    def __init__(self, accelerator: Accelerator, sampler: Sampler, in_step: bool = False):
        self.accelerator = accelerator
        self.sampler = sampler
        self.in_step = in_step

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        # One temperature after the other, for every process to have some of each, if they are to keep in step
        for temperature in dict.fromkeys(request.temperature for request in requests):
            owners = [
                i
                for i, request in enumerate(requests)
                for _ in range(request.num_samples)
                if request.temperature == temperature
            ]
            costs = [requests[i].max_new_tokens for i in owners]
            draw = partial(self._draw, requests)
            for i, sample in zip(owners, in_shares(self.accelerator, draw, owners, costs, self.in_step), strict=True):
                samples[i].append(sample)
        return samples

    def _draw(self, requests: Sequence[SamplingRequest], owners: list[int]) -> list[Sample]:
        """One sample for each of `owners`, in order: indices of requests, those of one request together."""
        counts = Counter(owners)
        drawn = self.sampler.sample([replace(requests[i], num_samples=counts[i]) for i in counts])
        of_request = {i: iter(samples) for i, samples in zip(counts, drawn, strict=True)}
        return [next(of_request[i]) for i in owners]
