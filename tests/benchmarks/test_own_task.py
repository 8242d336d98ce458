"""`python -m benchmarks compare` on a task of one's own: a model, examples and rewards in files."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from launches import wait_until
from models import model_on_disk

import benchmarks.__main__ as cli
from benchmarks.arguments import CompareArguments
from benchmarks.own_task import OwnTask

REWARDS = """
import os
import pathlib

def score(completions, prompts, right, **kwargs):
    device = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device is not None:
        pathlib.Path(f"device-{device}").touch()
    return [min(1.0, text.count(digit) / 2) for text, digit in zip(completions, right, strict=True)]

async def of_messages(completions, prompts, completion_ids, **kwargs):
    assert all(prompt[0]["role"] == "system" and prompt[1]["role"] == "user" for prompt in prompts)
    assert len(completion_ids) == len(completions)
    return [None if "2" in message["content"] else float("1" in message["content"]) for (message,) in completions]
"""

BASE = {"num_prompts": 4, "num_generations": 4, "num_anchors": 1, "max_completion_length": 8, "learning_rate": 1e-3}
ARMS = {"grpo": {"trainer": "fr3e", "num_anchors": 0}, "fr3e": {"trainer": "fr3e"}}


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """A task in files, and no plots, which take longer than these runs."""
    monkeypatch.setattr("benchmarks.report.plot_all", lambda results, headline: [])
    Path("my_rewards.py").write_text(REWARDS)
    examples = [{"prompt": f"{i}+{i}=", "question": f"{i}+{i}=", "right": "1"} for i in range(40)]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, examples)))


def command(**settings):
    defaults = {"model_name_or_path": model_on_disk(), "dataset_name": "data.jsonl"}
    defaults |= {"reward_funcs": "my_rewards.py:score", "base": BASE, "arms": ARMS, "generated_tokens": 400}
    defaults |= {"seeds": [0], "num_evals": 2, "num_heldout": 4, "output_dir": "out"}
    words = ["compare"]
    for name, value in (defaults | settings).items():
        if value is not None:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            words += [f"--{name}", *map(str, values)]
    return words


def run(**settings):
    cli.main(command(**settings))
    return json.loads(Path("out/results.json").read_text())


CUT = {"generated_tokens": 1200, "seeds": [0, 1]}  # four runs


def test_compares_on_held_out_examples_of_a_file(capsys):
    results = run(**CUT)
    arms = [(result["arm"], result["seed"]) for result in results["runs"]]
    assert arms == [("grpo", 0), ("fr3e", 0), ("grpo", 1), ("fr3e", 1)]
    for result in results["runs"]:
        tokens = [batch["generated_tokens"] for batch in result["batches"]]
        assert tokens[-2] < 1200 <= tokens[-1]
        rewards = result["evaluations"][-1]["rewards"]
        assert [len(of_prompt) for of_prompt in rewards] == [4] * 4
        assert {reward for of_prompt in rewards for reward in of_prompt} <= {0.0, 0.5, 1.0}  # graded
    # All start from the same policy, and learn
    assert len({json.dumps(result["evaluations"][0]) for result in results["runs"]}) == 1
    assert len({json.dumps(result["evaluations"][-1]["rewards"]) for result in results["runs"]}) > 1
    # Results of other rewards are not mixed with them
    Path("my_rewards.py").write_text(REWARDS.replace("/ 2", "/ 3"))
    with pytest.raises(SystemExit):
        run(**CUT)
    assert "has results of other arguments: files was" in capsys.readouterr().err


def test_no_prompt_is_held_out_and_trained_on():
    lines = Path("data.jsonl").read_text().splitlines()
    Path("twice.jsonl").write_text("\n".join(lines + lines[:20]))
    args = CompareArguments(model_name_or_path=model_on_disk(), dataset_name="twice.jsonl")
    splits = OwnTask(args, num_heldout=8).splits
    heldout = set(splits["heldout"]["prompt"])
    assert len(splits["heldout"]) == 8 and not heldout & set(splits["train"]["prompt"])
    assert len(splits["train"]) == sum(json.loads(line)["prompt"] not in heldout for line in lines + lines[:20])
    assert len(OwnTask(args, num_heldout=100).splits["heldout"]) == 12  # a fifth
    # The same for every seed, in another order, and again where there are too few
    task = OwnTask(args, num_heldout=8)
    first, second = (list(task.examples("train", seed, 100)["prompt"]) for seed in (0, 1))
    assert first != second and set(first) == set(second) == set(splits["train"]["prompt"])


def no_workers_are_left():
    """The pool's own thread waits for them too, and may hear of it first."""
    return not multiprocessing.active_children()


def test_ctrl_c_ends_workers_of_a_gpu_each(request, monkeypatch, capsys):
    """Of three GPUs as the environment has them, two for two workers, which have more to do than they come to."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def press_ctrl_c():
        wait_until(lambda: Path("device-3").exists() and Path("device-5").exists(), seconds=200)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_ctrl_c).start()
    with pytest.raises(SystemExit) as ending:
        run(**CUT | {"generated_tokens": 10**7}, num_workers=2)
    assert ending.value.code == 130
    assert "interrupted. The same command continues from what is in out." in capsys.readouterr().err
    wait_until(no_workers_are_left)
    assert {path.name for path in Path().glob("device-*")} == {"device-3", "device-5"}
    assert not list(Path("out").glob("runs/*.json"))


@pytest.mark.parametrize(
    ("ends", "message"),
    [("raise RuntimeError('quota exceeded')", "quota exceeded"), ("os.kill(os.getpid(), 9)", "A worker was killed")],
)
def test_a_run_that_fails_ends_the_others(ends, message, capsys):
    """At once: they would go on for hours behind the error, and so would those that have not begun."""
    Path("fails.py").write_text(
        "import os, pathlib\nfrom my_rewards import score as right\n\n"
        "def score(**kwargs):\n"
        "    if not pathlib.Path('failed').exists():\n"
        f"        pathlib.Path('failed').touch()\n        {ends}\n"
        "    return right(**kwargs)\n"
    )
    with pytest.raises(SystemExit):
        run(**CUT | {"generated_tokens": 10**7, "reward_funcs": "fails.py:score"}, num_workers=2)
    assert message in capsys.readouterr().err
    wait_until(no_workers_are_left)
    assert not list(Path("out").glob("runs/*.json"))


def test_arms_by_default_differ_in_the_trainer_alone():
    settings = {"arms": None, "base": {"max_completion_length": 8}, "generated_tokens": 1}
    results = run(**settings, eval_dataset_name="data.jsonl", num_evals=1)
    one, other = results["arms"]["grpo"], results["arms"]["fr3e"]
    assert (one.pop("trainer"), other.pop("trainer")) == ("grpo", "fr3e")
    assert one == other and one["learning_rate"] == 1e-6
    assert results["arguments"]["reference"] == "grpo"
    report = Path("out/report.md").read_text()
    assert report.startswith("# data.jsonl: arms at equal generated tokens")
    assert "lora_r" not in report and "model_name_or_path" in report


@pytest.mark.parametrize("budget, amount", [("training_rows", 40), ("train_seconds", 0.5)])
def test_other_stops(budget, amount):
    cost, told = ("seconds", "CPU (or GPU) seconds") if budget == "train_seconds" else (budget, "training rows")
    (result,) = run(generated_tokens=None, arms={"fr3e": ARMS["fr3e"]}, **{budget: amount})["runs"]
    assert result["evaluations"][0][cost] == 0 and result["evaluations"][-1][cost] >= amount
    assert cost == "seconds" or len(result["batches"]) == 3  # of 16 rows
    assert f"arms at equal {told}" in Path("out/report.md").read_text()


def test_conversational_prompts_and_an_adapter(capsys):
    """Of columns, with a system prompt, and a test split of its own; an asynchronous reward that does not score all."""
    Path("data").mkdir()
    rows = map(json.loads, Path("data.jsonl").read_text().splitlines())
    questions = "\n".join(json.dumps({"question": row["question"]}) for row in rows)
    for split in ("train", "test"):
        Path(f"data/{split}.jsonl").write_text(questions)
    columns = {"dataset_name": "data", "prompt_column": "question", "system_prompt": "1", "use_peft": True}
    rewards = {"reward_funcs": ["my_rewards.py:of_messages", "my_rewards.py:of_messages"]}
    results = run(**columns, **rewards, arms={"fr3e": ARMS["fr3e"]}, num_heldout=100)
    assert results["arguments"]["num_heldout"] == 40
    assert "num_heldout=100: 40 prompts are held out" in "".join(capsys.readouterr())
    first, *_, last = (evaluation["rewards"] for evaluation in results["runs"][0]["evaluations"])
    assert {reward for of_prompt in first for reward in of_prompt} == {0.0, 2.0}  # of both
    assert last != first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_name_or_path": None}, "model_name_or_path is not set. A task of your own needs"),
        ({"model_name_or_path": "no_weights"}, "model_name_or_path='no_weights': "),
        ({"dataset_name": "one.jsonl"}, "dataset_name='one.jsonl' has 1 example(s), too few"),
        ({"eval_dataset_name": "nowhere.jsonl"}, "dataset_name='nowhere.jsonl', split 'train': Unable to find"),
        ({"dataset_name": "few.jsonl", "base": BASE | {"num_prompts": 5}}, "=5 must be at most num_train_examples=4"),
        ({"dataset_streaming": True}, "dataset_streaming=True is not supported"),
        ({"base": {"num_anchor": 1}}, "Arm 'grpo': There is no setting 'num_anchor' for trainer='fr3e'. Did you mean"),
        (
            {"training_rows": 5},
            "Set exactly one of generated_tokens, training_rows, train_seconds, which limit a run. 2 are set",
        ),
        ({"generated_tokens": None, "training_rows": 9, "tuning_tokens": 5}, "tuning_tokens=5 needs generated"),
        (
            {"task": "chain"},
            "dataset_name='data.jsonl' only works with a task of your own. Remove it, or remove task='chain'",
        ),
        ({"policy": "x"}, "policy='x' only works with a built-in task"),
        ({"base": BASE | {"use_vllm": True}}, "keeps its memory after a run"),
        (
            {"base": BASE | {"use_vllm": True, "vllm_mode": "server"}, "num_workers": 2},
            "a vLLM server holds the weights of a single run. Set num_workers=1 instead of 2",
        ),
        ({"learnign_rate": 1}, "unrecognized arguments: --learnign_rate. Did you mean --learning_rates"),
        ({"config": "nowhere.yaml"}, "No such file or directory: 'nowhere.yaml'"),
    ],
)
def test_errors_of_usage_take_one_line(settings, message, capsys):
    lines = Path("data.jsonl").read_text().splitlines()
    Path("one.jsonl").write_text(lines[0])
    Path("few.jsonl").write_text("\n".join(lines[:5]))
    if settings.get("model_name_or_path") == "no_weights":
        shutil.copytree(model_on_disk(), "no_weights", ignore=lambda _, names: [n for n in names if "safetensors" in n])
    with pytest.raises(SystemExit) as ending:
        run(**settings)
    assert ending.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert line.startswith("python -m benchmarks compare: error: ") and message in line
    assert not list(Path("out").glob("runs/*"))
