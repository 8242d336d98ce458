"""From the runs of a comparison to its report."""

import math
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from .plots import plot_all
from .results import (
    COSTS,
    SIGNALS,
    Measure,
    Results,
    accuracies,
    accuracy_at,
    curve,
    final,
    greedy_rate,
    mean_accuracy,
    pass_rate,
)
from .runs import write_json
from .statistics import Interval, first_reached, mean_interval, paired_difference


def write_report(results: Results, output_dir: Path) -> None:
    """Write `results.json`, with all raw data, `report.md` and the plots."""
    write_json(output_dir / "results.json", asdict(results))
    plots = plot_all(results, output_dir)
    (output_dir / "report.md").write_text(render(results, plots))


def render(results: Results, plots: dict[str, str]) -> str:
    """The report, in Markdown. `plots` are file names by their titles."""
    arguments = results.arguments
    sections = [
        f"# {arguments['task']}: arms at equal generated tokens",
        f"**{verdict(results)}**",
        f"{len(arguments['seeds'])} seeds ({', '.join(map(str, arguments['seeds']))}), {arguments['num_heldout']} "
        f"held-out prompts with {arguments['num_samples']} samples each. `±` is half of the 95% interval over "
        "seeds, by Student's t; differences are taken seed by seed, and no interval is widened for the number of arms.",
        f"## After {arguments['generated_tokens']:,} generated tokens",
        _final_table(results),
        "Mean: area under pass@1 against generated tokens, divided by its length. Tokens: when pass@1 first reached "
        f"{arguments['threshold']:g}.",
        "## pass@1 along the run",
        _course_table(results),
        "## pass@1 at equal cost of other kinds",
        "Each column is taken at the largest amount that every run has spent.",
        _equal_cost_table(results),
        "## What a run cost",
        _cost_table(results),
        "Forward tokens are those without gradients: generation (what it reads and what it samples), entropies, old "
        "log-probs. Rows count whether or not they teach anything. The time is that of training, without evaluation.",
        "## What the batches taught",
        _signal_table(results),
        "Means over all batches. A state is what rows are compared within: GRPO's group, or a prompt or an anchor of "
        "FR3E. A row has a signal if it is in the loss with an advantage other than 0. Entropy (in nats) and length "
        "are of the held-out samples, at the end.",
        *_tuning_section(results),
        *(f"## {title}\n\n![{title}]({file})" for title, file in plots.items()),
        "## Settings",
        f"```yaml\n{yaml.safe_dump(_settings(results), sort_keys=False, default_flow_style=None, width=110)}```",
        "## To reproduce",
        f"```bash\n{results.command}\n```",
        "With "
        + ", ".join(f"{package} {version(package)}" for package in ("fr3e-trl", "trl", "transformers", "torch"))
        + ". Every run is in `results.json`.",
    ]
    return "\n\n".join(sections) + "\n"


def verdict(results: Results) -> str:
    """What the intervals say, in a sentence."""
    reference = results.arguments["reference"]
    against = f"`{reference}` (pass@1 {_estimate(results, reference, final)})"
    after = f"After {results.arguments['generated_tokens']:,} generated tokens"
    others = [arm for arm in results.arms if arm != reference]
    if len(results.arguments["seeds"]) == 1:
        return f"{after}, one seed shows no difference from {against}: run more seeds for a verdict."
    differences = {arm: _difference(results, arm, final) for arm in others}
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
    return ", ".join(f"`{arm}` ({_signed(difference)})" for arm, difference in ordered)


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


def _signed(interval: Interval) -> str:
    return f"{'+' if interval.mean >= 0 else ''}{number(interval)}".replace("-", "−")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _final_table(results: Results) -> str:
    reference = results.arguments["reference"]
    ks = [k for k in results.arguments["pass_at"] if k > 1]
    header = ["arm", "pass@1", f"− `{reference}`", "greedy", *(f"pass@{k}" for k in ks)]
    header += ["mean", f"− `{reference}`", "tokens"]
    rows = []
    for arm in results.arms:
        is_reference = arm == reference
        rows.append(
            [
                f"`{arm}`",
                _estimate(results, arm, final),
                "" if is_reference else _signed(_difference(results, arm, final)),
                _estimate(results, arm, lambda run: greedy_rate(run["evaluations"][-1])),
                *(_estimate(results, arm, lambda run, k=k: pass_rate(run["evaluations"][-1], k)) for k in ks),  # type: ignore[misc]
                _estimate(results, arm, mean_accuracy),
                "" if is_reference else _signed(_difference(results, arm, mean_accuracy)),
                _reached(results, arm),
            ]
        )
    return _table(header, rows)


def _reached(results: Results, arm: str) -> str:
    """After how many tokens an arm's runs reached the threshold, if all of them did."""
    level = results.arguments["threshold"]
    tokens = [first_reached(curve(run, "generated_tokens"), accuracies(run), level) for run in results.of_arm(arm)]
    num_reached = sum(map(math.isfinite, tokens))
    if num_reached < len(tokens):
        return f"{num_reached} of {len(tokens)} runs"
    interval = mean_interval(tokens)
    half_width = "" if math.isnan(interval.half_width) else f" ± {interval.half_width:,.0f}"
    return f"{interval.mean:,.0f}{half_width}"


def _course_table(results: Results) -> str:
    budget, num_evals = results.arguments["generated_tokens"], results.arguments["num_evals"]
    amounts = [budget * i / num_evals for i in range(num_evals + 1)]
    rows = [
        [
            f"`{arm}`",
            *(
                _estimate(results, arm, lambda run, amount=amount: accuracy_at(run, "generated_tokens", amount))  # type: ignore[misc]
                for amount in amounts
            ),
        ]
        for arm in results.arms
    ]
    return _table(["arm", *(f"{amount:,.0f}" for amount in amounts)], rows)


def _equal_cost_table(results: Results) -> str:
    amounts = {cost: min(curve(run, cost)[-1] for run in results.runs) for cost in COSTS}
    rows = [
        [
            f"`{arm}`",
            *(
                _estimate(results, arm, lambda run, cost=cost: accuracy_at(run, cost, amounts[cost]))  # type: ignore[misc]
                for cost in COSTS
            ),
        ]
        for arm in results.arms
    ]
    return _table(["arm", *(f"{amounts[cost]:,.0f} {name}" for cost, name in COSTS.items())], rows)


def _cost_table(results: Results) -> str:
    rows = []
    for arm, settings in results.arms.items():
        ends = [run["evaluations"][-1] for run in results.of_arm(arm)]
        batches = _mean([end["batches"] for end in ends])
        tokens = _mean([end["generated_tokens"] for end in ends])
        costs = [f"{_mean([end[cost] for end in ends]):,.0f}" for cost in COSTS]
        rows.append([f"`{arm}`", f"{settings['num_prompts']}", f"{batches:,.1f}", f"{tokens / batches:,.0f}", *costs])
    return _table(["arm", "prompts a batch", "batches", "tokens a batch", *COSTS.values()], rows)


def _signal_table(results: Results) -> str:
    rows = []
    for arm in results.arms:
        runs = results.of_arm(arm)
        signals = [
            _estimate(results, arm, lambda run, name=name: _mean([batch[name] for batch in run["batches"]]))  # type: ignore[misc]
            for name in SIGNALS
        ]
        ends = [
            number(mean_interval([curve(run, name)[-1] for run in runs])) for name in ("entropy", "completion_length")
        ]
        rows.append([f"`{arm}`", *signals, *ends])
    return _table(["arm", *SIGNALS.values(), "entropy", "completion length"], rows)


def _tuning_section(results: Results) -> list[str]:
    """Which learning rates were tried, and what came of it."""
    if not results.tuning:
        return []
    arguments = results.arguments
    rows = []
    for arm, settings in results.arms.items():
        tried = []
        for rate in arguments["learning_rates"]:
            ends = [
                pass_rate(run["evaluations"][-1])
                for run in results.tuning
                if run["arm"] == arm and run["settings"]["learning_rate"] == rate
            ]
            mean = f"{_mean(ends):.3f}"
            tried.append(f"**{mean}**" if rate == settings["learning_rate"] else mean)
        rows.append([f"`{arm}`", *tried])
    tokens = arguments["tuning_tokens"] or arguments["generated_tokens"]
    return [
        "## Learning rates",
        f"Each arm was run with each of these rates for {tokens:,} generated tokens, with the tuning seeds "
        f"{', '.join(map(str, arguments['tuning_seeds']))}. Its mean held-out pass@1 at the end decided which rate it "
        "has above (bold; the lower of two alike).",
        _table(["arm", *(f"{rate:g}" for rate in arguments["learning_rates"])], rows),
    ]


def _settings(results: Results) -> dict[str, Any]:
    """The arguments, with what was chosen for each arm."""
    chosen = {
        arm: results.arguments["arms"][arm] | {name: settings[name] for name in ("num_prompts", "learning_rate")}
        for arm, settings in results.arms.items()
    }
    return results.arguments | {"arms": chosen}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
