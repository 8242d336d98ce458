"""
Says what a branch's first token decides, along a run on each task:

    python -m benchmarks.results.decisions chain machine countdown hard distractors

Independent branches redraw the uncertain token. Some get the base trajectory's token again, others another one. If the
token matters, the second kind differs more from the base trajectory in reward. That is what branches that must differ
can gain by. Each task is run with the settings of `tree_4_independent` in `benchmarks/results/distinct_TASK.jsonl.gz`.
"""

import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from ..arms import make_trainer
from ..kept import read_kept
from ..policies import starting_policy
from ..runs import UNBOUNDED, be_quiet
from ..statistics import mean_interval
from ..tables import number
from ..tasks import TASKS

RUNS = Path(__file__).parent
SEEDS = (0, 1, 2, 3, 4)


class Branches(TrainerCallback):
    """Collects, of each branch: whether its first token differs, and the square of how far its reward is off."""

    def __init__(self, trainer: GRPOTrainer, amount: float):
        self.trainer = trainer
        self.amount = amount
        self.num_batches = 0
        self.squares: dict[bool, list[float]] = defaultdict(list)

    def on_step_end(self, args, state, control, **kwargs):
        if len(self.trainer.batches) == self.num_batches:
            return  # a further update of the same batch
        self.num_batches = len(self.trainer.batches)
        for tree in self.trainer.trees:
            for anchor in tree.states[1:]:
                for branch in anchor.rollouts:
                    difference = branch.reward - tree.bases[anchor.base].reward
                    if math.isfinite(difference):  # a copy has no reward of its own
                        self.squares[branch.differs].append(difference**2)
        control.should_training_stop = self.trainer.costs.generated_tokens >= self.amount


def measure(task: str, seed: int) -> tuple[float, float, float]:
    """Share of branches that begin with another token, and the mean squares of those that do not and that do."""
    kept = read_kept(RUNS / f"distinct_{task}.jsonl.gz")
    settings = kept.arms["tree_4_independent"] | {"max_steps": UNBOUNDED}
    policy = starting_policy(TASKS[task])
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(settings, policy, TASKS[task], Path(output_dir), seed)
        branches = Branches(trainer, kept.amount)
        trainer.add_callback(branches)
        trainer.train()
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
        squares = f"{fmean(same):.3f} | {fmean(other):.3f}"
        print(f"| `{task}` | {fmean(shares):.2f} | {squares} | {number(decided, 2)} |", flush=True)


if __name__ == "__main__":
    main()
