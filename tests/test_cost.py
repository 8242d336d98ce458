"""`fr3e cost`: its commands, with sizes that take seconds."""

import re
import time
from pathlib import Path

import pytest
from factory import make_trainer
from models import model_on_disk
from peft import LoraConfig
from transformers import GenerationMixin, set_seed

from fr3e_trl.bench.cost import stopwatch
from fr3e_trl.bench.cost.stopwatch import MethodStopwatch, peak_memory
from fr3e_trl.commands import cli

RECIPES = Path(__file__).parent.parent / "recipes"


def cells(output, name):
    """Of the row of that name in a table."""
    (row,) = [line for line in output.splitlines() if re.match(rf"│ +{name} +│", line)]
    return [cell.strip() for cell in row.strip("│").split("│")][1:]


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
    expected = {"TRL": 4.0, "loss": 4.0, "log-probs": 2.0, "generation": 0.0, "rewards": 0.0, "FR3E": 0.0}
    assert stopwatch.seconds == expected
    assert str(stopwatch) == "loss 40%, TRL 40%, log-probs 20%, generation 0%, rewards 0%, FR3E 0%"
    assert Work.step is original


@pytest.mark.parametrize("settings", ["{}", '{"anchor_threshold": 0.1, "credit": "tree"}'])
def test_step(settings, capsys):
    generate = GenerationMixin.generate
    sizes = ["--num_turns=1", "--num_steps=2", "--num_prompts=4", "--num_generations=4", "--max_completion_length=8"]
    cli.main(["cost", "step", f"--policy={model_on_disk()}", f"--settings={settings}", *sizes])
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
        generation, log_probs, _, loss, method, rest = shares
        assert min(generation, loss, rest) > 0
        assert log_probs == 0  # generation tells them
        assert (method > 0) == of_method
    assert GenerationMixin.generate is generate


def test_step_of_a_task_of_ones_own(tmp_path, capsys):
    own = [f"--dataset_name={RECIPES / 'smoke.jsonl'}", f"--reward_funcs={RECIPES / 'smoke_reward.py'}:answer_reward"]
    sizes = ["--num_turns=1", "--num_steps=1", "--num_prompts=2", "--num_generations=4", "--max_completion_length=8"]
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join((RECIPES / "smoke.jsonl").read_text().splitlines()[:3]))
    own[0] = f"--dataset_name={few}"
    policy = RECIPES.parent / "examples" / "demo_policy"
    full = ["--min_completion_length=8", "--dtype=bfloat16", "--use_peft"]
    cli.main(["cost", "step", f"--model_name_or_path={policy}", *own, *sizes, *full])
    output = capsys.readouterr().out
    assert "steps of each: 1, with 2 prompts x 4 rows" in output
    assert float(cells(output, "generated tokens per row")[3]) == 8
    with pytest.raises(SystemExit):
        cli.main(["cost", "step", f"--model_name_or_path={policy}", *own, *sizes, "--min_completion_length=9"])
    assert "min_completion_length=9 is above max_completion_length=8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["cost", "step", *own, *sizes])
    assert "model_name_or_path is not set" in capsys.readouterr().err


def test_update(capsys):
    sizes = ["--hidden_size=64", "--num_layers=2", "--vocab_size=64", "--prompt_length=8", "--num_turns=3"]
    cli.main(["cost", "update", "--num_generations=4", "--lengths", "256", *sizes])
    output = capsys.readouterr().out
    for shape in ("K=2 M=1", "K=1 M=2"):
        seconds, *ratios = cells(output, f"256 tokens, {shape}")
        assert float(seconds) > 0
        shares = [float(ratio.split("(")[1].rstrip(")")) for ratio in ratios]
        # Shared are the prompt, or next to nothing, half and nearly all of two of four completions
        assert shares == sorted(shares, reverse=True) and shares[-1] < 0.6 < 0.95 < shares[0]


def test_tensors(capsys):
    """Masks of rows apart grow with the square of the length, all else with the length; logits with neither."""
    shape = ["--hidden_size=32", "--num_heads=2", "--num_key_value_heads=1", "--vocab_size=5000", "--prompt_length=8"]
    cli.main(["cost", "tensors", "--num_generations=4", "--lengths", "4096", "8192", *shape])
    output = capsys.readouterr().out
    apart, shared, flash = (
        [[float(cell.replace(",", "")) for cell in cells(output, f"{length} tokens, {way}")] for length in (4096, 8192)]
        for way in ("rows apart, sdpa", "shared, sdpa", "shared, FlashAttention")
    )
    assert apart[1][0] > 3.9 * apart[0][0] > 0
    assert 0 < shared[1][0] <= 4 and flash[1][0] == 0
    for of_way in (shared, flash):
        assert of_way[1][2] < 2.3 * of_way[0][2]
    assert float(cells(output, "generate: leaving rows")[1]) > 0


def test_tensors_of_a_vocabulary_smaller_than_a_prompt(capsys):
    shape = ["--hidden_size=32", "--num_heads=2", "--num_key_value_heads=1", "--vocab_size=8", "--prompt_length=16"]
    cli.main(["cost", "tensors", "--num_generations=4", "--lengths", "16", *shape])
    assert "generate: leaving rows" in capsys.readouterr().out


def test_entropies(capsys):
    cli.main(["cost", "entropies", "--num_turns=1"])
    output = capsys.readouterr().out
    sizes = [float(cells(output, f"1024, {count}")[0]) for count in (20, 10, 5)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    # 2 x 7e9 parameters x 4,096 tokens at 8 x 3e14 FLOP a second
    assert float(cells(output, "4096, 20")[3]) == pytest.approx(23.9, abs=0.1)


def test_entropies_of_a_model(capsys):
    sizes = ["--num_turns=1", "--num_completions=1", "--max_completion_length=8"]
    cli.main(["cost", "entropies", f"--model_name_or_path={model_on_disk()}", *sizes])
    output = capsys.readouterr().out
    missing, at_anchors, moved = zip(*(cells(output, f"{count} log-probs") for count in (20, 10, 5)), strict=True)
    assert 0 <= float(missing[0]) < float(missing[1]) < float(missing[2])
    assert 0 <= float(at_anchors[0]) < float(at_anchors[2])
    assert all(0 <= float(share.rstrip("%")) <= 100 for share in moved)


def test_bookkeeping(capsys):
    told = []
    for num_tokens in (50, 500):
        sizes = ["--num_prompts=4", "--num_rows=8", f"--num_tokens={num_tokens}", "--num_processes=2"]
        cli.main(["cost", "bookkeeping", *sizes])
        output = capsys.readouterr().out
        assert f"4 prompts x 8 rows x {num_tokens} tokens" in output and "2 processes" in output
        told.append(float(cells(output, "gathered from all, MiB")[0]))
    assert told[0] == told[1]  # lengths, positions and rewards: nothing that grows with the tokens


def test_processes(capfd):
    cli.main(["cost", "processes", f"--policy={model_on_disk()}", "--num_turns=1", "--num_steps=1"])
    assert re.search(
        r"two processes / one, 8 prompts x 16 rows in all: [\d.]+ \(.* in 1 turns\)", capfd.readouterr().out
    )


def test_processes_that_fail(tmp_path):
    with pytest.raises(SystemExit, match=r"nowhere(.|\n)*Training in 1 processes failed"):
        cli.main(["cost", "processes", f"--policy={tmp_path / 'nowhere'}", "--num_turns=1", "--num_steps=1"])


def test_an_engine_whose_completions_are_all_as_long(capsys):
    cli.main(["cost", "engine", "--spread=0", "--num_steps=1", "--mean_length=20", "--longest=40", "--max_running=4"])
    assert "by rule" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argument", ["--num_turns=0", "--num_steps=-1", "--num_prompts=x", "--max_completion_length=0"]
)
def test_sizes_that_cannot_be(argument, capsys):
    with pytest.raises(SystemExit):
        cli.main(["cost", "step", argument])
    assert f"fr3e cost step: error: argument {argument.partition('=')[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("peft_config", [None, LoraConfig(target_modules="all-linear")], ids=["whole", "lora"])
def test_memory_is_the_same_however_often_it_is_read(peft_config, monkeypatch, capfd):
    peaks, readings = [], []
    end = stopwatch._Allocations.end
    monkeypatch.setattr(stopwatch._Allocations, "end", lambda self: readings.append(self) or end(self))
    for number in (2, 2, 10**9):
        monkeypatch.setattr(stopwatch, "FORWARDS_PROFILED", number)
        trainer = make_trainer(max_completion_length=12, seed=1, peft_config=peft_config)
        set_seed(1)
        peaks.append(peak_memory(trainer))
    assert len(readings) > 12  # also while it generates
    assert readings[-1] is not readings[-2]  # once in the last step, at its end
    _, *peaks = peaks  # the first in a process has what is made once
    assert peaks[0] == peaks[1] > 1e5
    assert "profiler" not in "".join(capfd.readouterr())  # of each reading
