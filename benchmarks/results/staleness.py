"""
Makes the table of what older rollouts cost and save, from the runs beside it:

    python -m benchmarks.results.staleness

Seconds are computed. Where generation takes r times as long as the updates of a batch do on policy, a batch takes
r + 1 there. If the last share s of its updates overlaps with the share h of generation that can be drawn ahead, it
takes (1 − s)·u + max(h·r, s·u) + (1 − h)·r, where u is the number of its updates over the number on policy. h is 1,
except that only the first turn of a dialogue is drawn ahead.
"""

import math
from collections.abc import Iterable

from ..estimates import arm_interval, difference, mean_rates, reward_bounds
from ..kept import read_kept
from ..outcomes import Results, reached
from ..statistics import ratio_interval
from ..tables import Table, number, tuned
from .families import RUNS, difference_text, short

TASKS = ("chain", "hard", "distractors", "machine", "search")
FIRST_TURNS = {"search": 7}  # tokens of a call
ON_POLICY, STALE = "tree_4_tracker", ("tree_4_half", "tree_4_all")
GENERATION = (0.5, 1.0, 2.0)  # over the updates of a batch on policy


def seconds(results: Results, arm: str, generation: float) -> float:
    """Seconds of a batch's tokens over those on policy."""
    share = results.arms[arm].get("staleness", 0)
    tokens = results.tokens_per_prompt[ON_POLICY]
    ahead = FIRST_TURNS.get(results.arguments["task"], tokens) / tokens
    updates = tuned(results.arms[arm], "num_iterations") / tuned(results.arms[ON_POLICY], "num_iterations")
    overlapped = max(ahead * generation, share * updates)
    return ((1 - share) * updates + overlapped + (1 - ahead) * generation) / (generation + 1)


def ratio_cells(results: Results, arm: str) -> list[str]:
    """Tokens, then seconds, that an arm spent until 75% of the improvement, over those on policy."""
    level = results.levels()["75%"]
    spent, on_policy = (
        [reached(run, "generated_tokens", level) for run in results.runs_of(name)] for name in (arm, ON_POLICY)
    )
    counts = [sum(map(math.isfinite, tokens)) for tokens in (spent, on_policy)]
    if counts != [len(spent), len(on_policy)]:
        return [f"{counts[0]} of {len(spent)} runs, on policy {counts[1]}", *[""] * len(GENERATION)]
    interval = ratio_interval(spent, on_policy)
    factors = [1.0, *(seconds(results, arm, generation) for generation in GENERATION)]
    return ["{:.2f} ({:.2f}–{:.2f})".format(*(factor * value for value in interval)) for factor in factors]


def table(tasks: Iterable[str] = TASKS) -> Table:
    """Each task and arm: its point, mean pass@1, its difference from on policy, and what reaching 75% took."""
    rows = []
    for name in tasks:
        results = read_kept(RUNS / f"stale_{name}.jsonl.gz")
        for arm in (ON_POLICY, *STALE):
            point = " · ".join(f"{tuned(results.arms[arm], axis):g}" for axis in ("learning_rate", "num_iterations"))
            mean = arm_interval(results, arm, mean_rates, reward_bounds(results))
            cells = [f"`{name}`", f"`{arm}`", point, number(mean)]
            if arm != ON_POLICY:
                cells += [difference_text(difference(results, arm, ON_POLICY)), *ratio_cells(results, arm)]
            rows.append([short(cell) for cell in cells] + [""] * (5 + len(GENERATION) + 1 - len(cells)))
    header = ["task", "arm", "rate · updates", "mean pass@1", f"− `{ON_POLICY}`", "tokens to 75%"]
    return Table([*header, *(f"seconds, generation {generation:g}" for generation in GENERATION)], rows)


if __name__ == "__main__":
    print(table().markdown())
