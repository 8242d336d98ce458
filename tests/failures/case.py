"""What a case of the corpus is, and the commands that cases are made of."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Setup = Callable[[], Any]

# Commands that work in the directory of a case. What follows overrides an argument that is there
TRAIN = (
    "train --model_name_or_path=model --dataset_name=data.jsonl --reward_funcs=rewards.py:digit --output_dir=out "
    "--bf16=false --use_cpu=true --num_generations=4 --per_device_train_batch_size=8 --max_completion_length=4 "
    "--max_steps=2 --save_strategy=no --report_to=none --learning_rate=1e-3"
)
EVAL = (
    "eval --model_name_or_path=model --dataset_name=data.jsonl --reward_funcs=rewards.py:digit --output_dir=out "
    "--num_samples=2 --max_completion_length=4 --limit=2"
)


@dataclass(frozen=True)
class Case:
    """Something that cannot work."""

    name: str  # unique in its category
    # Arguments of `fr3e`, as a shell has them, with `{url}` for the address of `server`; or a call that must raise
    command: str | Callable[[], Any]
    says: tuple[str, ...]  # what the line that the user gets must have in it
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # beside data.jsonl, rewards.py and model
    after: str | None = None  # a command whose results are in `out` before, run once for all cases
    setup: Setup | None = None  # is called in the directory before the command
    server: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # status and body at each path, else 404
    largest_file: int | None = None  # bytes that a file may have, as by a full disk

    def arguments(self, url: str) -> list[str]:
        assert isinstance(self.command, str)
        return [word.replace("{url}", url) for word in shlex.split(self.command)]


def case(name: str, command: str | Callable[[], Any], *says: str, **further: Any) -> Case:
    return Case(name, command, says, **further)


def change(path: str, edit: Callable[[bytes], bytes]) -> Setup:
    """A setup that changes files, which match a pattern in the directory of the case."""

    def setup() -> None:
        found = sorted(Path().glob(path))
        assert found, path
        for file in found:
            file.write_bytes(edit(file.read_bytes()))

    return setup


def cut(path: str) -> Setup:
    return change(path, lambda content: content[: len(content) // 2])


def replace(path: str, content: str) -> Setup:
    return change(path, lambda _: content.encode())


def remove(path: str) -> Setup:
    return lambda: [file.unlink() for file in sorted(Path().glob(path))]


def link(path: str, target: str) -> Setup:
    """A setup that makes a link, for example to /dev/full, which takes no byte."""

    def setup() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).unlink(missing_ok=True)
        Path(path).symlink_to(target)

    return setup
