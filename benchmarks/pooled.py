"""
Differences between arms, pooled over several comparisons, and the reports of these anew.

    python -m benchmarks pooled outputs/bench/chain outputs/bench/machine --reference prior_4
    python -m benchmarks pooled benchmarks/results/*.jsonl.gz --reference tree_4_independent --reports outputs/reports

A comparison is the directory of its results, or the small file that was kept of it: its `kept.jsonl.gz`, under any
name. With --reports, the report of each is written anew too, to a folder of its name.

It reports each arm that all comparisons have. A difference is the mean of pass@1 along a run, minus that of the
reference's run with the same seed. Pooled, the pairs of all comparisons count as draws of one difference, with a 95%
interval by Student's t. That interval is about these tasks. The one over comparisons takes their means as the draws: it
is about tasks and policies like these.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import mean

from fr3e_trl.commands.outputs import damaged, read_object
from fr3e_trl.commands.usage import Parser, UsageError

from .kept import KEPT, read_kept
from .outcomes import mean_accuracy
from .report import write_pages
from .statistics import mean_interval
from .tables import signed

# Of several references, each comparison takes the one with its best mean
GRPO = ["grpo_4", "grpo_8", "grpo_dapo"]


def main(argv: list[str]) -> None:
    """Print the differences."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "comparisons", nargs="+", type=Path, help=f"output directories of comparisons, or files kept of them ({KEPT})"
    )
    parser.add_argument("--reference", nargs="+", default=GRPO, help=f"an arm, or several (default: {' '.join(GRPO)})")
    parser.add_argument("--reports", type=Path, help="directory that the reports are written to, from kept files")
    options = parser.parse_args(argv)
    comparisons = {name_of(path): means_of(path) for path in options.comparisons}
    if len(comparisons) < len(options.comparisons):
        raise UsageError(
            f"Two comparisons have the same name: {', '.join(map(name_of, options.comparisons))}. Rename one."
        )
    for path in options.comparisons if options.reports is not None else []:
        write_pages(read_kept(path / KEPT if path.is_dir() else path), options.reports / name_of(path))
    references = {name: best_of(options.reference, arms, name) for name, arms in comparisons.items()}
    print("reference:", ", ".join(f"{arm} on {name}" for name, arm in references.items()))
    for arm in sorted(set.intersection(*map(set, comparisons.values()))):
        differences = {name: paired(arms[arm], arms[references[name]]) for name, arms in comparisons.items()}
        for name, pairs in differences.items():
            if not pairs:
                raise UsageError(
                    f"{name}: {arm} and {references[name]} have no seed in common. Run both with the same seeds."
                )
        pooled = list(chain.from_iterable(differences.values()))
        print(f"{arm}: {signed(mean_interval(pooled))} pooled, {ahead(pooled)}")
        if len(differences) > 1:
            means = [mean(pairs) for pairs in differences.values()]
            print(f"    over the {len(means)} comparisons: {signed(mean_interval(means))}")
        for name, pairs in differences.items():
            print(f"    {name}: {signed(mean_interval(pairs))}")


def paired(means: dict[int, float], reference: dict[int, float]) -> list[float]:
    """What the means of an arm's runs are ahead of another's with the same seeds, where both have one."""
    return [means[seed] - value for seed, value in reference.items() if seed in means]


def ahead(differences: Sequence[float]) -> str:
    """In how many pairs of runs the first is ahead."""
    return f"ahead in {sum(difference > 0 for difference in differences)} of {len(differences)}"


def name_of(path: Path) -> str:
    """The name of a comparison: its directory's, or that of the file that was kept of it."""
    return path.parent.name if path.name == KEPT else path.name if path.is_dir() else path.name.partition(".")[0]


def means_of(comparison: Path) -> dict[str, dict[int, float]]:
    """The mean of pass@1 along each run of a comparison, by arm and seed."""
    is_kept = comparison.is_file()
    path = comparison if is_kept else comparison / "results.json"
    if not path.is_file():
        raise UsageError(f"{comparison} has no results.json. Run `compare` with output_dir={comparison} first.")
    means: dict[str, dict[int, float]] = defaultdict(dict)
    content = {"runs": read_kept(path).runs} if is_kept else read_object(path)
    try:
        for run in content["runs"]:
            means[run["arm"]][run["seed"]] = mean_accuracy(run)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    return means


def best_of(names: list[str], arms: dict[str, dict[int, float]], comparison: str) -> str:
    """The one of these arms that has the best mean in a comparison."""
    known = [name for name in names if name in arms]
    if not known:
        raise UsageError(f"--reference {' '.join(names)}: {comparison} has the arms {', '.join(sorted(arms))}.")
    return max(known, key=lambda arm: mean(arms[arm].values()))
