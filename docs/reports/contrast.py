"""
Says where trees have more to learn from than groups, from the runs in docs/runs:

    python docs/reports/contrast.py

Two completions of a prompt teach something if their rewards differ. FR3E generates more rows from as many tokens, and
they differ less often, as rows of a tree share a beginning. Both are taken at the start, in the first tenth of the
runs' batches. Their product says how many pairs that differ there are in as many tokens, as a multiple of GRPO's.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from fr3e_trl.bench.estimates import difference
from fr3e_trl.bench.kept import read_kept
from fr3e_trl.bench.results import pass_rate
from fr3e_trl.bench.tables import signed_range

RUNS = Path(__file__).parent.parent / "runs"
TOYS = ("chain", "hard", "distractors", "few_prompts", "lengths", "machine", "countdown", "search", "graded")

# By file: the arms that are compared, GRPO with groups of 4 and the defaults with as many rows
ARMS = {
    **dict.fromkeys(TOYS, ("grpo_4", "tree_4_tracker")),
    **dict.fromkeys(("short", "words"), ("grpo_4_slow", "tree_4_slow")),
}


def rows_of_a_token(run: dict[str, Any]) -> float:
    last = run["evaluations"][-1]
    return last["training_rows"] / last["generated_tokens"]


def differing(run: dict[str, Any]) -> float:
    return run["taught"]["course"]["differing"][1][0]


def main() -> None:
    lines = []
    for name, arms in ARMS.items():
        kept = read_kept(RUNS / f"{name}.jsonl.gz")

        def means(measure: Callable[[dict[str, Any]], float], kept=kept, arms=arms) -> list[float]:
            return [fmean(map(measure, kept.of_arm(arm))) for arm in arms]

        start, _ = means(lambda run: pass_rate(run["evaluations"][0]))
        of_grpo, of_tree = means(differing)
        few, many = means(rows_of_a_token)
        contrast = of_tree / of_grpo * many / few
        cells = [f"`{name}`", *(f"{value:.2f}" for value in (start, of_grpo, of_tree, many / few, contrast))]
        lines.append((contrast, f"| {' | '.join(cells)} | {signed_range(difference(kept, *reversed(arms)))} |"))
    print("| | pass@1 at the start | pairs that differ, GRPO | FR3E | rows | such pairs in as many tokens | gain |")
    print("|---|---|---|---|---|---|---|")
    for _, line in sorted(lines, reverse=True):
        print(line)


if __name__ == "__main__":
    main()
