"""
Draws the README's learning curves from the tables of the reports beside this file:

    python docs/reports/curves.py
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter

REPORTS = Path(__file__).parent
FAMILIES = ["chain", "machine", "countdown", "few_prompts", "distractors", "hard", "graded", "search"]
ARMS = {
    "grpo_4": "GRPO, 4 rows a prompt",
    "prior_4": "GRPO with shrunk baselines, 4 rows",
    "tree_4": "FR3E with num_generations=4",
}


def curves(report: str) -> tuple[list[int], dict[str, tuple[list[float], ...]]]:
    """Generated tokens, and for each arm its mean pass@1 there, and the ends of the 95% interval."""
    section = report.split("## pass@1 along the run\n\n")[1].split("\n\n")[0]
    titles, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines()]
    numbers = {arm: list(map(interval, cells)) for arm, *cells in rows}
    tokens = [int(title.replace(",", "")) for title in titles[1:]]
    return tokens, {arm: tuple(map(list, zip(*of_arm, strict=True))) for arm, of_arm in numbers.items()}


def interval(cell: str) -> tuple[float, float, float]:
    """A mean and the ends of its interval, of `0.722 (0.695–0.748)` or, in reports of before, `0.722 ± 0.027`."""
    mean, *ends = map(float, re.findall(r"\d+\.\d+", cell))
    if "±" in cell:
        return mean, max(mean - ends[0], 0), min(mean + ends[0], 1)
    return mean, ends[0], ends[1]


def main() -> None:
    figure, axes = pyplot.subplots(2, 4, figsize=(12, 5.4), layout="constrained")
    for panel, family in zip(axes.flat, FAMILIES, strict=True):
        tokens, of_arms = curves((REPORTS / family / "report.md").read_text())
        for (arm, label), color in zip(ARMS.items(), ("C0", "C2", "C1"), strict=True):
            means, lower, upper = of_arms[arm]
            panel.plot(tokens, means, color=color, label=label, marker="o", markersize=3)
            panel.fill_between(tokens, lower, upper, color=color, alpha=0.15, linewidth=0)
        panel.set_title(family)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.grid(alpha=0.3)
    figure.supxlabel("generated tokens")
    figure.supylabel("held-out pass@1")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(ARMS))
    figure.savefig(REPORTS / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
