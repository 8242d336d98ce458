"""How completions are drawn: what is asked of a sampler, and how several processes share it out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from accelerate import Accelerator

from ..training.processes import in_shares


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
        num_prompt_tokens (`int`, *optional*):
            How many of `prefix_ids` are the prompt: the rest was sampled before. If `None`, all of them are.
    """

    prefix_ids: list[int]
    num_samples: int
    max_new_tokens: int
    temperature: float
    num_prompt_tokens: int | None = None

    @property
    def num_sampled_before(self) -> int:
        """How many of `prefix_ids` are a completion's first tokens."""
        return 0 if self.num_prompt_tokens is None else len(self.prefix_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class Sample:
    """
    A continuation, without its prefix.

    Args:
        token_ids (`Sequence[int]` or `np.ndarray`):
            At least one token id, ending with EOS unless the budget ended it.
        logprobs (`list[float]`, *optional*):
            Log-probability of each token under the distribution that it was drawn from, where the backend has them.
    """

    token_ids: Sequence[int] | np.ndarray
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
