"""A run that was cut goes on as the run that was not: the same weights, losses and metrics, bit for bit."""

import json
import logging
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import factory
import numpy as np
import pandas
import pytest
import torch
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
REJECTING = {"num_anchors": 3, "value_prior_strength": 0.0}  # of two rollouts, where their rewards are equal


def make_trainer(cls=FR3ETrainer, **settings):
    reward_func = parity if settings.get("max_refills") else letters
    three_steps_an_epoch = make_dataset(6)
    return factory.make_trainer(cls, reward_funcs=reward_func, dataset=three_steps_an_epoch, **SAVING | settings)


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
        {
            "steps_per_generation": 4,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
        },
        {"steps_per_generation": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3},
        {"num_iterations": 3, "peft_config": LoraConfig(lora_dropout=0.2, target_modules="all-linear")},
        {"logging_steps": 3, "num_anchors": 0, "num_iterations": 2},
        {"max_refills": 3} | REJECTING,
    ],
    ids=["aligned", "iterations", "buffer", "misaligned", "dropout", "grpo", "refill"],
)
def test_resuming_from_any_checkpoint_is_exact(settings):
    """Also within a generated batch, between two logs, and in a later epoch."""
    whole = make_trainer(**settings)
    set_seed(1)
    whole.train()
    if settings.get("max_refills"):
        assert sum(entry.get("fr3e/refill/reused", 0) for entry in whole.state.log_history) > 0
    for step in (1, 3, 4, 5, 7):
        resumed = make_trainer(**settings, output_dir="resumed")
        set_seed(100 + step)
        resumed.train(resume_from_checkpoint=f"output/checkpoint-{step}")
        check_same(resumed, whole)


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


@pytest.mark.parametrize("settings", [{}, ADAPTIVE | IN_TWO], ids=["defaults", "adaptive"])
def test_going_on_in_the_same_process_is_exact(settings):
    settings |= {"save_steps": 2, "entropy_coef_delta": 0.02}
    whole, trainer = make_trainer(**settings), make_trainer(**settings, output_dir="cut")
    for run in (lambda: whole.train(), lambda: cut(trainer, step=3)):
        set_seed(1)
        run()
    trainer.train(resume_from_checkpoint=True)
    check_same(trainer, whole)


@pytest.mark.parametrize(
    "settings", [{}, ADAPTIVE | IN_TWO, {"max_refills": 3} | REJECTING], ids=["defaults", "adaptive", "refill"]
)
def test_a_second_run_in_the_same_process_begins_anew(settings):
    """With weights and an optimizer as at first, it is the first."""
    trainer, first = (make_trainer(**settings, max_steps=4, save_strategy="no") for _ in range(2))
    cut(trainer, step=3)
    trainer.model.load_state_dict(first.model.state_dict())
    trainer.optimizer = None
    for run in (trainer, first):
        set_seed(1)
        run.train()
    check_same(trainer, first)


def test_beginning_anew_in_the_same_process():
    """Nothing is trained on that the run before has left."""
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer = make_trainer(**sizes, max_steps=2)
    cut(trainer, step=0)
    trainer._step = 1  # of two micro-batches
    steps, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: steps.append(trainer._step) or generate(inputs)
    trainer.train()
    assert steps == [0, 2]


@pytest.mark.parametrize("step", [3, 4], ids="at step {}".format)
@pytest.mark.parametrize("settings", [{"num_iterations": 2}, {"max_refills": 1} | REJECTING, ADAPTIVE], ids=str)
def test_a_checkpoint_saved_within_an_update_is_exact(settings, step):
    """As by `enable_jit_checkpoint`, before the update's end; the third of an epoch of three steps, or a later one."""
    settings |= IN_TWO | {"max_steps": 6}
    whole = make_trainer(**settings)
    set_seed(1)
    whole.train()
    trainer = make_trainer(**settings, save_steps=100, enable_jit_checkpoint=True, output_dir="cut")
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
    assert max(num_calls) == step and Path(f"cut/checkpoint-{step}").is_dir()
    resumed = make_trainer(**settings, output_dir="resumed")
    set_seed(100)
    resumed.train(resume_from_checkpoint=f"cut/checkpoint-{step}")
    check_same(resumed, whole)


def test_numbers_of_numpys_are_settings_too():
    settings = {"temperature": np.float64(0.9), "num_iterations": np.int64(2), "loss_type": np.str_("dapo")}
    make_trainer(**settings, max_steps=3).train()
    make_trainer(**settings, max_steps=3).train(resume_from_checkpoint="output/checkpoint-1")


def test_tables_of_completions_are_kept():
    """With what reward functions log, of whatever type."""
    settings = {"num_iterations": 2, "log_completions": True, "max_steps": 2}

    def train(checkpoint=None):
        trainer = make_trainer(**settings)
        reward_func = trainer.reward_funcs[0]

        def logging_func(completions, log_extra, **kwargs):
            log_extra("length", [np.int64(len(text)) for text in completions])
            return reward_func(completions=completions, **kwargs)

        trainer.reward_funcs = [logging_func]
        trainer.train(checkpoint)
        return pandas.read_parquet("output/completions/completions_00002.parquet").astype({"length": int})

    whole = train()
    assert len(whole) == 16 and whole.equals(train("output/checkpoint-1"))


def test_a_checkpoint_that_is_there_is_not_written_again():
    """Its state may be more than is known where a run that goes on fails before its first step."""
    trainer = make_trainer(max_steps=1)
    trainer.train()
    before = {path: path.stat().st_mtime_ns for path in Path("output/checkpoint-1").iterdir()}
    error = ValueError()
    save_before(trainer, error)
    assert before == {path: path.stat().st_mtime_ns for path in Path("output/checkpoint-1").iterdir()}
    assert "Step 1, the last that was trained" in error.__notes__[0]


@pytest.mark.parametrize(
    "setting, saved, present, rows",
    [
        ("steps_per_generation", 4, 2, [8] * 2),
        ("steps_per_generation", 4, 5, [8] * 5),
        ("num_generations", 8, 16, [8] * 4),
        ("per_device_train_batch_size", 8, 4, [4] * 4),
        ("per_device_train_batch_size", 8, 12, [12] * 4),
        ("num_iterations", 1, 2, [8] * 8),
        ("gradient_accumulation_steps", 1, 3, [8] * 4),
    ],
)
def test_resuming_with_other_sizes_generates_anew(setting, saved, present, rows, caplog):
    """In the middle of a batch. Each batch from then on has `rows` in its micro-batches, and all of them are used."""
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 4}
    make_trainer(**sizes, save_steps=6, max_steps=6).train()
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
    """More of them than left a state, then fewer, with rows left over from a refill."""
    settings = {
        "num_generations": 6,
        "num_anchors": 2,
        "per_device_train_batch_size": 6,
        "steps_per_generation": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_refills": 3,
        "credit": "rollout",
        "value_prior_strength": 0,
        "num_rewards": 2,  # that many, and no prior, for states to be rejected
    }
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


def test_rows_left_over_are_kept_with_other_sizes():
    """They are whole, whatever the size of the batch that they come into."""
    mine, theirs = resumed_where_rows_are_left_over(per_device_train_batch_size=32)
    assert mine == theirs


def resumed_where_rows_are_left_over(**others):
    """How many rows a step finds that resumes with other settings, and in the whole run, where there are some."""
    settings = {"max_refills": 3} | REJECTING
    whole = make_trainer(**settings)
    whole.train()
    step = next(entry["step"] for entry in whole.state.log_history if num_left_over_before(entry) > 0)
    resumed = make_trainer(**settings, **others, max_steps=step, output_dir="resumed")
    resumed.train(resume_from_checkpoint=f"output/checkpoint-{step - 1}")
    return [num_left_over_before(run.state.log_history[step - 1]) for run in (resumed, whole)]


def num_left_over_before(entry):
    """Rows that a step found, by what it logged."""
    return entry["fr3e/refill/reused"] + entry["fr3e/refill/dropped"]


def test_a_checkpoint_of_grpo_trainers_is_gone_on_from():
    theirs = make_trainer(GRPOTrainer, max_steps=2)
    theirs.train()
    ours = make_trainer()
    ours.train(resume_from_checkpoint="output/checkpoint-2")
    assert ours.state.global_step == 8


@pytest.mark.parametrize("cls", [FR3ETrainer, GRPOTrainer])
def test_refill_goes_on_in_the_data_of_a_run_without(cls):
    """Whose steps drew two prompts each."""

    def prompts_of_step_3(trainer, **arguments):
        drawn = {}

        def reward_func(prompts, completions, **kwargs):
            drawn.setdefault(trainer.state.global_step, []).extend(prompts)
            return [float(len(text) % 3) for text in completions]

        trainer.reward_funcs = [reward_func]
        set_seed(1)
        trainer.train(**arguments)
        return list(dict.fromkeys(drawn.get(2, [])))

    whole = prompts_of_step_3(make_trainer(max_steps=3, output_dir="whole"))
    prompts_of_step_3(make_trainer(cls, max_steps=2, output_dir="first"))
    resumed = make_trainer(max_steps=3, max_refills=1, output_dir="resumed")
    assert len(whole) == 2
    assert prompts_of_step_3(resumed, resume_from_checkpoint="first/checkpoint-2")[:2] == whole


def test_a_process_without_its_own_state_ends(tmp_path):
    """The checkpoint was cut while it was written: what others have kept is not this process's batch."""
    settings = {"num_generations": 8, "per_device_train_batch_size": 8, "max_steps": 1, "save_strategy": "steps"}
    launch(tmp_path / "run", 2, settings)
    checkpoint = tmp_path / "run" / "output" / "checkpoint-1"
    (checkpoint / "grpo_state_1.pt").unlink()
    settings |= {"max_steps": 2, "resume": str(checkpoint)}
    went_well, _ = launch(tmp_path / "again", 2, settings, check=False)
    assert not went_well
    assert "grpo_state_1.pt is missing" in (tmp_path / "again" / "1.error").read_text()


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


@pytest.mark.parametrize("content", ["{}", "[]", "", '{"global_step": 3}'])
def test_a_checkpoint_without_a_trainer_state_is_passed_over(content):
    make_trainer(max_steps=3).train()
    Path("output/checkpoint-3/trainer_state.json").write_text(content)
    shutil.copytree("output/checkpoint-1", "output/checkpoint-best")
    (Path("output") / "checkpoint-").mkdir()
    assert last_complete_checkpoint("output") == "output/checkpoint-2"


def test_a_stream_goes_on_exactly_within_its_first_pass(caplog):
    """Later it is told that prompts come again."""

    def streaming(**settings):
        stream = make_dataset(6).to_iterable_dataset()
        return factory.make_trainer(FR3ETrainer, reward_funcs=letters, dataset=stream, **SAVING | settings)

    whole = streaming(max_steps=6)
    set_seed(1)
    whole.train()
    for step, is_exact in ((2, True), (4, False)):
        resumed = streaming(max_steps=6, output_dir="resumed")
        resumed.train(resume_from_checkpoint=f"output/checkpoint-{step}")
        assert resumed.state.global_step == 6
        assert ("a stream, whose place" in caplog.text) == (not is_exact)
        if is_exact:
            check_same(resumed, whole)


@pytest.mark.parametrize("save_only_model", [False, True])
def test_a_checkpoint_without_its_state_is_told_of(save_only_model, caplog):
    """That losses will differ, and what is kept; the run goes on."""
    make_trainer(max_steps=2, save_only_model=save_only_model).train()
    Path("output/checkpoint-2/grpo_state_0.pt").unlink(missing_ok=save_only_model)
    resumed = make_trainer(max_steps=5)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    (told,) = [message for message in caplog.messages if "grpo_state_0.pt" in message]
    kept, _, anew = told.partition(" are kept. ")
    assert "losses will differ" in anew
    assert ("optimizer" in kept, "optimizer" in anew) == (not save_only_model, save_only_model)


def test_weights_that_are_tied_are_not_said_to_be_missing(caplog):
    """They are saved once."""

    def tied(**settings):
        config = make_model().config.to_dict() | {"tie_word_embeddings": True}
        return make_trainer(model=Qwen3ForCausalLM(Qwen3Config(**config)), **settings)

    tied(max_steps=1).train()
    resumed = tied(max_steps=2)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    resumed.train(resume_from_checkpoint=True)
    logger.removeHandler(caplog.handler)
    assert resumed.state.global_step == 2
    assert "missing keys" not in caplog.text


def test_a_damaged_state_is_named():
    make_trainer(max_steps=2).train()
    state = Path("output/checkpoint-2/grpo_state_0.pt")
    for content in (b"", state.read_bytes()[:1000]):
        state.write_bytes(content)
        with pytest.raises(ValueError, match=r"checkpoint-2/grpo_state_0\.pt is damaged .*checkpoint before it"):
            make_trainer(max_steps=3).train(resume_from_checkpoint=True)


REFILLED = {"max_refills": 3} | REJECTING


@pytest.mark.parametrize(
    "saved, present, told",
    [
        ({}, {"credit": "rollout"}, ["credit='tree' (now 'rollout')"]),
        ({"num_anchors": 7}, {"num_anchors": 3}, ["num_anchors=7 (now 3)"]),
        ({"value_tracker": False}, {}, ["value_tracker=False (now True)"]),
        ({}, {"value_tracker": False}, ["value_tracker=True (now False)"]),
        ({}, {"seed": 7}, ["seed=42 (now 7)", "the tracked values"]),
        (REFILLED, REFILLED | {"max_refills": 1}, ["max_refills=3 (now 1)", "order of prompts"]),
        (REFILLED, REJECTING, ["max_refills=3 (now 0)"]),
        ({}, {"num_anchors": 0}, ["num_anchors=", "(now 0)", "credit='tree' (now"]),
        ({"num_anchors": 0}, {}, ["num_anchors=0 (now"]),
        ({}, {"beta": 0.1}, ["beta=0.0 (now 0.1)"]),
    ],
)
def test_settings_that_differ_from_the_checkpoints_are_told(saved, present, told, caplog):
    """The run goes on with those that it has now."""
    make_trainer(**saved, max_steps=2).train()
    resumed = make_trainer(**present, max_steps=4, output_dir="resumed")
    resumed.train(resume_from_checkpoint="output/checkpoint-2")
    assert resumed.state.global_step == 4
    (message,) = [message for message in caplog.messages if "other settings" in message]
    assert all(words in message for words in [*told, "From here on the present ones hold", "its optimizer"])


@pytest.mark.parametrize("settings", [{"beta": 0.1}, {"temperature": 0.5}], ids=str)
def test_a_batch_that_was_drawn_with_other_settings_is_dropped(settings):
    """It has no log-probs of a reference model, and old ones at another temperature."""
    make_trainer(num_iterations=2, max_steps=2).train()
    resumed = make_trainer(**settings, num_iterations=2, max_steps=2, output_dir="resumed")
    resumed.train(resume_from_checkpoint="output/checkpoint-1")
    (log,) = (entry for entry in resumed.state.log_history if entry.get("step") == 2 and "loss" in entry)
    assert log["clip_ratio/region_mean"] == 0 and "fr3e/value/S0" in log


def test_rows_left_over_from_other_settings_are_dropped():
    """Theirs too are old log-probs at another temperature."""
    mine, _ = resumed_where_rows_are_left_over(temperature=0.5)
    assert mine == 0


def test_the_same_settings_are_not_told_of(caplog):
    make_trainer(max_steps=2).train()
    make_trainer(max_steps=3, output_dir="resumed", logging_steps=2).train(resume_from_checkpoint="output/checkpoint-2")
    assert "other settings" not in caplog.text


def test_another_learning_rate_is_told_to_have_no_effect(caplog):
    constant = {"lr_scheduler_type": "constant"}
    make_trainer(**constant, max_steps=2).train()
    resumed = make_trainer(**constant, max_steps=3, output_dir="resumed", learning_rate=1e-5)
    resumed.train(resume_from_checkpoint="output/checkpoint-2")
    assert resumed.state.log_history[-2]["learning_rate"] == 1e-2
    assert "goes on with learning_rate=0.01" in caplog.text and "1e-05, has no effect" in caplog.text
    assert "other settings" not in caplog.text


def test_a_reference_model_that_begins_anew_is_told_of(caplog):
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 2}
    make_trainer(**settings).train()
    make_trainer(**settings).train(resume_from_checkpoint="output/checkpoint-1")
    assert caplog.text.count("A checkpoint has no reference model") == 1


def test_a_smaller_dataset_with_refills(caplog):
    """Rows that are left over have no example any more: they are dropped, and it is told."""
    whole = make_trainer(**REFILLED)
    whole.train()
    entry = next(entry for entry in whole.state.log_history if num_left_over_before(entry) > 0)
    resumed = factory.make_trainer(
        FR3ETrainer,
        reward_funcs=parity,
        dataset=make_dataset(2),
        **SAVING | REFILLED | {"output_dir": "resumed", "max_steps": entry["step"]},
    )
    resumed.train(resume_from_checkpoint=f"output/checkpoint-{entry['step'] - 1}")
    assert resumed.state.global_step == entry["step"]
    assert "examples of train_dataset=6 (now 2)" in caplog.text


def test_a_run_that_is_done_is_not_trained_further():
    whole = make_trainer(max_steps=2)
    whole.train()
    again = make_trainer(max_steps=2)
    again.train(resume_from_checkpoint=True)
    check_same(again, whole)


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint in 'output' to resume from"):
        make_trainer().train(resume_from_checkpoint=True)


SCRIPT = Path(__file__).with_name("resume_train.py")


def start(*arguments):
    """A run in a process of its own, when it begins to train."""
    process = start_script(SCRIPT, *arguments)
    line_of(process, "training")
    return process


def line_of(process, beginning: str) -> str:
    """The next line of what a run prints that begins like this: libraries that it imports may print, too."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(Path("stderr").read_text())


def resume(*arguments) -> str:
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
        resumed = resume(*arguments)
        print(f"kill {kill + 1} after {moment:.2f} of {seconds:.2f} s, {saved}: {resumed}", end="", flush=True)
        assert resumed == whole
