"""The figures of a comparison."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from .results import COSTS, SIGNALS, Results, accuracies, curve
from .statistics import interpolate, mean_interval

NUM_POINTS = 41  # along a curve


def plot_all(results: Results, output_dir: Path) -> dict[str, str]:
    """
    Draw the figures into `output_dir`.

    Lines are means over seeds, and bands their 95% intervals.

    Returns:
        `dict[str, str]`: File names by the figures' titles.
    """
    accuracy_panels = {
        name: {arm: [(curve(run, cost), accuracies(run)) for run in results.of_arm(arm)] for arm in results.arms}
        for cost, name in COSTS.items()
    }
    policy_panels = {
        name: {
            arm: [(curve(run, "generated_tokens"), curve(run, key)) for run in results.of_arm(arm)]
            for arm in results.arms
        }
        for key, name in (("entropy", "policy entropy, nats"), ("completion_length", "completion length, tokens"))
    }
    batch_panels = {
        name: {arm: [_smoothed(run, key) for run in results.of_arm(arm)] for arm in results.arms}
        for key, name in SIGNALS.items()
    }
    return {
        "Held-out pass@1": _draw(output_dir / "accuracy.png", accuracy_panels, y="held-out pass@1"),
        "Policy": _draw(output_dir / "policy.png", policy_panels, x="generated tokens"),
        "Batches": _draw(output_dir / "batches.png", batch_panels, x="generated tokens"),
    }


# The points of the curve of a run: x and y
Points = tuple[list[float], list[float]]


def _smoothed(run: dict[str, Any], name: str) -> Points:
    """A measure of the batches of a run, as means over a tenth of them."""
    batches = run["batches"]
    size = max(1, len(batches) // 10)
    parts = [batches[start : start + size] for start in range(0, len(batches), size)]
    return (
        [part[-1]["generated_tokens"] for part in parts],
        [sum(batch[name] for batch in part) / len(part) for part in parts],
    )


def _draw(path: Path, panels: dict[str, dict[str, list[Points]]], x: str = "", y: str = "") -> str:
    """Draw panels beside each other, each named on the axis that is not given."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    colours = pyplot.get_cmap("tab10" if len(next(iter(panels.values()))) <= 10 else "tab20")
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.8 * rows), squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (name, arms) in zip(axes.flat, panels.items(), strict=False):
        for number, (arm, curves) in enumerate(arms.items()):
            _draw_arm(panel, arm, curves, colours(number % colours.N))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
        panel.set_xlabel(x or name)
        panel.set_ylabel(y or name)
        panel.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(5, len(labels)))
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path.name


def _draw_arm(panel: Axes, arm: str, curves: list[Points], colour: Any) -> None:
    """The mean of an arm's curves, where all have points, and its interval."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    at = [start + (end - start) * i / (NUM_POINTS - 1) for i in range(NUM_POINTS - 1)] + [end]
    intervals = [mean_interval([interpolate(x, y, point) for x, y in curves]) for point in at]
    panel.plot(at, [interval.mean for interval in intervals], label=arm, color=colour)
    if len(curves) > 1:
        low, high = [interval.low for interval in intervals], [interval.high for interval in intervals]
        panel.fill_between(at, low, high, color=colour, alpha=0.12)
