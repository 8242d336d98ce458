"""What a run prints, and the model card that it leaves, by `train()` and as `fr3e train`."""

import io
import random
import re
import shlex
import sys
from pathlib import Path

import pytest
from factory import make_trainer, train
from huggingface_hub import ModelCard
from models import make_dataset, model_on_disk
from test_recipes import command_line
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers import trainer as transformers_trainer

from fr3e_trl import FR3ETrainer
from fr3e_trl.callbacks import Console, changes, duration, say
from fr3e_trl.commands import cli
from fr3e_trl.commands.outputs import concealed
from fr3e_trl.commands.recipe import parse_arguments
from fr3e_trl.commands.train import evaluation_command, make_parser, name_damaged_file, write_recipe

ROOT = Path(__file__).parent.parent
STEP = r"step \d/\d  reward [\d.]+  length \d+  tokens [\d,]+  entropy [\d.]+  \d+ s left"
DICT = "For TRL's dict of all metrics, set disable_tqdm=True."
START = f"reward: mean over completions sampled from the prompt (fr3e/value/S0). {DICT}"
LINES = {"disable_tqdm": False}  # the other tests print all metrics
EVALUATION = {"eval_dataset": make_dataset(4), "eval_strategy": "steps", "eval_steps": 3, "num_generations_eval": 2}
EVALUATION |= {"per_device_eval_batch_size": 4}


def printed(capsys) -> list[str]:
    """The lines of both streams, without those of warnings about a tiny model's metrics."""
    captured = capsys.readouterr()
    return [line for line in (captured.out + captured.err).splitlines() if not line.startswith("warning: ")]


def test_a_log_is_a_line_and_the_end_says_what_came_of_it(capsys):
    trainer = train(FR3ETrainer, max_steps=6, log_trees=3, save_strategy="steps", **LINES, **EVALUATION)
    lines = printed(capsys)
    assert lines[0] == START
    steps = [line for line in lines if re.fullmatch(STEP, line)]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(f"reward {entry['fr3e/value/S0']:.3f}" in line for line, entry in zip(steps, logs, strict=True))
    assert len(logs) == 6 and all(len(entry) > 40 for entry in logs)  # all metrics are still there
    evaluations = [line for line in lines if line.startswith("step 3/6  evaluation  reward ")]
    assert len(evaluations) == 1 and max(map(len, steps)) < 100
    end = lines[lines.index("") :]
    assert end[1].startswith("6 step(s) in ")
    rows = {name.strip(): text for name, text in (re.match(r"  (.{13})(.*)", line).groups() for line in end[2:7])}
    assert list(rows) == ["eval_reward", "reward", "time", "trees", "all metrics"]
    assert re.fullmatch(r"(\w+ \d+%(, )?){3}", rows["time"])
    assert {*trainer.stopwatch.seconds} == {"generation", "rewards", "update"}
    took, whole_run = sum(trainer.stopwatch.seconds.values()), trainer.state.log_history[-1]["train_runtime"]
    assert sum(entry["step_time"] for entry in logs) < took < whole_run  # evaluations and checkpoints are no part
    first, last = logs[0]["fr3e/value/S0"], logs[-1]["fr3e/value/S0"]
    assert rows["reward"] == f"{first:.3f} → {last:.3f}: {last - first:+.3f} (first and last log)"
    first, last = (entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry)
    assert rows["eval_reward"] == f"{first:.3f} → {last:.3f}"
    assert Path(rows["trees"]).exists() and Path(rows["all metrics"]).exists()
    trainer.train(resume_from_checkpoint=True)
    assert printed(capsys)[0].startswith("All 6 steps are done.")


def test_without_exploration_the_line_has_the_reward(capsys):
    train(FR3ETrainer, beta=0.1, num_anchors=0, **LINES)
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert all(re.match(r"step \d/2  reward [\d.]+  length \d+  entropy [\d.]+  kl ", line) for line in steps)
    assert lines[0] == DICT and len(steps) == 2


def test_all_metrics_are_printed_as_by_trl_where_the_line_says_so(capsys):
    train(FR3ETrainer, disable_tqdm=True)
    lines = printed(capsys)
    assert len(lines) == 3 and all(line.startswith("{'loss': ") and "'fr3e/value/S0': " in line for line in lines[:2])
    trainer = make_trainer(FR3ETrainer, max_steps=1, **LINES)
    trainer.log({"mine": 0.25, "note": "text"})  # a user's
    assert printed(capsys) == ["step 0/0  mine 0.25  note text"]
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert printed(capsys) == []
    trainer.add_callback(PrinterCallback)
    trainer.train()
    assert "'fr3e/value/S0': " in printed(capsys)[0]


class Notebook(TrainerCallback):
    """What transformers prints by in a notebook."""


def test_it_takes_the_place_of_transformers_default_alone(monkeypatch):
    def kinds(**settings):
        trainer = make_trainer(FR3ETrainer, **LINES | settings)
        return [type(callback) for callback in trainer.callback_handler.callbacks[-2:]]

    assert kinds()[-1] is Console and ProgressCallback not in kinds()
    assert kinds(disable_tqdm=True)[-1] is PrinterCallback
    assert kinds(callbacks=[ProgressCallback]) == [ProgressCallback, Console]
    assert kinds(callbacks=[ProgressCallback()]) == [ProgressCallback, Console]
    monkeypatch.setattr(transformers_trainer, "DEFAULT_PROGRESS_CALLBACK", Notebook)
    assert kinds(callbacks=[ProgressCallback()]) == [ProgressCallback, Notebook]


def test_a_terminal_has_a_bar_and_a_step_that_generates_nothing_says_nothing_of_it(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(FR3ETrainer, num_iterations=2, **LINES)
    captured = capsys.readouterr()
    assert "100%" in captured.err
    first, second = (line for line in captured.out.splitlines() if line.startswith("step "))
    assert "  reward " in first and "  entropy " in first
    assert second == "step 2/2  same batch  0 s left"


@pytest.mark.parametrize("logging_steps", [1, 10])
def test_what_can_be_mended_is_told_once(logging_steps, capsys):
    settings = LINES | {"max_steps": 3, "logging_steps": logging_steps, "max_completion_length": 4}
    train(FR3ETrainer, **settings, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "raise max_completion_length" in warnings[0] and "collapsed" in warnings[0]
    assert "Check the reward function" in warnings[1]


def test_a_threshold_that_no_token_reaches_is_told(capsys):
    train(FR3ETrainer, anchor_threshold=50.0, **LINES)
    assert "warning: fr3e/anchor/count = 0: there were no branches." in capsys.readouterr().out
    train(FR3ETrainer, num_anchors=0, reject_degenerate_states=True, **LINES)  # asks for none
    assert "there were no branches" not in capsys.readouterr().out


def test_each_of_several_evaluation_sets_is_told_apart(capsys):
    dataset = make_dataset(4)
    sets = {name: dataset.add_column("is_easy", [name == "easy"] * 4) for name in ("easy", "hard")}
    evaluation = EVALUATION | {"eval_dataset": sets, "eval_steps": 1}

    def reward(completions, is_easy=None, **kwargs):
        return list(map(float, is_easy)) if is_easy else [float(len(text) % 2) for text in completions]

    train(FR3ETrainer, reward_funcs=reward, max_steps=2, **LINES, **evaluation)
    lines = printed(capsys)
    for name, value in (("easy", "1.000"), ("hard", "0.000")):
        assert sum(f"evaluation of {name}  reward {value}" in line for line in lines) == 2
        assert any(line.startswith(f"  eval_reward of {name}") and f"{value} → {value}" in line for line in lines)


@pytest.mark.fast
def test_what_is_said(monkeypatch, tmp_path):
    told = ["4 s", "99 s", "2 min", "12 min", "3 h 20 min"]
    assert [duration(seconds) for seconds in (4, 99, 100, 720, 12_000)] == told
    output = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="latin-1"))
        say("0.1 → 0.2 ± 0.1")
        assert output.getvalue() == "0.1 ? 0.2 ± 0.1\n".encode("latin-1")
    # A checkpoint that later ones replaced is not taken for damaged
    assert name_damaged_file("output/checkpoint-1", "output", RuntimeError("quota exceeded")) is None
    nested = {"model_init_kwargs": {"token": "hf_1", "dtype": "float32"}, "config": '{"api_key": "hf_2"}'}
    nested |= {"hub_token": "hf_3", "resume_from_checkpoint": "true"}  # which a run that begins anew cannot
    write_recipe(tmp_path / "resolved.yaml", nested)
    text = (tmp_path / "resolved.yaml").read_text()
    assert "hf_" not in text and "resume" not in text and "float32" in text
    assert concealed("--kwargs={'token': 'hf_4', 'max_tokens': 3}") == "--kwargs={'token': ***, 'max_tokens': 3}"


@pytest.mark.fast
@pytest.mark.parametrize("number", [16, 60])
def test_intervals_of_logs_hold_the_truth(number):
    """Of 1,000 runs that stand still, and of as many that rise slowly: about 95% of intervals hold the true change."""
    generator = random.Random(0)
    ends = min(max(number // 4, 1), 10)
    for slope in (0.0, 0.02):
        held = 0
        for _ in range(1000):
            logs = [{"reward": slope * i + generator.gauss(0, 1)} for i in range(number)]
            ((_, told),) = changes(logs)
            change, noise = map(float, re.search(r": (\S+) ± (\S+) ", told).groups())
            held += abs(change - slope * (number - ends)) <= noise
        assert held / 1000 == pytest.approx(0.94, abs=0.03)


def test_the_command_that_comes_next_runs_and_the_card_says_what_was_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    cli.main(["train", *command_line("smoke", tmp_path), "--hub_token=hf_mine", "--seed", "7"])
    lines, folder = capsys.readouterr().out.splitlines(), tmp_path / "output"
    assert lines[-2] == f"  model        {folder}"
    assert sum("  next  " in line for line in lines) == 1
    _, command, *arguments = shlex.split(lines[-1].split("next", 1)[1])
    cli.main([command, *arguments, "--limit=1", "--num_samples=2", f"--output_dir={folder / 'eval'}"])
    assert "pass@1" in capsys.readouterr().out
    card = ModelCard.load(folder / "README.md")
    assert "None" not in card.text and card.data.datasets is None and "hf_mine" not in card.text
    assert f"This model is a fine-tuned version of `{Path(model_on_disk()).name}`" in card.text
    rows = dict(re.findall(r"^\| ([^|]+) \| `(.+)` \|$", card.text, flags=re.MULTILINE))
    assert rows["dataset"] == "recipes/smoke.jsonl" and rows["rewards"] == "answer_reward" and rows["seed"] == "7"
    assert rows["generation batch"] == "10 prompts × 8" and rows["steps"] == "2 (0.50 epochs)"
    assert "num_anchors=6" in rows["FR3E"] and " → " in rows["reward"] and "- FR3E for TRL: " in card.text


def test_the_card_has_settings_that_differ_results_of_evaluation_and_the_step_of_the_best_weights():
    settings = {"num_anchors": 3, "modulation": "exp", "credit": "rollout"}
    saved = {"model": model_on_disk(), "save_strategy": "steps", "learning_rate": 0.02, "max_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "step", "greater_is_better": False}
    trainer = make_trainer(FR3ETrainer, **saved, **settings, **EVALUATION | {"eval_steps": 1, "save_steps": 1}, **best)
    evaluate = trainer.evaluate
    trainer.evaluate = lambda **given: evaluate(**given) | {"eval_step": trainer.state.global_step}
    trainer.train()
    trainer.save_model()
    text = Path("output/README.md").read_text()
    assert all(f"{name}={value!r}" in text for name, value in settings.items()) and "max_refills" not in text
    assert re.search(r"\| eval_reward \| `[01]\.\d{3} → [01]\.\d{3}` \|", text)
    assert "| weights of step | `1` |" in text and "| steps | `2 (" in text


def test_the_card_of_a_resumed_run_has_the_learning_rate_that_it_kept():
    saved = {"model": model_on_disk(), "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    make_trainer(FR3ETrainer, **saved, max_steps=1, learning_rate=0.02).train()
    trainer = make_trainer(FR3ETrainer, **saved, max_steps=2, learning_rate=1e-5)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    assert "| learning rate | `0.02` |" in Path("output/README.md").read_text()


def test_the_command_that_evaluates_says_what_the_recipe_said():
    given = ["--config", str(ROOT / "recipes/qwen3/4b_qlora.yaml"), "--bf16=false", "--use_vllm=false"]
    given += ["--use_cpu=true", "--trust_remote_code=true", "--answer_column=answer", "--answer_separator=---"]
    command = evaluation_command(*parse_arguments(make_parser(), given))
    for words in (
        """--chat_template_kwargs '{"enable_thinking": false}'""",
        *("--load_in_4bit True", "--use_bnb_nested_quant True", "--dtype bfloat16", "--trust_remote_code True"),
        "--answer_column answer --answer_separator=---",
    ):
        assert words in command
