"""What a run will do, printed by `fr3e train --dry_run`."""

import math
from dataclasses import fields

from trl import GRPOConfig

from ..fr3e_config import FR3EConfig
from .outputs import SECRET, concealed

Table = list[tuple[str, str]]


def print_plan(args: FR3EConfig, num_examples: int | None) -> None:
    """Print the settings and sizes of a run on `num_examples` examples (`None` if they are streamed)."""
    if args.process_index != 0:
        return
    if off := args.parts_off():
        print("\n".join([*off, ""]))
    for title, table in [
        ("Settings that differ from GRPOConfig's", settings(args)),
        ("The run", sizes(args, num_examples)),
    ]:
        width = max((len(name) for name, _ in table), default=0)
        print("\n".join([title, "", *(f"  {name:<{width}}  {value}" for name, value in table), ""]))


def settings(args: FR3EConfig) -> Table:
    """The resolved settings that `GRPOConfig` lacks, or whose default there differs."""
    args.resolve()
    default = GRPOConfig(args.output_dir, bf16=args.bf16, use_cpu=args.use_cpu)
    names = [field.name for field in fields(args) if field.init]
    return [
        (name, "***" if SECRET.search(name) else str(concealed(getattr(args, name))))
        for name in sorted(names)
        if not hasattr(default, name) or getattr(args, name) != getattr(default, name)
    ]


def sizes(args: FR3EConfig, num_examples: int | None) -> Table:
    """Completions, prompts, updates, steps and tokens of a run."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    prompts = args.generation_batch_size // args.num_generations
    updates = args.num_iterations * args.steps_per_generation / args.gradient_accumulation_steps
    branched = args.num_states - 1
    steps = num_steps(args, num_examples)
    table = [
        ("completions per step", f"{rows} per device, {rows * args.world_size} in all"),
        ("prompts per step", number(rows * args.world_size / args.num_generations)),
        ("completions per prompt", str(args.num_generations)),
        ("base trajectories per prompt", str(args.num_bases if branched else args.num_generations)),
        (
            "anchors per prompt",
            f"{branched}, branches per anchor: {args.num_rollouts}" if branched else "0: plain GRPO",
        ),
        ("generation batch", f"{args.generation_batch_size} completions of {prompts} prompts"),
        ("optimizer updates per generation batch", number(updates)),
        ("tokens generated per generation batch, at most", f"{most_tokens(args):,}"),
        ("tokens generated per update, at most", f"{math.ceil(most_tokens(args) / updates):,}"),
        ("optimizer updates in all", "unknown, because the dataset is streamed" if steps is None else f"{steps:,}"),
    ]
    if num_examples is not None and steps is not None:
        epochs = number(steps / updates * prompts / num_examples)
        table.append(("examples", f"{num_examples:,}, used for {epochs} epochs"))
    return table


def num_steps(args: FR3EConfig, num_examples: int | None) -> int | None:
    """Optimizer updates of the whole run, as `Trainer` counts them, `None` if that needs an unknown length."""
    if args.max_steps >= 0:
        return args.max_steps
    if num_examples is None:
        return None
    batches = num_examples // (args.generation_batch_size // args.num_generations)  # an incomplete one is dropped
    micro_batches = batches * args.num_iterations * args.steps_per_generation
    return math.ceil(args.num_train_epochs * max(1, math.ceil(micro_batches / args.gradient_accumulation_steps)))


def most_tokens(args: FR3EConfig) -> int:
    """Tokens of a generation batch if all completions have the maximum length, and branches start at the top."""
    prompts = args.generation_batch_size // args.num_generations
    completions = args.num_generations + (0 if args.reuse_base or args.num_states == 1 else args.num_bases)
    return prompts * (1 + args.max_refills) * completions * args.max_completion_length


def number(value: float) -> str:
    """A number with three digits, or as a whole number if it is one or large."""
    return f"{value:.3g}" if value % 1 and value < 1000 else f"{value:,.0f}"
