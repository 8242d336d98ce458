"""Disks that are full, and links that lead nowhere. /dev/full takes no byte."""

from .case import EVAL, TRAIN, Case, link

FULL = "No space left on device"
SAVED = f"{TRAIN} --save_strategy=steps --save_steps=1"

CASES = [
    Case("no room for a model", TRAIN, ("File too large", "room"), largest_file=20_000),
    Case("no room for a checkpoint", SAVED, ("File too large", "room"), largest_file=20_000),
    Case("no room for completions", f"{EVAL} --num_samples=64", ("File too large", "room"), largest_file=8000),
    Case("no room for results", EVAL, (FULL, "room"), setup=link("out/results.json", "/dev/full")),
    Case("no room for a report", EVAL, (FULL, "room"), setup=link("out/results.md", "/dev/full")),
    Case("a directory for a lock", EVAL, (".lock", "directory"), files={"out/.lock/a": ""}),
    Case("no room for a dataset", EVAL, ("File too large", "room"), largest_file=100),
    Case(
        "a directory for completions",
        f"{EVAL} --output_dir=.",
        ("completions.jsonl",),
        files={"completions.jsonl/a": ""},
    ),
    Case("a directory for results", f"{EVAL} --output_dir=.", ("results.json",), files={"results.json/a": ""}),
]
