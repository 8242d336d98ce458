"""
Makes the table and the chart of docs/results.md, which README shows a part of, from the runs beside it:

    python -m benchmarks.results.summary
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from fr3e_trl.commands.statistics import Interval

from ..estimates import arm_interval, difference, mean_rates, reward_bounds
from ..kept import read_kept
from ..outcomes import Results
from ..pooled import GRPO, best_of, means_of
from ..tables import Table, number
from .families import FAMILIES, RUNS, difference_text, further_runs, kept_families, short, speed_cells
from .language import SUMMARY

CHART = Path(__file__).parents[2] / "docs" / "assets" / "differences.png"

FR3E, SHIPPED, SHRUNK = "tree_4_tracker", "grpo_4_shipped", "prior_4"  # arms, as they are called in the runs

HEADER = [
    "task",
    "GRPO as TRL ships it",
    "GRPO, best variant",
    "GRPO with shrunk baselines",
    "FR3E (default)",
    "FR3E − GRPO as TRL ships it",
    "tokens to 75%",
    "FR3E − GRPO, best variant",
]

LANGUAGE = {
    "short_low": "short, accuracy .11 at the start",
    "short_low_again": "short, accuracy .09 at the start",
    "short": "short",
    "short_linear": "short, falling rate",
    "words": "words, on a GPU",
    "words_cpu": "words, smaller batches",
    "stocks": "stocks",
    "stocks_rows": "stocks, another policy",
    "stories": "stories",
}


def table(families: dict[str, Results], shipped: dict[str, Results]) -> Table:
    """
    Mean pass@1 along the run by arm, what FR3E is ahead, and the tokens it needs for 75% of the improvement.

    Args:
        families (`dict[str, Results]`):
            The comparisons of the nine tasks.
        shipped (`dict[str, Results]`):
            The same with [`SHIPPED`].
    """
    rows = []
    for name, results in families.items():
        best = best_grpo(name)
        arms = [(shipped[name], SHIPPED), *((results, arm) for arm in (best, SHRUNK, FR3E))]
        means = [short(number(arm_interval(of, arm, mean_rates, reward_bounds(of))).split(" ")[0]) for of, arm in arms]
        ahead = difference_text(difference(shipped[name], FR3E, SHIPPED))
        ahead_of_best = difference_text(difference(results, FR3E, best))
        rows.append([f"`{name}`", *means, ahead, tokens_cell(shipped[name]), ahead_of_best])
    return Table(HEADER, rows)


def best_grpo(name: str) -> str:
    return best_of(GRPO, means_of(RUNS / f"{name}.jsonl.gz"), name)


def tokens_cell(results: Results) -> str:
    """A ratio to GRPO's tokens, or how many runs came there where not all of both did."""
    cells = [speed_cells(results, arm, SHIPPED)[0] for arm in (FR3E, SHIPPED)]
    if "runs" not in cells[0]:
        return cells[0]
    return "{} of 10 runs, GRPO {}".format(*(cell.split(" ")[0] for cell in cells))


def differences(shipped: dict[str, Results]) -> list[tuple[str, list[tuple[str, Interval]]]]:
    """FR3E less GRPO in mean pass@1 along the run: generated tasks, then SmolLM2."""
    tasks = [(name, difference(results, FR3E, SHIPPED)) for name, results in shipped.items()]
    language = [
        (LANGUAGE[name], difference(read_kept(RUNS / f"{name}.jsonl.gz"), arm, other))
        for name, (_, arm, other) in SUMMARY.items()
    ]
    return [("generated tasks", tasks), ("SmolLM2-135M", language)]


def draw(groups: list[tuple[str, list[tuple[str, Interval]]]], path: Path) -> None:
    """Differences with their 95% intervals, one below another. It is narrow, so that a phone shows its letters."""
    figure, panels = pyplot.subplots(len(groups), 1, figsize=(5.6, 6.4), sharex=True, layout="constrained")
    for panel, (title, rows) in zip(panels, groups, strict=True):
        for place, (_, interval) in enumerate(reversed(rows)):
            color = "C1" if interval.low > 0 else "C3" if interval.high < 0 else "0.45"
            panel.plot(
                [interval.low, interval.high], [place, place], color=color, linewidth=2.5, solid_capstyle="round"
            )
            panel.plot(interval.mean, place, "o", color=color, markersize=6)
        panel.axvline(0, color="0.3", linewidth=1)
        panel.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
        panel.set_title(title, loc="left", fontsize=11)
        panel.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("mean pass@1 along training: FR3E − GRPO")
    figure.savefig(path, dpi=150)


def main() -> None:
    families, shipped = kept_families(), further_runs("shipped", FAMILIES)
    print(table(families, shipped).markdown())
    draw(differences(shipped), CHART)


if __name__ == "__main__":
    main()
