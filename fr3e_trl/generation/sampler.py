"""Wrappers for samplers: one validates a user's sampler, and one keeps several processes in step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from accelerate.utils import gather_object

from ..method.sampling import Sample, Sampler, SamplingRequest


class OwnSampler:
    """
    The sampler that was passed to the trainer, whose samples are validated.

    Args:
        sampler ([`Sampler`]):
            The user's sampler. It gets requests without `branching`.
        needs_logprobs (`bool`):
            Whether samples must have log-probs.

    [`sample`] raises a `ValueError` if the samples do not fit the requests.
    """

    def __init__(self, sampler: Sampler, needs_logprobs: bool):
        self.sampler = sampler
        self.needs_logprobs = needs_logprobs

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples = list(self.sampler.sample([replace(request, branching=None) for request in requests]))
        if len(samples) != len(requests):
            raise self._error(f"{len(samples)} lists of samples for {len(requests)} requests. It must return one each")
        for i, (request, request_samples) in enumerate(zip(requests, samples, strict=True)):
            if len(request_samples) != request.num_samples:
                raise self._error(
                    f"{len(request_samples)} samples for request {i}, whose num_samples={request.num_samples}"
                )
            for sample in request_samples:
                if problem := self._problem(request, sample):
                    raise self._error(f"a sample for request {i} that has {problem}")
        return samples

    def _problem(self, request: SamplingRequest, sample: Sample) -> str | None:
        num_tokens = len(sample.token_ids)
        if num_tokens == 0:
            return "no tokens. It must have at least one: EOS for a completion that ends at once"
        if num_tokens > request.max_new_tokens:
            return f"{num_tokens} tokens, more than the request's max_new_tokens={request.max_new_tokens}"
        for name in ("logprobs", "entropies"):
            values = getattr(sample, name)
            if values is not None and (len(values) != num_tokens or not np.isfinite(values).all()):
                return f"{len(values)} {name} for {num_tokens} tokens. It must have a finite value for each, or None"
        if sample.logprobs is None and sample.entropies is not None:
            return "entropies but no logprobs. Return both, or logprobs alone, or neither"
        if sample.logprobs is None and self.needs_logprobs:
            return (
                "no logprobs, which vLLM's importance sampling correction needs. Return them, or set "
                "vllm_importance_sampling_correction=False"
            )
        return None

    def _error(self, detail: str) -> ValueError:
        return ValueError(f"The sampler {type(self.sampler).__name__} returned {detail}.")


class InStepSampler:
    """
    Calls a sampler equally often in every process, for models whose sharded weights make each call a collective one.

    A process that has no request with some temperature samples a single token that is discarded.

    Args:
        sampler ([`Sampler`]):
            This process's sampler.
    """

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        for temperature in sorted(set(gather_object([request.temperature for request in requests]))):
            own = [i for i, request in enumerate(requests) if request.temperature == temperature]
            idle = SamplingRequest(np.zeros(1, np.int32), 1, 1, temperature)
            drawn = self.sampler.sample([replace(requests[i], branching=None) for i in own] or [idle])
            for i, request_samples in zip(own, drawn, strict=False):
                samples[i] = request_samples
        return samples
