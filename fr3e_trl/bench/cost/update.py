"""
What the update costs, with shared prefixes forwarded once or with every row.

    fr3e cost update --hidden_size 256 --num_layers 4 --lengths 128 512

The loss of one micro-batch and its backward pass, by the trainer itself, on random tokens and a random policy: trees
of two base trajectories, with K anchors in all and M rollouts from each, all of the same length. Anchors are in the
first or the last tenth of the completions (early, late), or spread over all (even). Printed is the time as a ratio to
that of the same rows forwarded one by one, which is GRPO's for as many rows: without sharing, a prefix costs what any
tokens cost. Shared, GRPO's rows have their prompt in common.
"""

import argparse
import statistics
import tempfile
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, set_seed

from ...fr3e_config import FR3EConfig
from ...prefix_sharing.trie import fold
from ...trainer import FR3ETrainer
from ..measures import now
from ..policies import small_config
from ..runs import be_quiet
from ..tasks import TASKS
from .common import add_counts, count, followed, make_parser, make_table

NUM_BASES = 2

# Where anchors are, as shares of a completion's length
PLACES = {"early": (0.0, 0.1), "even": (0.0, 1.0), "late": (0.9, 1.0)}


def main(argv: list[str]) -> None:
    """Measure, and print the ratios."""
    parser = make_parser(
        __doc__,
        hidden_size=(128, "of the policy"),
        num_layers=(4, "of the policy"),
        vocab_size=(2048, "of the policy"),
        num_turns=(1, "turns of each, beside a first one that is not counted"),
    )
    parser.add_argument("--attn_implementation", default="sdpa", help="'sdpa' (the default) or 'eager'")
    options = parse_with_rows(parser, argv, [128, 512, 2048])
    be_quiet()
    set_seed(0)
    table = make_table(
        f"Time of the update, shared / one by one (tokens): {options.num_prompts} prompts x {options.num_generations}",
        "one by one, s",
        *("GRPO", *PLACES),
    )
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_update_trainer(options, output_dir)
        for length in followed(options.lengths, "length"):
            batches = {"GRPO": make_batch(options, length, [])}
            batches |= {
                f"{shape} {place}": make_batch(options, length, branches)
                for shape, of_places in branches_of(options.num_generations - NUM_BASES, length).items()
                for place, branches in of_places.items()
            }
            one_by_one, ratios = measure(trainer, batches, options.num_turns)
            for shape in branches_of(options.num_generations - NUM_BASES, length):
                of_row = [ratios["GRPO"], *(ratios[f"{shape} {place}"] for place in PLACES)]
                table.add_row(f"{length} tokens, {shape}", f"{one_by_one:.3g}", *of_row)
    Console(width=100).print(table)


def parse_with_rows(parser: argparse.ArgumentParser, argv: list[str], lengths: list[int]) -> argparse.Namespace:
    """The options, with those of a micro-batch's rows, whose completions have each of `lengths` by default."""
    add_counts(
        parser,
        num_prompts=(1, "prompts of the micro-batch"),
        num_generations=(8, "rows of a prompt"),
        prompt_length=(64, "in tokens"),
    )
    told = f"of the completions, in tokens (default: {' '.join(map(str, lengths))})"
    parser.add_argument("--lengths", type=count, nargs="+", default=lengths, help=told)
    options = parser.parse_args(argv)
    if options.num_generations <= NUM_BASES:
        parser.error(f"argument --num_generations: {options.num_generations} must be more than {NUM_BASES}")
    return options


def branches_of(num_branches: int, length: int) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Which base trajectory each branch leaves, and where, by K and M and by place."""
    shapes = {}
    for num_rollouts in (1, 2, 3):
        num_anchors = num_branches // num_rollouts
        if num_anchors * num_rollouts != num_branches:
            continue
        per_base = -(-num_anchors // NUM_BASES)
        shapes[f"K={num_anchors} M={num_rollouts}"] = {
            place: [
                (
                    anchor % NUM_BASES,
                    int(length * (first + (last - first) * (anchor // NUM_BASES + 1) / (per_base + 1))),
                )
                for anchor in range(num_anchors)
                for _ in range(num_rollouts)
            ]
            for place, (first, last) in PLACES.items()
        }
    return shapes


def make_update_trainer(options: argparse.Namespace, output_dir: str) -> FR3ETrainer:
    """A trainer of a random policy, of which the loss is wanted and no more."""
    tokenizer = TASKS["chain"].make_tokenizer()
    model = AutoModelForCausalLM.from_config(
        small_config(tokenizer, options.vocab_size, options.hidden_size, options.num_layers),
        attn_implementation=options.attn_implementation,
    )
    args = FR3EConfig(
        output_dir,
        num_generations=options.num_generations,
        per_device_train_batch_size=options.num_generations * options.num_prompts,
        gradient_checkpointing=True,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    trainer = FR3ETrainer(
        model,
        lambda completions, **kwargs: [0.0] * len(completions),
        args,
        train_dataset=TASKS["chain"].examples("train", 0, options.num_prompts),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs or {"use_reentrant": False})
    trainer.model.train()
    return trainer


def make_batch(options: argparse.Namespace, length: int, branches: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """
    A micro-batch as TRL's loss takes it, of random tokens.

    Args:
        options (`argparse.Namespace`):
            Sizes.
        length (`int`):
            Tokens of every completion.
        branches (`list[tuple[int, int]]`):
            Which base trajectory each branch leaves, and where. Without any, all rows are sampled from the prompt.
    """
    num_rows = options.num_prompts * options.num_generations
    prompts = torch.randint(2, options.vocab_size, (options.num_prompts, options.prompt_length))
    completions = torch.randint(2, options.vocab_size, (options.num_prompts, options.num_generations, length))
    mask = torch.ones_like(completions)
    for row, (base, position) in enumerate(branches, start=NUM_BASES):
        completions[:, row, :position] = completions[:, base, :position]
        mask[:, row, :position] = 0
    return {
        "prompt_ids": prompts.repeat_interleave(options.num_generations, 0),
        "prompt_mask": torch.ones(num_rows, options.prompt_length, dtype=torch.long),
        "completion_ids": completions.flatten(0, 1),
        "completion_mask": torch.ones(num_rows, length, dtype=torch.long),
        "tool_mask": mask.flatten(0, 1),
        "advantages": torch.randn(num_rows),
        "in_loss": torch.ones(num_rows, dtype=torch.bool),
        "num_rows_in_loss": torch.tensor(num_rows),
        "num_items_in_batch": mask.sum(),
    }


def measure(trainer: Any, batches: dict[str, dict[str, torch.Tensor]], num_turns: int) -> tuple[float, dict[str, str]]:
    """Seconds of rows one by one, and the time of each batch as a ratio to it: medians over turns but a first one."""
    one_by_one: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in batches}
    for turn in range(num_turns + 1):
        apart = seconds(trainer, batches["GRPO"], share=False)
        times = {name: seconds(trainer, batch, share=True) for name, batch in batches.items()}
        if turn > 0:
            one_by_one.append(apart)
            for name, time in times.items():
                ratios[name].append(time / apart)
    return statistics.median(one_by_one), {
        name: f"{statistics.median(ratios[name]):.2f} ({share_of_tokens(batch):.2f})" for name, batch in batches.items()
    }


def share_of_tokens(batch: dict[str, torch.Tensor]) -> float:
    """How many of a batch's tokens are forwarded when they are shared."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    trie = fold(input_ids, torch.ones_like(input_ids), batch["completion_mask"].bool())
    return trie.input_ids.numel() / input_ids.numel()


def seconds(trainer: Any, batch: dict[str, torch.Tensor], share: bool) -> float:
    """Of the loss and its backward pass."""
    trainer.share_prefixes(share)
    assert trainer.shares_prefixes == share
    batch = {name: value.to(trainer.accelerator.device) for name, value in batch.items()}
    trainer.model.zero_grad()
    began = now(trainer.accelerator.device)
    trainer.compute_loss(trainer.model, batch).backward()
    return now(trainer.accelerator.device) - began
