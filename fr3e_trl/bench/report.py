"""From the runs of a comparison to its report."""

import math
import statistics
from dataclasses import MISSING, asdict, fields
from functools import partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from ..commands.statistics import Interval, mean_interval, paired_difference, ratio_interval
from .arms import ArmsArguments
from .plots import plot_all
from .results import (
    COLLAPSED_NOISE,
    COSTS,
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
from .runs import write_json
from .tuning import GRIDS, TUNED

# How the settings that are tuned are called in tables
TUNED_NAMES = dict(zip(TUNED, ("rate", "prompts a batch", "updates a batch"), strict=True))


def write_report(results: Results, output_dir: Path) -> None:
    """Write `results.json`, with all raw data, `report.md` and the plots."""
    write_json(output_dir / "results.json", asdict(results))
    plots = plot_all(results, output_dir)
    (output_dir / "report.md").write_text(render(results, plots))


def render(results: Results, plots: dict[str, str]) -> str:
    """The report, in Markdown. `plots` are file names by their titles."""
    arguments = results.arguments
    sections = [
        f"# {arguments['task'] or arguments['dataset_name']}: arms at equal {COSTS[results.cost]}",
        f"**{verdict(results)}**",
        _verdict_table(results),
        _legend(results),
        *(f"![{title}]({file})" for title, file in plots.items()),
        "## Until pass@1 has come so far",
        _levels_table(results),
        "Median over seeds, and the lowest and highest (for 5 seeds a 94% interval of the median). A run that never "
        "came there counts as ∞.",
        "## pass@1 along the run",
        _course_table(results),
        "## Diversity",
        _diversity_table(results),
        "At half of that, and in the end. pass@k is the expected reward of the best of k samples. Distinct: "
        f"different completions among the right ones of {arguments['num_samples']}, for prompts that have a right one "
        "(with graded rewards, among those of the prompt's highest reward). Before training: "
        f"{_start(results)}.",
        "## pass@1 at equal cost of other kinds",
        "Each column is taken at the largest amount that every run has spent.",
        _equal_cost_table(results),
        "## What a run cost",
        _cost_table(results),
        "Forward tokens are those without gradients: generation (what it reads and what it samples), entropies, old "
        "log-probs. Rows count whether or not they teach anything. The time is that of training; evaluation took the "
        "given share of both.",
        "## What the batches taught",
        _signal_table(results),
        "Means over all batches. A state is what rows are compared within: GRPO's group, or a prompt or an anchor of "
        "FR3E. A row has a signal if it is in the loss with an advantage other than 0. Entropy (in nats) and length "
        "are of the held-out samples, at the end.",
        *_tuning_section(results),
        "## Settings",
        f"```yaml\n{yaml.safe_dump(_settings(results), sort_keys=False, default_flow_style=None, width=110)}```",
        "## To reproduce",
        f"```bash\n{results.command}\n```",
        "With "
        + ", ".join(f"{package} {version(package)}" for package in ("fr3e-trl", "trl", "transformers", "torch"))
        + ". Every run is in `results.json`.",
    ]
    return "\n\n".join(sections) + "\n"


def _legend(results: Results) -> str:
    arguments = results.arguments
    return (
        f"{_seeds(results)} seeds ({', '.join(map(str, arguments['seeds']))}), {arguments['num_heldout']} held-out "
        f"prompts with {arguments['num_samples']} samples each; pass@1 is their mean reward. Mean: area under it "
        f"against {COSTS[results.cost]}, up to {results.amount:,}, divided by its length. `±` is half of the "
        "95% interval over seeds, by Student's t; differences and ratios are taken seed by seed, and no interval is "
        "widened for the number of arms. Tokens and seconds (of CPU or GPU, in training): how many until pass@1 has "
        f"come so far from the start to the best arm's end, as multiples of `{arguments['reference']}`'s, with the 95% "
        "interval of the ratio; where a run never came there, how many did. Collapsed: runs whose last pass@1 is under "
        f"half of their best, and more than {COLLAPSED_NOISE:g} below."
    )


def verdict(results: Results) -> str:
    """What the intervals say of the mean along the run, in a sentence."""
    reference = results.arguments["reference"]
    against = f"`{reference}` ({_estimate(results, reference, mean_accuracy)})"
    after = f"By the mean of pass@1 along {results.amount:,} {COSTS[results.cost]}"
    others = [arm for arm in results.arms if arm != reference]
    if len(results.arguments["seeds"]) == 1:
        return f"{after}, one seed shows no difference from {against}: run more seeds for a verdict."
    differences = {arm: _difference(results, arm, mean_accuracy) for arm in others}
    better = {arm: difference for arm, difference in differences.items() if difference.low > 0}
    worse = {arm: difference for arm, difference in differences.items() if difference.high < 0}
    beaten = f"{after}, {_listed(better) or 'no arm'} {'beat' if len(better) > 1 else 'beats'} {against}"
    parts = [beaten + " beyond the 95% interval"]
    if worse:
        parts.append(f"worse than it: {_listed(worse)}")
    undecided = len(others) - len(better) - len(worse)
    if undecided:
        parts.append(f"{undecided} of {len(others)} cannot be told from it by {_seeds(results)} seeds")
    return "; ".join(parts) + "."


def _seeds(results: Results) -> int:
    return len(results.arguments["seeds"])


def _listed(differences: dict[str, Interval]) -> str:
    ordered = sorted(differences.items(), key=lambda item: -item[1].mean)
    return ", ".join(f"`{arm}` ({signed(difference)})" for arm, difference in ordered)


def _estimate(results: Results, arm: str, measure: Measure) -> str:
    return number(mean_interval([measure(run) for run in results.of_arm(arm)]))


def _difference(results: Results, arm: str, measure: Measure) -> Interval:
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


def _verdict_table(results: Results) -> str:
    reference = results.arguments["reference"]
    header = ["arm", "mean", f"− `{reference}`", "in the end", "tokens to ¾", "to 9/10", "seconds to ¾", "to 9/10"]
    rows = []
    for arm, settings in results.arms.items():
        is_reference = arm == reference
        rows.append(
            [
                f"`{arm}`",
                _estimate(results, arm, mean_accuracy),
                "" if is_reference else signed(_difference(results, arm, mean_accuracy)),
                _estimate(results, arm, final),
                *(
                    _speed(results, arm, cost, results.levels()[share])
                    for cost in ("generated_tokens", "seconds")
                    for share in ("¾", "9/10")
                ),
                f"{sum(map(has_collapsed, results.of_arm(arm)))}",
                *(f"{_tuned(settings, name):g}" for name in TUNED),
            ]
        )
    return _table([*header, "collapsed", *TUNED_NAMES.values()], rows)


def _tuned(settings: dict[str, Any], name: str) -> float:
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


def _levels_table(results: Results) -> str:
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


def _diversity_measures(results: Results) -> dict[str, Measure]:
    """What is measured of an evaluation, by name."""
    ks = [k for k in results.arguments["pass_at"] if k > 1]
    passes: dict[str, Measure] = {f"pass@{k}": partial(pass_rate, k=k) for k in ks}
    return {"entropy": itemgetter("entropy"), **passes, "distinct": distinct_right}


def _diversity_table(results: Results) -> str:
    measures, end = _diversity_measures(results), results.amount
    rows = [
        [
            f"`{arm}`",
            *(
                _estimate(results, arm, partial(value_at, measure=measure, amount=amount))
                for measure in measures.values()
                for amount in (end / 2, end)
            ),
        ]
        for arm in results.arms
    ]
    return _table(["arm", *(f"{name}, {when}" for name in measures for when in ("half", "end"))], rows)


def _start(results: Results) -> str:
    first = results.runs[0]["evaluations"][0]
    return ", ".join(f"{name} {measure(first):.3f}" for name, measure in _diversity_measures(results).items())


def _course_table(results: Results) -> str:
    budget, num_evals = results.amount, results.arguments["num_evals"]
    amounts = [budget * i / num_evals for i in range(num_evals + 1)]
    rows = [
        [
            f"`{arm}`",
            *(
                _estimate(results, arm, lambda run, amount=amount: accuracy_at(run, results.cost, amount))  # type: ignore[misc]
                for amount in amounts
            ),
        ]
        for arm in results.arms
    ]
    return _table(["arm", *(f"{amount:,.0f}" for amount in amounts)], rows)


def _equal_cost_table(results: Results) -> str:
    costs = results.costs()
    amounts = {cost: min(curve(run, cost)[-1] for run in results.runs) for cost in costs}
    rows = [
        [
            f"`{arm}`",
            *(
                _estimate(results, arm, lambda run, cost=cost: accuracy_at(run, cost, amounts[cost]))  # type: ignore[misc]
                for cost in costs
            ),
        ]
        for arm in results.arms
    ]
    return _table(["arm", *(f"{amounts[cost]:,.0f} {name}" for cost, name in costs.items())], rows)


def _cost_table(results: Results) -> str:
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


def _signal_table(results: Results) -> str:
    rows = []
    for arm in results.arms:
        runs = results.of_arm(arm)
        signals = [
            _estimate(results, arm, lambda run, name=name: fmean([batch[name] for batch in run["batches"]]))  # type: ignore[misc]
            for name in SIGNALS
        ]
        ends = [
            number(mean_interval([curve(run, name)[-1] for run in runs])) for name in ("entropy", "completion_length")
        ]
        rows.append([f"`{arm}`", *signals, *ends])
    return _table(["arm", *SIGNALS.values(), "entropy", "completion length"], rows)


def _tuning_section(results: Results) -> list[str]:
    """What was tried to tune the arms, and what came of it."""
    if not results.screening:
        return []
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
                cells.append(f"**{cell}**" if cell and value == _tuned(settings, name) else cell)
        rows.append([f"`{arm}`", *cells, _num_collapsed(results.grid_of(arm)), _finalists(results, arm)])
    budget = arguments["tuning_tokens"] or results.amount
    return [
        "## Tuning",
        f"Each arm was run at each point of its grid, for {budget:,} {COSTS[results.cost]} with seed "
        f"{arguments['tuning_seeds'][0]}: the mean of pass@1 along the run, of the best point with each value, and how "
        "many runs collapsed. The best points were run whole with the seeds "
        f"{', '.join(map(str, arguments['tuning_seeds']))}. The mean over these decided (of two alike, the lower "
        "values). What the arm was then run with is bold.",
        _table(["arm", *header, "collapsed", "finalists: rate · prompts a batch · updates a batch, mean"], rows),
    ]


def _num_collapsed(runs: list[dict[str, Any]]) -> str:
    return f"{sum(map(has_collapsed, runs))} of {len(runs)}" if runs else ""


def _best_with(results: Results, arm: str, name: str, value: float) -> str:
    """The best mean along the run in an arm's grid, of the points where a setting has a value."""
    means = [mean_accuracy(run) for run in results.grid_of(arm) if _tuned(run["settings"], name) == value]
    return f"{max(means):.3f}" if means else ""


def _finalists(results: Results, arm: str) -> str:
    """An arm's finalists, the best first, with the mean over the tuning seeds."""
    means: dict[str, list[float]] = {}
    for run in results.finalists_of(arm):
        point = " · ".join(f"{_tuned(run['settings'], name):g}" for name in TUNED)
        means.setdefault(point, []).append(mean_accuracy(run))
    ordered = sorted(means, key=lambda point: -fmean(means[point]))
    return "; ".join(f"{point}, {fmean(means[point]):.3f}" for point in ordered)


def _settings(results: Results) -> dict[str, Any]:
    """The arguments, with what was chosen for each arm."""
    chosen = {
        arm: results.arguments["arms"][arm] | {name: _tuned(settings, name) for name in TUNED}
        for arm, settings in results.arms.items()
    }
    # Most arguments are those of a dataset and a model, which a task of the bench has not
    usual: dict[str, Any] = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(ArmsArguments)
    }
    told = {name: value for name, value in results.arguments.items() if name not in usual or value != usual[name]}
    return told | {"arms": chosen}
