"""
FR3E beside GRPO: what a row costs.

    python -m benchmarks cost step --model_name_or_path MODEL --dataset_name FILE.jsonl \\
        --reward_funcs my_rewards.py:score --num_generations 8 --max_completion_length 512

`FR3ETrainer` and `GRPOTrainer` train the same policy on the same prompts, rows and seed, in turns of a few steps, in
one process, so that what else the machine does meanwhile meets both. So does "shared": GRPO by `FR3ETrainer`, without
anchors and with shared prefixes. Printed are ratios of FR3E to both: tokens that are generated, tokens that the update
forwards, time, and the most memory that a step holds beside what was held before it. Then where a step's time goes.
Each moment counts once, for the innermost of the parts below that is running:

- generation: transformers' `generate`;
- log-probs: forward passes outside of the loss, for FR3E those that give the entropies;
- rewards: TRL's reward computation, with the reward functions;
- loss: TRL's loss, its forward pass included;
- backward: the backward pass and the optimizer. With the loss, it is an update;
- FR3E: this package. Requests and padding, anchors, values, advantages, rejection, metrics;
- TRL: the rest of the step, and what each of them does alike: reading prompts, decoding completions, making the model
  ready to generate, assembling the batch.
"""

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from fr3e_trl.commands.usage import usage_errors
from fr3e_trl.fr3e_config import FR3EConfig

from ..arms import make_trainer, read_settings
from ..runs import be_quiet
from .common import SETTINGS, add_own_task_options, add_task_options, count, followed, make_parser, make_table, task_of
from .stopwatch import PARTS, measure, peak_memory

# As the tables call them, with what makes FR3E one of them
TRAINERS: dict[str, dict[str, Any]] = {
    "FR3E": {"trainer": "fr3e"},
    "GRPO": {"trainer": "grpo"},
    "shared": {"trainer": "fr3e", "num_anchors": 0, "share_prefixes": True},
}


def main(argv: list[str]) -> None:
    """Measure, and print the ratios."""
    parser = make_parser(
        __doc__,
        num_generations=(8, "rows of a prompt"),
        num_prompts=(8, "prompts of a step"),
        num_steps=(5, "steps of each trainer in a turn"),
        num_turns=(5, "turns of each trainer, beside a first one that is not counted"),
    )
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=[*TRAINERS], help="by default all three")
    parser.add_argument("--max_completion_length", type=count, help="in tokens; by default the task's")
    parser.add_argument("--min_completion_length", type=count, help="in tokens; by default EOS may come at once")
    parser.add_argument(
        "--settings", type=read_settings, default={}, help="of FR3E, in JSON, for example '{\"anchor_threshold\": 0.3}'"
    )
    add_task_options(parser)
    add_own_task_options(parser)
    options = parser.parse_args(argv)
    be_quiet()
    settings = {name: getattr(options, name) for name in ("num_generations", "num_prompts")}
    settings["max_steps"] = options.num_steps
    if options.max_completion_length is not None:
        settings["max_completion_length"] = options.max_completion_length
    if options.min_completion_length is not None:
        settings["generation_kwargs"] = {"min_new_tokens": options.min_completion_length}
    with tempfile.TemporaryDirectory() as output_dir:
        with usage_errors("wrong arguments", "See --help.", ValueError, TypeError):
            task, policy = task_of(options)
            trainers = {
                name: make_trainer(SETTINGS | settings | own, policy, task, Path(output_dir), seed=0)
                for name, own in (TRAINERS | {"FR3E": TRAINERS["FR3E"] | options.settings}).items()
                if name in ("FR3E", *options.trainers)
            }
            config = trainers["FR3E"].args
            assert isinstance(config, FR3EConfig)
            longest = config.max_completion_length
            if (options.min_completion_length or 0) > longest:
                raise ValueError(
                    f"min_completion_length={options.min_completion_length} is above max_completion_length={longest}."
                )
        seconds, generated, updated, peaks = measure(trainers, followed(range(options.num_turns + 1), "turn"))
        num_steps = options.num_steps * options.num_turns
        num_rows = num_steps * options.num_prompts * options.num_generations
        print(f"steps of each: {num_steps}, with {options.num_prompts} prompts x {options.num_generations} rows")
        print(f"FR3E: {config.num_bases} base trajectories and {config.num_states - 1} anchors a prompt")
        print_ratios(
            {
                "generated tokens per row": {name: number / num_rows for name, number in generated.items()},
                "tokens in the update per row": {name: number / num_rows for name, number in updated.items()},
                "generation time, s": {name: parts["generation"] for name, parts in seconds.items()},
                "update's time, s": {name: parts["loss"] + parts["backward"] for name, parts in seconds.items()},
                "whole step's time, s": {name: sum(parts.values()) for name, parts in seconds.items()},
            }
        )
        print_shares(seconds)
        for name, trainer in trainers.items() if not peaks else []:  # last, as it may take more than there is
            trainer.args.max_steps = 1
            peaks[name] = peak_memory(trainer)
        print_ratios({"peak memory, MiB": {name: peak / 2**20 for name, peak in peaks.items()}})


def print_ratios(entries: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(entries.values())))
    table = make_table("FR3E beside GRPO", *(f"/ {name}" for name in names[1:]), *names)
    for what, amounts in entries.items():
        fr3e, *others = amounts.values()
        table.add_row(what, *(f"{fr3e / other:.2f}" for other in others), *(f"{n:.2f}" for n in amounts.values()))
    Console().print(table)


def print_shares(seconds: dict[str, dict[str, float]]) -> None:
    table = make_table("Share of the step's time", *PARTS)
    for name, parts in seconds.items():
        table.add_row(name, *(f"{parts[part] / sum(parts.values()):.1%}" for part in PARTS))
    Console().print(table)
