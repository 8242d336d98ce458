"""`python -m benchmarks cost`: its commands, with sizes that take seconds."""

import re
import time
from pathlib import Path

import pytest
from models import model_on_disk
from transformers import GenerationMixin

import benchmarks.__main__ as cli
from benchmarks.cost.stopwatch import MethodStopwatch

RECIPES = Path(__file__).parents[2] / "recipes"


SMALL = ["--num_turns=1", "--num_generations=4", "--max_completion_length=8"]


def cells(output, name):
    (row,) = re.findall(rf"^│ +{name} +│(.*)│$", output, re.MULTILINE)
    return [cell.strip() for cell in row.split("│")]


class Work:
    """Takes a second in each method, by a clock of its own."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def step(self):
        self.now += 1
        self.loss()
        self.log_probs()
        self.now += 1

    def loss(self):
        self.now += 1
        self.log_probs()

    def log_probs(self):
        self.now += 1


def test_each_moment_counts_once(monkeypatch):
    work, stopwatch = Work(monkeypatch), MethodStopwatch()
    original = Work.step
    with stopwatch.times([(Work, "step", "TRL"), (Work, "loss", "loss"), (Work, "log_probs", "log-probs")]):
        work.step()
        work.now += 10  # between steps
        work.step()
    # A step takes 5 s: 2 of its own, 2 in the loss with its forward pass, 1 in a forward pass beside it
    expected = {"TRL": 4.0, "loss": 4.0, "log-probs": 2.0}
    assert {part: seconds for part, seconds in stopwatch.seconds.items() if seconds} == expected
    assert Work.step is original


@pytest.mark.parametrize("settings", ["{}", '{"anchor_threshold": 0.1, "credit": "tree"}'])
def test_step(settings, capsys):
    generate = GenerationMixin.generate
    given = [f"--policy={model_on_disk()}", f"--settings={settings}", "--num_steps=2", "--num_prompts=4"]
    cli.main(["cost", "step", *given, *SMALL])
    output, progress = capsys.readouterr()
    assert re.findall(r"turn \d of 2, after \d+ min", progress) == [f"turn {i} of 2, after 0 min" for i in (1, 2)]
    assert "steps of each: 2, with 4 prompts x 4 rows" in output
    assert "FR3E: 1 base trajectories and 3 anchors a prompt" in output
    ratio, _, fr3e, grpo, shared = map(float, cells(output, "generated tokens per row"))
    assert 0 < fr3e < min(grpo, shared) <= 8  # a prefix is not generated again
    assert ratio == pytest.approx(fr3e / grpo, abs=0.01)
    # No row of this policy is right: of rows that teach nothing one is forwarded, and the ratio is 0.00
    assert min(map(float, cells(output, "peak memory, MiB")[2:])) > 0
    for trainer, of_method in (("FR3E", True), ("GRPO", False)):
        shares = [float(cell.rstrip("%")) for cell in cells(output, trainer)]
        assert sum(shares) == pytest.approx(100, abs=0.4)
        generation, log_probs, _, loss, backward, method, rest = shares
        assert min(generation, loss, backward, rest) > log_probs == 0  # generation tells them
        assert (method > 0) == of_method
    assert GenerationMixin.generate is generate


def test_step_of_a_task_of_ones_own(capsys):
    Path("few.jsonl").write_text("\n".join((RECIPES / "smoke.jsonl").read_text().splitlines()[:3]))
    step = ["cost", "step", "--dataset_name=few.jsonl", f"--reward_funcs={RECIPES / 'smoke_reward.py'}:answer_reward"]
    step += [*SMALL, "--num_steps=1", "--num_prompts=2"]
    policy = f"--model_name_or_path={RECIPES.parent / 'examples' / 'demo_policy'}"
    cli.main([*step, policy, "--min_completion_length=8", "--dtype=bfloat16", "--use_peft"])
    output = capsys.readouterr().out
    assert "steps of each: 1, with 2 prompts x 4 rows" in output
    assert float(cells(output, "generated tokens per row")[3]) == 8
    for arguments, message in (
        ([policy, "--min_completion_length=9"], "min_completion_length=9 is above max_completion_length=8"),
        ([], "model_name_or_path is not set"),
    ):
        with pytest.raises(SystemExit):
            cli.main([*step, *arguments])
        assert message in capsys.readouterr().err


def test_bookkeeping(capsys):
    told = []
    for num_tokens in (50, 500):
        sizes = f"--num_prompts=4 --num_rows=8 --num_tokens={num_tokens} --num_processes=2"
        cli.main(["cost", "bookkeeping", *sizes.split()])
        output = capsys.readouterr().out
        assert f"4 prompts x 8 rows x {num_tokens} tokens" in output and "2 processes" in output
        told.append(float(cells(output, "gathered from all, MiB")[0]))
    assert told[0] == told[1]  # lengths, positions and rewards: nothing that grows with the tokens


def test_overlap(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("benchmarks.cost.overlap.GENERATION_SECONDS", 0.1)
    monkeypatch.setattr("benchmarks.cost.overlap.UPDATE_SECONDS", 0.05)
    sizes = "--num_turns 1 --num_iterations 2 --num_prompts 2 --max_completion_length 8 --plot overlap.svg"
    cli.main(["cost", "overlap", *sizes.split()])
    output = capsys.readouterr().out
    for name in ("GRPO", "FR3E", "FR3E, max_staleness=1", "FR3E, max_staleness=2"):
        num_updates, *ratios = cells(output, name)[:4]
        assert num_updates == "2" and min(map(float, ratios)) > 0
    assert Path("overlap.svg").stat().st_size > 1000
