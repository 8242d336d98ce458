"""From the runs of a comparison to its report."""

import math
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fr3e_trl.commands.outputs import revision, write_json
from fr3e_trl.commands.statistics import Interval

from . import tables
from .arguments import ArmsArguments
from .estimates import arm_interval, difference, few_seeds, mean_rates, reward_bounds, verdict_of
from .kept import KEPT, keep, restore
from .outcomes import COLLAPSED_NOISE, COSTS, TUNED, Results, accuracies, told_apart
from .plots import Plot, plot_all
from .tables import Section

PLOTS = "plots"  # their folder
LINES = (
    "a thin line is a run, and a thick one an arm's mean, as far as all of its runs go. From five seeds on, a band is "
    "the mean's 95% interval over seeds, on these prompts"
)


def write_report(results: Results, output_dir: Path) -> None:
    """Write `results.json`, with all raw data, the small file that is kept of it, and the report made from that."""
    write_json(output_dir / "results.json", asdict(results))
    content = keep(results)
    (output_dir / KEPT).write_bytes(content)
    write_pages(restore(content), output_dir)


def write_pages(results: Results, output_dir: Path) -> None:
    """Write `report.md` and the plots."""
    output_dir.mkdir(parents=True, exist_ok=True)
    plots = plot_all(results, headline(results).replace("`", ""))
    for plot in plots:
        path = output_dir / PLOTS / f"{plot.name}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(plot.svg)
    below = sections(results, has_runs=(output_dir / "results.json").exists())
    (output_dir / "report.md").write_text(markdown(results, plots, below))


def markdown(results: Results, plots: list[Plot], sections: list[Section]) -> str:
    """The report, in Markdown, with [`sections`] below its verdict."""
    parts = [
        f"# {title(results)}",
        f"**{verdict(results)}**",
        costs(results),
        few_seeds(results),
        tables.verdict_table(results).markdown(),
        legend(results),
        *(f"![{plot.title}]({PLOTS}/{plot.name}.svg)" for plot in plots),
        f"In the plots, {LINES}." if plots else "",
        *(section.markdown() for section in sections),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def title(results: Results) -> str:
    arguments = results.arguments
    return f"{arguments['task'] or arguments['dataset_name']}: arms at equal {COSTS[results.cost]}"


def sections(results: Results, has_runs: bool = True) -> list[Section]:
    """What the report says below its verdict. `has_runs`: whether `results.json` is beside it."""
    return [
        Section("pass@1 along the run", table=tables.course_table(results)),
        Section(
            "Diversity",
            table=tables.diversity_table(results),
            after="At half of that, and in the end. pass@k is the expected reward of the best of k samples. Before "
            f"training: {_start(results)}.",
        ),
        Section(
            "What a run cost",
            table=tables.cost_table(results),
            after="Rows count whether or not they teach anything. The time is that of training; "
            "evaluation took the given share of both.",
        ),
        Section(
            "What the batches taught",
            table=tables.signal_table(results),
            after="Means over all batches. Reward from the prompt: of what is sampled from the prompt itself, not from "
            "an anchor. Pairs that differ: how often two rows of a prompt have different rewards, whatever their "
            "number. A row has a signal if it is in the loss with an advantage other than 0. Entropy (in nats) and "
            "length are of the held-out samples, at the end.",
        ),
        *_tuning_section(results),
        Section(
            "Settings",
            code=yaml.safe_dump(_settings(results), sort_keys=False, default_flow_style=None, width=110).rstrip(),
            language="yaml",
        ),
        Section(
            "To reproduce",
            code=results.command,
            language="bash",
            after="With "
            + "; with ".join(made_with(results))
            + (f". Every run is in `results.json`, and its curve in `{KEPT}`." if has_runs else ".")
            + (f" {apart}" if (apart := told_apart([accuracies(run)[0] for run in results.runs])) else ""),
        ),
    ]


def made_with(results: Results) -> list[str]:
    """The revisions of the runs, each once. A run of an earlier version did not record its own: today's stands in."""
    revisions = [run.get("revision") or revision() for run in results.runs]
    return list(
        dict.fromkeys(", ".join(f"{name} {version}" for name, version in each.items() if version) for each in revisions)
    )


def legend(results: Results) -> str:
    """What the figures of the first table are."""
    arguments = results.arguments
    seeds = f"{_seeds(results)} seed{'s' if _seeds(results) > 1 else ''} ({', '.join(map(str, arguments['seeds']))})"
    parts = [
        f"{seeds}, {arguments['num_heldout']} held-out prompts with {arguments['num_samples']} samples each; pass@1 is "
        f"their mean reward. Mean: area under the curve of pass@1 against {COSTS[results.cost]} up to "
        f"{results.amount:,}, divided by that number.",
        "In brackets: the 95% interval over seeds and held-out prompts, both treated as random samples, each with its "
        "own Student's t; intervals of shares stay between 0 and 1 (Wilson). Differences and ratios are taken seed by "
        "seed, and no interval is widened for the number of arms. (all): all runs are alike.",
        "Tokens and seconds (of CPU or GPU, in training) to 75% and 90% of the best arm's improvement, as multiples of "
        f"`{arguments['reference']}`'s, with the 95% interval of the ratio over seeds; where not all runs reached it, "
        "how many did. Collapsed: runs whose last pass@1 is less than half of their best, and more than "
        f"{COLLAPSED_NOISE:g} below it.",
    ]
    return " ".join(parts + _unscored(results))


def headline(results: Results) -> str:
    """Which arm is ahead, by how much, and whether that is sure."""
    found = verdict_of(results)
    if found is None:
        (arm,) = results.arms
        mean = tables.number(arm_interval(results, arm, mean_rates, reward_bounds(results)))
        return f"`{arm}` has a mean pass@1 of {mean}; there is no other arm to compare it with"
    by = f"{tables.signed_range(found.difference)} in mean pass@1"
    if _seeds(results) == 1:
        return f"`{found.leader}` leads `{found.other}` by {by}, with one seed: no verdict"
    if found.is_sure:
        return f"`{found.leader}` is ahead of `{found.other}` by {by}: beyond the 95% interval"
    return f"No arm is clearly ahead: `{found.leader}` leads `{found.other}` by {by}, which may be chance"


def verdict(results: Results) -> str:
    """The headline, and what the intervals say of every arm beside the reference."""
    fell = "No arm improved. " if math.isnan(results.levels()["75%"]) else ""
    return f"{fell}{headline(results)}. {beside_reference(results)}".strip()


def beside_reference(results: Results) -> str:
    """Which arms are better or worse than the reference, where there are several."""
    reference = results.arguments["reference"]
    others = [arm for arm in results.arms if arm != reference]
    if _seeds(results) == 1 or len(others) < 2:
        return ""
    differences = {arm: difference(results, arm) for arm in others}
    better = {arm: interval for arm, interval in differences.items() if interval.low > 0}
    worse = {arm: interval for arm, interval in differences.items() if interval.high < 0}
    parts = [f"Better than `{reference}`: {_listed(better) or 'none'}"]
    if worse:
        parts.append(f"worse: {_listed(worse)}")
    undecided = len(others) - len(better) - len(worse)
    if undecided:
        parts.append(f"{undecided} of {len(others)} do not differ from it beyond their intervals")
    return "; ".join(parts) + "."


def costs(results: Results) -> str:
    """What the leading arm cost, compared with the other."""
    found = verdict_of(results)
    if found is None:
        return ""
    shares = " and ".join(f"{ratio} of the {name}" for name, ratio in tables.speeds(results, found).items())
    spent = [f"a run of `{arm}` took {tables.mean_seconds(results, arm):,.0f} s" for arm in (found.leader, found.other)]
    reached = f"`{found.leader}` reached 75% of the best improvement with {shares} of `{found.other}`; "
    return f"Cost: {reached if shares else ''}{', '.join(spent)} of training."


def _seeds(results: Results) -> int:
    return len(results.arguments["seeds"])


def _listed(differences: dict[str, Interval]) -> str:
    ordered = sorted(differences.items(), key=lambda item: -item[1].mean)
    return ", ".join(f"`{arm}` {tables.signed_range(interval)}" for arm, interval in ordered)


def _start(results: Results) -> str:
    arm, texts = results.runs[0]["arm"], []
    for name, (measure, bounds) in tables.diversity_measures(results).items():
        interval = arm_interval(results, arm, partial(measure, amount=0.0), bounds)
        texts.append(f"{name} {tables.number(interval)}")
    return ", ".join(texts)


def _tuning_section(results: Results) -> list[Section]:
    """What was tried to tune the arms, and what came of it."""
    if not results.screening:
        return []
    arguments = results.arguments
    budget = arguments["tuning_tokens"] or results.amount
    return [
        Section(
            "Tuning",
            f"Each arm was run at each point of its grid, for {budget:,} {COSTS[results.cost]} with "
            f"{_seeds_of(results.screening)}: the mean of pass@1 along the runs, of the best point with each value, "
            "and how many runs collapsed. The best points were run whole with the seeds "
            f"{', '.join(map(str, arguments['tuning_seeds']))}. The mean over these decided (of two alike, the lower "
            "values). What the arm was then run with is bold.",
            tables.tuning_table(results),
        )
    ]


def _seeds_of(runs: list[dict[str, Any]]) -> str:
    seeds = sorted({run["seed"] for run in runs})
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


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
    changed = {name: value for name, value in results.arguments.items() if name not in usual or value != usual[name]}
    return changed | {"arms": chosen}


def _unscored(results: Results) -> list[str]:
    """How many completions had no score, if any."""
    counts = [evaluation.get("num_unscored", 0) for run in results.runs for evaluation in run["evaluations"]]
    if not any(counts):
        return []
    return [
        f"{sum(counts)} held-out completions had no score (None or NaN), up to {max(counts)} in an evaluation. Their "
        "prompts are left out of it, and intervals are over seeds alone."
    ]
