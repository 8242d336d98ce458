"""Samplers around others: one that was passed to the trainer, and one that keeps several processes in step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from accelerate.utils import gather_object

from ..method.sampling import Sample, Sampler, SamplingRequest


class OwnSampler:
    """
    A sampler that was passed to the trainer, whose samples are looked at before they are trained on.

    Args:
        sampler ([`Sampler`]):
            Draws. It gets requests without `branching`.
        needs_logprobs (`bool`):
            Whether samples must have log-probs.

    Raises:
        ValueError: By [`sample`], what it returned is not what it was asked for.
    """

    def __init__(self, sampler: Sampler, needs_logprobs: bool):
        self.sampler = sampler
        self.needs_logprobs = needs_logprobs

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples = list(self.sampler.sample([replace(request, branching=None) for request in requests]))
        if len(samples) != len(requests):
            raise self._error(f"samples of {len(samples)} requests for {len(requests)}. It must return a list for each")
        for i, (request, of_request) in enumerate(zip(requests, samples, strict=True)):
            if len(of_request) != request.num_samples:
                raise self._error(f"{len(of_request)} samples for request {i}, whose num_samples={request.num_samples}")
            for sample in of_request:
                if obstacle := self._obstacle(request, sample):
                    raise self._error(f"a sample for request {i} that has {obstacle}")
        return samples

    def _obstacle(self, request: SamplingRequest, sample: Sample) -> str | None:
        """What is wrong with a sample."""
        num_tokens = len(sample.token_ids)
        if num_tokens == 0:
            return "no tokens. At least one must be drawn, EOS for a completion that is to end at once"
        if num_tokens > request.max_new_tokens:
            return f"{num_tokens} tokens, and the request's max_new_tokens={request.max_new_tokens}"
        for name in ("logprobs", "entropies"):
            values = getattr(sample, name)
            if values is not None and (len(values) != num_tokens or not np.isfinite(values).all()):
                return f"{len(values)} {name} for {num_tokens} tokens. There must be a finite one for each, or None"
        if sample.logprobs is None and sample.entropies is not None:
            return "entropies and no logprobs. Give both, or logprobs alone, or neither"
        if sample.logprobs is None and self.needs_logprobs:
            return (
                "no logprobs, which vLLM's correction compares with the policy's. Give them, or set "
                "vllm_importance_sampling_correction=False"
            )
        return None

    def _error(self, what: str) -> ValueError:
        return ValueError(f"The sampler {type(self.sampler).__name__} returned {what}.")


class InStepSampler:
    """
    Has every process call a sampler equally often, as it must where calling it is a collective call.

    A model whose weights are sharded runs in all processes together. One without a request of some temperature draws a
    token that nobody needs.

    Args:
        sampler ([`Sampler`]):
            This process's.
    """

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        for temperature in sorted(set(gather_object([request.temperature for request in requests]))):
            own = [i for i, request in enumerate(requests) if request.temperature == temperature]
            idle = SamplingRequest(np.zeros(1, np.int32), 1, 1, temperature)
            drawn = self.sampler.sample([replace(requests[i], branching=None) for i in own] or [idle])
            for i, of_request in zip(own, drawn, strict=False):
                samples[i] = of_request
        return samples
