"""`fr3e train`, and every recipe for two steps, with a tiny model and a small dataset in place of its own."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from factory import logged
from models import model_on_disk
from peft import PeftModel
from recipe_header import header
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, ModelConfig

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands import cli, train
from fr3e_trl.commands.eval import EvalArguments
from fr3e_trl.commands.options import option_names
from fr3e_trl.fr3e_config import PRESETS

ROOT = Path(__file__).parent.parent
PATHS = os.environ | {"PYTHONPATH": str(ROOT)}
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
BASELINES = [name for name in RECIPES if name.endswith("_grpo")]
FR3E_SETTINGS = {field.name for field in fields(FR3EConfig)} - {field.name for field in fields(GRPOConfig)}

# What the recipes' datasets on the hub look like
PENS = [{"question": f"Tom has {i}. How many?", "answer": f"{i}=<<{i}={i}>>\n#### {i}"} for i in range(16)]
HALVES = [{"problem": f"Half of ${i}$?", "answer": rf"\frac{{{i}}}{{2}}", "solution": "Half."} for i in range(16)]
HUB_DATASETS = {"openai/gsm8k": PENS, "agentica-org/DeepScaleR-Preview-Dataset": HALVES}


@pytest.fixture
def trainers(monkeypatch):
    made = []

    def make(**arguments):
        made.append(FR3ETrainer(**arguments))
        return made[-1]

    monkeypatch.setattr(train, "FR3ETrainer", make)
    return made


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def read(name):
    recipe = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    return PRESETS.get(recipe.pop("preset", None), {}) | recipe


def command_line(name, tmp_path):
    """A recipe's arguments: itself, and what makes it run here in seconds."""
    dataset = read(name)["dataset_name"]
    if dataset in HUB_DATASETS:
        Dataset.from_list(HUB_DATASETS[dataset]).to_json(tmp_path / "data.jsonl")
        dataset = tmp_path / "data.jsonl"
    overrides = {"model_name_or_path": model_on_disk(), "dataset_name": dataset, "output_dir": tmp_path / "output"}
    overrides |= {"max_steps": 2, "per_device_train_batch_size": 80, "gradient_accumulation_steps": 1}
    overrides |= {"steps_per_generation": 1, "max_completion_length": 8, "bf16": False, "use_cpu": True}
    overrides |= {"use_vllm": False, "report_to": "none"}  # with a server: tests/with_vllm
    return ["--config", f"recipes/{name}.yaml", *(f"--{key}={value}" for key, value in overrides.items())]


def check_trained(name, tmp_path):
    """Two steps were logged, with FR3E's metrics where anchors are, and what was saved can be loaded."""
    state = json.loads((tmp_path / "output" / "checkpoint-2" / "trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    explored = read(name).get("num_anchors") != 0
    assert all((entry["fr3e/anchor/count"] > 0) == explored for entry in steps)
    AutoModelForCausalLM.from_pretrained(tmp_path / "output")


LAUNCHED = ["-m", "accelerate.commands.launch", "--num_processes=1", "examples/train.py"]
IN_TWO = ["--per_device_train_batch_size=40", "--use_cpu=true", "--num_processes=2"]


@pytest.mark.parametrize(
    ("command", "sizes"), [(LAUNCHED, []), (["-m", "fr3e_trl.commands.cli", "train"], IN_TWO)], ids=["one", "two"]
)
def test_smoke_recipe_is_launched(command, sizes, tmp_path):
    """Two logs are two lines, however many processes there are, and no other library warns of its names."""
    command = [sys.executable, *command, *command_line("smoke", tmp_path), *sizes]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(re.findall(r"^step [12]/2  reward ", result.stdout, flags=re.MULTILINE)) == 2
    assert result.stdout.count("  time  ") == 1
    assert "FutureWarning" not in result.stdout + result.stderr and "Setting accelerator" not in result.stdout
    check_trained("smoke", tmp_path)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "smoke"])
def test_recipe_trains(trainers, name, tmp_path):
    train.main(command_line(name, tmp_path))
    check_trained(name, tmp_path)
    model = trainers[0].model
    assert model.dtype == getattr(torch, read(name).get("dtype", "float32"))
    assert isinstance(model, PeftModel) == read(name).get("use_peft", False)
    assert getattr(model, "is_loaded_in_4bit", False) == read(name).get("load_in_4bit", False)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "qwen3").glob("*.yaml")), ids=lambda path: path.stem)
def test_qwen3_recipe_can_be_planned(path, tmp_path, capsys):
    head, recipe = header(path), yaml.safe_load(path.read_text())
    assert any(line.endswith(f"fr3e train --config recipes/qwen3/{path.name}") for line in head)
    assert recipe["output_dir"] == f"outputs/qwen3_{path.stem}"
    rows = [{"question": "1+1=", "answer": "#### 2"}] * 64
    Dataset.from_list(rows).to_json(tmp_path / "data.jsonl")
    given = [f"--model_name_or_path={model_on_disk()}", f"--dataset_name={tmp_path / 'data.jsonl'}", "--bf16=false"]
    large = [line.split() for line in head if line.startswith("--")]
    for settings in [[], *large]:
        cli.main(["train", "--dry_run", "--config", str(path), *given, *settings])
    assert capsys.readouterr().out.count("The run") == 1 + len(large)


def test_every_recipe_opens_with_its_launch_command_and_has_a_baseline():
    assert {f"{name}_grpo" for name in RECIPES if name not in BASELINES} == set(BASELINES)
    for name in RECIPES:
        assert f"fr3e train --config recipes/{name}.yaml" in header(ROOT / "recipes" / f"{name}.yaml")


@pytest.mark.parametrize("baseline", BASELINES)
def test_baseline_differs_in_fr3e_settings_alone(baseline):
    name = baseline.removesuffix("_grpo")
    ours, theirs = read(name), read(baseline)
    assert (ours.pop("output_dir"), theirs.pop("output_dir")) == (f"outputs/{name}", f"outputs/{baseline}")
    settings = {key: theirs.pop(key) for key in FR3E_SETTINGS & theirs.keys()}
    assert settings == {"num_anchors": 0, "reject_degenerate_states": True}
    assert theirs == {key: value for key, value in ours.items() if key not in FR3E_SETTINGS}


MODEL = "--model_name_or_path=unused"


@pytest.mark.parametrize("name, prompts", [("paper", 512), ("released", 32)])
def test_published_settings_are_those_of_the_preset(name, prompts, tmp_path):
    recipe = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    assert recipe["preset"] == name and not recipe.keys() & PRESETS[name].keys()
    arguments = ["--config", f"recipes/{name}.yaml", "--bf16=false", "--use_cpu=true", f"--output_dir={tmp_path}"]
    script, args, model = train.make_parser().parse_args_and_config(arguments)
    assert {key: getattr(args, key) for key in PRESETS[name]} == PRESETS[name]
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert rows == prompts * args.num_generations  # in one update
    others = {field.name for part in (script, model) for field in fields(part)} | {"preset"}
    given = {key: value for key, value in recipe.items() if key not in others}
    made = getattr(FR3EConfig, name)(**given | {"bf16": False, "use_cpu": True, "output_dir": str(tmp_path)})
    assert all(getattr(args, field.name) == getattr(made, field.name) for field in fields(made))


def test_a_preset_is_overridden_by_the_recipe_and_the_command_line_and_brackets_may_be_left_out(tmp_path):
    recipe = "preset: paper\nepsilon: 0.1\nnum_generations: 8\nbf16: false\nuse_cpu: true\nreward_funcs: math_reward"
    (tmp_path / "recipe.yaml").write_text(recipe)
    given = ["--config", str(tmp_path / "recipe.yaml"), f"--output_dir={tmp_path}", "--num_generations=4", MODEL]
    script, args, _ = train.make_parser().parse_args_and_config(given)
    assert (args.epsilon, args.num_generations, args.epsilon_high, args.modulation) == (0.1, 4, 0.28, "exp")
    assert script.reward_funcs == ["math_reward"]


def test_evaluates_on_the_test_split_of_a_directory(trainers, tmp_path):
    for split in ("train", "test"):
        examples = Dataset.from_dict({"prompt": [split] * 16, "solution": ["1"] * 16})
        examples.to_json(tmp_path / "data" / f"{split}.jsonl")
    evaluation = ["--eval_strategy=steps", "--eval_steps=2", "--per_device_eval_batch_size=16"]
    train.main([*command_line("smoke", tmp_path), f"--dataset_name={tmp_path / 'data'}", *evaluation])
    assert set(trainers[0].eval_dataset["prompt"]) == {"test"}
    assert [entry["step"] for entry in trainers[0].state.log_history if "eval_reward" in entry] == [2]


@pytest.mark.parametrize(
    ("command", "misspelt", "meant"),
    [
        ("train", "--num_anchor=3", "--num_anchors"),
        ("train", "--learnign_rate=1", "--learning_rate"),
        ("eval", "--num_sample=3", "--num_samples"),
        ("tree", "--out=x", "--output"),
    ],
)
def test_an_option_is_taken_by_its_whole_name(command, misspelt, meant, capsys):
    with pytest.raises(SystemExit) as ending:
        cli.main([command, "run", misspelt])
    assert ending.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "unrecognized arguments: " in error
    assert error.endswith(f"{misspelt}. Did you mean {meant}? See fr3e {command} --help.")


def test_a_mistyped_option_or_setting_is_found_before_anything_is_imported(tmp_path):
    (tmp_path / "recipe.yaml").write_text("dataset_nmae: data.jsonl")
    script = "from fr3e_trl.commands import cli\ntry: cli.main(sys.argv[1:])\nfinally: print(*sys.modules)"
    for command in ("train", "eval"):
        for arguments in (["--seeed=1"], ["--config", "recipe.yaml"]):
            told = [sys.executable, "-c", f"import sys; {script}", command, *arguments]
            result = subprocess.run(told, capture_output=True, text=True, cwd=tmp_path, timeout=60, env=PATHS)
            assert result.returncode == 2 and "Did you mean" in result.stderr, result.stderr
            assert {*result.stdout.split()} & {"yaml", "torch", "trl", "transformers"} == {"yaml"}


@pytest.mark.parametrize("command", ["train", "eval"])
def test_the_options_that_the_source_has_are_those_of_the_parser(command):
    dataclasses = {"train": [train.TrainArguments, FR3EConfig, ModelConfig], "eval": [EvalArguments, ModelConfig]}
    parser = {field.name for part in dataclasses[command] for field in fields(part) if field.init}
    assert parser <= option_names(f"fr3e {command}")


def test_a_recipe_that_is_begun_trains_and_its_settings_train_again(trainers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "first: run #1"
    cli.main(["init", name])
    with pytest.raises(SystemExit):
        cli.main(["init", name])
    command = capsys.readouterr().out.splitlines()[1].removeprefix("next: fr3e train ")
    here = ["--model_name_or_path", model_on_disk(), "--hub_token=hf_1"]  # the recipe knows the machine
    cli.main(["train", *shlex.split(command), *map(str, here), "--max_steps=2", "--max_completion_length=8"])
    output = tmp_path / "outputs" / name
    logs = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert logs == trainers[0].state.log_history and [log["step"] for log in logs if "loss" in log] == [1, 2]
    resolved = (output / "resolved.yaml").read_text()
    assert "hf_1" not in resolved and yaml.safe_load(resolved)["dataset_name"] == f"{name}/data.jsonl"
    cli.main(["train", "--config", str(output / "resolved.yaml"), "--output_dir", "again"])
    own = dict.fromkeys(["hub_token", "logging_dir", "output_dir"])
    first, again = (trainer.args.to_dict() | own for trainer in trainers)
    assert again == first and logged(trainers[1], "loss") == logged(trainers[0], "loss")


def test_a_recipe_for_a_gpu_loads_the_model_in_the_type_that_it_trains_in(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_torch_bf16_gpu_available", lambda: True)
    cli.main(["init", str(tmp_path / "run")])
    given = ["--config", str(tmp_path / "run" / "recipe.yaml"), "--use_cpu=true"]
    _, args, model = train.make_parser().parse_args_and_config(given)
    assert args.bf16 and model.dtype == "bfloat16"


def test_help_of_training_is_a_page_of_options_that_there_are(capsys, tmp_path):
    script = "from fr3e_trl.commands import cli; cli.main(['train', '--help']); print('torch' in sys.modules)"
    command = [sys.executable, "-c", f"import sys; {script}"]
    page = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout
    assert page.endswith("False\n") and len(page.splitlines()) < 90
    assert page.startswith("usage: fr3e train [--config RECIPE.yaml]")
    options = re.findall(r"^  --(\w+) ", page, flags=re.MULTILINE)
    known = {action.dest for action in train.make_parser()._actions} | {"config"}
    assert {*options} <= known and {*options} >= FR3E_SETTINGS
    with pytest.raises(SystemExit):
        cli.main(["train", "--help-all"])
    assert "--fp16_full_eval" in capsys.readouterr().out
    cli.main(["eval", "--help"])
    options = re.findall(r"^  --(\w+) ", capsys.readouterr().out, flags=re.MULTILINE)
    assert {*options} <= option_names("fr3e eval")
    assert {"limit", "pass_at"} <= {field.name for field in fields(EvalArguments)}
    assert {"num_samples", "vllm_server_base_url"} <= {*options} and "use_peft" not in options
    # What a command says before it imports anything
    with pytest.raises(SystemExit):
        cli.main([])
    assert "train     " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert re.fullmatch(r"fr3e_trl \S+, trl \S+, transformers \S+, torch \S+\n", capsys.readouterr().out)
    cli.main(["init", str(tmp_path / "run")])
    assert capsys.readouterr().err == "fr3e init: loading ...\n"


@pytest.mark.parametrize(
    ("value", "is_resumed"), [("true", True), ("CHECKPOINT", True), ("false", False), ("None", False)]
)
def test_resumes_where_it_is_told_to(trainers, value, is_resumed, tmp_path):
    checkpoint = tmp_path / "output" / "checkpoint-1"
    arguments = [*command_line("smoke", tmp_path), "--save_strategy=steps", "--save_steps=1"]
    train.main([*arguments, "--max_steps=1"])
    where = [] if is_resumed else [f"--output_dir={tmp_path / 'other'}"]
    train.main([*arguments, *where, f"--resume_from_checkpoint={checkpoint if value == 'CHECKPOINT' else value}"])
    assert trainers[1].state.global_step == 2
    # A run from the start writes one of its own
    assert (tmp_path / "other" / "checkpoint-1").is_dir() != is_resumed
