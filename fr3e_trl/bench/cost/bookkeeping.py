"""
FR3E's own part of a large step.

    fr3e cost bookkeeping

With a sampler that draws at once: requests, anchors, rows, values, advantages, rejection, and the filling of a batch.
As a ratio to the time that TRL's own padding of the same rows takes, measured in the same process.
"""

import time
from collections.abc import Sequence

import torch
from rich.console import Console
from trl.trainer.utils import pad

from ...config import FR3EConfig
from ...generation.sampler import Sample, SamplingRequest
from ...method.advantages import compute_advantages
from ...method.explore import explore
from ...method.refill import Row, fill_batch
from ...method.tree import Score, Tree, chains_of, rollouts_of
from .common import make_parser, make_table


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
    title = f"FR3E's own part: {num_prompts} prompts x {num_rows} rows x {num_tokens} tokens"
    table = make_table(title, "seconds", "/ TRL's padding")
    for part, time_of_part in [*seconds.items(), ("all of it", sum(seconds.values()))]:
        table.add_row(part, f"{time_of_part:.1f}", f"{time_of_part / padding:.2f}")
    Console().print(table)


def main(argv: list[str]) -> None:
    """Measure, and print the parts."""
    parser = make_parser(
        __doc__,
        num_prompts=(512, "prompts"),
        num_rows=(80, "rows of a prompt"),
        num_tokens=(3000, "tokens of a row"),
    )
    options = parser.parse_args(argv)
    bookkeeping(options.num_prompts, options.num_rows, options.num_tokens)
