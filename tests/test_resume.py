"""A run that was cut goes on as the run that was not: the same weights, losses and metrics, bit for bit."""

import copy
import json
import logging
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import factory
import numpy as np
import pandas
import pytest
import torch
from factory import assert_same_run
from launches import launch, start_script
from models import make_dataset, make_model
from peft import LoraConfig
from resume_train import letters, parity
from test_processes import weights_of
from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from trl import GRPOTrainer

from fr3e_trl import FR3ETrainer
from fr3e_trl.resume import last_complete_checkpoint, save_before

SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 8, "learning_rate": 1e-2}
# Two rollouts of a state are rejected where their rewards are equal
REFILLED = {"max_refills": 3, "num_anchors": 3, "value_prior_strength": 0.0}


def make_trainer(cls=FR3ETrainer, **settings):
    three_steps_an_epoch = {"dataset": make_dataset(6)}
    defaults = {"reward_funcs": parity if settings.get("max_refills") else letters} | three_steps_an_epoch
    return factory.make_trainer(cls, **SAVING | defaults | settings)


train = partial(factory.train, make=make_trainer)


def resume(step=None, **settings):
    """A trainer that has gone on from a checkpoint, the last by default, and saves elsewhere."""
    return train(resume=f"output/checkpoint-{step}" if step else True, **{"output_dir": "resumed"} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_iterations": np.int64(2), "beta": np.float64(0.1), "value_prior_strength": 2.0},
        {"steps_per_generation": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3},
        {"num_iterations": 3, "peft_config": LoraConfig(lora_dropout=0.2, target_modules="all-linear")},
        {"logging_steps": 3, "num_anchors": 0, "num_iterations": 2, "loss_type": np.str_("dapo")},
        REFILLED,
    ],
    ids=["aligned", "iterations", "buffer", "misaligned", "dropout", "grpo", "refill"],
)
def test_resuming_from_any_checkpoint_is_exact(settings):
    whole = train(**settings)
    if settings.get("max_refills"):
        assert sum(entry.get("fr3e/refill/reused", 0) for entry in whole.state.log_history) > 0
    for step in (1, 3, 4, 5, 7):
        assert_same_run(resume(step, **settings), whole)


def cut(trainer, step):
    """Train, until Ctrl-C after the first micro-batch of an update."""
    compute_loss = trainer._compute_loss

    def interrupted(*args):
        loss = compute_loss(*args)
        if trainer.state.global_step == step:
            raise KeyboardInterrupt
        return loss

    trainer._compute_loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer._compute_loss = compute_loss


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0}
IN_TWO = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}


@pytest.mark.parametrize("settings", [{}, ADAPTIVE | IN_TWO, REFILLED], ids=["defaults", "adaptive", "refill"])
def test_going_on_and_beginning_anew_in_the_same_process_are_exact(settings):
    """With weights and an optimizer as at first, a second run is the first."""
    settings = settings | {"save_steps": 2, "entropy_coef_delta": 0.02}
    whole, trainer = train(**settings), make_trainer(**settings, output_dir="cut")
    at_first = copy.deepcopy(trainer.model.state_dict())
    for goes_on in (True, False):
        set_seed(1)
        cut(trainer, step=3)
        if not goes_on:
            trainer.model.load_state_dict(at_first)
            trainer.optimizer = None
            set_seed(1)
        trainer.train(resume_from_checkpoint=goes_on)
        assert_same_run(trainer, whole)


def test_beginning_anew_in_the_same_process():
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer = make_trainer(**sizes, max_steps=2)
    cut(trainer, step=0)
    trainer._step = 1  # of two micro-batches
    steps, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: steps.append(trainer._step) or generate(inputs)
    trainer.train()
    assert steps == [0, 2]


@pytest.mark.parametrize("step", [3, 4], ids="at step {}".format)
@pytest.mark.parametrize("settings", [{"num_iterations": 2}, REFILLED | {"max_refills": 1}, ADAPTIVE], ids=str)
def test_a_checkpoint_saved_within_an_update_is_exact(settings, step):
    settings = settings | IN_TWO | {"max_steps": 6}
    whole = train(**settings, output_dir="whole")
    trainer = make_trainer(**settings, save_steps=100, enable_jit_checkpoint=True)
    (terminated,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback)]
    compute_loss, num_calls = trainer._compute_loss, []

    def signalled(*args):
        num_calls.append(trainer.state.global_step)
        if num_calls.count(step) == 2:
            terminated.jit_manager.is_checkpoint_requested = True  # as 3 seconds after SIGTERM
        return compute_loss(*args)

    trainer._compute_loss = signalled
    set_seed(1)
    trainer.train()
    assert max(num_calls) == step and Path(f"output/checkpoint-{step}").is_dir()
    assert_same_run(resume(step, **settings), whole)


def test_tables_of_completions_are_kept():
    def logging_func(completions, log_extra, **kwargs):
        log_extra("length", [np.int64(len(text)) for text in completions])
        return letters(completions)

    def table_of(trainer):
        return pandas.read_parquet(f"{trainer.args.output_dir}/completions/completions_00002.parquet")

    settings = {"num_iterations": 2, "log_completions": True, "max_steps": 2, "reward_funcs": [logging_func]}
    whole, rest = (table_of(trainer).astype({"length": int}) for trainer in (train(**settings), resume(1, **settings)))
    assert len(whole) == 16 and whole.equals(rest)


def test_a_checkpoint_that_is_there_is_not_written_again():
    trainer, error = train(max_steps=1), ValueError()
    times = lambda: {path: path.stat().st_mtime_ns for path in Path("output/checkpoint-1").iterdir()}  # noqa: E731
    before = times()
    save_before(trainer, error)
    assert before == times()
    assert "Step 1, the last that was trained" in error.__notes__[0]


@pytest.mark.parametrize(
    "setting, saved, present, rows",
    [
        *(("steps_per_generation", 4, present, [8] * present) for present in (2, 5)),
        *(("per_device_train_batch_size", 8, present, [present] * 4) for present in (4, 12)),
        ("num_generations", 8, 16, [8] * 4),
        ("num_iterations", 1, 2, [8] * 8),
        ("gradient_accumulation_steps", 1, 3, [8] * 4),
    ],
)
def test_resuming_with_other_sizes_generates_anew(setting, saved, present, rows, caplog):
    """In the middle of a batch. Each batch from then on has `rows` in its micro-batches, and all of them are used."""
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 4}
    train(**sizes, save_steps=6, max_steps=6)
    resumed = make_trainer(**sizes | {setting: present}, max_steps=16, output_dir="resumed")
    generate, compute_loss, rows_of_batches = resumed._generate_and_score_completions, resumed._compute_loss, []

    def record_batch(inputs):
        rows_of_batches.append([])
        return generate(inputs)

    def record_rows(model, inputs):
        rows_of_batches[-1].append(len(inputs["advantages"]))
        return compute_loss(model, inputs)

    resumed._generate_and_score_completions, resumed._compute_loss = record_batch, record_rows
    resumed.train(resume_from_checkpoint="output/checkpoint-6")
    assert resumed.state.global_step == 16
    assert all(of_batch == rows for of_batch in rows_of_batches[:-1])
    assert rows_of_batches[-1] == rows[: len(rows_of_batches[-1])]
    (warning,) = [message for message in caplog.messages if "other sizes" in message]
    assert f"other sizes: {setting}={saved} (now {present}). " in warning


def test_resuming_with_other_processes(tmp_path):
    settings = {"num_generations": 6, "num_anchors": 2, "per_device_train_batch_size": 6, "steps_per_generation": 2}
    settings |= {"save_strategy": "steps", "save_steps": 1, "max_refills": 3, "credit": "rollout"}
    settings |= {"value_prior_strength": 0, "num_rewards": 2}  # that many, and no prior, for states to be rejected
    launch(tmp_path / "one", 1, settings | {"max_steps": 1})
    checkpoint = str(tmp_path / "one" / "output" / "checkpoint-1")
    of_both = launch(tmp_path / "two", 2, settings | {"max_steps": 6, "resume": checkpoint})
    assert [len(of_one["trees"]) for of_one in of_both] == [3, 3]  # steps 2 and 3, 4 and 5, and 6
    assert all(map(torch.equal, *(weights_of(tmp_path / "two", process) for process in range(2))))
    states = {step: tmp_path / "two" / "output" / f"checkpoint-{step}" / "grpo_state_0.pt" for step in (2, 4, 6)}
    step = next(step for step, state in states.items() if torch.load(state)["of_method"]["leftovers"])
    settings |= {"max_steps": step + 2, "resume": str(states[step].parent)}
    (resumed,) = launch(tmp_path / "again", 1, settings)
    assert len(resumed["trees"]) == 1
    assert resumed["logs"][-2]["step"] == step + 2


@pytest.mark.parametrize(
    "others, are_kept",
    [
        ({"per_device_train_batch_size": 32}, True),  # they are whole, whatever the batch that they come into
        ({"temperature": 0.5}, False),  # theirs too are old log-probs at another temperature
        ({"dataset": make_dataset(2)}, False),  # they have no example any more
    ],
    ids=["other sizes", "other settings", "a smaller dataset"],
)
def test_rows_left_over_are_kept_where_they_fit(others, are_kept, caplog):
    whole = train(**REFILLED)
    entry = next(entry for entry in whole.state.log_history if num_left_over_before(entry) > 0)
    resumed = resume(entry["step"] - 1, **REFILLED | others | {"max_steps": entry["step"]})
    assert resumed.state.global_step == entry["step"]
    num_left = num_left_over_before(resumed.state.log_history[entry["step"] - 1])
    assert "dataset" in others or num_left == num_left_over_before(entry) * are_kept
    assert ("examples of train_dataset=6 (now 2)" in caplog.text) == ("dataset" in others)


def num_left_over_before(entry):
    return entry["fr3e/refill/reused"] + entry["fr3e/refill/dropped"]


@pytest.mark.parametrize("cls", [FR3ETrainer, GRPOTrainer])
def test_refill_goes_on_in_the_data_of_a_run_without(cls):

    def prompts_of_step_3(run, **settings):
        drawn = []

        def reward_func(prompts, completions, trainer_state, **kwargs):
            drawn.extend(prompts if trainer_state.global_step == 2 else [])
            return [float(len(text) % 3) for text in completions]

        run(reward_funcs=[reward_func], max_steps=3, **settings)
        return list(dict.fromkeys(drawn))

    whole = prompts_of_step_3(train, output_dir="whole")
    train(cls, max_steps=2)
    assert len(whole) == 2
    assert prompts_of_step_3(partial(resume, 2), max_refills=1)[:2] == whole


def test_a_process_without_its_own_state_ends(tmp_path):
    settings = {"num_generations": 8, "per_device_train_batch_size": 8, "max_steps": 1, "save_strategy": "steps"}
    launch(tmp_path / "run", 2, settings)
    checkpoint = tmp_path / "run" / "output" / "checkpoint-1"
    (checkpoint / "grpo_state_1.pt").unlink()
    settings |= {"max_steps": 2, "resume": str(checkpoint)}
    went_well, _ = launch(tmp_path / "again", 2, settings, check=False)
    assert not went_well
    assert "grpo_state_1.pt is missing" in (tmp_path / "again" / "1.error").read_text()


def test_a_checkpoint_that_was_being_written_is_passed_over():
    train(max_steps=3)
    state = Path("output/checkpoint-3/trainer_state.json")
    shutil.copytree("output/checkpoint-1", "output/checkpoint-best")
    for name in ("checkpoint-", "checkpoint-10"):
        (Path("output") / name).mkdir()
    for content in ("{}", "[]", "", '{"global_step": 3}', state.read_text()[:100]):
        state.write_text(content)
        assert last_complete_checkpoint("output") == "output/checkpoint-2"
    assert resume(output_dir="output").state.global_step == 8
    assert json.loads(state.read_text())["global_step"] == 3


def test_a_stream_goes_on_exactly_within_its_first_pass(caplog):
    settings = {"dataset": make_dataset(6).to_iterable_dataset(), "max_steps": 6}
    whole = train(**settings)
    for step, is_exact in ((2, True), (4, False)):
        resumed = resume(step, **settings)
        assert resumed.state.global_step == 6
        assert ("a stream, whose position" in caplog.text) == (not is_exact)
        if is_exact:
            assert_same_run(resumed, whole)


@pytest.mark.parametrize("save_only_model", [False, True])
def test_a_checkpoint_without_its_state_is_told_of(save_only_model, caplog):
    train(max_steps=2, save_only_model=save_only_model)
    Path("output/checkpoint-2/grpo_state_0.pt").unlink(missing_ok=save_only_model)
    assert resume(2, max_steps=5).state.global_step == 5
    (told,) = [message for message in caplog.messages if "grpo_state_0.pt" in message]
    kept, _, anew = told.partition(" are kept. ")
    assert "losses will differ" in anew
    assert ("optimizer" in kept, "optimizer" in anew) == (not save_only_model, save_only_model)


def test_weights_that_are_tied_are_not_said_to_be_missing(caplog):
    config = Qwen3Config(**make_model().config.to_dict() | {"tie_word_embeddings": True})
    train(model=Qwen3ForCausalLM(config), max_steps=1)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    resumed = resume(1, model=Qwen3ForCausalLM(config), max_steps=2)
    logger.removeHandler(caplog.handler)
    assert resumed.state.global_step == 2
    assert "missing keys" not in caplog.text


@pytest.mark.parametrize(
    "saved, present, told",
    [
        ({}, {"credit": "rollout"}, ["credit='tree' (now 'rollout')"]),
        ({"num_anchors": 7}, {"num_anchors": 3}, ["num_anchors=7 (now 3)"]),
        ({"value_tracker": False}, {}, ["value_tracker=False (now True)"]),
        ({}, {"value_tracker": False}, ["value_tracker=True (now False)"]),
        ({}, {"seed": 7}, ["seed=42 (now 7)", "the tracked values"]),
        (REFILLED, REFILLED | {"max_refills": 1}, ["max_refills=3 (now 1)", "order of prompts"]),
        (REFILLED, REFILLED | {"max_refills": 0}, ["max_refills=3 (now 0)"]),
        ({}, {"num_anchors": 0}, ["num_anchors=", "(now 0)", "credit='tree' (now"]),
        ({"num_anchors": 0}, {}, ["num_anchors=0 (now"]),
        ({}, {"beta": 0.1}, ["beta=0.0 (now 0.1)"]),
        ({}, {"logging_steps": 2}, []),  # of which nothing depends
    ],
)
def test_settings_that_differ_from_the_checkpoints_are_told(saved, present, told, caplog):
    train(**saved, max_steps=2)
    assert resume(2, **present, max_steps=4).state.global_step == 4
    messages = [message for message in caplog.messages if "other settings" in message]
    assert len(messages) == bool(told)
    for message in messages:
        assert all(words in message for words in [*told, "The run continues with the current ones", "its optimizer"])


@pytest.mark.parametrize("settings", [{"beta": 0.1}, {"temperature": 0.5}], ids=str)
def test_a_batch_that_was_drawn_with_other_settings_is_dropped(settings):
    train(num_iterations=2, max_steps=2)
    resumed = resume(1, **settings, num_iterations=2, max_steps=2)
    (log,) = (entry for entry in resumed.state.log_history if entry.get("step") == 2 and "loss" in entry)
    assert log["clip_ratio/region_mean"] == 0 and "fr3e/value/S0" in log


def test_a_rate_without_effect_a_run_that_is_done_and_a_new_reference_model(caplog):
    constant = {"lr_scheduler_type": "constant"}
    train(**constant, max_steps=2)
    resumed = resume(2, **constant, max_steps=3, learning_rate=1e-5)
    assert resumed.state.log_history[-2]["learning_rate"] == 1e-2
    assert "continues with learning_rate=0.01" in caplog.text and "1e-05, has no effect" in caplog.text
    assert "other settings" not in caplog.text
    # A run that is done is not trained further
    whole = train(max_steps=2)
    assert_same_run(resume(max_steps=2, output_dir="output"), whole)
    # A reference model that begins anew is told of
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 2}
    train(**settings)
    resume(1, **settings)
    assert caplog.text.count("Checkpoints do not hold the reference model") == 1


SCRIPT = Path(__file__).with_name("resume_train.py")


def start(*arguments):
    process = start_script(SCRIPT, *arguments)
    line_of(process, "training")
    return process


def line_of(process, beginning: str) -> str:
    """The next line of what a run prints that begins like this: libraries that it imports may print, too."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(Path("stderr").read_text())


def digest_of_rest(*arguments) -> str:
    """The digest of a run that goes on in a fresh process, which orders sets in its own way."""
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines(keepends=True) if line.startswith("digest"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arguments", [[], ["tools"]], ids=["text", "tools"])
def test_kill_9_at_random_moments(num_kills, arguments):
    """Each run is killed once, within the time that the whole one trained, and resumed to its end."""
    process = start(*arguments)
    began = time.monotonic()
    whole = line_of(process, "digest")
    seconds = time.monotonic() - began
    process.join(200)
    assert process.exitcode == 0  # it has ended
    print("uncut:", whole, end="")
    for kill in range(num_kills):
        shutil.rmtree("output", ignore_errors=True)
        process = start(*arguments)
        moment = random.random() * seconds
        time.sleep(moment)
        process.kill()
        process.join()
        saved = sorted(path.name for path in Path("output").glob("checkpoint-*"))
        resumed = digest_of_rest(*arguments)
        print(f"kill {kill + 1} after {moment:.2f} of {seconds:.2f} s, {saved}: {resumed}", end="", flush=True)
        assert resumed == whole
