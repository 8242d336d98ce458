"""Checkpoints that a run cannot go on from."""

import shutil
from pathlib import Path

from .case import TRAIN, Case, cut, remove, replace

SAVED = f"{TRAIN} --save_strategy=steps --save_steps=1"
LAST = f"{SAVED} --max_steps=3 --resume_from_checkpoint=true"
SECOND = f"{SAVED} --max_steps=3 --resume_from_checkpoint=out/checkpoint-2"


def damaged(name: str, file: str, setup, *says: str, command: str = LAST) -> Case:
    return Case(name, command, (file.rpartition("/")[2], *says), after=SAVED, setup=setup)


def both(setup_of) -> None:
    def setup() -> None:
        for checkpoint in ("out/checkpoint-1", "out/checkpoint-2"):
            setup_of(checkpoint)()

    return setup


def as_best() -> None:
    for checkpoint in sorted(Path("out").glob("checkpoint-*")):
        shutil.move(checkpoint, "out/checkpoint-best")
        break
    for checkpoint in sorted(Path("out").glob("checkpoint-[0-9]*")):
        shutil.rmtree(checkpoint)


STATE = "out/checkpoint-2/grpo_state_0.pt"
CASES = [
    Case(
        "nothing to resume",
        f"{SAVED} --resume_from_checkpoint=true",
        ("resume_from_checkpoint=True", "output_dir='out'"),
    ),
    Case(
        "no such checkpoint", f"{SAVED} --resume_from_checkpoint=out/checkpoint-9", ("'out/checkpoint-9'", "directory")
    ),
    Case("a file for a checkpoint", f"{SAVED} --resume_from_checkpoint=data.jsonl", ("'data.jsonl'", "directory")),
    Case("a directory for a checkpoint", f"{SAVED} --resume_from_checkpoint=model", ("'model'", "trainer_state.json")),
    Case(
        "only the best",
        f"{SAVED} --resume_from_checkpoint=true",
        ("resume_from_checkpoint=True",),
        after=SAVED,
        setup=as_best,
    ),
    damaged("cut state", STATE, cut(STATE), "is damaged"),
    damaged("empty state", STATE, replace(STATE, ""), "is damaged"),
    damaged("text for a state", STATE, replace(STATE, "hello"), "is damaged"),
    damaged("cut optimizer", "optimizer.pt", cut("out/checkpoint-2/optimizer.pt"), "is damaged", "checkpoint before"),
    damaged("cut scheduler", "scheduler.pt", cut("out/checkpoint-2/scheduler.pt"), "is damaged", "checkpoint before"),
    damaged("cut generator", "rng_state.pth", cut("out/checkpoint-2/rng_state.pth"), "is damaged"),
    damaged("cut weights", "model.safetensors", cut("out/checkpoint-2/model.safetensors"), "is damaged"),
    damaged("empty weights", "model.safetensors", replace("out/checkpoint-2/model.safetensors", ""), "is damaged"),
    damaged("no weights", "checkpoint-2", remove("out/checkpoint-2/model.safetensors"), "checkpoint"),
    damaged("cut trainer state", "trainer_state.json", cut("out/checkpoint-2/trainer_state.json"), command=SECOND),
    damaged(
        "empty trainer state",
        "trainer_state.json",
        replace("out/checkpoint-2/trainer_state.json", "{}"),
        command=SECOND,
    ),
    damaged("no trainer state", "trainer_state.json", remove("out/checkpoint-2/trainer_state.json"), command=SECOND),
    damaged(
        "list for a trainer state",
        "trainer_state.json",
        replace("out/checkpoint-2/trainer_state.json", "[]"),
        command=SECOND,
    ),
    Case(
        "no trainer state at all",
        LAST,
        ("no complete checkpoint in 'out'",),
        after=SAVED,
        setup=replace("out/checkpoint-*/trainer_state.json", "{}"),
    ),
    Case("another model", f"{LAST} --model_name_or_path=other", ("model_name_or_path='other'",), after=SAVED),
    Case("file for the output", f"{LAST} --output_dir=data.jsonl", ("output_dir='data.jsonl'",)),
]
