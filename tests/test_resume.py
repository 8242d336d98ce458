"""A run that was cut goes on as the run that was not: the same weights, losses and metrics, bit for bit."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models import CPU, make_dataset, make_model, make_tokenizer, model_on_disk
from peft import LoraConfig
from resume_train import letters, parity
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.training.resume import last_complete_checkpoint

SIZES = {"num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 12}
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 8}


def make_trainer(cls=FR3ETrainer, config=FR3EConfig, peft_config=None, **settings):
    return cls(
        model_on_disk() if settings.get("beta") else make_model(),
        parity if settings.get("max_refills") else letters,
        config(**{"output_dir": "output", "learning_rate": 1e-2} | CPU | SIZES | SAVING | settings),
        train_dataset=make_dataset(6),  # three steps an epoch, of two prompts each
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )


def check_same(resumed, whole):
    for mine, their in zip(resumed.state.log_history, whole.state.log_history, strict=True):
        assert mine.keys() == their.keys()
        for name in mine.keys() - {"step_time", "train_runtime", "train_loss"}:
            assert name.endswith("per_second") or mine[name] == their[name], (name, mine["step"])
    for mine, their in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert mine.equal(their)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_iterations": 2, "beta": 0.1, "value_prior_strength": 2.0},
        {"steps_per_generation": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3},
        {"num_iterations": 3, "peft_config": LoraConfig(lora_dropout=0.2, target_modules="all-linear")},
        {"logging_steps": 3, "num_anchors": 0, "num_iterations": 2},
        {"max_refills": 3, "explore_temperature_scale": 1.5},
    ],
    ids=["aligned", "iterations", "buffer", "misaligned", "dropout", "grpo", "refill"],
)
def test_resuming_from_any_checkpoint_is_exact(settings):
    """Also within a generated batch, between two logs, and in a later epoch."""
    whole = make_trainer(**settings)
    set_seed(1)
    whole.train()
    for step in (2, 3, 5, 7):
        resumed = make_trainer(**settings, output_dir="resumed")
        set_seed(100 + step)
        resumed.train(resume_from_checkpoint=f"output/checkpoint-{step}")
        check_same(resumed, whole)


def test_a_checkpoint_of_grpo_trainers_is_gone_on_from():
    theirs = make_trainer(GRPOTrainer, GRPOConfig, max_steps=2)
    theirs.train()
    ours = make_trainer()
    ours.train(resume_from_checkpoint="output/checkpoint-2")
    assert ours.state.global_step == 8


def test_a_checkpoint_that_was_being_written_is_passed_over():
    make_trainer(max_steps=3).train()
    state = Path("output/checkpoint-3/trainer_state.json")
    state.write_text(state.read_text()[:100])
    (Path("output") / "checkpoint-10").mkdir()
    assert last_complete_checkpoint("output") == "output/checkpoint-2"
    resumed = make_trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert json.loads(state.read_text())["global_step"] == 3


def test_a_run_that_is_done_is_not_trained_further():
    whole = make_trainer(max_steps=2)
    whole.train()
    again = make_trainer(max_steps=2)
    again.train(resume_from_checkpoint=True)
    check_same(again, whole)


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint in 'output' to resume from"):
        make_trainer().train(resume_from_checkpoint=True)


def start():
    """A run in a process of its own, when it begins to train."""
    command = [sys.executable, Path(__file__).with_name("resume_train.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line_of(process, "training")
    return process


def line_of(process, beginning: str) -> str:
    """The next line of what a run prints that begins like this: libraries that it imports may print, too."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(process.stderr.read())


def finish(process) -> str:
    digest = line_of(process, "digest")
    process.communicate(timeout=200)
    assert process.returncode == 0
    return digest


@pytest.mark.timeout(900)
def test_kill_9_at_random_moments(num_kills):
    """Each run is killed once, within the time that the whole one trained, and resumed to its end."""
    process = start()
    began = time.monotonic()
    whole = line_of(process, "digest")
    seconds = time.monotonic() - began
    process.communicate(timeout=200)
    print("uncut:", whole, end="")
    for kill in range(num_kills):
        shutil.rmtree("output", ignore_errors=True)
        process = start()
        moment = random.random() * seconds
        time.sleep(moment)
        process.kill()
        process.communicate()
        saved = sorted(path.name for path in Path("output").glob("checkpoint-*"))
        resumed = finish(start())
        print(f"kill {kill + 1} after {moment:.2f} of {seconds:.2f} s, {saved}: {resumed}", end="", flush=True)
        assert resumed == whole
