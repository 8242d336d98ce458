"""How an arm comes by its learning rate, batch size and updates a batch: the best point of the grid that all have."""

import itertools
from typing import Any

# The axes of the grid: settings of an arm, and what is told to try for them
GRIDS = {"learning_rate": "learning_rates", "num_prompts": "tokens_per_batch", "num_iterations": "num_iterations"}
TUNED = tuple(GRIDS)

# Of the tuning seeds, as many run all points of a grid. Of some sixty points one seed chooses some that do badly with
# others: the best of many noisy means is the luckiest
SCREENING_SEEDS = 2


def grid(
    settings: dict[str, Any], learning_rates: list[float], num_prompts: list[int], num_iterations: list[int]
) -> list[dict[str, Any]]:
    """
    Settings of an arm with each combination of what it has not set itself, the lowest values first.

    Args:
        settings (`dict[str, Any]`):
            The arm's own settings. Of `learning_rate`, `num_prompts` and `num_iterations`, those that are there stay.
        learning_rates (`list[float]`), num_prompts (`list[int]`), num_iterations (`list[int]`):
            What to combine, each empty where there is nothing to try.
    """
    choices: tuple[list[Any], ...] = (learning_rates, num_prompts, num_iterations)
    axes = {
        name: sorted(set(values))
        for name, values in zip(TUNED, choices, strict=True)
        if values and name not in settings
    }
    return [settings | dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def ranked(points: list[dict[str, Any]], scores: list[tuple[dict[str, Any], float]]) -> list[dict[str, Any]]:
    """
    The points of a grid, the best first, and of two alike the one that came first.

    Args:
        points (`list[dict[str, Any]]`):
            Settings.
        scores (`list[tuple[dict[str, Any], float]]`):
            Settings of each run, and how good it was. The mean over the runs of a point decides.
    """

    def mean_score(point: dict[str, Any]) -> float:
        of_point = [score for settings, score in scores if settings == point]
        return sum(of_point) / len(of_point)

    return sorted(points, key=mean_score, reverse=True)
