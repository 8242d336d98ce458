"""
Differences between arms over several comparisons: seed by seed, and pooled over all pairs of runs.

    python benchmarks/pooled.py outputs/bench/chain outputs/bench/machine --reference prior_4

Of each arm that all comparisons have: the mean of pass@1 along the run, minus that of the reference in the run with the
same seed. Pooled, the pairs of all comparisons are taken as draws of one difference, with a 95% interval by Student's
t: it says something of these tasks, and not of tasks at large.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

from fr3e_trl.bench.report import signed
from fr3e_trl.bench.results import mean_accuracy
from fr3e_trl.commands.statistics import mean_interval

# Of several references, the one with the best mean is taken in each comparison
GRPO = ["grpo_4", "grpo_8", "grpo_dapo"]


def means_of(directory: Path) -> dict[str, dict[int, float]]:
    """The mean of pass@1 along the run, by arm and seed."""
    path = directory / "results.json"
    if not path.is_file():
        raise SystemExit(f"{directory} has no results.json. Run fr3e compare with output_dir={directory} first.")
    means: dict[str, dict[int, float]] = defaultdict(dict)
    for run in json.loads(path.read_text())["runs"]:
        means[run["arm"]][run["seed"]] = mean_accuracy(run)
    return means


def best_of(names: list[str], arms: dict[str, dict[int, float]], where: str) -> str:
    known = [name for name in names if name in arms]
    if not known:
        raise SystemExit(f"--reference {' '.join(names)}: {where} has the arms {', '.join(sorted(arms))}.")
    return max(known, key=lambda arm: mean(arms[arm].values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, help="of the comparisons")
    parser.add_argument("--reference", nargs="+", default=GRPO, help=f"an arm, or several (default: {' '.join(GRPO)})")
    options = parser.parse_args()
    comparisons = {directory.name: means_of(directory) for directory in options.directories}
    references = {name: best_of(options.reference, arms, name) for name, arms in comparisons.items()}
    print("reference:", ", ".join(f"{arm} on {name}" for name, arm in references.items()))
    for arm in sorted(set.intersection(*map(set, comparisons.values()))):
        differences = {
            name: [arms[arm][seed] - value for seed, value in arms[references[name]].items() if seed in arms[arm]]
            for name, arms in comparisons.items()
        }
        pooled = [difference for of_one in differences.values() for difference in of_one]
        ahead = sum(difference > 0 for difference in pooled)
        print(f"{arm}: {signed(mean_interval(pooled))} pooled, ahead in {ahead} of {len(pooled)}")
        for name, of_one in differences.items():
            print(f"    {name}: {signed(mean_interval(of_one))}")


if __name__ == "__main__":
    main()
