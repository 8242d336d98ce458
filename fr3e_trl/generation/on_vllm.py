"""Sampling with vLLM: a server, or an engine in this process."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..training.processes import through_main_process
from .sampler import Sample, SamplingRequest

if TYPE_CHECKING:
    from .vllm_sync import FR3EVLLMGeneration


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
        """
        What a request asks of vLLM.

        `generation_kwargs` add `stop_token_ids` to EOS; their `min_tokens` counts from the prompt, like that of a
        completion drawn at once. They override all else but what is the request's own, which is refused when the
        trainer is made.
        """
        settings = self.generation.generation_kwargs
        min_tokens = settings.get("min_tokens", 0) - request.num_sampled_before
        return {
            "top_p": self.generation.top_p,
            "top_k": self.generation.top_k,
            "min_p": self.generation.min_p or 0.0,
            "repetition_penalty": self.generation.repetition_penalty,
            **settings,
            "stop_token_ids": [*self.eos_token_ids, *settings.get("stop_token_ids", [])],
            "min_tokens": max(0, min(min_tokens, request.max_new_tokens)),  # vLLM refuses more than the budget
            "temperature": request.temperature,
            "n": request.num_samples,
            "max_tokens": request.max_new_tokens,
            "logprobs": 0,  # the sampled token's alone
        }


class VLLMServerSampler(VLLMSampler):
    """
    [`VLLMSampler`] that asks a server, from the main process, for the requests of all processes at once: the server
    batches them.

    Attributes:
        hit_rate (`float`, *optional*):
            Of the prefix tokens of the last call, each counted for every sample, how many the server had in its prefix
            cache. Other clients' requests at the same time count too. `None` if the server does not say, and in other
            processes.
    """

    hit_rate: float | None = None

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        return through_main_process(self.generation.accelerator, self._ask, requests)

    def _ask(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        server = self.generation.server
        assert server is not None
        payloads = [{**self.sampling_params(request), "prompt": request.prefix_ids.tolist()} for request in requests]
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

        prompts = [{"prompt_token_ids": request.prefix_ids.tolist()} for request in requests]
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
