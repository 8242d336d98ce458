"""Means of arms and differences between them, with intervals over what was drawn: seeds, and held-out prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from fr3e_trl.commands.statistics import Interval

from .outcomes import Results, curve
from .statistics import (
    DIFFERENCE_OF_SHARES,
    SHARE,
    UNBOUNDED,
    Bounds,
    crossed_interval,
    interpolate,
    mean_height,
    mean_interval,
)

# Of a run: a number, or one for each held-out prompt, of shape (P,)
Measure = Callable[[dict[str, Any]], Any]

FEW_SEEDS = 5  # with fewer, an interval says little


def rates(evaluation: dict[str, Any], k: int = 1) -> np.ndarray:
    """Held-out pass@k of each prompt of an evaluation, (P,), see [`~fr3e_trl.commands.statistics.best_of_k`]."""
    rewards = np.sort(np.asarray(evaluation["rewards"], float), axis=1)
    n = rewards.shape[1]
    return rewards @ np.array([math.comb(i, k - 1) for i in range(n)], float) / math.comb(n, k)


def rates_at(run: dict[str, Any], cost: str, amount: float, k: int = 1) -> Any:
    """The same when a run had spent so much, between evaluations on the lines through them."""
    return interpolate(curve(run, cost), evaluated(run, partial(rates, k=k)), amount)


def final_rates(run: dict[str, Any], k: int = 1) -> Any:
    """The same at the end of a run's budget."""
    return rates_at(run, run["cost"], run["amount"], k)


def mean_rates(run: dict[str, Any]) -> Any:
    """Mean of pass@1 along a run, for each prompt: its area against what ends the run."""
    return mean_height(curve(run, run["cost"]), evaluated(run, rates), run["amount"])


def evaluated(run: dict[str, Any], measure: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """
    A measure at each evaluation of a run: of each prompt, or its mean over prompts if an evaluation left out some that
    had no score.
    """
    values = [measure(evaluation) for evaluation in run["evaluations"]]
    is_aligned = not any(evaluation.get("num_unscored", 0) for evaluation in run["evaluations"])
    return values if is_aligned else [float(np.mean(value)) for value in values]


def reward_bounds(results: Results) -> Bounds:
    """Between what rewards lie: 0 and 1, or anything."""
    rewards = [np.asarray(evaluation["rewards"], float) for run in results.runs for evaluation in run["evaluations"]]
    return SHARE if all(values.min() >= 0 and values.max() <= 1 for values in rewards) else UNBOUNDED


def interval_of(values: Sequence[Any], bounds: Bounds = UNBOUNDED) -> Interval:
    """Mean of a measure over runs and its interval. With a value for each prompt, (P,), prompts count as drawn too."""
    table = _by_prompts(values)
    if table is None:
        return mean_interval([float(np.mean(value)) for value in values], bounds)
    return crossed_interval(table, bounds)


def _by_prompts(values: Sequence[Any]) -> np.ndarray | None:
    """The measure of each prompt in each run, (N, P), if all runs have the same prompts."""
    shapes = {np.shape(value) for value in values}
    return np.stack(list(values)) if len(shapes) == 1 and shapes != {()} else None


def arm_interval(results: Results, arm: str, measure: Measure, bounds: Bounds = UNBOUNDED) -> Interval:
    """A measure of an arm."""
    return interval_of([measure(run) for run in results.runs_of(arm)], bounds)


def differences(results: Results, arm: str, reference: str) -> list[Any]:
    """By how much an arm's mean of pass@1 is above another's, seed by seed, and where it can be prompt by prompt."""
    pairs = [
        (mean_rates(run), mean_rates(other))
        for run, other in zip(results.runs_of(arm), results.runs_of(reference), strict=True)
    ]
    return [a - b if np.shape(a) == np.shape(b) else float(np.mean(a) - np.mean(b)) for a, b in pairs]


def difference(results: Results, arm: str, reference: str | None = None) -> Interval:
    """The mean of these differences. `reference` is that of the comparison if it is `None`."""
    is_share = reward_bounds(results) == SHARE
    values = differences(results, arm, reference or results.arguments["reference"])
    return interval_of(values, DIFFERENCE_OF_SHARES if is_share else UNBOUNDED)


@dataclass(frozen=True)
class Verdict:
    """
    Which arm is ahead: the one with the highest mean of pass@1 along the run. It is compared with the reference, or
    with the next best arm if it is the reference itself. The difference is leader minus other.
    """

    leader: str
    other: str
    difference: Interval

    @property
    def is_sure(self) -> bool:
        return self.difference.low > 0


def verdict_of(results: Results) -> Verdict | None:
    """The verdict of a comparison, `None` of one arm."""
    reference = results.arguments["reference"]
    means = {arm: fmean([float(np.mean(mean_rates(run))) for run in results.runs_of(arm)]) for arm in results.arms}
    ranking = sorted(means, key=lambda arm: -means[arm])
    if len(ranking) == 1:
        return None
    leader = ranking[0]
    other = reference if leader != reference else ranking[1]
    return Verdict(leader, other, difference(results, leader, other))


def few_seeds(results: Results) -> str:
    """A warning where there are too few seeds for a verdict."""
    seeds = len(results.arguments["seeds"])
    if seeds == 1:
        return "Warning: one seed says nothing of how runs differ. Take three to begin with, and five for a verdict."
    return f"Warning: {seeds} seeds are few. Take five for a verdict." if seeds < FEW_SEEDS else ""
