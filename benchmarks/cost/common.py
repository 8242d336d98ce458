"""What the measurements of cost have in common."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from fr3e_trl.commands.usage import Parser

from ..arguments import ArmsArguments
from ..policies import starting_policy
from ..tasks import TASKS

T = TypeVar("T")

# Of both trainers, where their defaults differ and it is not FR3E itself; and what the bench's arms have otherwise
SETTINGS: dict[str, Any] = {
    "epsilon_high": 0.28,
    "scale_rewards": "none",
    "learning_rate": 1e-5,
    "gradient_checkpointing": True,
    "num_train_examples": 2000,
    "logging_steps": 1,
}


def followed(items: Sequence[T], name: str) -> Iterator[T]:
    """Items that take long, with a line for each on stderr."""
    start = time.monotonic()
    for i, item in enumerate(items):
        minutes = (time.monotonic() - start) / 60
        print(f"{name} {i + 1} of {len(items)}, after {minutes:.0f} min", file=sys.stderr, flush=True)
        yield item


def make_parser(description: str | None, **counts: tuple[int, str]) -> argparse.ArgumentParser:
    """Parser of options that are whole numbers of at least 1: their names, each with its default and help."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, meaning) in counts.items():
        parser.add_argument(f"--{name}", type=count, default=default, help=f"{meaning} (default: {default})")
    return parser


def count(text: str) -> int:
    """A whole number of at least 1, of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """`--task` and `--policy`, see [`task_of`]."""
    parser.add_argument("--task", choices=TASKS, default="chain", help="task with the prompts (default: chain)")
    parser.add_argument("--policy", help="directory or hub id; by default the task's own, made on first use")


def add_own_task_options(parser: argparse.ArgumentParser) -> None:
    """A task of the user's own, by the names that `python -m benchmarks compare` takes."""
    parser.add_argument("--model_name_or_path", help="of a task of your own, in the place of --task and --policy")
    parser.add_argument("--dataset_name", help="its dataset or file")
    parser.add_argument("--reward_funcs", nargs="+", help="its reward functions, for example my_rewards.py:score")
    parser.add_argument("--dtype", help="of its model's weights, for example bfloat16 (default: float32)")
    parser.add_argument("--use_peft", action="store_const", const=True, help="train its model with LoRA")


def task_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """The task and the policy of the options, as [`~benchmarks.arms.make_trainer`] takes them."""
    names = ("model_name_or_path", "dataset_name", "reward_funcs", "dtype", "use_peft")
    own = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if own:
        any_arm = {"num_prompts": 1}  # measurements have their own
        return ArmsArguments(**own, base=any_arm).task_and_policy(num_heldout=0)
    task = TASKS[options.task]
    return task, Path(options.policy or starting_policy(task))


def make_table(title: str, *columns: str) -> Table:
    """A table of numbers, with a first column of what they are."""
    table = Table(title=title)
    table.add_column()
    for column in columns:
        table.add_column(column, justify="right")
    return table
