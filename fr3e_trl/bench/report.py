"""From the runs of a comparison to its report."""

from dataclasses import MISSING, asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from ..commands.outputs import write_json
from ..commands.statistics import Interval
from . import tables
from .arguments import ArmsArguments
from .plots import plot_all
from .results import COLLAPSED_NOISE, COSTS, Results, mean_accuracy
from .tuning import TUNED


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
        tables.verdict_table(results),
        _legend(results),
        *_unscored(results),
        *(f"![{title}]({file})" for title, file in plots.items()),
        "## Until pass@1 has come so far",
        tables.levels_table(results),
        "Median over seeds, and the lowest and highest (for 5 seeds a 94% interval of the median). A run that never "
        "came there counts as ∞.",
        "## pass@1 along the run",
        tables.course_table(results),
        "## Diversity",
        tables.diversity_table(results),
        "At half of that, and in the end. pass@k is the expected reward of the best of k samples. Distinct: "
        f"different completions among the right ones of {arguments['num_samples']}, for prompts that have a right one "
        "(with graded rewards, among those of the prompt's highest reward). Before training: "
        f"{_start(results)}.",
        "## pass@1 at equal cost of other kinds",
        "Each column is taken at the largest amount that every run has spent.",
        tables.equal_cost_table(results),
        "## What a run cost",
        tables.cost_table(results),
        "Forward tokens are those without gradients: generation (what it reads and what it samples), entropies, old "
        "log-probs. Rows count whether or not they teach anything. The time is that of training; evaluation took the "
        "given share of both.",
        "## What the batches taught",
        tables.signal_table(results),
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
    against = f"`{reference}` ({tables.estimate(results, reference, mean_accuracy)})"
    after = f"By the mean of pass@1 along {results.amount:,} {COSTS[results.cost]}"
    others = [arm for arm in results.arms if arm != reference]
    if len(results.arguments["seeds"]) == 1:
        return f"{after}, one seed shows no difference from {against}: run more seeds for a verdict."
    differences = {arm: tables.difference(results, arm, mean_accuracy) for arm in others}
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
    return ", ".join(f"`{arm}` ({tables.signed(difference)})" for arm, difference in ordered)


def _start(results: Results) -> str:
    first = results.runs[0]["evaluations"][0]
    return ", ".join(f"{name} {measure(first):.3f}" for name, measure in tables.diversity_measures(results).items())


def _tuning_section(results: Results) -> list[str]:
    """What was tried to tune the arms, and what came of it."""
    if not results.screening:
        return []
    arguments = results.arguments
    budget = arguments["tuning_tokens"] or results.amount
    return [
        "## Tuning",
        f"Each arm was run at each point of its grid, for {budget:,} {COSTS[results.cost]} with seed "
        f"{arguments['tuning_seeds'][0]}: the mean of pass@1 along the run, of the best point with each value, and how "
        "many runs collapsed. The best points were run whole with the seeds "
        f"{', '.join(map(str, arguments['tuning_seeds']))}. The mean over these decided (of two alike, the lower "
        "values). What the arm was then run with is bold.",
        tables.tuning_table(results),
    ]


def _settings(results: Results) -> dict[str, Any]:
    """The arguments, with what was chosen for each arm."""
    chosen = {
        arm: results.arguments["arms"][arm] | {name: tables.tuned(settings, name) for name in TUNED}
        for arm, settings in results.arms.items()
    }
    # Most arguments are those of a dataset and a model, which a task of the bench has not
    usual: dict[str, Any] = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(ArmsArguments)
    }
    told = {name: value for name, value in results.arguments.items() if name not in usual or value != usual[name]}
    return told | {"arms": chosen}


def _unscored(results: Results) -> list[str]:
    """How many completions had no score, if any."""
    counts = [evaluation.get("num_unscored", 0) for run in results.runs for evaluation in run["evaluations"]]
    if not any(counts):
        return []
    return [
        f"{sum(counts)} held-out completions had no score (None or NaN), up to {max(counts)} in an evaluation. Their "
        "prompts are left out of it."
    ]
