"""
Says where trees have more to learn from than groups, from the runs in benchmarks/results:

    python -m benchmarks.results.contrast

Two completions of a prompt teach something if their rewards differ. FR3E generates more rows from as many tokens, and
they differ less often, as rows of a tree share a beginning. Both are taken at the start, in the first tenth of the
runs' batches. Their product says how many pairs that differ there are in as many tokens, as a multiple of GRPO's.

The gain is given for the whole runs, and for the tokens of GRPO's first ten batches: language models had few.
"""

from statistics import fmean
from typing import Any

from fr3e_trl.commands.statistics import Interval

from ..estimates import difference, interval_of, rates_at
from ..kept import read_kept
from ..outcomes import Results, curve, pass_rate, taught
from ..statistics import DIFFERENCE_OF_SHARES, interpolate
from ..tables import Table
from .families import FAMILIES, RUNS, difference_text, short

FEW_BATCHES = 10

# By file: the arms that are compared, GRPO with groups of 4 and the defaults with as many rows
ARMS = {
    **dict.fromkeys(FAMILIES, ("grpo_4", "tree_4_tracker")),
    **dict.fromkeys(("short", "words"), ("grpo_4_slow", "tree_4_slow")),
    **dict.fromkeys(("stocks", "stocks_rows", "stories", "short_low", "short_low_again"), ("grpo_4", "tree_4")),
}


def start(run: dict[str, Any]) -> float:
    return pass_rate(run["evaluations"][0])


def differing(run: dict[str, Any]) -> float:
    _, tenths = taught(run)["course"]["differing"]
    return tenths[0]


def rows_of_a_token(run: dict[str, Any]) -> float:
    last = run["evaluations"][-1]
    return last["training_rows"] / last["generated_tokens"]


def early_difference(results: Results, arm: str, reference: str) -> Interval:
    """By how much an arm is ahead in pass@1 when it has spent the tokens of the other's first ten batches."""
    values = []
    for run, other in zip(results.runs_of(arm), results.runs_of(reference), strict=True):
        spent = interpolate(curve(other, "batches"), curve(other, other["cost"]), FEW_BATCHES)
        values.append(rates_at(run, run["cost"], spent) - rates_at(other, other["cost"], spent))
    return interval_of(values, DIFFERENCE_OF_SHARES)


def table() -> Table:
    rows = []
    for name, arms in ARMS.items():
        kept = read_kept(RUNS / f"{name}.jsonl.gz")
        grpo, tree = (
            [fmean(map(measure, kept.runs_of(arm))) for measure in (start, differing, rows_of_a_token)] for arm in arms
        )
        more_rows = tree[2] / grpo[2]
        contrast = tree[1] / grpo[1] * more_rows
        cells = [short(f"{value:.2f}") for value in (*grpo[:2], tree[1], more_rows, contrast)]
        gains = (difference(kept, *reversed(arms)), early_difference(kept, *reversed(arms)))
        rows.append((contrast, [f"`{name}`", *cells, *map(difference_text, gains)]))
    header = [
        "",
        "pass@1 at the start",
        "pairs that differ, GRPO",
        "FR3E",
        "rows",
        "such pairs in as many tokens",
        "gain",
        "after ten batches",
    ]
    return Table(header, [row for _, row in sorted(rows, reverse=True)])


if __name__ == "__main__":
    print(table().markdown())
