"""`fr3e eval`: its arguments, and rewards that give nothing to report."""

import fcntl
from pathlib import Path

from .case import EVAL, Case, change

_held = []


def hold() -> None:
    """As another process that works in the directory."""
    Path("out").mkdir(exist_ok=True)
    file = Path("out/.lock").open("a+")  # noqa: SIM115
    file.write("process 7 on there (fr3e eval)\n")
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)


def refused(setting: str, *says: str) -> Case:
    return Case(setting, f"{EVAL} --{setting}", says)


def changed(name: str, file: str, old: bytes, new: bytes) -> Case:
    """A file that has changed since the evaluation that is to go on."""
    says = ("output_dir='out'", "files was", file)
    return Case(name, EVAL, says, after=EVAL, setup=change(file, lambda content: content.replace(old, new)))


OUT_OF_RANGE = "num_samples=0 limit=0 batch_size=-1 seed=-1 max_completion_length=0 "
OUT_OF_RANGE += "temperature=-1 temperature=nan top_p=0 top_p=1.1"

CASES = [
    Case("two at once", EVAL, ("output_dir='out'", "in use by process 7", "another output_dir"), setup=hold),
    changed("another reward of that name", "rewards.py", b"01234", b"56789"),
    changed("other data of that name", "data.jsonl", b"3+3", b"4+4"),
    *[refused(setting, setting) for setting in OUT_OF_RANGE.split()],
    refused("temperature=0", "temperature=0", "num_samples=2"),
    refused("pass_at 4", "pass_at=[4]", "num_samples=2"),
    refused("pass_at 0", "pass_at=[0]"),
    refused("answer_regex=[", "answer_regex='['"),
    refused("chat_template_kwargs={thinking", "chat_template_kwargs='{thinking'", "JSON"),
    refused("chat_template_kwargs=[1]", "chat_template_kwargs=[1]", "mapping"),
    refused("output_dir=data.jsonl", "output_dir='data.jsonl'", "is a file"),
    refused("output_dir=data.jsonl/out", "'data.jsonl' is a file"),
    refused("model_name_or_path=nowhere", "model_name_or_path='nowhere'"),
    refused("model_name_or_path=data.jsonl", "model_name_or_path='data.jsonl'"),
    refused("dataset_test_split=dev --dataset_name=folder", "folder"),
    refused("dataset_test_split=dev", "dataset_test_split='dev'", "data.jsonl"),
    refused("reward_funcs=rewards.py:none", "'rewards.py:none'", "2 problems", "None"),
    refused("reward_funcs=rewards.py:nan", "'rewards.py:nan'", "2 problems", "NaN"),
    refused("reward_funcs=rewards.py:text", "'rewards.py:text'", "'good'", "number"),
    refused("reward_funcs=rewards.py:few", "'rewards.py:few'", "1 values", "4 completions"),
    refused("reward_funcs=rewards.py:number", "'rewards.py:number'", "1.0", "list"),
]
