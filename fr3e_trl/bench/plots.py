"""The figures of a comparison."""

import math
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image

from ..commands.statistics import interpolate, mean_interval
from .results import SIGNALS, Measure, Results, accuracies, curve, distinct_right, final, mean_accuracy, pass_rate

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
        for cost, name in results.costs().items()
    }
    k = max(results.arguments["pass_at"])
    policy_measures: dict[str, Measure] = {
        "policy entropy, nats": itemgetter("entropy"),
        f"held-out pass@{k}": partial(pass_rate, k=k),
        "distinct right completions of a prompt": distinct_right,
        "completion length, tokens": itemgetter("completion_length"),
    }
    policy_panels = {
        name: {
            arm: [
                (curve(run, "generated_tokens"), list(map(measure, run["evaluations"]))) for run in results.of_arm(arm)
            ]
            for arm in results.arms
        }
        for name, measure in policy_measures.items()
    }
    batch_panels = {
        name: {arm: [_smoothed(run, key) for run in results.of_arm(arm)] for arm in results.arms}
        for key, name in SIGNALS.items()
    }
    robustness = {}
    if results.screening:
        robustness["Learning rates"] = _draw_rates(results, output_dir / "rates.png")
    return {
        "Held-out pass@1": _draw(output_dir / "accuracy.png", accuracy_panels, y="held-out pass@1"),
        **robustness,
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
    colours = _colours(len(next(iter(panels.values()))))
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.8 * rows), squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (name, arms) in zip(axes.flat, panels.items(), strict=False):
        for (arm, curves), colour in zip(arms.items(), colours, strict=True):
            _draw_arm(panel, arm, curves, colour)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
        panel.set_xlabel(x or name)
        panel.set_ylabel(y or name)
        panel.grid(alpha=0.3)
    return _save(figure, path)


def _draw_rates(results: Results, path: Path) -> str:
    """Draw what came of each learning rate in each arm's grid, at the batch size and updates that were best with it."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for panel, (name, measure) in zip(axes, (("mean", mean_accuracy), ("final", final)), strict=True):
        for arm, colour in zip(results.arms, _colours(len(results.arms)), strict=True):
            grid = results.grid_of(arm)
            rates = sorted({run["settings"]["learning_rate"] for run in grid})
            best = [
                max((run for run in grid if run["settings"]["learning_rate"] == rate), key=mean_accuracy)
                for rate in rates
            ]
            panel.plot(rates, list(map(measure, best)), marker="o", label=arm, color=colour)
        panel.set_xscale("log")
        panel.set_xlabel("learning rate")
        panel.set_ylabel(f"{name} held-out pass@1, tuning run")
        panel.grid(alpha=0.3)
    return _save(figure, path)


def _colours(number: int) -> list[Any]:
    palette = pyplot.get_cmap("tab10" if number <= 10 else "tab20")
    return [palette(i % palette.N) for i in range(number)]


def _save(figure: Figure, path: Path) -> str:
    """Save a figure with the legend of its first panel."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(5, len(labels)))
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    with Image.open(path) as image:  # in few colours, a quarter as large
        image.convert("RGB").quantize(128, Image.Quantize.FASTOCTREE).save(path, optimize=True)
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
