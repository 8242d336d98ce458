"""Chains of very different lengths: what short and long completions get of anchors."""

import random
from dataclasses import dataclass

from .chain import ModularChain

MEDIAN, SPREAD, LEAST, MOST = 5, 0.8, 2, 24  # operations, and the standard deviation of the logarithm of their number


@dataclass(frozen=True)
class Lengths(ModularChain):
    """
    A [`ModularChain`] of 2 to 24 operations, five in the median, lognormal.

    A completion has 2 tokens for an operation and 3 for the answer: a third of them have fewer than 10, and a quarter
    more than 19.
    """

    name: str = "lengths"
    max_completion_length: int = 2 * MOST + 3
    policy_steps: int = 1600

    def num_operations(self, rng: random.Random) -> int:
        return min(max(round(MEDIAN * rng.lognormvariate(0, SPREAD)), LEAST), MOST)
