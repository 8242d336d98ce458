"""
Says what kind of token anchors are, in the trees that a run logged:

    python docs/reports/anchors.py outputs/demo_lm/trees

A number or a sign of arithmetic is a step of the calculation. All else is wording.
"""

import gzip
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

NUM_EXAMPLES = 6
CALCULATION = re.compile(r"[0-9+\-*=]")


def anchors(folder: Path):
    """For each anchor of the logged trees: kind of its token, entropy, whether a branch has another reward, text."""
    for path in sorted(folder.glob("step-*.json.gz")):
        for tree in json.loads(gzip.decompress(path.read_bytes()))["trees"]:
            for state in tree["states"][1:]:
                base = tree["rollouts"][state["base"]]
                tokens, position = base["tokens"], state["position"]
                branches = [tree["rollouts"][index] for index in state["rollouts"]]
                rewards = [base["reward"], *(branch["reward"] for branch in branches)]
                kind = "calculation" if CALCULATION.search(tokens[position]) else "wording"
                others = sorted({branch["tokens"][0] for branch in branches if branch["tokens"]})
                before = "".join(tokens[max(0, position - 12) : position]).replace("\n", " ")
                text = f"{before} [{' | '.join([tokens[position], *others])}]"
                yield kind, state["entropy"], len(set(rewards)) > 1, text


def main() -> None:
    found = defaultdict(list)
    for kind, *rest in anchors(Path(sys.argv[1])):
        found[kind].append(rest)
    total = sum(map(len, found.values()))
    print("| anchors | share | mean entropy in nats | branches with another reward |\n|---|---|---|---|")
    for kind, of_kind in found.items():
        entropy, differs = (fmean(values) for values in list(zip(*of_kind, strict=True))[:2])
        print(f"| {kind} | {len(of_kind) / total:.2f} of {total} | {entropy:.2f} | {differs:.2f} |")
    for kind, of_kind in found.items():
        print(f"\n{kind}:")
        for _, _, text in of_kind[:: max(1, len(of_kind) // NUM_EXAMPLES)][:NUM_EXAMPLES]:
            print(f"- {text}")


if __name__ == "__main__":
    main()
