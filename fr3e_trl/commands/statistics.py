"""Estimates and their uncertainty, as functions of plain numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its 95% interval, which are NaN for a single value."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """
    Unbiased estimate of the expected highest reward of `k` samples, from the rewards of n ≥ k samples.

    Among the C(n, k) choices, the reward with i lower ones is the highest of C(i, k − 1). With rewards of 0 and 1 this
    is pass@k, 1 − C(n − c, k) / C(n, k) with c correct samples (arXiv 2107.03374, equation 1).
    """
    if k == 1:
        return fmean(rewards)
    if k > len(rewards):
        raise ValueError(f"pass@{k} cannot be estimated from {len(rewards)} samples: it needs at least k.")
    ordered = enumerate(sorted(rewards))
    return sum(math.comb(i, k - 1) * reward for i, reward in ordered) / math.comb(len(rewards), k)


def majority_of_k(answers: Sequence[tuple[int, float]], num_without: int, k: int) -> float:
    """
    Unbiased estimate of the expected reward of the majority answer of k samples, from n ≥ k samples.

    It is the exact mean over all C(n, k) choices. Answers that tie are equally likely to win. Samples without an answer
    are chosen like the others but do not vote, and the reward is 0 if no chosen sample votes.

    Args:
        answers (`Sequence[tuple[int, float]]`):
            For each different answer, how many samples gave it, and its reward.
        num_without (`int`):
            Samples without an answer.
        k (`int`):
            How many samples vote.
    """
    total = 0.0
    for i, (count, reward) in enumerate(answers):
        if reward == 0:
            continue
        others = [other for j, (other, _) in enumerate(answers) if j != i]
        for votes in range(1, min(count, k) + 1):
            for (used, tied), ways in _losing_choices(others, votes, k - votes).items():
                ways *= math.comb(count, votes) * math.comb(num_without, k - votes - used)
                total += reward * ways / (1 + tied)
    return total / math.comb(sum(count for count, _ in answers) + num_without, k)


def _losing_choices(counts: Sequence[int], most: int, k: int) -> dict[tuple[int, int], int]:
    """Ways to choose up to k samples, at most `most` per answer, by (samples chosen, answers chosen `most` times)."""
    choices = {(0, 0): 1}
    for count in counts:
        extended: dict[tuple[int, int], int] = {}
        for (used, tied), ways in choices.items():
            for drawn in range(min(count, most, k - used) + 1):
                key = used + drawn, tied + (drawn == most)
                extended[key] = extended.get(key, 0) + ways * math.comb(count, drawn)
        choices = extended
    return choices


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of independent values, at least two, and its interval by Student's t."""
    mean, half_width = fmean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half_width, mean + half_width)


def score_interval(share: float, ratio: float) -> Interval:
    """Wilson's interval of a share p. `ratio` is the squared half-width divided by p (1 − p): z² / n for n draws."""
    centre = (share + ratio / 2) / (1 + ratio)
    spread = math.sqrt(ratio * max(share * (1 - share), 0) + ratio**2 / 4) / (1 + ratio)
    return Interval(share, centre - spread, centre + spread)


def share_interval(values: Sequence[float]) -> Interval:
    """
    Mean of independent values between 0 and 1, at least two, and its interval.

    It is Wilson's, with the variance of the values plus a 0 and a 1, because a sample of almost equal values may have
    missed the few that differ.
    """
    more = [*values, 0.0, 1.0]
    middle, error = fmean(more), stdev(more) / math.sqrt(len(more))
    return score_interval(fmean(values), (t_quantile(len(more) - 1) * error) ** 2 / (middle * (1 - middle)))


def t_quantile(degrees: int) -> float:
    """
    The 97.5% quantile of Student's t distribution, for 95% intervals.

    With three degrees of freedom or more it is within 0.2% (Abramowitz and Stegun, 26.7.5, at z = 1.96).
    """
    if degrees < 3:
        return (12.706205, 4.302653)[degrees - 1]
    terms = (1.959964, 2.372271, 2.822499, 2.555852, 1.589536)
    return sum(term / degrees**i for i, term in enumerate(terms))
