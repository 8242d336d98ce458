"""Datasets and rewards by name, as the commands take them."""

import importlib
import re
from pathlib import Path

import pytest
from datasets import Dataset
from models import make_tokenizer
from trl.rewards import accuracy_reward

from fr3e_trl.commands import data
from fr3e_trl.commands.data import FR3EScriptArguments
from fr3e_trl.commands.options import beside
from fr3e_trl.commands.usage import UsageError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    """Rewards are looked for from the root of the repository."""
    monkeypatch.chdir(ROOT)


def accuracies(example, *texts, **settings):
    """The prompt of an example, and the rewards of completions that answer it so."""
    mapped = data.map_columns(example, FR3EScriptArguments(answer_column="answer", **settings))
    completions = [[{"role": "assistant", "content": rf"So \boxed{{{text}}}."}] for text in texts]
    return mapped.get("prompt"), accuracy_reward(completions, [mapped["solution"]] * len(texts))


def test_columns(tmp_path):
    # Without the separator math-verify takes the 3
    example = {"question": "How many pens?", "answer": "The answer is 3.\nTimes 400 is 1,200.\n#### 1,200"}
    settings = {"prompt_column": "question", "answer_separator": "####", "system_prompt": "Box it."}
    prompt, rewards = accuracies(example, "1200", "3", **settings)
    assert prompt == [{"role": "system", "content": "Box it."}, {"role": "user", "content": "How many pens?"}]
    assert rewards == [1.0, 0.0]
    # Of a CSV, whose answers stay text
    (tmp_path / "data.csv").write_text("problem,answer,level\nHalf of 8?,4,1\nHalf of none?,NA,2\n")
    args = FR3EScriptArguments(dataset_name=str(tmp_path / "data.csv"), prompt_column="problem", answer_column="answer")
    loaded = data.load_examples(args, "train", make_tokenizer())
    assert list(loaded["solution"]) == [r"\boxed{4}", r"\boxed{NA}"]
    assert list(loaded["level"]) == [1, 2]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        *((text, text, wrong) for text, wrong in ((r"2\sqrt{3}", "2"), (r"\dfrac{9}{7}", "9"), ("(3,4)", "4"))),
        (["$\\frac{1}{2}$"], "0.5", "2"),
        (["1", "-1"], "-1, 1", "1"),
        (204, "204", "20"),
        ("025", "25", "5"),
    ],
)
def test_answers_are_read_as_latex(answer, right, wrong):
    """Bare ones; lists, as in OlympiadBench, and numbers; LaTeX in dollars, and zeros in front, as in AIME."""
    assert accuracies({"answer": answer}, right, wrong)[1] == [1.0, 0.0]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_local_datasets(suffix, is_streamed, tmp_path):
    examples = [{"prompt": f"{i}+{i}=", "solution": f"0{2 * i}"} for i in range(3)]
    path = tmp_path / f"data.{suffix}"
    dataset = Dataset.from_list(examples)
    write = {"csv": dataset.to_csv, "json": dataset.to_json, "jsonl": dataset.to_json, "parquet": dataset.to_parquet}
    write[suffix](path, **({"lines": False} if suffix == "json" else {}))
    args = FR3EScriptArguments(dataset_name=str(path), dataset_streaming=is_streamed)
    assert list(data.load_examples(args, "train", make_tokenizer())) == examples


@pytest.mark.parametrize(
    ("prompt_column", "most", "told", "kept"),
    [
        (None, 5, None, ["12", "1234"]),
        ("prompt", 5, None, ["12"]),
        ("prompt", 7, None, ["12", "1234"]),
        ("prompt", 7, {"thinks": False}, ["12"]),  # as Qwen3's template, with `enable_thinking: false`
    ],
)
def test_long_prompts_are_dropped(prompt_column, most, told, kept, tmp_path):
    path = str(tmp_path / "data.jsonl")
    Dataset.from_dict({"prompt": ["12", "1234", "123456"]}).to_json(path)
    args = FR3EScriptArguments(dataset_name=path, prompt_column=prompt_column, max_prompt_length=most)
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{{ '=' if thinks is false }}"
    prompts = data.load_examples(args, "train", tokenizer, told)["prompt"]
    assert [prompt if prompt_column is None else prompt[0]["content"] for prompt in prompts] == kept


def test_rewards_by_name_and_by_path(tmp_path):
    assert data.get_reward("accuracy_reward") is accuracy_reward
    smoke_reward = data.get_reward("recipes.smoke_reward.answer_reward")
    texts = ["1 + 1 = 2\n<answer>2</answer>", "<answer>3</answer>", "2"]
    assert smoke_reward(completions=texts, solution=["2"] * 3, prompts=[""] * 3) == [1.0, 0.0, 0.0]
    # A file may have the name of a module, and dataclasses, which look theirs up
    (tmp_path / "json.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Score:\n    value: float\n\n"
        "def score(completions, **kwargs):\n    return [Score(len(text)).value for text in completions]\n"
    )
    score = data.get_reward(f"{tmp_path / 'json.py'}:score")
    assert data.call_reward("score", score, completions=["12", ""]) == [2, 0]
    assert importlib.import_module("json").loads("1") == 1


@pytest.mark.parametrize(
    "settings", [{"dataset_name": 5}, {"dataset_name": ""}, {"reward_funcs": [3]}, {"reward_funcs": []}], ids=str
)
def test_names_are_texts(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}')} must .*, for example "):
        FR3EScriptArguments(**settings)


def test_a_reward_that_takes_not_all_that_it_is_given_is_told_so():
    dataset = Dataset.from_dict({"prompt": ["1+1="], "solution": ["2"]})
    rewards = {
        "prompts": lambda completions: [1.0],
        "trainer_state": lambda prompts, completions, completion_ids, solution: [1.0],
        "solution": lambda prompts, completions, completion_ids, trainer_state, log_extra, log_metric: [1.0],
    }
    for given, reward in rewards.items():
        with pytest.raises(UsageError, match=rf"reward_funcs='mine' is also given '{given}'. Add \*\*kwargs"):
            data.check_reward_columns({"mine": reward}, dataset)
    data.check_reward_columns({"mine": lambda completions, **kwargs: [1.0]}, dataset)


def test_a_file_beside_the_recipe_comes_before_one_of_that_name_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_run").mkdir()
    for folder in (".", "my_run"):
        Path(folder, "data.jsonl").touch()
    assert beside("data.jsonl", Path("my_run")) == "my_run/data.jsonl"
    Path("my_run/data.jsonl").unlink()
    assert beside("data.jsonl", Path("my_run")) == "data.jsonl"
