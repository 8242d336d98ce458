"""
What several processes gain, and what the bookkeeping costs.

    make bench-scaling        (or: python benchmarks/scaling.py)

First, the demo's policy is trained on the same global batch by one process and by two, in turns, each process with one
thread: the ratio of their step times. Without a GPU the processes talk by gloo.

Second, FR3E's own part of a large step, with a sampler that draws at once: requests, anchors, rows, values, advantages,
rejection, and the filling of a batch, for 512 prompts with 80 rows of 3,000 tokens. As a ratio to the time that TRL's
own padding of the same rows takes, measured in the same process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import reasoning_gym
import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import pad

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.generation.sampler import Sample, SamplingRequest
from fr3e_trl.method.advantages import compute_advantages
from fr3e_trl.method.explore import explore
from fr3e_trl.method.refill import Row, fill_batch
from fr3e_trl.method.tree import Score, Tree, chains_of, rollouts_of

POLICY = Path(__file__).parents[1] / "examples" / "demo_policy"
LAUNCH = Path(__file__).parents[1] / "recipes" / "accelerate" / "ddp.yaml"


# One process and two


def right(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    return [float(f">{a}<" in completion) for completion, a in zip(completions, answer, strict=True)]


def train(output: Path, num_steps: int) -> None:
    """Train 8 prompts a step with 16 rows each, in as many processes as there are, and write the time of each step."""
    problems = reasoning_gym.create_dataset(
        "chain_sum", min_terms=5, max_terms=6, min_digits=1, max_digits=1, seed=0, size=2000
    )
    trainer = FR3ETrainer(
        AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32"),
        right,
        FR3EConfig(
            str(output.parent),
            num_generations=16,
            per_device_train_batch_size=128 // int(os.environ["WORLD_SIZE"]),
            max_completion_length=64,
            max_steps=num_steps,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            learning_rate=1e-5,
        ),
        train_dataset=Dataset.from_list([{"prompt": p["question"], "answer": p["answer"]} for p in problems]),
        processing_class=AutoTokenizer.from_pretrained(POLICY, padding_side="left"),
    )
    began = [time.perf_counter()]
    step = trainer.training_step

    def timed(*args, **kwargs):
        began.append(time.perf_counter())
        return step(*args, **kwargs)

    trainer.training_step = timed
    trainer.train()
    seconds = [later - earlier for earlier, later in pairwise(began[2:])]  # not the first
    if trainer.is_world_process_zero():
        output.write_text(json.dumps(seconds))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def step_times(num_processes: int, num_steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "seconds.json"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH)]
        command += ["--mixed_precision", "no", "--num_processes", str(num_processes), "--main_process_port", "0"]
        command += [__file__, "--train", str(output), "--num_steps", str(num_steps)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
        return json.loads(output.read_text())


def compare_processes(num_turns: int, num_steps: int) -> None:
    ratios = []
    for _ in track(range(num_turns), description="Turns", console=Console(stderr=True)):
        one, two = (statistics.median(step_times(n, num_steps)) for n in (1, 2))
        ratios.append(two / one)
    print(
        f"Step time of two processes / one, 8 prompts x 16 rows in all: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {num_turns} turns of {num_steps} steps)"
    )


# The bookkeeping


class InstantSampler:
    """Draws tokens that do not depend on the prefix, and counts the time that it takes."""

    seconds = 0.0

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        began = time.perf_counter()
        samples = [
            [Sample(ids) for ids in torch.randint(150_000, (r.num_samples, r.max_new_tokens)).tolist()]
            for r in requests
        ]
        self.seconds += time.perf_counter() - began
        return samples


def bookkeeping(num_prompts: int, num_rows: int, num_tokens: int) -> None:
    args = FR3EConfig(
        "unused",
        num_generations=num_rows,
        per_device_train_batch_size=num_rows,
        max_completion_length=num_tokens,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    sampler = InstantSampler()
    entropies = torch.rand(num_tokens)
    seconds = {}
    began = time.perf_counter()
    trees = [Tree(list(range(i, i + 200)), num_tokens) for i in range(num_prompts)]
    explore(
        trees,
        args,
        sampler,
        lambda owners, completions: [Score([0.0], float(ids[-1] % 3 == 0)) for ids in completions],
        lambda prompts, completions: [(entropies, entropies)] * len(completions),
        seed=(0, 0),
    )
    seconds["requests, anchors"] = time.perf_counter() - began - sampler.seconds
    began = time.perf_counter()
    states, parents = chains_of(trees)
    rollouts = rollouts_of(trees)
    row_states = torch.tensor([i for i, state in enumerate(states) for _ in state.rollouts])
    rewards = torch.tensor([rollout.score.reward for _, _, rollout in rollouts], dtype=torch.float64)
    result = compute_advantages(
        rewards,
        row_states,
        parents,
        modulation=args.modulation,
        prior_strength=args.value_prior_strength or 0.0,
        negative_scale=args.negative_advantage_scale or 0.0,
    )
    seconds["values, advantages, rejection"] = time.perf_counter() - began
    began = time.perf_counter()
    in_loss = (~result.rejected[row_states]).tolist()
    rows = [
        Row({}, None, tree.prompt_ids, state.prefix_ids, rollout, 1.0, advantage, is_in_loss)
        for (tree, state, rollout), advantage, is_in_loss in zip(
            rollouts, result.advantages.tolist(), in_loss, strict=True
        )
    ]
    batch, _, _ = fill_batch(rows, [], len(rows))
    completions = [row.completion_ids for row in batch]
    masks = [[0] * len(row.prefix_ids) + [1] * len(row.rollout.token_ids) for row in batch]
    seconds["rows"] = time.perf_counter() - began
    began = time.perf_counter()
    for start in range(0, len(batch), num_rows):  # not all at once, for the memory's sake
        pad([torch.tensor(ids) for ids in completions[start : start + num_rows]])
        pad([torch.tensor(mask) for mask in masks[start : start + num_rows]])
    padding = time.perf_counter() - began
    table = Table(title=f"FR3E's own part: {num_prompts} prompts x {num_rows} rows x {num_tokens} tokens")
    for column in ("", "seconds", "/ TRL's padding"):
        table.add_column(column, justify="left" if column == "" else "right")
    for part, time_of_part in [*seconds.items(), ("all of it", sum(seconds.values()))]:
        table.add_row(part, f"{time_of_part:.1f}", f"{time_of_part / padding:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_turns", type=int, default=5)
    parser.add_argument("--num_steps", type=int, default=12, help="steps of each in a turn, the first not counted")
    parser.add_argument("--num_prompts", type=int, default=512)
    parser.add_argument("--num_rows", type=int, default=80, help="rows of a prompt")
    parser.add_argument("--num_tokens", type=int, default=3000, help="tokens of a row")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # what the processes are launched with
    options = parser.parse_args()
    if options.train:
        train(options.train, options.num_steps)
        return
    bookkeeping(options.num_prompts, options.num_rows, options.num_tokens)
    compare_processes(options.num_turns, options.num_steps)


if __name__ == "__main__":
    main()
