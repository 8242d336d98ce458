"""
Says what kind of token anchors are and where, in the trees that a run logged, and how often branches change the reward:

    python -m benchmarks.results.anchors outputs/demo_lm/trees

A number or a sign of arithmetic is a step of the calculation. All else is wording.
"""

import gzip
import json
import re
import sys
from pathlib import Path
from statistics import fmean

NUM_EXAMPLES = 6
NUM_PARTS = 4
CALCULATION = re.compile(r"[0-9+\-*=]")


def logged_branches(folder: Path):
    """Each branch of the logged trees: what can be said of its anchor, entropy, whether its reward differs, text."""
    for path in sorted(folder.glob("step-*.json.gz")):
        for tree in json.loads(gzip.decompress(path.read_bytes()))["trees"]:
            for state in tree["states"][1:]:
                base = tree["rollouts"][state["base"]]
                tokens, position = base["tokens"], state["position"]
                before = "".join(tokens[max(0, position - 12) : position]).replace("\n", " ")
                place = int(NUM_PARTS * position / len(tokens))
                for index in state["rollouts"]:
                    branch = tree["rollouts"][index]
                    first = branch["tokens"][0]
                    told = (
                        "calculation" if CALCULATION.search(tokens[position]) else "wording",
                        f"in part {place + 1} of {NUM_PARTS} of the completion",
                        "begins with the same token" if first == tokens[position] else "begins with another token",
                    )
                    text = f"{before} [{tokens[position]} | {first}]"
                    yield told, state["entropy"], branch["reward"] != base["reward"], text


def main() -> None:
    branches = list(logged_branches(Path(sys.argv[1])))
    print("| branches | share | mean entropy in nats | with another reward |\n|---|---|---|---|")
    for of_kind in zip(*(told for told, *_ in branches), strict=True):
        for kind in sorted(set(of_kind)):
            _, entropies, differ, _ = zip(*(branch for branch in branches if kind in branch[0]), strict=True)
            share = f"{len(differ) / len(branches):.2f} of {len(branches)}"
            print(f"| {kind} | {share} | {fmean(entropies):.2f} | {fmean(differ):.2f} |")
    for kind in ("wording", "calculation"):
        texts = [text for told, *_, text in branches if kind in told]
        print(f"\n{kind}:")
        for text in texts[:: max(1, len(texts) // NUM_EXAMPLES)][:NUM_EXAMPLES]:
            print(f"- {text}")


if __name__ == "__main__":
    main()
