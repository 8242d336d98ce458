"""What a comparison found, and what is computed of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .statistics import interpolate, mean_height, pass_at_k

COSTS = {
    "generated_tokens": "generated tokens",
    "training_rows": "training rows",
    "forward_tokens": "forward tokens",
    "forward_backward_tokens": "forward and backward tokens",
    "seconds": "CPU (or GPU) seconds of training",
}

# What batches teach, see `sampled_states` and `batch_signal`
SIGNALS = {
    "all_right": "states all right",
    "all_wrong": "states all wrong",
    "signal": "rows with a signal",
    "rejected": "rows rejected",
    "advantage_mean": "advantages, mean",
    "advantage_std": "advantages, standard deviation",
}


@dataclass(frozen=True)
class Results:
    """
    All that a comparison found.

    Args:
        arguments (`dict[str, Any]`):
            Its arguments.
        command (`str`):
            The command that runs it.
        arms (`dict[str, dict[str, Any]]`):
            Settings of each arm as it was run, with prompts per batch and learning rate.
        runs (`list[dict[str, Any]]`):
            The runs.
        tuning (`list[dict[str, Any]]`):
            The runs by which learning rates were chosen.
    """

    arguments: dict[str, Any]
    command: str
    arms: dict[str, dict[str, Any]]
    runs: list[dict[str, Any]]
    tuning: list[dict[str, Any]]

    def of_arm(self, arm: str) -> list[dict[str, Any]]:
        """The runs of an arm, in the order of the seeds."""
        return [run for run in self.runs if run["arm"] == arm]


# Gives a number for a run
Measure = Callable[[dict[str, Any]], float]


def pass_rate(evaluation: dict[str, Any], k: int = 1) -> float:
    """Held-out pass@k of an evaluation, sampled at temperature 1."""
    n = evaluation["num_samples"]
    return sum(pass_at_k(n, c, k) for c in evaluation["num_right"]) / len(evaluation["num_right"])


def greedy_rate(evaluation: dict[str, Any]) -> float:
    """Held-out accuracy of the likeliest tokens."""
    return sum(evaluation["greedy_right"]) / len(evaluation["greedy_right"])


def curve(run: dict[str, Any], name: str) -> list[float]:
    """A cost, entropy or length along a run, at its evaluations."""
    return [evaluation[name] for evaluation in run["evaluations"]]


def accuracies(run: dict[str, Any]) -> list[float]:
    """Held-out pass@1 along a run, at its evaluations."""
    return [pass_rate(evaluation) for evaluation in run["evaluations"]]


def accuracy_at(run: dict[str, Any], cost: str, amount: float) -> float:
    """Held-out pass@1 when a run had spent so much, between evaluations on the line through them."""
    return interpolate(curve(run, cost), accuracies(run), amount)


def final(run: dict[str, Any]) -> float:
    """Held-out pass@1 at the end of the run's tokens."""
    return accuracy_at(run, "generated_tokens", run["generated_tokens"])


def mean_accuracy(run: dict[str, Any]) -> float:
    """Area under the curve of held-out pass@1 against generated tokens, as its mean height."""
    return mean_height(curve(run, "generated_tokens"), accuracies(run))
