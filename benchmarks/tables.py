"""The tables of a comparison's report."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any

from fr3e_trl.commands.statistics import Interval

from .arms import whole_prompts
from .estimates import Verdict, arm_interval, difference, final_rates, interval_of, mean_rates, rates_at, reward_bounds
from .outcomes import (
    GRIDS,
    SIGNALS,
    TUNED,
    Results,
    curve,
    has_collapsed,
    mean_accuracy,
    reached,
    taught,
    value_at,
)
from .statistics import SHARE, UNBOUNDED, Bounds, ratio_interval

AT_LEAST_0 = (0.0, math.inf)

# Between what the measures of batches lie, where they have bounds
SIGNAL_BOUNDS: dict[str, Bounds] = {
    "differing": SHARE,
    "signal": SHARE,
    "rejected": SHARE,
    "advantage_std": AT_LEAST_0,
}

# How the settings that are tuned are called in tables
TUNED_NAMES = dict(zip(TUNED, ("rate", "prompts a batch", "updates a batch"), strict=True))


@dataclass(frozen=True)
class Table:
    """A table of a report. Cells have `code` and **bold** as in Markdown."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Section:
    """
    A part of the report, below its verdict.

    Args:
        title (`str`), before (`str`), table ([`Table`], *optional*), after (`str`):
            Its parts, in order, with `code` and **bold** as in Markdown.
        code (`str`), language (`str`):
            What is to be shown as it is, between `before` and the table.
    """

    title: str
    before: str = ""
    table: Table | None = None
    after: str = ""
    code: str = ""
    language: str = ""

    def markdown(self) -> str:
        code = f"```{self.language}\n{self.code}\n```" if self.code else ""
        table = self.table.markdown() if self.table else ""
        return "\n\n".join(part for part in (f"## {self.title}", self.before, code, table, self.after) if part)


def number(interval: Interval, digits: int = 3) -> str:
    """A mean and its interval, such as `0.803 (0.783–0.822)`; `0.000 (all)` where no run differs from another."""
    mean, low, high = (f"{value + 0.0:.{digits}f}" for value in _rounded(interval, digits))  # 0.0 makes -0 a 0
    if math.isnan(interval.low):
        return mean.replace("-", "−")
    if interval.high - interval.low < 1e-9:
        return f"{mean} (all)".replace("-", "−")
    between = "–" if interval.low >= 0 else " to "
    return f"{mean} ({low}{between}{high})".replace("-", "−")


def signed_range(interval: Interval) -> str:
    """A difference and its interval, such as `+0.029 (+0.006 to +0.052)`."""
    mean, low, high = (f"{value + 0.0:+.3f}".replace("-", "−") for value in _rounded(interval))
    return mean if math.isnan(interval.low) else f"{mean} ({low} to {high})"


def signed(interval: Interval) -> str:
    """A difference and half of its symmetric interval, such as `+0.029 ± 0.023`."""
    half_width = "" if math.isnan(interval.low) else f" ± {interval.half_width:.3f}"
    return f"{round(interval.mean, 3) + 0.0:+.3f}{half_width}".replace("-", "−")


def _rounded(interval: Interval, digits: int = 3) -> tuple[float, float, float]:
    return round(interval.mean, digits), round(interval.low, digits), round(interval.high, digits)


def verdict_table(results: Results) -> Table:
    """Each arm beside the reference: pass@1, how soon it came so far, and what it was tuned to."""
    reference, bounds, levels = results.arguments["reference"], reward_bounds(results), results.levels()
    header = ["arm", "mean", f"− `{reference}`", "in the end", "tokens to 75%", "to 90%", "seconds to 75%", "to 90%"]
    rows = []
    for arm, settings in results.arms.items():
        is_reference = arm == reference
        rows.append(
            [
                f"`{arm}`",
                number(arm_interval(results, arm, mean_rates, bounds)),
                "" if is_reference else signed_range(difference(results, arm)),
                number(arm_interval(results, arm, final_rates, bounds)),
                *(
                    speed(results, arm, reference, cost, levels[share])
                    for cost in ("generated_tokens", "seconds")
                    for share in ("75%", "90%")
                ),
                f"{sum(map(has_collapsed, results.runs_of(arm)))}",
                *(f"{tuned(settings, name):g}" for name in TUNED),
            ]
        )
    return Table([*header, "collapsed", *TUNED_NAMES.values()], rows)


def tuned(settings: dict[str, Any], name: str) -> float:
    return settings.get(name, 1)  # updates that are neither tuned nor set


def speed(results: Results, arm: str, reference: str, cost: str, level: float) -> str:
    """What an arm's runs had spent at a level, over another's, or how many came there if not all did."""
    if math.isnan(level):
        return "not measured"
    spent, reference_spent = ([reached(run, cost, level) for run in results.runs_of(name)] for name in (arm, reference))
    num_reached = sum(map(math.isfinite, spent))
    if num_reached < len(spent):
        return f"{num_reached} of {len(spent)} runs"
    if arm == reference:
        return "1"
    if not all(map(math.isfinite, reference_spent)) or 0 in (*spent, *reference_spent):  # one was there at the start
        return f"{len(spent)} runs"
    ratio, low, high = ratio_interval(spent, reference_spent)
    return f"{ratio:.2f}" if math.isnan(low) else f"{ratio:.2f} ({low:.2f}–{high:.2f})"


def speeds(results: Results, found: Verdict) -> dict[str, str]:
    """Tokens and seconds of the leader to 75%, as multiples of the other's, where all runs reached it."""
    level = results.levels()["75%"]
    if math.isnan(level):
        return {}
    ratios = {
        name: speed(results, found.leader, found.other, cost, level)
        for cost, name in (("generated_tokens", "tokens"), ("seconds", "seconds"))
    }
    return {name: ratio for name, ratio in ratios.items() if "run" not in ratio}


def mean_seconds(results: Results, arm: str) -> float:
    """Seconds of training that a run of an arm took, on average."""
    return fmean([run["evaluations"][-1]["seconds"] for run in results.runs_of(arm)])


def diversity_measures(results: Results) -> dict[str, tuple[Callable[..., Any], Bounds]]:
    """What is measured of a policy, by name: a measure of a run that has spent so much, and between what it lies."""
    bounds, cost = reward_bounds(results), results.cost
    ks = [k for k in results.arguments["pass_at"] if k > 1]

    def passes(k: int) -> Callable[[dict[str, Any], float], Any]:
        return lambda run, amount: rates_at(run, cost, amount, k)

    return {
        "entropy": (lambda run, amount: value_at(run, itemgetter("entropy"), amount), AT_LEAST_0),
        **{f"pass@{k}": (passes(k), bounds) for k in ks},
    }


def diversity_table(results: Results) -> Table:
    """Entropy and pass@k, halfway and in the end."""
    measures, end = diversity_measures(results), results.amount
    rows = [
        [
            f"`{arm}`",
            *(
                number(arm_interval(results, arm, partial(measure, amount=amount), bounds))
                for measure, bounds in measures.values()
                for amount in (end / 2, end)
            ),
        ]
        for arm in results.arms
    ]
    return Table(["arm", *(f"{name}, {when}" for name in measures for when in ("half", "end"))], rows)


def course_table(results: Results) -> Table:
    """pass@1 along the run."""
    budget, num_evals = results.amount, results.arguments["num_evals"]
    amounts = [budget * i / num_evals for i in range(num_evals + 1)]
    bounds, rows = reward_bounds(results), []
    for arm in results.arms:
        points = [partial(rates_at, cost=results.cost, amount=amount) for amount in amounts]
        rows.append([f"`{arm}`", *(number(arm_interval(results, arm, point, bounds)) for point in points)])
    return Table(["arm", *(f"{amount:,.0f}" for amount in amounts)], rows)


def cost_table(results: Results) -> Table:
    """What a run of each arm spent."""
    columns = results.costs()
    rows = []
    for arm, settings in results.arms.items():
        ends = [run["evaluations"][-1] for run in results.runs_of(arm)]
        batches = fmean([end["batches"] for end in ends])
        tokens = fmean([end["generated_tokens"] for end in ends])
        costs = [f"{fmean([end[cost] for end in ends]):,.0f}" for cost in columns]
        seconds = sum(run["evaluation_seconds"] for run in results.runs_of(arm))
        share = seconds / (seconds + sum(end["seconds"] for end in ends))
        row = [f"{settings['num_prompts']}", f"{batches:,.1f}", f"{tokens / batches:,.0f}", *costs, f"{share:.0%}"]
        rows.append([f"`{arm}`", *row])
    return Table(["arm", "prompts a batch", "batches", "tokens a batch", *columns.values(), "evaluation"], rows)


def signal_table(results: Results) -> Table:
    """What the batches of each arm taught."""
    bounds = SIGNAL_BOUNDS | {"reward": reward_bounds(results)}
    names = signals(results)
    rows = []
    for arm, settings in results.arms.items():
        runs = results.runs_of(arm)
        means = [_over_runs([taught(run)["mean"][name] for run in runs], bounds.get(name, UNBOUNDED)) for name in names]
        ends = [interval_of([curve(run, name)[-1] for run in runs], AT_LEAST_0) for name in ENDS]
        rows.append([f"`{arm}`", f"{settings['num_generations']}", *map(number, [*means, *ends])])
    return Table(["arm", "rows a prompt", *names.values(), *ENDS.values()], rows)


def _over_runs(values: list[float], bounds: Bounds) -> Interval:
    """An interval over runs. What is the same in all of them is so by the settings: no row is rejected, for one."""
    return interval_of(values, bounds if max(values) - min(values) > 1e-9 else UNBOUNDED)


ENDS = {"entropy": "entropy", "completion_length": "completion length"}


def signals(results: Results) -> dict[str, str]:
    """The measures of batches that all runs have: some are of earlier versions."""
    known = set.intersection(*(set(taught(run)["mean"]) for run in results.runs))
    return {name: title for name, title in SIGNALS.items() if name in known}


def tuning_table(results: Results) -> Table:
    """What came of each value that was tried, and the finalists."""
    arguments = results.arguments
    rates, sizes, updates = (sorted(arguments[name] or []) for name in GRIDS.values())
    header = [f"rate {value:g}" for value in rates]
    header += [f"{value:,} tokens a batch" for value in sizes] + [f"{value} updates a batch" for value in updates]
    rows = []
    for arm, settings in results.arms.items():
        tokens = results.tokens_per_prompt.get(arm)  # not known of an arm that has prompts of its own
        axes = {
            "learning_rate": rates,
            "num_prompts": [whole_prompts(size / tokens, settings) if tokens else 0 for size in sizes],
            "num_iterations": updates,
        }
        cells = []
        for name, values in axes.items():
            for value in values:
                cell = _best_with(results, arm, name, value)
                cells.append(f"**{cell}**" if cell and value == tuned(settings, name) else cell)
        rows.append([f"`{arm}`", *cells, _num_collapsed(results.grid_of(arm)), _finalists(results, arm)])
    return Table(["arm", *header, "collapsed", "finalists: rate · prompts a batch · updates a batch, mean"], rows)


def _num_collapsed(runs: list[dict[str, Any]]) -> str:
    return f"{sum(map(has_collapsed, runs))} of {len(runs)}" if runs else ""


def _best_with(results: Results, arm: str, name: str, value: float) -> str:
    """The best mean along the run in an arm's grid, of the points where a setting has a value."""
    best = results.best_in_grid(arm, name, value)
    return "" if math.isnan(best) else f"{best:.3f}"


def _finalists(results: Results, arm: str) -> str:
    """An arm's finalists, the best first, with the mean over the tuning seeds."""
    means: dict[str, list[float]] = {}
    for run in results.finalists_of(arm):
        point = " · ".join(f"{tuned(run['settings'], name):g}" for name in TUNED)
        means.setdefault(point, []).append(mean_accuracy(run))
    ordered = sorted(means, key=lambda point: -fmean(means[point]))
    return "; ".join(f"{point}, {fmean(means[point]):.3f}" for point in ordered)
