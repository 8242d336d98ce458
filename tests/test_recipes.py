"""The training script, and every recipe for two steps, with a tiny model and a small dataset in place of its own."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from models import make_tokenizer, model_on_disk
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from trl.rewards import accuracy_reward

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.config import PAPER, RELEASED

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
BASELINES = [name for name in RECIPES if name.endswith("_grpo")]
FR3E_SETTINGS = {field.name for field in fields(FR3EConfig)} - {field.name for field in fields(GRPOConfig)}

# What the recipes' datasets on the hub look like
HUB_DATASETS = {
    "openai/gsm8k": [
        {
            "question": f"Tom has {i} pens and buys {i}. How many?",
            "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>\n#### {2 * i}",
        }
        for i in range(16)
    ],
    "agentica-org/DeepScaleR-Preview-Dataset": [
        {"problem": f"Half of ${i}$?", "answer": rf"\frac{{{i}}}{{2}}", "solution": "It is half."} for i in range(16)
    ],
}


@pytest.fixture(scope="module")
def train():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "examples" / "train.py")
    module = sys.modules["train"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trainers(train, monkeypatch):
    """The trainers that the script makes."""
    made = []

    def make(**arguments):
        made.append(FR3ETrainer(**arguments))
        return made[-1]

    monkeypatch.setattr(train, "FR3ETrainer", make)
    return made


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    """Recipes are launched from the root of the repository."""
    monkeypatch.chdir(ROOT)


def read(name):
    return yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())


def run(train, arguments):
    train.main(*train.make_parser().parse_args_and_config(arguments))


def command_line(name, tmp_path):
    """A recipe's arguments: itself, and what makes it run here in seconds."""
    dataset = read(name)["dataset_name"]
    if dataset in HUB_DATASETS:
        Dataset.from_list(HUB_DATASETS[dataset]).to_json(tmp_path / "data.jsonl")
        dataset = tmp_path / "data.jsonl"
    overrides = {
        "model_name_or_path": model_on_disk(),
        "dataset_name": dataset,
        "output_dir": tmp_path / "output",
        "max_steps": 2,
        "per_device_train_batch_size": 80,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "max_completion_length": 8,
        "bf16": False,
        "use_cpu": True,
        "use_vllm": False,  # with a server: tests/with_vllm
        "report_to": "none",
    }
    return ["--config", f"recipes/{name}.yaml", *(f"--{key}={value}" for key, value in overrides.items())]


def check_trained(name, tmp_path):
    """Two steps were logged, with FR3E's metrics where anchors are, and what was saved can be loaded."""
    state = json.loads((tmp_path / "output" / "checkpoint-2" / "trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    explored = read(name)["num_anchors"] > 0
    assert all((entry["fr3e/anchor/count"] > 0) == explored for entry in steps)
    AutoModelForCausalLM.from_pretrained(tmp_path / "output")


def test_smoke_recipe_is_launched(tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1"]
    subprocess.run([*launch, "examples/train.py", *command_line("smoke", tmp_path)], check=True)
    check_trained("smoke", tmp_path)


def test_smoke_recipe_is_launched_in_two_processes(tmp_path):
    # accelerate's own launcher starts one process on a CPU, whatever it is told
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    sizes = ["--per_device_train_batch_size=40", "--use_cpu=true"]
    subprocess.run([*launch, "examples/train.py", *command_line("smoke", tmp_path), *sizes], check=True, timeout=280)
    check_trained("smoke", tmp_path)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "smoke"])
def test_recipe_trains(train, trainers, name, tmp_path):
    run(train, command_line(name, tmp_path))
    check_trained(name, tmp_path)
    model = trainers[0].model
    assert model.dtype == getattr(torch, read(name).get("dtype", "float32"))
    assert isinstance(model, PeftModel) == read(name).get("use_peft", False)
    assert getattr(model, "is_loaded_in_4bit", False) == read(name).get("load_in_4bit", False)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_opens_with_its_launch_command(name):
    head, _, _ = (ROOT / "recipes" / f"{name}.yaml").read_text().partition("\n\n")
    assert f"#     accelerate launch examples/train.py --config recipes/{name}.yaml" in head.splitlines()


def test_every_recipe_has_a_baseline():
    assert {f"{name}_grpo" for name in RECIPES if name not in BASELINES} == set(BASELINES)


@pytest.mark.parametrize("baseline", BASELINES)
def test_baseline_differs_in_fr3e_settings_alone(baseline):
    name = baseline.removesuffix("_grpo")
    ours, theirs = read(name), read(baseline)
    assert (ours.pop("output_dir"), theirs.pop("output_dir")) == (f"outputs/{name}", f"outputs/{baseline}")
    settings = {key: theirs.pop(key) for key in FR3E_SETTINGS & theirs.keys()}
    assert settings == {"num_anchors": 0, "reject_degenerate_states": True}
    assert theirs == {key: value for key, value in ours.items() if key not in FR3E_SETTINGS}


@pytest.mark.parametrize("name, published, prompts", [("paper", PAPER, 512), ("released", RELEASED, 32)])
def test_published_settings_are_spelt_out(train, name, published, prompts, tmp_path):
    assert published.keys() <= read(name).keys()
    arguments = ["--config", f"recipes/{name}.yaml", "--bf16=false", "--use_cpu=true", f"--output_dir={tmp_path}"]
    _, args, _ = train.make_parser().parse_args_and_config(arguments)
    assert {key: getattr(args, key) for key in published} == published
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert rows == prompts * args.num_generations  # in one update


def test_gsm8k_columns(train):
    args = train.FR3EScriptArguments(
        prompt_column="question", answer_column="answer", answer_separator="####", system_prompt="Box it."
    )
    # Without the separator math-verify takes the 3
    example = {"question": "How many pens?", "answer": "The answer is 3.\nTimes 400 is 1,200.\n#### 1,200"}
    mapped = train.map_columns(example, args)
    assert mapped["prompt"] == [
        {"role": "system", "content": "Box it."},
        {"role": "user", "content": "How many pens?"},
    ]
    completions = [[{"role": "assistant", "content": rf"So \boxed{{{answer}}}."}] for answer in ("1200", "3")]
    assert accuracy_reward(completions, [mapped["solution"]] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("answer, wrong", [(r"2\sqrt{3}", "2"), (r"\dfrac{9}{7}", "9"), ("(3,4)", "4"), ("72", "7")])
def test_bare_answers_are_read_as_latex(train, answer, wrong):
    mapped = train.map_columns({"answer": answer}, train.FR3EScriptArguments(answer_column="answer"))
    completions = [[{"role": "assistant", "content": rf"So \boxed{{{text}}}."}] for text in (answer, wrong)]
    assert accuracy_reward(completions, [mapped["solution"]] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_local_datasets(train, suffix, is_streamed, tmp_path):
    """Answers stay text, in a format without types too."""
    examples = [{"prompt": f"{i}+{i}=", "solution": f"0{2 * i}"} for i in range(3)]
    path = tmp_path / f"data.{suffix}"
    dataset = Dataset.from_list(examples)
    write = {"csv": dataset.to_csv, "json": dataset.to_json, "jsonl": dataset.to_json, "parquet": dataset.to_parquet}
    write[suffix](path, **({"lines": False} if suffix == "json" else {}))
    args = train.FR3EScriptArguments(dataset_name=str(path), dataset_streaming=is_streamed)
    assert list(train.load_examples(args, "train", make_tokenizer())) == examples


def test_columns_of_a_csv(train, tmp_path):
    (tmp_path / "data.csv").write_text("problem,answer,level\nHalf of 8?,4,1\nHalf of none?,NA,2\n")
    args = train.FR3EScriptArguments(
        dataset_name=str(tmp_path / "data.csv"), prompt_column="problem", answer_column="answer"
    )
    loaded = train.load_examples(args, "train", make_tokenizer())
    assert list(loaded["solution"]) == [r"\boxed{4}", r"\boxed{NA}"]
    assert list(loaded["level"]) == [1, 2]


# What each file holds, and what is said of it
BAD_DATASETS = {
    "empty.jsonl": ("", "it is empty"),
    "blank.jsonl": ("\n\n", "corresponds to no data"),
    "broken.jsonl": ('{"prompt": "1+1="', "JSON parse error"),
    "header.csv": ("prompt,solution\n", "corresponds to no data"),
    "data.xml": ("<prompt/>", r"must end with one of \.csv, \.json, \.jsonl, \.parquet"),
    "missing.jsonl": (None, "Unable to find .*Use a local file"),
    "missing_directory": (None, "Couldn't reach .*or the id of a dataset on the hub"),
    "other_split.jsonl": ('{"prompt": "1+1="}', 'Unknown split "train"'),
}


@pytest.mark.parametrize("name", BAD_DATASETS)
def test_dataset_that_cannot_be_loaded(train, name, tmp_path, monkeypatch):
    content, message = BAD_DATASETS[name]
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    if name == "other_split.jsonl":
        name = "other"
        Path(name).mkdir()
        Path(name, "test.jsonl").write_text(content)
    with pytest.raises(train.UsageError, match=f"dataset_name='{name}'.*{message}") as error:
        train.load_examples(train.FR3EScriptArguments(dataset_name=name), "train", make_tokenizer())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_dataset_of_which_nothing_is_left(train, is_streamed, tmp_path):
    Dataset.from_dict({"prompt": ["12", "1234"]}).to_json(tmp_path / "data.jsonl")
    args = train.FR3EScriptArguments(
        dataset_name=str(tmp_path / "data.jsonl"), max_prompt_length=1, dataset_streaming=is_streamed
    )
    with pytest.raises(train.UsageError, match="max_prompt_length=1: no example is left"):
        train.load_examples(args, "train", make_tokenizer())


def test_evaluates_on_the_test_split_of_a_directory(train, trainers, tmp_path):
    for split in ("train", "test"):
        examples = Dataset.from_dict({"prompt": [split] * 16, "solution": ["1"] * 16})
        examples.to_json(tmp_path / "data" / f"{split}.jsonl")
    evaluation = ["--eval_strategy=steps", "--eval_steps=2", "--per_device_eval_batch_size=16"]
    run(train, [*command_line("smoke", tmp_path), f"--dataset_name={tmp_path / 'data'}", *evaluation])
    assert set(trainers[0].eval_dataset["prompt"]) == {"test"}
    assert [entry["step"] for entry in trainers[0].state.log_history if "eval_reward" in entry] == [2]


@pytest.mark.parametrize("prompt_column, kept", [(None, ["12", "1234"]), ("prompt", ["12"])])
def test_long_prompts_are_dropped(train, prompt_column, kept, tmp_path):
    """The tokens of the chat template count: here a user's, `<eos>` and the assistant's."""
    Dataset.from_dict({"prompt": ["12", "1234", "123456"]}).to_json(tmp_path / "data.jsonl")
    args = train.FR3EScriptArguments(
        dataset_name=str(tmp_path / "data.jsonl"), prompt_column=prompt_column, max_prompt_length=5
    )
    prompts = train.load_examples(args, "train", make_tokenizer())["prompt"]
    assert [prompt if prompt_column is None else prompt[0]["content"] for prompt in prompts] == kept


def test_rewards_by_name_and_by_path(train):
    assert train.get_reward("accuracy_reward") is accuracy_reward
    smoke_reward = train.get_reward("recipes.smoke_reward.answer_reward")
    texts = ["1 + 1 = 2\n<answer>2</answer>", "<answer>3</answer>", "2"]
    assert smoke_reward(completions=texts, solution=["2"] * 3, prompts=[""] * 3) == [1.0, 0.0, 0.0]


def test_one_reward_may_stand_without_brackets(train, tmp_path):
    (tmp_path / "recipe.yaml").write_text("reward_funcs: math_reward\nbf16: false\nuse_cpu: true\noutput_dir: unused\n")
    args, _, _ = train.make_parser().parse_args_and_config(["--config", str(tmp_path / "recipe.yaml")])
    assert args.reward_funcs == ["math_reward"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accuracy", "There is no reward function 'accuracy'"),
        ("recipes.smoke_reward.answer", "module 'recipes.smoke_reward' has no function 'answer'"),
        ("recipes.smoke_reward.re", "has no function 're'"),  # a module
        ("recipes.smoke_rewards.answer_reward", "No module named 'recipes.smoke_rewards'"),
        ("recipes/smoke_reward.py", "No module named 'recipes/smoke_reward'"),
    ],
)
def test_unknown_reward_is_told_those_that_work(train, name, message):
    with pytest.raises(train.UsageError, match=message) as error:
        train.get_reward(name)
    assert all(reward in str(error.value) for reward in [*train.REWARDS, "my_lib.rewards.my_reward"])


def test_missing_column_is_told_those_there_are(train):
    with pytest.raises(ValueError, match=r"no column 'question'.* answer, problem"):
        train.map_columns({"problem": "", "answer": ""}, train.FR3EScriptArguments(prompt_column="question"))


def test_answer_without_separator(train):
    with pytest.raises(ValueError, match="'####' is not in the answer '42'"):
        train.final_answer("42", "####")


@pytest.mark.parametrize("name, needed", [("system_prompt", "prompt_column"), ("answer_separator", "answer_column")])
def test_arguments_that_go_together(train, name, needed):
    with pytest.raises(ValueError, match=f"{name}='x' does nothing without {needed}"):
        train.FR3EScriptArguments(**{name: "x"})


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_missing_argument(train, missing, tmp_path):
    given = {"model_name_or_path": "x", "dataset_name": "x", "bf16": False, "output_dir": tmp_path}
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        run(train, [f"--{key}={value}" for key, value in given.items() if key != missing])


# As a script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset_name=empty.jsonl"], "dataset_name='empty.jsonl', split 'train': it is empty"),
        (["--num_anchors=9"], "num_anchors=9 does not fit num_generations=8"),
    ],
)
def test_errors_of_usage_take_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    script = [sys.executable, ROOT / "examples" / "train.py", "--model_name_or_path", model_on_disk()]
    settings = ["--output_dir=out", "--bf16=false", "--use_cpu=true", "--num_generations=8", *arguments]
    result = subprocess.run([*script, *settings], capture_output=True, text=True, timeout=280)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert message in result.stderr.splitlines()[-1]


# Resuming


@pytest.mark.parametrize(
    ("value", "is_resumed"), [("true", True), ("CHECKPOINT", True), ("false", False), ("None", False)]
)
def test_resumes_where_it_is_told_to(train, trainers, value, is_resumed, tmp_path):
    checkpoint = tmp_path / "output" / "checkpoint-1"
    arguments = [*command_line("smoke", tmp_path), "--save_strategy=steps", "--save_steps=1"]
    run(train, [*arguments, "--max_steps=1"])
    written = (checkpoint / "trainer_state.json").stat().st_mtime_ns
    run(train, [*arguments, f"--resume_from_checkpoint={checkpoint if value == 'CHECKPOINT' else value}"])
    assert trainers[1].state.global_step == 2
    # A run from the start writes it again
    assert ((checkpoint / "trainer_state.json").stat().st_mtime_ns == written) == is_resumed


@pytest.mark.parametrize(
    ("value", "message"), [("true", "there is no checkpoint in output_dir"), ("nowhere", "'nowhere' must be the dir")]
)
def test_nothing_to_resume_from(train, value, message, tmp_path):
    with pytest.raises(train.UsageError, match=message):
        run(train, [*command_line("smoke", tmp_path), f"--resume_from_checkpoint={value}"])
