"""
Samplers around others: one that was passed to the trainer, one that begins with tokens that another draws, and one that
keeps several processes in step.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from accelerate.utils import gather_object

from ..method.sampling import Sample, Sampler, SamplingRequest
from ..method.tree import as_ids


class OwnSampler:
    """
    A sampler that was passed to the trainer, whose samples are looked at before they are trained on.

    Args:
        sampler ([`Sampler`]):
            Draws. It gets requests without `branching`.
        needs_logprobs (`bool`):
            Whether samples must have log-probs.

    Attributes:
        draws_distinct (`bool`):
            Whether it says that it draws without replacement where it is asked to.

    Raises:
        ValueError: By [`sample`], what it returned is not what it was asked for.
    """

    def __init__(self, sampler: Sampler, needs_logprobs: bool):
        self.sampler = sampler
        self.needs_logprobs = needs_logprobs
        self.draws_distinct = bool(getattr(sampler, "draws_distinct", False))

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples = list(self.sampler.sample([replace(request, branching=None) for request in requests]))
        if len(samples) != len(requests):
            raise self._error(f"samples of {len(samples)} requests for {len(requests)}. It must return a list for each")
        for i, (request, of_request) in enumerate(zip(requests, samples, strict=True)):
            if len(of_request) != request.num_samples:
                raise self._error(f"{len(of_request)} samples for request {i}, whose num_samples={request.num_samples}")
            if self.draws_distinct and (obstacle := _repetition(request, of_request)):
                raise self._error(f"samples for request {i} that {obstacle}")
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


def _repetition(request: SamplingRequest, samples: Sequence[Sample]) -> str | None:
    """What is wrong with samples that are drawn without replacement, or independently where that cannot be."""
    with_chances = [sample for sample in samples if sample.chances is not None]
    if request.distinct_from is None or not with_chances:
        return None
    if len(with_chances) < len(samples):
        return "have chances in part. All of a request have them, or none"
    first = [request.distinct_from, *(int(sample.token_ids[0]) for sample in samples)]
    if len(set(first)) < len(first):
        return f"begin with {first[1:]}, and the base trajectory with {first[0]} (distinct_from). All must differ"
    if not all(0 < chance <= 1 for sample in samples for chance in sample.chances or ()):
        return f"have the chances {[sample.chances for sample in samples]}. They must be above 0, and 1 at most"
    return None


class DistinctSampler:
    """
    Draws without replacement by a sampler that does not: another one draws the first tokens, and it goes on with them.

    Args:
        sampler ([`Sampler`]):
            Goes on.
        first ([`Sampler`]):
            Draws the first tokens.
        eos_token_ids (`list[int]`):
            Tokens that end a continuation.
        batch_size (`int`):
            How many prefixes to draw first tokens for at a time.
    """

    draws_distinct = True

    def __init__(self, sampler: Sampler, first: Sampler, eos_token_ids: list[int], batch_size: int):
        self.sampler = sampler
        self.first = first
        self.eos_token_ids = eos_token_ids
        self.batch_size = batch_size

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        leaving = [i for i, request in enumerate(requests) if request.distinct_from is not None]
        begun = dict(zip(leaving, self._first_tokens([requests[i] for i in leaving]), strict=True))
        unfinished = [
            (i, k)
            for i, of_request in begun.items()
            for k, sample in enumerate(of_request)
            if requests[i].max_new_tokens > 1 and sample.token_ids[0] not in self.eos_token_ids
        ]
        others = [i for i in range(len(requests)) if i not in begun]
        drawn = self.sampler.sample(
            [requests[i] for i in others] + [_after(requests[i], begun[i][k]) for i, k in unfinished]
        )
        for (i, k), (rest,) in zip(unfinished, drawn[len(others) :], strict=True):
            first = begun[i][k]
            begun[i][k] = replace(first, token_ids=[*first.token_ids, *rest.token_ids])
        samples = begun | dict(zip(others, drawn, strict=False))
        return [samples[i] for i in range(len(requests))]

    def _first_tokens(self, requests: list[SamplingRequest]) -> list[list[Sample]]:
        """Samples of one token."""
        asked = [replace(request, max_new_tokens=1, branching=None) for request in requests]
        batches = [asked[start : start + self.batch_size] for start in range(0, len(asked), self.batch_size)]
        return [
            [Sample(list(sample.token_ids), chances=sample.chances) for sample in of_request]
            for batch in batches
            for of_request in self.first.sample(batch)
        ]


def _after(request: SamplingRequest, first: Sample) -> SamplingRequest:
    """Asks for what follows a first token."""
    return replace(
        request,
        prefix_ids=np.append(request.prefix_ids, as_ids(first.token_ids)),
        num_samples=1,
        max_new_tokens=request.max_new_tokens - 1,
        branching=None,
        distinct_from=None,
    )


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
        self.draws_distinct = bool(getattr(sampler, "draws_distinct", False))

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        for temperature in sorted(set(gather_object([request.temperature for request in requests]))):
            own = [i for i, request in enumerate(requests) if request.temperature == temperature]
            idle = SamplingRequest(np.zeros(1, np.int32), 1, 1, temperature)
            drawn = self.sampler.sample([replace(requests[i], branching=None) for i in own] or [idle])
            for i, of_request in zip(own, drawn, strict=False):
                samples[i] = of_request
        return samples
