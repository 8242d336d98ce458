"""The tables of a comparison's report."""

import math
import statistics
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any

from ..commands.statistics import Interval, mean_interval, paired_difference, ratio_interval
from .results import (
    SHARES,
    SIGNALS,
    Measure,
    Results,
    accuracy_at,
    curve,
    distinct_right,
    final,
    has_collapsed,
    mean_accuracy,
    pass_rate,
    reached,
    value_at,
)
from .tuning import GRIDS, TUNED

# How the settings that are tuned are called in tables
TUNED_NAMES = dict(zip(TUNED, ("rate", "prompts a batch", "updates a batch"), strict=True))


def estimate(results: Results, arm: str, measure: Measure) -> str:
    """A measure of an arm: its mean over the runs, and the interval."""
    return number(mean_interval([measure(run) for run in results.of_arm(arm)]))


def difference(results: Results, arm: str, measure: Measure) -> Interval:
    """By how much an arm is above the reference, seed by seed."""
    reference = results.of_arm(results.arguments["reference"])
    return paired_difference([measure(run) for run in results.of_arm(arm)], [measure(run) for run in reference])


def number(interval: Interval, digits: int = 3) -> str:
    """A mean and its interval, such as `0.803 ± 0.020`."""
    half_width = "" if math.isnan(interval.half_width) else f" ± {interval.half_width:.{digits}f}"
    return f"{round(interval.mean, digits) + 0.0:.{digits}f}{half_width}"  # 0.0 makes -0 a 0


def signed(interval: Interval) -> str:
    """A difference and its interval, such as `+0.029 ± 0.023`."""
    return f"{'+' if interval.mean >= 0 else ''}{number(interval)}".replace("-", "−")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict_table(results: Results) -> str:
    """Each arm beside the reference: pass@1, how soon it came so far, and what it was tuned to."""
    reference = results.arguments["reference"]
    header = ["arm", "mean", f"− `{reference}`", "in the end", "tokens to ¾", "to 9/10", "seconds to ¾", "to 9/10"]
    rows = []
    for arm, settings in results.arms.items():
        is_reference = arm == reference
        rows.append(
            [
                f"`{arm}`",
                estimate(results, arm, mean_accuracy),
                "" if is_reference else signed(difference(results, arm, mean_accuracy)),
                estimate(results, arm, final),
                *(
                    _speed(results, arm, cost, results.levels()[share])
                    for cost in ("generated_tokens", "seconds")
                    for share in ("¾", "9/10")
                ),
                f"{sum(map(has_collapsed, results.of_arm(arm)))}",
                *(f"{tuned(settings, name):g}" for name in TUNED),
            ]
        )
    return _table([*header, "collapsed", *TUNED_NAMES.values()], rows)


def tuned(settings: dict[str, Any], name: str) -> float:
    return settings.get(name, 1)  # updates that are neither tuned nor set


def _speed(results: Results, arm: str, cost: str, level: float) -> str:
    """What an arm's runs had spent at a level, over the reference's, or how many came there if not all did."""
    spent, of_reference = (
        [reached(run, cost, level) for run in results.of_arm(name)] for name in (arm, results.arguments["reference"])
    )
    num_reached = sum(map(math.isfinite, spent))
    if num_reached < len(spent):
        return f"{num_reached} of {len(spent)} runs"
    if arm == results.arguments["reference"]:
        return "1"
    if not all(map(math.isfinite, of_reference)):
        return f"{len(spent)} runs"
    ratio, low, high = ratio_interval(spent, of_reference)
    return f"{ratio:.2f}" if math.isnan(low) else f"{ratio:.2f} ({low:.2f}–{high:.2f})"


def levels_table(results: Results) -> str:
    """What each arm spent until pass@1 had come to each level."""
    levels = results.levels()
    names = {"generated_tokens": "tokens", "tool_calls": "tool calls", "seconds": "seconds"}
    costs = {cost: name for cost, name in names.items() if cost in results.costs()}
    rows = []
    for arm in results.arms:
        cells = []
        for cost in costs:
            for share in SHARES:
                spent = sorted(reached(run, cost, levels[share]) for run in results.of_arm(arm))
                cells.append(f"{_amount(statistics.median(spent))} ({_amount(spent[0])}–{_amount(spent[-1])})")
        rows.append([f"`{arm}`", *cells])
    header = [f"{what} to {share} ({levels[share]:.3f})" for what in costs.values() for share in SHARES]
    return _table(["arm", *header], rows)


def _amount(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def diversity_measures(results: Results) -> dict[str, Measure]:
    """What is measured of an evaluation, by name."""
    ks = [k for k in results.arguments["pass_at"] if k > 1]
    passes: dict[str, Measure] = {f"pass@{k}": partial(pass_rate, k=k) for k in ks}
    return {"entropy": itemgetter("entropy"), **passes, "distinct": distinct_right}


def diversity_table(results: Results) -> str:
    """Entropy, pass@k and distinct completions, halfway and in the end."""
    measures, end = diversity_measures(results), results.amount
    rows = [
        [
            f"`{arm}`",
            *(
                estimate(results, arm, partial(value_at, measure=measure, amount=amount))
                for measure in measures.values()
                for amount in (end / 2, end)
            ),
        ]
        for arm in results.arms
    ]
    return _table(["arm", *(f"{name}, {when}" for name in measures for when in ("half", "end"))], rows)


def course_table(results: Results) -> str:
    """pass@1 along the run."""
    budget, num_evals = results.amount, results.arguments["num_evals"]
    amounts = [budget * i / num_evals for i in range(num_evals + 1)]
    rows = [
        [
            f"`{arm}`",
            *(
                estimate(results, arm, lambda run, amount=amount: accuracy_at(run, results.cost, amount))  # type: ignore[misc]
                for amount in amounts
            ),
        ]
        for arm in results.arms
    ]
    return _table(["arm", *(f"{amount:,.0f}" for amount in amounts)], rows)


def equal_cost_table(results: Results) -> str:
    """pass@1 when all arms have spent as much, for each kind of cost."""
    costs = results.costs()
    amounts = {cost: min(curve(run, cost)[-1] for run in results.runs) for cost in costs}
    rows = [
        [
            f"`{arm}`",
            *(
                estimate(results, arm, lambda run, cost=cost: accuracy_at(run, cost, amounts[cost]))  # type: ignore[misc]
                for cost in costs
            ),
        ]
        for arm in results.arms
    ]
    return _table(["arm", *(f"{amounts[cost]:,.0f} {name}" for cost, name in costs.items())], rows)


def cost_table(results: Results) -> str:
    """What a run of each arm spent."""
    columns = results.costs()
    rows = []
    for arm, settings in results.arms.items():
        ends = [run["evaluations"][-1] for run in results.of_arm(arm)]
        batches = fmean([end["batches"] for end in ends])
        tokens = fmean([end["generated_tokens"] for end in ends])
        costs = [f"{fmean([end[cost] for end in ends]):,.0f}" for cost in columns]
        seconds = sum(run["evaluation_seconds"] for run in results.of_arm(arm))
        share = seconds / (seconds + sum(end["seconds"] for end in ends))
        row = [f"{settings['num_prompts']}", f"{batches:,.1f}", f"{tokens / batches:,.0f}", *costs, f"{share:.0%}"]
        rows.append([f"`{arm}`", *row])
    return _table(["arm", "prompts a batch", "batches", "tokens a batch", *columns.values(), "evaluation"], rows)


def signal_table(results: Results) -> str:
    """What the batches of each arm taught."""
    rows = []
    for arm in results.arms:
        runs = results.of_arm(arm)
        signals = [
            estimate(results, arm, lambda run, name=name: fmean([batch[name] for batch in run["batches"]]))  # type: ignore[misc]
            for name in SIGNALS
        ]
        ends = [
            number(mean_interval([curve(run, name)[-1] for run in runs])) for name in ("entropy", "completion_length")
        ]
        rows.append([f"`{arm}`", *signals, *ends])
    return _table(["arm", *SIGNALS.values(), "entropy", "completion length"], rows)


def tuning_table(results: Results) -> str:
    """What came of each value that was tried, and the finalists."""
    arguments = results.arguments
    rates, sizes, updates = (sorted(arguments[name] or []) for name in GRIDS.values())
    header = [f"rate {value:g}" for value in rates]
    header += [f"{value:,} tokens a batch" for value in sizes] + [f"{value} updates a batch" for value in updates]
    rows = []
    for arm, settings in results.arms.items():
        tried = sorted({run["settings"]["num_prompts"] for run in results.grid_of(arm)})
        axes = {
            "learning_rate": rates,
            "num_prompts": (tried + [0] * len(sizes))[: len(sizes)],
            "num_iterations": updates,
        }
        cells = []
        for name, values in axes.items():
            for value in values:
                cell = _best_with(results, arm, name, value)
                cells.append(f"**{cell}**" if cell and value == tuned(settings, name) else cell)
        rows.append([f"`{arm}`", *cells, _num_collapsed(results.grid_of(arm)), _finalists(results, arm)])
    return _table(["arm", *header, "collapsed", "finalists: rate · prompts a batch · updates a batch, mean"], rows)


def _num_collapsed(runs: list[dict[str, Any]]) -> str:
    return f"{sum(map(has_collapsed, runs))} of {len(runs)}" if runs else ""


def _best_with(results: Results, arm: str, name: str, value: float) -> str:
    """The best mean along the run in an arm's grid, of the points where a setting has a value."""
    means = [mean_accuracy(run) for run in results.grid_of(arm) if tuned(run["settings"], name) == value]
    return f"{max(means):.3f}" if means else ""


def _finalists(results: Results, arm: str) -> str:
    """An arm's finalists, the best first, with the mean over the tuning seeds."""
    means: dict[str, list[float]] = {}
    for run in results.finalists_of(arm):
        point = " · ".join(f"{tuned(run['settings'], name):g}" for name in TUNED)
        means.setdefault(point, []).append(mean_accuracy(run))
    ordered = sorted(means, key=lambda point: -fmean(means[point]))
    return "; ".join(f"{point}, {fmean(means[point]):.3f}" for point in ordered)
