"""
Makes the tables of docs/results.md anew, and the README's figure, from the runs in docs/runs:

    python docs/reports/results.py
"""

from functools import partial
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter

from fr3e_trl.bench.estimates import difference, mean_rates, of_arm, rates_at, reward_bounds
from fr3e_trl.bench.kept import read_kept
from fr3e_trl.bench.pooled import GRPO, best_of, means_of
from fr3e_trl.bench.results import Results
from fr3e_trl.bench.tables import Table, number, signed_range, speed, tuned
from fr3e_trl.bench.tuning import TUNED

RUNS = Path(__file__).parent.parent / "runs"

# Those whose arms are tuned with two screening seeds and three finalists, by their files
FAMILIES = ("chain", "hard", "distractors")

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
ROWS = {"tree_3_distinct": "tree_4_distinct", "tree_2_distinct": "tree_4_distinct"}

SHOWN = {
    "grpo_4": "GRPO, 4 rows a prompt",
    "prior_4": "GRPO with shrunk baselines, 4 rows",
    "tree_4_independent": "FR3E with num_generations=4",
}


def short(text: str) -> str:
    """Numbers without the 0 before the point, as the pages have them."""
    return text.replace("0.", ".")


def difference_cell(results: Results, arm: str, reference: str) -> str:
    """By how much an arm is ahead of another, bold where that is beyond the interval."""
    if arm == reference or not {arm, reference} <= set(results.arms):
        return ""
    interval = difference(results, arm, reference)
    told = short(signed_range(interval))
    return f"**{told}**" if interval.low > 0 or interval.high < 0 else told


def family_table(name: str, results: Results, best: str) -> Table:
    """Each arm of a family: pass@1 along the run, and what it spent until ¾ of the way, beside `grpo_4`."""
    level, bounds = results.levels()["¾"], reward_bounds(results)
    rows = [
        [
            f"`{arm}`",
            short(number(of_arm(results, arm, mean_rates, bounds))),
            difference_cell(results, arm, best),
            *(short(speed(results, arm, "grpo_4", cost, level)) for cost in ("generated_tokens", "seconds")),
        ]
        for arm in results.arms
    ]
    return Table([f"`{name}`", "mean pass@1", f"− `{best}`", "tokens to ¾", "seconds to ¾"], rows)


def beside_table(families: dict[str, Results], arms: list[str], reference: str) -> Table:
    """What arms are ahead of another, family by family."""
    rows = [
        [f"`{name}`", *(difference_cell(results, arm, reference) for arm in arms)] for name, results in families.items()
    ]
    return Table([f"− `{reference}`", *(f"`{arm}`" for arm in arms)], rows)


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


def added_table(families: dict[str, Results], kind: str, arms: dict[str, str]) -> Table:
    """
    What arms are ahead of a family's tuned ones in further runs, by the mean over their seeds.

    Args:
        families (`dict[str, Results]`):
            The families.
        kind (`str`):
            The further runs of a family are in `docs/runs/KIND_FAMILY.jsonl.gz`.
        arms (`dict[str, str]`):
            Arms of these, and which of the family's arms they are compared with.
    """
    further, known = (
        {name: means_of(RUNS / f"{prefix}{name}.jsonl.gz") for name in families} for prefix in (f"{kind}_", "")
    )
    rows = [
        [f"`{arm}` − `{other}`", *(added_cell(further[name].get(arm, {}), known[name][other]) for name in families)]
        for arm, other in arms.items()
    ]
    return Table(["mean pass@1, difference", *(f"`{name}`" for name in families)], rows)


def added_cell(means: dict[int, float], of_other: dict[int, float]) -> str:
    """An arm's mean over its seeds, and what it is ahead of another with the same ones."""
    if not means:
        return ""
    pairs = [mean - of_other[seed] for seed, mean in means.items()]
    told = (
        f"{fmean(means.values()):.3f}, {fmean(pairs):+.3f}, ahead in {sum(pair > 0 for pair in pairs)} of {len(pairs)}"
    )
    return short(told).replace("-", "−")


def draw(families: dict[str, Results], path: Path) -> None:
    """Learning curves with 95% intervals over seeds and held-out prompts."""
    figure, axes = pyplot.subplots(1, len(families), figsize=(4 * len(families), 3.4), layout="constrained")
    for panel, (name, results) in zip(axes, families.items(), strict=True):
        num_evals = results.arguments["num_evals"]
        amounts = [results.amount * i / num_evals for i in range(num_evals + 1)]
        for (arm, label), color in zip(SHOWN.items(), ("C0", "C2", "C1"), strict=True):
            points = [
                of_arm(results, arm, partial(rates_at, cost=results.cost, amount=amount), reward_bounds(results))
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
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(SHOWN))
    figure.savefig(path, dpi=110)


def tables(families: dict[str, Results]) -> list[Table]:
    """The tables of the page, in order."""
    best = {name: best_of(GRPO, means_of(RUNS / f"{name}.jsonl.gz"), name) for name in families}
    return [
        *(family_table(name, results, best[name]) for name, results in families.items()),
        beside_table(families, ["tree_4_independent", "tree_4_distinct"], "prior_4"),
        beside_table(families, ["tree_4_distinct"], "tree_4_independent"),
        points_table(families),
        added_table(families, "masked", MASKED),
        added_table(families, "rows", ROWS),
    ]


def kept_families() -> dict[str, Results]:
    return {name: read_kept(RUNS / f"{name}.jsonl.gz") for name in FAMILIES}


def main() -> None:
    families = kept_families()
    print("\n\n".join(table.markdown() for table in tables(families)))
    draw(families, Path(__file__).parent / "curves.png")


if __name__ == "__main__":
    main()
