"""Checkpoints that a run cannot go on from."""

import shutil
from pathlib import Path

from .case import TRAIN, Case, case, cut, remove, replace

SAVED = f"{TRAIN} --save_strategy=steps --save_steps=1"
LAST = f"{SAVED} --max_steps=3 --resume_from_checkpoint=true"
SECOND = f"{SAVED} --max_steps=3 --resume_from_checkpoint=out/checkpoint-2"


def damaged(name: str, file: str, setup, *says: str, command: str = LAST) -> Case:
    return case(name, command, file.rpartition("/")[2], *says, after=SAVED, setup=setup)


def as_best() -> None:
    first, *others = sorted(Path("out").glob("checkpoint-*"))
    shutil.move(first, "out/checkpoint-best")
    for checkpoint in others:
        shutil.rmtree(checkpoint)


STATE, TRAINER_STATE = "out/checkpoint-2/grpo_state_0.pt", "out/checkpoint-2/trainer_state.json"
STATES = "out/checkpoint-*/trainer_state.json"
WEIGHTS = "out/checkpoint-2/model.safetensors"


def resumed(name: str, checkpoint: str, *says: str, **further) -> Case:
    return case(name, f"{SAVED} --resume_from_checkpoint={checkpoint}", *says, **further)


def damaged_state(name: str, setup) -> Case:
    return damaged(name, TRAINER_STATE, setup, command=SECOND)


CASES = [
    resumed("nothing to resume", "true", "resume_from_checkpoint=True", "output_dir='out'"),
    resumed("no such checkpoint", "out/checkpoint-9", "'out/checkpoint-9'", "directory"),
    resumed("a file for a checkpoint", "data.jsonl", "'data.jsonl'", "directory"),
    resumed("a directory for a checkpoint", "model", "'model'", "trainer_state.json"),
    resumed("only the best", "true", "resume_from_checkpoint=True", after=SAVED, setup=as_best),
    damaged("cut state", STATE, cut(STATE), "is damaged"),
    damaged("empty state", STATE, replace(STATE, ""), "is damaged"),
    damaged("cut optimizer", "optimizer.pt", cut("out/checkpoint-2/optimizer.pt"), "is damaged", "checkpoint before"),
    damaged("cut scheduler", "scheduler.pt", cut("out/checkpoint-2/scheduler.pt"), "is damaged", "checkpoint before"),
    damaged("cut generator", "rng_state.pth", cut("out/checkpoint-2/rng_state.pth"), "is damaged"),
    damaged("cut weights", WEIGHTS, cut(WEIGHTS), "is damaged"),
    damaged("no weights", "checkpoint-2", remove(WEIGHTS), "checkpoint"),
    damaged_state("cut trainer state", cut(TRAINER_STATE)),
    damaged_state("empty trainer state", replace(TRAINER_STATE, "{}")),
    damaged_state("no trainer state", remove(TRAINER_STATE)),
    damaged_state("list for a trainer state", replace(TRAINER_STATE, "[]")),
    case("no trainer state at all", LAST, "no complete checkpoint in 'out'", after=SAVED, setup=replace(STATES, "{}")),
    case("another model", f"{LAST} --model_name_or_path=other", "model_name_or_path='other'", after=SAVED),
    case("file for the output", f"{LAST} --output_dir=data.jsonl", "output_dir='data.jsonl'"),
]
