"""
FR3E beside GRPO: what a row costs.

    fr3e cost step --model_name_or_path MODEL --dataset_name FILE.jsonl --reward_funcs my_rewards.py:score \\
        --num_generations 8 --max_completion_length 512

`FR3ETrainer` and `GRPOTrainer` train the same policy on the same prompts, rows and seed, in turns of a few steps, in
one process, so that what else the machine does meanwhile meets both. So does "shared": GRPO by `FR3ETrainer`, without
anchors and with shared prefixes. Printed are ratios of FR3E to both: tokens that are generated, tokens that the update
forwards, time, and the most memory that a step holds beside what was held before it. Then where a step's time goes.
Each moment counts once, for the innermost of the parts below that is running:

- generation: transformers' `generate`;
- log-probs: forward passes outside of the loss, for FR3E those that give the entropies;
- rewards: TRL's reward computation, with the reward functions;
- loss: TRL's loss, its forward pass included;
- FR3E: this package. Requests and padding, anchors, values, advantages, rejection, metrics;
- TRL: the rest of the step, and what each of them does alike: reading prompts, decoding completions, making the model
  ready to generate, assembling the batch, backward pass, optimizer.
"""

import contextlib
import functools
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationMixin

from ...commands.usage import usage_errors
from ...generation.generate import GenerateSampler
from ...trainer import FR3ETrainer
from ...trl_adapter import logprobs, watching
from ..arms import make_trainer, read_settings
from ..runs import be_quiet
from .common import SETTINGS, add_own_task_options, add_task_options, count, make_parser, make_table, task_of

# As the tables call them, with what makes FR3E one of them
TRAINERS: dict[str, dict[str, Any]] = {
    "FR3E": {"trainer": "fr3e"},
    "GRPO": {"trainer": "grpo"},
    "shared": {"trainer": "fr3e", "num_anchors": 0, "share_prefixes": True},
}

PARTS = ["generation", "log-probs", "rewards", "loss", "FR3E", "TRL"]

TIMED: list[tuple[type | ModuleType, str, str]] = [
    (GenerationMixin, "generate", "generation"),
    *watching.PARTS,
    *((FR3ETrainer, name, part) for name, part in watching.OVERRIDES.items()),
    (GenerateSampler, "sample", "FR3E"),
    (logprobs, "token_statistics", "FR3E"),
]


class Stopwatch:
    """Time by part, each moment counted for the innermost part that is running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._running: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        # Inside the loss, the forward pass is the loss's
        self._running.append("loss" if name == "log-probs" and "loss" in self._running else name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what a part has asked for is its own
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def times(self, methods: list[tuple[type | ModuleType, str, str]]) -> Iterator[None]:
        """Have every call of these methods and functions, each with its class or module, counted for their parts."""
        originals = [(owner, name, vars(owner)[name]) for owner, name, _ in methods]
        for owner, name, part in methods:
            setattr(owner, name, self._timed(vars(owner)[name], part))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                result = function(*args, **kwargs)
            return self._entered(result, part) if isinstance(result, AbstractContextManager) else result

        return timed

    @contextlib.contextmanager
    def _entered(self, context: AbstractContextManager, part: str) -> Iterator[Any]:
        """A context whose beginning and end count for a part, and not what is done in it."""
        with contextlib.ExitStack() as stack:
            with self.part(part):
                entered = stack.enter_context(context)
            yield entered
            with self.part(part):
                stack.close()


def main(argv: list[str]) -> None:
    """Measure, and print the ratios."""
    parser = make_parser(
        __doc__,
        num_generations=(8, "rows of a prompt"),
        num_prompts=(8, "prompts of a step"),
        num_steps=(5, "steps of each trainer in a turn"),
        num_turns=(5, "turns of each trainer, beside a first one that is not counted"),
    )
    parser.add_argument("--max_completion_length", type=count, help="in tokens; by default the task's")
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
    with tempfile.TemporaryDirectory() as output_dir:
        with usage_errors("wrong arguments", "See --help.", ValueError, TypeError):
            task, policy = task_of(options)
            trainers = {
                name: make_trainer(SETTINGS | settings | of_trainer, policy, task, Path(output_dir), seed=0)
                for name, of_trainer in (TRAINERS | {"FR3E": TRAINERS["FR3E"] | options.settings}).items()
            }
        seconds, generated, updated = measure(trainers, options.num_turns)
        memory = {name: peak_memory(trainer) / 2**20 for name, trainer in trainers.items()}
    num_steps = options.num_steps * options.num_turns
    num_rows = num_steps * options.num_prompts * options.num_generations
    config = trainers["FR3E"].args
    print(f"{num_steps} steps each of {options.num_prompts} prompts x {options.num_generations} rows")
    print(f"FR3E: {config.num_bases} base trajectories and {config.num_anchors} anchors a prompt")
    generated, updated = (
        {name: number / num_rows for name, number in tokens.items()} for tokens in (generated, updated)
    )
    print_ratios(seconds, generated, updated, memory)
    print_shares(seconds)


def measure(
    trainers: dict[str, Any], num_turns: int
) -> tuple[dict[str, dict[str, float]], dict[str, float], dict[str, float]]:
    """
    Seconds of each trainer by part, the tokens that it generated, and those that its loss forwarded, over all turns but
    a first one.
    """
    stopwatch = Stopwatch()
    seconds = {name: dict.fromkeys(PARTS, 0.0) for name in trainers}
    generated, updated = dict.fromkeys(trainers, 0.0), dict.fromkeys(trainers, 0.0)
    with stopwatch.times(TIMED):
        for turn in track(range(num_turns + 1), description="Turns", console=Console(stderr=True)):
            for name, trainer in trainers.items():
                stopwatch.seconds = dict.fromkeys(PARTS, 0.0)
                before = replace(trainer.costs)
                trainer.train()
                if turn > 0:
                    generated[name] += trainer.costs.generated_tokens - before.generated_tokens
                    updated[name] += trainer.costs.forward_backward_tokens - before.forward_backward_tokens
                    for part in PARTS:
                        seconds[name][part] += stopwatch.seconds[part]
    return seconds, generated, updated


def peak_memory(trainer: Any) -> int:
    """Most bytes of tensors of a step, beside those that there were before it: on the GPU if there is one."""
    trainer.args.max_steps = 1
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()  # what is freed below was made below
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.train()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(num_bytes for _, num_bytes in changes))


def print_ratios(
    seconds: dict[str, dict[str, float]],
    generated_per_row: dict[str, float],
    updated_per_row: dict[str, float],
    memory: dict[str, float],
) -> None:
    table = make_table("FR3E beside GRPO", "/ GRPO", "/ shared", *TRAINERS)
    entries = {
        "generated tokens per row": generated_per_row,
        "tokens in the update per row": updated_per_row,
        "generation time, s": {name: parts["generation"] for name, parts in seconds.items()},
        "whole step's time, s": {name: sum(parts.values()) for name, parts in seconds.items()},
        "peak memory, MiB": memory,
    }
    for what, amounts in entries.items():
        fr3e, *others = (amounts[name] for name in TRAINERS)
        table.add_row(
            what, *(f"{fr3e / other:.2f}" for other in others), *(f"{amounts[name]:.2f}" for name in TRAINERS)
        )
    Console().print(table)


def print_shares(seconds: dict[str, dict[str, float]]) -> None:
    table = make_table("Share of the step's time", *PARTS)
    for name, parts in seconds.items():
        table.add_row(name, *(f"{parts[part] / sum(parts.values()):.1%}" for part in PARTS))
    Console().print(table)
