"""The figures of a comparison, a panel each."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from .estimates import FEW_SEEDS, evaluated, rates, reward_bounds
from .outcomes import COSTS, Results, curve
from .statistics import Bounds, interpolate, mean_interval
from .tables import AT_LEAST_0

POINTS_BETWEEN = 4  # points of a curve for each of its markers
NUM_MARKERS = 10
MARKERS = "osD^vP*X<>"

# Reports of the same runs are the same bytes. Letters are shapes, for those who have not the font
STYLE: Any = {"svg.hashsalt": "fr3e", "svg.fonttype": "path", "font.size": 10, "axes.titlesize": 10.5}

_thousands = EngFormatter(sep="")  # 100k


@dataclass(frozen=True)
class Plot:
    """A figure: the name of its file without the ending, what it shows, and its content."""

    name: str
    title: str
    svg: str


# The points of the curve of a run: where, and a value or one for each prompt
Points = tuple[list[float], list[Any]]


def plot_all(results: Results, headline: str) -> list[Plot]:
    """
    Draw the figures: first the one that the verdict is about, with that as its title.

    Thin lines are runs, thick ones their means. From five seeds on there are bands, the means' 95% intervals.
    """
    bounds = reward_bounds(results)
    with pyplot.rc_context(STYLE):
        panel = _Panel(results, results.cost, bounds, "held-out pass@1", results.amount)
        plots = [panel.draw("accuracy", f"Held-out pass@1 against {COSTS[results.cost]}", _passes, headline)]
        for cost in ("seconds", "tool_calls"):
            if cost in results.costs() and cost != results.cost:
                title = f"Held-out pass@1 against {COSTS[cost]}"
                panel = _Panel(results, cost, bounds, "held-out pass@1")
                plots.append(panel.draw(cost, title, _passes, "Lines end where an arm's runs end"))
        k = max(results.arguments["pass_at"])
        measures = {
            "entropy": ("policy entropy, nats", AT_LEAST_0, itemgetter("entropy")),
            "best_of_k": (f"held-out pass@{k}", bounds, partial(rates, k=k)),
        }
        if k == 1:
            del measures["best_of_k"]
        for name, (title, measure_bounds, measure) in measures.items():
            panel = _Panel(results, "generated_tokens", measure_bounds, title)
            plots.append(panel.draw(name, title, partial(_evaluated, measure=measure)))
    return plots


def _passes(run: dict[str, Any], cost: str) -> Points:
    return _evaluated(run, cost, rates)


def _evaluated(run: dict[str, Any], cost: str, measure: Any) -> Points:
    return curve(run, cost), evaluated(run, measure)


@dataclass(frozen=True)
class _Panel:
    """A panel with a curve for each arm against a cost, and a line at the budget at which runs are compared, if any."""

    results: Results
    cost: str
    bounds: Bounds
    y: str
    budget: float | None = None

    def draw(self, name: str, title: str, points_of: Any, heading: str = "") -> Plot:
        is_headline = self.budget is not None
        figure, panel = pyplot.subplots(figsize=(6.2, 4.4) if is_headline else (4.4, 3.6))
        for arm, style in zip(self.results.arms, _styles(self.results), strict=True):
            self._draw_arm(panel, arm, style, [points_of(run, cost=self.cost) for run in self.results.runs_of(arm)])
        if self.budget is not None:
            panel.axvline(self.budget, color="0.35", linestyle="--", linewidth=1)
            place = panel.get_xaxis_transform()
            panel.text(self.budget, 0.02, "budget", transform=place, rotation=90, ha="right", va="bottom", fontsize=8)
        panel.set_xlabel(COSTS[self.cost])
        panel.set_ylabel(self.y)
        low, high = panel.get_ylim()
        margin = 0.02 * (high - low)
        panel.set_ylim(max(low, self.bounds[0] - margin), min(high, self.bounds[1] + margin))
        panel.set_title(textwrap.fill(heading, 72 if is_headline else 50), fontsize=None if is_headline else 9)
        return _saved(name, title, figure, panel)

    def _draw_arm(self, panel: Axes, arm: str, style: dict[str, Any], curves: Sequence[Points]) -> None:
        """The curves of an arm's runs; their mean, as far as all of them go; and its interval, from five runs on."""
        for x, y in curves if len(curves) > 1 else []:
            means = [float(np.mean(value)) for value in y]
            panel.plot(x, means, color=style["color"], linewidth=0.6, alpha=0.45 if len(curves) < FEW_SEEDS else 0.15)
        start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        end = min(end, self.budget or end)
        if start > end:
            return
        at = np.linspace(start, end, POINTS_BETWEEN * NUM_MARKERS + 1).tolist()
        at[-1] = end
        # Over seeds alone: the prompts are the same for all arms, and move them together
        values = [[float(np.mean(interpolate(x, y, point))) for x, y in curves] for point in at]
        intervals = [mean_interval(at_point) for at_point in values]
        means = [interval.mean for interval in intervals]
        panel.plot(at, means, label=arm, linewidth=1.8, markevery=POINTS_BETWEEN, markersize=4, **style)
        if len(curves) >= FEW_SEEDS:
            low = [max(interval.low, self.bounds[0]) for interval in intervals]
            high = [min(interval.high, self.bounds[1]) for interval in intervals]
            panel.fill_between(at, low, high, color=style["color"], alpha=0.13, linewidth=0)


def _styles(results: Results) -> list[dict[str, Any]]:
    """A colour and a marker of each arm. The reference is dark."""
    colormap: Any = pyplot.get_cmap("tab10")
    palette = colormap.colors
    styles, others = [], 0
    for arm in results.arms:
        if arm == results.arguments["reference"]:
            styles.append({"color": "0.15", "marker": "s"})
            continue
        styles.append({"color": palette[others % len(palette)], "marker": MARKERS[others % len(MARKERS)]})
        others += 1
    return styles


def _saved(name: str, title: str, figure: Any, panel: Axes) -> Plot:
    if panel.get_xscale() == "linear":
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if abs(value) < 1000 else _thousands(value))
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    labels = panel.get_legend_handles_labels()[1]
    columns = min(3 if max(map(len, labels)) > 14 else 4, len(labels))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    figure.set_layout_engine("constrained")
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return Plot(name, title, file.getvalue())
