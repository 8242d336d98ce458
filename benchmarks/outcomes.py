"""What a comparison found, and what is computed of a run."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fr3e_trl.commands.statistics import best_of_k

from .statistics import first_reached, interpolate, mean_height

COSTS = {
    "generated_tokens": "generated tokens",
    "tool_calls": "tool calls",
    "training_rows": "training rows",
    "forward_tokens": "forward tokens",  # of kept runs
    "forward_backward_tokens": "forward and backward tokens",
    "seconds": "CPU (or GPU) seconds of training",
}

# What ends a run when it has spent so much: arguments, and which of the costs each is of
BUDGETS = {"generated_tokens": "generated_tokens", "training_rows": "training_rows", "train_seconds": "seconds"}

# Axes of the grid in which all arms are tuned: settings of an arm, and the arguments that say what to try for them
GRIDS = {"learning_rate": "learning_rates", "num_prompts": "tokens_per_batch", "num_iterations": "num_iterations"}
TUNED = tuple(GRIDS)

# How far towards the best arm's end
SHARES = {"75%": 3 / 4, "90%": 9 / 10}

# A run has collapsed if its last pass@1 is under this share of its best, by more than the noise of an evaluation
COLLAPSED_SHARE, COLLAPSED_NOISE = 0.5, 0.03

# Of pass@1 between 0 and 1, in the files of `kept.py`
KEPT_ROUNDING = 1e-6

# What batches teach, see `sampled_prompts` and `batch_signal`
SIGNALS = {
    "reward": "reward from the prompt",
    "differing": "pairs of rows that differ",
    "signal": "rows with a signal",
    "rejected": "rows rejected",
    "advantage_mean": "advantages, mean",
    "advantage_std": "advantages, standard deviation",
}

# Those of which a kept run has the course
KEPT_COURSES = ("reward", "differing", "signal")


@dataclass(frozen=True)
class Results:
    """
    All that a comparison found: the settings of each arm as it was run, with what was tuned, and the runs. `screening`
    has runs of all points of the arms' grids with the first tuning seeds, and `tuning` runs of the best of them with
    all tuning seeds, by which settings were chosen. By `tokens_per_prompt` of each arm its batches were sized.
    """

    arguments: dict[str, Any]
    command: str
    arms: dict[str, dict[str, Any]]
    runs: list[dict[str, Any]]
    screening: list[dict[str, Any]]
    tuning: list[dict[str, Any]]
    tokens_per_prompt: dict[str, float] = field(default_factory=dict)

    @property
    def cost(self) -> str:
        """The cost that is equal for all arms."""
        return next(cost for name, cost in BUDGETS.items() if self.arguments.get(name) is not None)

    @property
    def amount(self) -> float:
        """How much of it each run spends."""
        return next(self.arguments[name] for name in BUDGETS if self.arguments.get(name) is not None)

    def runs_of(self, arm: str) -> list[dict[str, Any]]:
        """The runs of an arm, in the order of the seeds."""
        return [run for run in self.runs if run["arm"] == arm]

    def grid_of(self, arm: str) -> list[dict[str, Any]]:
        """Runs of all points of an arm's grid, with the first tuning seeds."""
        return [run for run in self.screening if run["arm"] == arm]

    def best_in_grid(self, arm: str, name: str, value: float) -> float:
        """The best of an arm's points where a setting has a value, by the mean over its runs; NaN if there is none."""
        means: dict[str, list[float]] = {}
        for run in self.grid_of(arm):
            if run["settings"].get(name, 1) == value:
                means.setdefault(str(run["settings"]), []).append(mean_accuracy(run))
        return max(map(fmean, means.values()), default=math.nan)

    def finalists_of(self, arm: str) -> list[dict[str, Any]]:
        """Runs of the best of them, with all tuning seeds."""
        return [run for run in self.tuning if run["arm"] == arm]

    def costs(self) -> dict[str, str]:
        """What the runs have spent, and what it is called: no tool calls where there are no tools."""
        ends = [run["evaluations"][-1] for run in self.runs]
        known = [name for name in COSTS if all(name in end for end in ends)]
        return {name: COSTS[name] for name in known if any(end[name] for end in ends)}

    def levels(self) -> dict[str, float]:
        """Levels of pass@1 by their names: shares of the way from the start to the best arm's end. NaN if all fell."""
        start = fmean([accuracies(run)[0] for run in self.runs])
        end = max(fmean([final(run) for run in self.runs_of(arm)]) for arm in self.arms)
        has_risen = end - start > 1e-6  # more than by rounding
        return {name: start + share * (end - start) if has_risen else math.nan for name, share in SHARES.items()}


# Of an evaluation: a number
EvaluationMeasure = Callable[[dict[str, Any]], float]


def pass_rate(evaluation: dict[str, Any], k: int = 1) -> float:
    """Held-out pass@k of an evaluation, sampled at temperature 1: the expected reward of the best of k samples."""
    return fmean([best_of_k(rewards, k) for rewards in evaluation["rewards"]])


def taught(run: dict[str, Any]) -> dict[str, Any]:
    """What the batches of a run taught: the mean of each measure, and its course in tenths, with the tokens so far."""
    if "taught" in run:
        return run["taught"]  # of a kept file
    means, courses = {}, {}
    for name in (name for name in SIGNALS if name in run["batches"][0]):
        batches = [batch for batch in run["batches"] if math.isfinite(batch[name])]
        size = max(1, len(batches) // 10)
        parts = [batches[start : start + size] for start in range(0, len(batches), size)]
        means[name] = fmean([batch[name] for batch in batches]) if batches else math.nan
        courses[name] = [
            [part[-1]["generated_tokens"] for part in parts],
            [fmean([batch[name] for batch in part]) for part in parts],
        ]
    return {"mean": means, "course": {name: courses[name] for name in KEPT_COURSES if name in courses}}


def curve(run: dict[str, Any], name: str) -> list[float]:
    """A cost, entropy or length along a run, at its evaluations."""
    return [evaluation[name] for evaluation in run["evaluations"]]


def told_apart(starts: Collection[float]) -> str:
    """A sentence where held-out pass@1 of runs before they trained is not the same: all begin with one policy."""
    if max(starts) - min(starts) < KEPT_ROUNDING:
        return ""
    return (
        f"Runs begin at pass@1 of {min(starts):.4f} to {max(starts):.4f}: machines or versions that round otherwise, "
        "a reward that varies, or another policy."
    )


def accuracies(run: dict[str, Any]) -> list[float]:
    """Held-out pass@1 along a run, at its evaluations."""
    return [pass_rate(evaluation) for evaluation in run["evaluations"]]


def value_at(run: dict[str, Any], measure: EvaluationMeasure, amount: float) -> float:
    """A measure of evaluations when a run had spent so much of its budget, on the line through those around."""
    return interpolate(curve(run, run["cost"]), list(map(measure, run["evaluations"])), amount)


def final(run: dict[str, Any]) -> float:
    """Held-out pass@1 at the end of the run's budget."""
    return value_at(run, pass_rate, run["amount"])


def mean_accuracy(run: dict[str, Any]) -> float:
    """Area under the curve of held-out pass@1 against what ends the run, as its mean height."""
    return mean_height(curve(run, run["cost"]), accuracies(run), run["amount"])


def reached(run: dict[str, Any], cost: str, level: float) -> float:
    """What a run had spent when its held-out pass@1 first reached a level, infinity if it never did."""
    return first_reached(curve(run, cost), accuracies(run), level)


def has_collapsed(run: dict[str, Any]) -> bool:
    """
    Whether the last pass@1 of a run is under half of its best, and not by noise. Where rewards may be below 0, halves
    are counted from the least.
    """
    best, last, least = max(accuracies(run)), accuracies(run)[-1], min(0.0, *accuracies(run))
    return last - least < COLLAPSED_SHARE * (best - least) and best - last > COLLAPSED_NOISE
