"""
Makes the tables of results.md anew, and the figure of learning curves, from the runs beside it:

    python -m benchmarks.results.families
"""

import math
import re
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter

from fr3e_trl.commands.statistics import Interval

from ..estimates import arm_interval, difference, mean_rates, rates, rates_at, reward_bounds
from ..kept import read_kept
from ..outcomes import TUNED, Results
from ..pooled import GRPO, ahead, best_of, means_of, paired
from ..statistics import mean_interval
from ..tables import Table, number, signed, signed_range, speed, tuned

RUNS = Path(__file__).parent

# Those whose arms are tuned with two screening seeds and three finalists, by their files
FAMILIES = ("chain", "hard", "distractors", "few_prompts", "lengths", "machine", "countdown", "search", "graded")
PANELS_IN_A_ROW = 3

# Arms with TRL's off-policy mask, and with fewer rows, beside the tuned ones of their kind
MASKED = {
    "grpo_masked_2": "grpo_4",
    "grpo_masked_4": "grpo_4",
    "grpo_masked_8": "grpo_4",
    "grpo_masked_8_tight": "grpo_4",
    "prior_masked_4": "prior_4",
    "prior_masked_8": "prior_4",
    "tree_masked_2": "tree_4_distinct",
    "tree_masked_4": "tree_4_distinct",
    "tree_masked_8": "tree_4_distinct",
    "tree_masked_8_tight": "tree_4_distinct",
}
ROWS = {
    "grpo_2": "grpo_4",
    "grpo_3": "grpo_4",
    "tree_2_tracker": "tree_4_tracker",
    "tree_3_tracker": "tree_4_tracker",
    "tree_3_distinct_tracker": "tree_4_tracker",
    "tree_4_distinct_tracker": "tree_4_tracker",
    "grpo_8": "grpo_4",
    "tree_8_tracker": "tree_4_tracker",
}

# Trees beside groups with as many rows, and with branches drawn without replacement
AS_MANY_ROWS = [
    ("tree_2_tracker", "grpo_2"),
    ("tree_3_tracker", "grpo_3"),
    ("tree_8_tracker", "grpo_8"),
    ("tree_3_distinct_tracker", "tree_3_tracker"),
]

# With negative advantages halved, and not
HALVED = [
    ("grpo_4_half", "grpo_4"),
    ("tree_4_half", "tree_4"),
    ("tree_4_half", "grpo_4_half"),
    ("tree_4", "grpo_4_half"),
]

# Trees by their rows a prompt
TREES = {2: "tree_2_tracker", 3: "tree_3_tracker", 4: "tree_4_tracker", 8: "tree_8_tracker"}

# Arms with a value tracker, beside those without
TRACKED = [
    ("tree_4_tracker", "tree_4_independent"),
    ("prior_4_tracker", "prior_4"),
    ("tree_4_tracker", "prior_4_tracker"),
]

# Arms with other weights of the prior, on `lengths`
PRIORS = dict.fromkeys(
    ["kappa_0", "kappa_1", "kappa_4", "tree_kappa_1", "tree_tracker", "two_bases_kappa_0", "two_bases_kappa_1"],
    "grpo_4",
)

NOT_BESIDE = "not beside it"

SHOWN = {
    "grpo_4": "GRPO, 4 rows a prompt",
    "prior_4": "GRPO with shrunk baselines, 4 rows",
    "tree_4_tracker": "FR3E with num_generations=4",
}


def short(text: str) -> str:
    """Numbers without the 0 before the point, as the pages have them."""
    return re.sub(r"(?<!\d)0\.", ".", text)


def difference_cell(results: Results, arm: str, reference: str) -> str:
    """By how much an arm is ahead of another."""
    if arm == reference or not {arm, reference} <= set(results.arms):
        return ""
    return difference_text(difference(results, arm, reference))


def difference_text(interval: Interval) -> str:
    """A difference with its interval, bold where it is beyond it."""
    return bold_beyond(signed_range(interval), interval)


def bold_beyond(text: str, interval: Interval) -> str:
    """The text of a difference, bold where its interval leaves out 0."""
    text = short(text)
    return f"**{text}**" if interval.low > 0 or interval.high < 0 else text


def speed_cells(results: Results, arm: str, reference: str) -> list[str]:
    """Tokens and seconds that an arm spent until 75% of the improvement, as ratios to another's that ran beside it."""
    level = results.levels()["75%"]
    cells = [short(speed(results, arm, reference, cost, level)) for cost in ("generated_tokens", "seconds")]
    beside = [run["revision"] for name in (arm, reference) for run in results.runs_of(name)]
    return cells if all(revision == beside[0] for revision in beside) else [cells[0], NOT_BESIDE]


def family_table(name: str, results: Results, best: str, beside: Results | None) -> Table:
    """
    Each arm of a family: pass@1 along the run, and what it spent until 75% of the improvement, beside `grpo_4`.

    Args:
        name (`str`), results ([`Results`]):
            The family.
        best (`str`):
            The best arm of GRPO.
        beside ([`Results`], *optional*):
            Further runs of arms that did not run beside `grpo_4`: their seconds.
    """
    bounds, rows = reward_bounds(results), []
    for arm in results.arms:
        tokens, seconds = speed_cells(results, arm, "grpo_4")
        if seconds == NOT_BESIDE and beside is not None and arm in beside.arms:
            seconds = f"{speed_cells(beside, arm, 'grpo_4')[1]}, {len(beside.runs_of(arm))} seeds"
        mean = short(number(arm_interval(results, arm, mean_rates, bounds)))
        rows.append([f"`{arm}`", mean, difference_cell(results, arm, best), tokens, seconds])
    return Table([f"`{name}`", "mean pass@1", f"− `{best}`", "tokens to 75%", "seconds to 75%"], rows)


def prior_table(families: dict[str, Results]) -> Table:
    """What trees are ahead of shrunk baselines alone."""
    arms = ["tree_4_independent", "tree_4_distinct", "tree_4_tracker"]
    rows = [
        [f"`{name}`", *(difference_cell(results, arm, "prior_4") for arm in arms)] for name, results in families.items()
    ]
    return Table(["− `prior_4`", *(f"`{arm}`" for arm in arms)], rows)


def difficulty_table(results: Results) -> Table:
    """How arms end on the easiest and the hardest held-out prompts, by all runs, and how uncertain they are then."""
    by_prompt = np.mean([list(map(rates, run["evaluations"])) for run in results.runs], (0, 1))
    order, size = np.argsort(-by_prompt), len(by_prompt) // 4

    def row(name: str, evaluations: list[dict[str, Any]]) -> list[str]:
        by_rank = np.mean(list(map(rates, evaluations)), 0)[order]
        entropy = fmean(evaluation["entropy"] for evaluation in evaluations)
        return [name, *map(short, (f"{by_rank[:size].mean():.2f}", f"{by_rank[-size:].mean():.2f}", f"{entropy:.3f}"))]

    rows = [row("before training", [run["evaluations"][0] for run in results.runs])]
    for arm in results.arms:
        rows.append(row(f"`{arm}` in the end", [run["evaluations"][-1] for run in results.runs_of(arm)]))
    return Table(["pass@1 on `lengths`", "easiest quarter", "hardest quarter", "entropy in nats"], rows)


def pairs_table(families: dict[str, Results], pairs: list[tuple[str, str]]) -> Table:
    """What arms are ahead of others in the same runs. Families that have none of the pairs are left out."""
    rows = [[f"`{name}`", *(difference_cell(results, *pair) for pair in pairs)] for name, results in families.items()]
    return Table(["family", *(f"`{arm}` − `{other}`" for arm, other in pairs)], [row for row in rows if any(row[1:])])


def points_table(families: dict[str, Results]) -> Table:
    """What each arm was tuned to: rate · prompts a batch · updates a batch."""
    arms = dict.fromkeys(arm for results in families.values() for arm in results.arms)
    rows = [
        [
            f"`{arm}`",
            *(
                " · ".join(f"{tuned(results.arms[arm], name):g}" for name in TUNED) if arm in results.arms else ""
                for results in families.values()
            ),
        ]
        for arm in arms
    ]
    return Table(["rate · prompts · updates", *(f"`{name}`" for name in families)], rows)


def further_runs(kind: str, names: Iterable[str]) -> dict[str, Results]:
    """Further runs of families, in `KIND_FAMILY.jsonl.gz`. Those without any are left out."""
    paths = {name: RUNS / f"{kind}_{name}.jsonl.gz" for name in names}
    return {name: read_kept(path) for name, path in paths.items() if path.exists()}


def added_table(families: dict[str, Results], kind: str, arms: dict[str, str]) -> Table:
    """
    What arms are ahead of a family's tuned ones in further runs, by the mean over their seeds.

    Args:
        families (`dict[str, Results]`):
            The families. Those without such runs are left out.
        kind (`str`):
            The further runs of a family are in `benchmarks/results/KIND_FAMILY.jsonl.gz`.
        arms (`dict[str, str]`):
            Arms of these, and which of the family's arms they are compared with.
    """
    names = [name for name in families if (RUNS / f"{kind}_{name}.jsonl.gz").exists()]
    further, known = (
        {name: means_of(RUNS / f"{prefix}{name}.jsonl.gz") for name in names} for prefix in (f"{kind}_", "")
    )
    rows = [
        [f"`{arm}` − `{other}`", *(added_cell(further[name].get(arm, {}), known[name][other]) for name in names)]
        for arm, other in arms.items()
    ]
    return Table(["mean pass@1, difference", *(f"`{name}`" for name in names)], rows)


def halved_tables() -> list[Table]:
    """Arms with negative advantages halved: their means, and their differences, each pooled over the tasks too."""
    families = {name: means_of(RUNS / f"halved_{name}.jsonl.gz") for name in ("hard", "distractors", "chain")}
    names = [f"`{name}`" for name in families]
    means = [
        [f"`{arm}`", *(short(f"{fmean(of[arm].values()):.3f}") for of in families.values())]
        for arm in sorted({arm for pair in HALVED for arm in pair})
    ]
    rows = []
    for arm, other in HALVED:
        pairs = [paired(of[arm], of[other]) for of in families.values()]
        pooled = list(chain.from_iterable(pairs))
        rows.append([f"`{arm}` − `{other}`", *map(interval_cell, pairs), f"{interval_cell(pooled)}, {ahead(pooled)}"])
    return [
        Table(["mean pass@1 along the run", *names], means),
        Table(["difference", *names, "pooled"], rows),
    ]


def interval_cell(differences: list[float]) -> str:
    """The mean of differences between runs with one seed, with its 95% interval. Bold where that leaves out 0."""
    interval = mean_interval(differences)
    return bold_beyond(signed(interval), interval)


def chosen_rows_table(names: Iterable[str]) -> Table:
    """What trees gain by the number of rows that is best for their task, chosen on the other seeds."""
    rows = []
    for name in names:
        further, known = (means_of(RUNS / f"{prefix}{name}.jsonl.gz") for prefix in ("rows_", ""))
        by_size = {size: means for size, arm in TREES.items() if (means := further.get(arm) or known.get(arm))}
        seeds = sorted(set.intersection(*map(set, by_size.values())))
        chosen = {seed: best_size(by_size, [other for other in seeds if other != seed]) for seed in seeds}
        gains = {seed: by_size[size][seed] - by_size[4][seed] for seed, size in chosen.items()}
        gain = f"{fmean(gains.values()):+.3f}, {ahead(list(gains.values()))}"
        sizes = [", ".join(map(str, of)) for of in (sorted(by_size), sorted(set(chosen.values())))]
        rows.append([f"`{name}`", *sizes, short(gain).replace("-", "−")])
    return Table(["task", "rows to choose from", "chosen", "− `tree_4_tracker`"], rows)


def best_size(by_size: dict[int, dict[int, float]], seeds: list[int]) -> int:
    """The number of rows with the best mean over these seeds."""
    return max(by_size, key=lambda size: fmean(by_size[size][seed] for seed in seeds))


def added_cell(means: dict[int, float], reference_means: dict[int, float]) -> str:
    """An arm's mean over its seeds, and what it is ahead of another with the same ones."""
    if not means:
        return ""
    pairs = [mean - reference_means[seed] for seed, mean in means.items()]
    text = f"{fmean(means.values()):.3f}, {fmean(pairs):+.3f}, {ahead(pairs)}"
    return short(text).replace("-", "−")


def draw(families: dict[str, Results], path: Path) -> None:
    """Learning curves with 95% intervals over seeds and held-out prompts."""
    num_rows = math.ceil(len(families) / PANELS_IN_A_ROW)
    figure, axes = pyplot.subplots(
        num_rows, PANELS_IN_A_ROW, figsize=(4 * PANELS_IN_A_ROW, 0.4 + 3 * num_rows), layout="constrained"
    )
    for panel in axes.flat[len(families) :]:
        panel.set_visible(False)
    for panel, (name, results) in zip(axes.flat, families.items(), strict=False):
        num_evals = results.arguments["num_evals"]
        amounts = [results.amount * i / num_evals for i in range(num_evals + 1)]
        for (arm, label), color in zip(SHOWN.items(), ("C0", "C2", "C1"), strict=True):
            points = [
                arm_interval(results, arm, partial(rates_at, cost=results.cost, amount=amount), reward_bounds(results))
                for amount in amounts
            ]
            means, lower, upper = zip(*((point.mean, point.low, point.high) for point in points), strict=True)
            panel.plot(amounts, means, color=color, label=label, marker="o", markersize=3)
            panel.fill_between(amounts, lower, upper, color=color, alpha=0.15, linewidth=0)
        panel.set_title(name)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.grid(alpha=0.3)
    figure.supxlabel("generated tokens")
    figure.supylabel("held-out pass@1")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(SHOWN))
    figure.savefig(path, dpi=110)


def tables(families: dict[str, Results]) -> list[Table]:
    """The tables of the page, in order."""
    best = {name: best_of(GRPO, means_of(RUNS / f"{name}.jsonl.gz"), name) for name in families}
    beside = further_runs("seconds", families)
    return [
        *(family_table(name, results, best[name], beside.get(name)) for name, results in families.items()),
        prior_table(families),
        points_table(families),
        pairs_table(families, TRACKED),
        difficulty_table(families["lengths"]),
        *halved_tables(),
        added_table(families, "prior", PRIORS),
        added_table(families, "masked", MASKED),
        added_table(families, "rows", ROWS),
        pairs_table(further_runs("rows", families), AS_MANY_ROWS),
        chosen_rows_table(further_runs("rows", families)),
    ]


def kept_families() -> dict[str, Results]:
    return {name: read_kept(RUNS / f"{name}.jsonl.gz") for name in FAMILIES}


def main() -> None:
    families = kept_families()
    print("\n\n".join(table.markdown() for table in tables(families)))
    draw(families, Path(__file__).parent / "curves.png")


if __name__ == "__main__":
    main()
