"""
`python -m benchmarks`, from a clone of the repository with `pip install -e ".[bench]"`.

Errors and `--debug` are those of the `fr3e` command.
"""

from fr3e_trl.commands import cli
from fr3e_trl.commands.options import DATA, MODEL_AND_DATA, PAGES, Page

COSTS: cli.Commands = {
    "step": ("A step of FR3E compared with one of GRPO: tokens, time, and where it goes.", "benchmarks.cost.step"),
    "overlap": ("What rollouts drawn during training save.", "benchmarks.cost.overlap"),
    "bookkeeping": ("FR3E's bookkeeping overhead in a large step.", "benchmarks.cost.bookkeeping"),
}
ARMS, COMPARE = ("benchmarks.arguments", "ArmsArguments"), ("benchmarks.arguments", "CompareArguments")
PAGES["python -m benchmarks compare"] = Page(
    "Train arms at equal generated tokens, and report which is best.",
    [COMPARE],
    {"What is compared": [ARMS], "How": [COMPARE], "A task of your own": [MODEL_AND_DATA, DATA]},
)
COMMANDS: cli.Commands = {
    "compare": ("Train arms at equal generated tokens, and report which is best.", "benchmarks.compare"),
    "pooled": ("Pool the differences between arms over several comparisons.", "benchmarks.pooled"),
    "cost": ("Measure what FR3E costs.", COSTS),
    "make-policy": ("Make the starting policy of a task.", "benchmarks.make_policy"),
}


def main(argv: list[str] | None = None) -> None:
    """Run the command that the arguments name."""
    cli.main(argv, "python -m benchmarks", "What FR3E gains and costs, measured.", COMMANDS)


if __name__ == "__main__":
    main()
