"""
Says what a branch's first token decides, along a run on each task:

    python docs/reports/decisions.py chain machine countdown hard distractors

Independent branches redraw the uncertain token. Some get the base trajectory's token again, others another one. If the
token matters, the second kind differs more from the base trajectory in reward. That is what branches that must differ
can gain by. Each task is run with `tree_4_independent`'s settings of `recipes/bench/compare_distinct.yaml`.
"""

import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import torch
from transformers import TrainerCallback

from fr3e_trl.bench.arms import make_trainer
from fr3e_trl.bench.policies import starting_policy
from fr3e_trl.bench.runs import UNBOUNDED, be_quiet
from fr3e_trl.bench.tasks import TASKS
from fr3e_trl.commands.recipe import read_recipe
from fr3e_trl.commands.statistics import mean_interval

RECIPE = Path(__file__).parents[2] / "recipes" / "bench" / "compare_distinct.yaml"
SEEDS = (0, 1, 2, 3, 4)

# Learning rate, prompts and updates of a batch, and tokens of a run, as the recipe has them for each task
POINTS = {
    "chain": (3e-4, 34, 4, 120_000),
    "machine": (5e-5, 18, 4, 160_000),
    "countdown": (7e-4, 129, 2, 90_000),
    "hard": (1e-4, 25, 4, 200_000),
    "distractors": (3e-4, 22, 2, 120_000),
}


class Branches(TrainerCallback):
    """Collects, of each branch: whether its first token differs, and the square of how far its reward is off."""

    def __init__(self, amount: int):
        self.amount = amount
        self.num_batches = 0
        self.squares: dict[bool, list[float]] = defaultdict(list)

    def on_step_end(self, args, state, control, **kwargs):
        if len(self.trainer.batches) == self.num_batches:
            return  # a further update of the same batch
        self.num_batches = len(self.trainer.batches)
        for tree in self.trainer.trees:
            for anchor in tree.states[1:]:
                off = [branch.reward - tree.bases[anchor.base].reward for branch in anchor.rollouts]
                for branch, difference in zip(anchor.rollouts, off, strict=True):
                    if math.isfinite(difference):  # a copy has no reward of its own
                        self.squares[branch.differs].append(difference**2)
        control.should_training_stop = self.trainer.costs.generated_tokens >= self.amount


def measure(task: str, seed: int) -> tuple[float, float, float]:
    """Share of branches that begin with another token, and the mean squares of those that do not and that do."""
    rate, num_prompts, num_iterations, amount = POINTS[task]
    point = {"learning_rate": rate, "num_prompts": num_prompts, "num_iterations": num_iterations}
    settings = read_recipe(RECIPE)["base"] | point | {"max_steps": UNBOUNDED}
    policy = starting_policy(TASKS[task])
    branches = Branches(amount)
    with tempfile.TemporaryDirectory() as output_dir:
        branches.trainer = make_trainer(settings, policy, TASKS[task], Path(output_dir), seed)
        branches.trainer.add_callback(branches)
        branches.trainer.train()
    same, other = branches.squares[False], branches.squares[True]
    return len(other) / len(same + other), fmean(same), fmean(other)


def main() -> None:
    be_quiet()
    torch.set_num_threads(1)
    print("| task | branches that differ | squared difference in reward: the same token | another | token's share |")
    print("|---|---|---|---|---|")
    for task in sys.argv[1:]:
        shares, same, other = zip(*(measure(task, seed) for seed in SEEDS), strict=True)
        decided = mean_interval([1 - a / b for a, b in zip(same, other, strict=True)])
        share = f"{decided.mean:.2f} ({decided.low:.2f}–{decided.high:.2f})"
        print(f"| `{task}` | {fmean(shares):.2f} | {fmean(same):.3f} | {fmean(other):.3f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
