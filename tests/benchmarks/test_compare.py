"""`python -m benchmarks compare`: what it counts, when it stops, what it reports, and that a kill changes nothing."""

import gzip
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from bench_task import Ones
from models import model_on_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

import benchmarks.__main__ as cli
from benchmarks import statistics as stats
from benchmarks.arguments import CompareArguments
from benchmarks.arms import make_config, make_trainer, whole_prompts
from benchmarks.compare import compare
from benchmarks.evaluation import evaluate
from benchmarks.kept import read_kept
from benchmarks.measures import batch_signal, sampled_prompts
from benchmarks.outcomes import TUNED
from benchmarks.tasks import HELDOUT_SEED
from fr3e_trl.commands.outputs import differing
from fr3e_trl.commands.recipe import RecipeParser, parse_arguments
from fr3e_trl.commands.usage import UsageError
from fr3e_trl.generation.generate import GenerateSampler

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "bench_task.py"

BASE = {"trainer": "fr3e", "num_prompts": 4, "num_generations": 4, "num_train_examples": 64, "learning_rate": 1e-3}
BASE |= {"epsilon_high": 0.28, "scale_rewards": "none"}
# What may be tuned left out
UNTUNED = {name: value for name, value in BASE.items() if name not in ("learning_rate", "num_prompts")}
GRPO = {"trainer": "grpo"}
FR3E = {"num_anchors": 1}
THROWN_AWAY = {"num_anchors": 1, "reuse_base": False, "num_base_trajectories": 3}


@pytest.fixture(autouse=True)
def light(request, monkeypatch):
    """Plots take longer than these runs: they are drawn where a test is about them alone."""
    if request.node.get_closest_marker("plots") is None:
        monkeypatch.setattr("benchmarks.report.plot_all", lambda results, headline: [])


def arguments(**overrides):
    settings = {"task": "ones", "policy": model_on_disk(), "output_dir": "out", "base": BASE}
    settings |= {"arms": {"fr3e": FR3E, "grpo": GRPO}, "reference": "grpo", "generated_tokens": 500, "seeds": [0]}
    settings |= {"num_evals": 2, "num_heldout": 6, "num_samples": 4, "pass_at": [2]}
    return CompareArguments(**settings | overrides)


def run(**overrides):
    args = arguments(**overrides)
    compare(args, "python -m benchmarks compare --config x.yaml")
    return json.loads((Path(args.output_dir) / "results.json").read_text())


def without_times(results):
    """What must come out the same again."""
    for result in itertools.chain(*(results[name] for name in ("screening", "tuning", "runs"))):
        del result["evaluation_seconds"]
        for evaluation in result["evaluations"]:
            del evaluation["seconds"]
    for name in ("output_dir", "num_workers"):
        del results["arguments"][name]
    return results


def test_interval_over_seeds_and_prompts():
    values = np.array([[0.2, 0.5, 0.8], [0.4, 0.5, 0.9]])
    # Means of seeds .5, .6: variance .005. Of prompts .3, .5, .85: .0775. What is left: ±.05, ∓.05, 0, twice as squares
    # .01, over 1 · 2 degrees of freedom .005
    by_seeds = 12.706205 * (0.005 / 2) ** 0.5
    by_prompts = 4.302653 * (0.0775 / 3 - 0.005 / 6) ** 0.5
    assert stats.half_widths(values) == pytest.approx((by_seeds, by_prompts), rel=1e-6)
    assert stats.crossed_interval(values).half_width == pytest.approx((by_seeds**2 + by_prompts**2) ** 0.5, rel=1e-6)
    # Noise alone, ±½ four times, 1 as squares over 1 · 1 degrees of freedom: nothing is left for the prompts
    noise = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert stats.half_widths(noise) == pytest.approx((12.706205 * (1 / 4) ** 0.5, 0), rel=1e-6)
    # Wilson's for a share p of n: (p + z²/2n ± z √(p (1 − p)/n + z²/4n²)) / (1 + z²/n)
    half_width, ratio = 1.96 * (0.9 * 0.1 / 40) ** 0.5, 1.96**2 / 40
    spread = 1.96 * (0.9 * 0.1 / 40 + ratio / 160) ** 0.5
    expected = [(0.9 + ratio / 2 + side * spread) / (1 + ratio) for side in (-1, 1)]
    assert ends(stats.within(0.9, half_width, stats.SHARE, least=0)) == pytest.approx(expected)
    # All 40 right: from n / (n + z²) to 1
    assert ends(stats.within(1.0, 0.0, stats.SHARE, least=ratio)) == pytest.approx((40 / (40 + 1.96**2), 1.0))
    # The same of a difference, twice as wide and half as far
    doubled = stats.within(0.8, 2 * half_width, (-1.0, 1.0), least=0)
    assert ends(doubled) == pytest.approx([2 * end - 1 for end in expected])
    low, high = ends(stats.mean_interval([0.9, 1.0], stats.SHARE))
    assert 0 < low < high < 1
    assert stats.mean_interval([0.1, 1.0], (0.0, math.inf)).low == 0


def ends(interval):
    return interval.low, interval.high


def test_curves_and_whole_batches():
    x, y = [0, 10, 20], [0.0, 0.5, 0.7]
    assert [stats.interpolate(x, y, at) for at in (0, 5, 15, 20)] == pytest.approx([0.0, 0.25, 0.6, 0.7])
    assert stats.interpolate(x, y, 21) != stats.interpolate(x, y, 21)  # NaN
    assert stats.mean_height(x, y, end=20) == pytest.approx((10 * 0.25 + 10 * 0.6) / 20)
    assert stats.mean_height(x, y, end=14) == pytest.approx((10 * 0.25 + 4 * 0.54) / 14)  # 0.58 at 14
    assert stats.first_reached(x, y, 0.6) == pytest.approx(15)
    assert stats.first_reached(x, y, 0.0) == 0
    assert stats.first_reached(x, y, 0.8) == float("inf")
    # Prompts that make whole batches, of 4 rows each; also in micro-batches of 6, or in five of them
    rows, most = {"num_generations": 4}, {"num_generations": 4, "num_train_examples": 64}
    given = [(7.4, rows), (0.2, rows), (70, most), (7.4, rows | {"per_device_train_batch_size": 6})]
    given += [(7.6, rows | {"steps_per_generation": 5}), (70, most | {"steps_per_generation": 5})]
    assert [whole_prompts(wanted, settings) for wanted, settings in given] == [7, 1, 64, 6, 10, 60]


def test_signal_of_a_batch():
    # Of four rows with one that differs 3 pairs of 6 do; of two alike none; one row makes no pair
    nan = math.nan
    prompts = sampled_prompts([[1.0, 0, 0, 0], [1.0, 1, nan], [0.5], []], prompt_rewards=[[1.0, 0], [1.0], [nan], []])
    assert prompts == pytest.approx({"reward": 2 / 3, "differing": (3 / 6 + 0) / 2})
    assert all(map(math.isnan, sampled_prompts(rewards=[[nan]], prompt_rewards=[[nan]]).values()))
    advantages, in_loss = torch.tensor([0.5, -0.5, 0, 0, 0.25, 0]), torch.tensor([1, 1, 0, 0, 1, 1]).bool()
    expected = {"signal": 3 / 6, "rejected": 2 / 6, "advantage_mean": 0.25 / 6}
    expected |= {"advantage_std": ((0.5 + 0.0625) / 6 - (0.25 / 6) ** 2) ** 0.5}
    assert batch_signal(advantages, in_loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("arm", [GRPO, FR3E, THROWN_AWAY, {"num_anchors": 0, "reject_degenerate_states": True}])
def test_stops_at_the_tokens_to_one_batch(arm, monkeypatch):
    """By the lengths of the completions that training samples, taken where they come from."""
    lengths, sample, reward = [], GenerateSampler.sample, Ones.reward

    def sample_and_count(self, requests):
        samples = sample(self, requests)
        for drawn in itertools.chain(*samples):
            lengths.extend(len(one.token_ids) for one in [drawn, *itertools.chain(*drawn.branches.values())])
        return samples

    def reward_and_count(self, completions, right, completion_ids, trainer_state, **kwargs):
        if arm is GRPO and trainer_state.max_steps > 0:  # in training
            lengths.extend(map(len, completion_ids))
        return reward(self, completions, right)

    monkeypatch.setattr(GenerateSampler, "sample", sample_and_count)
    monkeypatch.setattr(Ones, "reward", reward_and_count)
    (result,) = run(arms={"arm": arm}, reference="arm")["runs"]
    tokens = [batch["generated_tokens"] for batch in result["batches"]]
    assert tokens[-2] < 500 <= tokens[-1] == sum(lengths)
    end = [result["evaluations"][-1][name] for name in ("generated_tokens", "batches", "training_rows")]
    assert end == [tokens[-1], len(tokens), 16 * len(tokens)]


def test_a_batch_is_trained_on_to_its_end():
    """Micro-batches, steps and iterations of one batch: all its tokens go through the loss as often."""
    micro = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
    arms = {f"{number}": GRPO | micro | {"num_iterations": number} for number in (1, 2)}
    results = run(arms=arms, reference="1", generated_tokens=1, num_evals=1)["runs"]
    once, twice = (result["evaluations"][-1] for result in results)
    assert once["batches"] == twice["batches"] == 1 and once["generated_tokens"] == twice["generated_tokens"]
    assert twice["forward_backward_tokens"] == 2 * once["forward_backward_tokens"] > 2 * once["generated_tokens"]


def test_evaluations_leave_no_trace_and_are_evenly_spaced(tmp_path):
    """And the policy of each run is kept that was evaluated last: the same completions of the same seed."""
    seldom = run(output_dir="seldom", num_evals=1, keep_policies=False)
    often = run(num_evals=4)
    assert [result["batches"] for result in seldom["runs"]] == [result["batches"] for result in often["runs"]]
    heldout = Ones().examples("heldout", HELDOUT_SEED, 6)
    for result in often["runs"]:
        tokens = [0, *(batch["generated_tokens"] for batch in result["batches"])]
        due = [next(count for count in tokens if count >= 125 * i) for i in range(5)]
        assert [evaluation["generated_tokens"] for evaluation in result["evaluations"]] == list(dict.fromkeys(due))
        path = Path(f"out/policies/{result['arm']}-rate0.001-prompts4-updates1-seed0")
        trainer = make_trainer(BASE | {"max_steps": 1}, path, Ones(), tmp_path, seed=0)
        assert evaluate(trainer, Ones(), heldout, 4, 512).rewards == result["evaluations"][-1]["rewards"]
    assert len(list(Path("out/policies").iterdir())) == 2 and not Path("seldom/policies").exists()


def test_measuring_changes_nothing(tmp_path):
    task = Ones()
    settings = BASE | GRPO | {"max_completion_length": 8, "max_steps": 2, "logging_steps": 1}

    def make_plain():
        model = AutoModelForCausalLM.from_pretrained(model_on_disk(), dtype=torch.float32)
        args, dataset = make_config(settings, tmp_path, seed=3), task.examples("train", 3, 64)
        tokenizer = AutoTokenizer.from_pretrained(model_on_disk(), padding_side="left")
        return GRPOTrainer(model, task.reward, args, dataset, processing_class=tokenizer)

    losses = []
    for make in (lambda: make_trainer(settings, Path(model_on_disk()), task, tmp_path, seed=3), make_plain):
        trainer = make()
        trainer.train()
        losses.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log])
    assert any(loss != 0 for loss, _ in losses[0])
    assert losses[0] == losses[1]


def spent_by(result):
    return [evaluation["generated_tokens"] for evaluation in result["evaluations"]]


def pass_at_1(result):
    """At each evaluation, of each prompt."""
    return np.array([np.mean(evaluation["rewards"], axis=1) for evaluation in result["evaluations"]])


def at(result, tokens, measure=pass_at_1):
    return np.array([np.interp(tokens, spent_by(result), curve) for curve in measure(result).T])


def mean_along(result, end):
    """Mean of pass@1 along a run of so many tokens, of each prompt, by the trapezes between its evaluations."""
    x = [*(tokens for tokens in spent_by(result) if tokens < end), end]
    return np.trapezoid([at(result, tokens) for tokens in x], x, axis=0) / end


def rows_of(report, heading):
    """Cells of the table below a heading, by the name in the first."""
    _, _, section = report.partition(f"# {heading}")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in lines)}


def test_report_has_the_numbers_of_the_raw_data():
    raw = run(seeds=[0, 1, 2], arms={"fr3e": FR3E, "grpo": GRPO, "fixed": GRPO | {"learning_rate": 0.0}})
    report = Path("out/report.md").read_text()

    def pass_at_2(run):
        wrong = 4 - 4 * pass_at_1(run)
        return 1 - wrong * (wrong - 1) / 12

    def entropy(run):
        return np.array([[evaluation["entropy"]] for evaluation in run["evaluations"]])

    def summary(values, sign=""):
        """Over seeds and prompts: of each seed a measure, or one for each prompt."""
        values = np.array(values)
        if values.shape[1] == 1:
            mean, half_width = values.mean(), 4.302652730 * (values.var(ddof=1) / 3) ** 0.5
            low, high = max(mean - half_width, 0), mean + half_width
        else:
            interval = stats.crossed_interval(values, (-1.0, 1.0) if sign else stats.SHARE)
            low, mean, high = interval.low, interval.mean, interval.high
        texts = [f"{value:{sign}.3f}".replace("-", "−") for value in (mean, low, high)]
        if high - low < 1e-9:
            return f"{texts[0]} (all)"
        return "{} ({}{}{})".format(*texts[:2], " to " if sign else "–", texts[2])

    runs = {arm: [run for run in raw["runs"] if run["arm"] == arm] for arm in ("fr3e", "grpo", "fixed")}
    assert [run["seed"] for run in runs["fr3e"]] == [0, 1, 2]
    table = rows_of(report, "ones: arms at equal generated tokens")
    for arm, of_arm in runs.items():
        assert table[arm][0] == summary([mean_along(run, 500) for run in of_arm])
        assert table[arm][2] == summary([at(run, 500) for run in of_arm])
        if arm != "grpo":
            pairs = zip(of_arm, runs["grpo"], strict=True)
            difference = [mean_along(run, 500) - mean_along(other, 500) for run, other in pairs]
            assert table[arm][1] == summary(difference, "+")
        course = rows_of(report, "pass@1 along the run")[arm]
        assert course == [summary([at(run, tokens) for run in of_arm]) for tokens in (0, 250, 500)]
        shares = [sum(b["signal"] for b in run["batches"]) / len(run["batches"]) for run in of_arm]
        within_bounds = stats.mean_interval(shares, stats.SHARE)
        signal = f"{within_bounds.mean:.3f} ({within_bounds.low:.3f}–{within_bounds.high:.3f})"
        assert rows_of(report, "What the batches taught")[arm][3] == signal
        costs = rows_of(report, "What a run cost")[arm]
        assert costs[3] == f"{sum(spent_by(run)[-1] for run in of_arm) / 3:,.0f}"
        diversity = rows_of(report, "Diversity")[arm]
        for cell, measure in ((1, entropy), (3, pass_at_2)):
            assert diversity[cell] == summary([at(run, 500, measure) for run in of_arm])
    assert "python -m benchmarks compare --config x.yaml" in report
    # A policy that does not learn stays what it was
    assert all((pass_at_1(run).mean(1) == pass_at_1(runs["grpo"][0])[0].mean()).all() for run in runs["fixed"])


@pytest.mark.plots
def test_both_sides_are_tuned_alike(monkeypatch, capsys):
    """In the same grid: all of it with two seeds, the best of each arm with three, by the mean along whole runs."""
    grid = {"learning_rates": [0.0, 1e-2], "tokens_per_batch": [30, 70], "num_iterations": [1, 2]}
    tuning = {"tuning_seeds": [7, 8, 9], "tuning_finalists": 2, "tuning_tokens": 150}
    arms = {"fr3e": FR3E, "own": GRPO | {"num_iterations": 1}}
    monkeypatch.setattr("benchmarks.runs.PAUSE", 0.0)
    raw = run(base=UNTUNED, arms=arms, reference="own", generated_tokens=300, seeds=[0, 1, 2], **grid, **tuning)
    told = capsys.readouterr().err
    assert re.search(r"^own-rate\S+-seed2: \d+ of 300 generated tokens, pass@1 \d\.\d{3}$", told, re.MULTILINE)
    assert re.search(r"^runs \[6/6\] own-\S+-seed2 after \d+:\d\d, about 0:00 left$", told, re.MULTILINE)
    table = rows_of(Path("out/report.md").read_text(), "Tuning")
    for arm in arms:
        screened = {}
        for result in raw["screening"]:
            if result["arm"] == arm:
                assert result["amount"] == 150
                screened.setdefault(point_of(result), {})[result["seed"]] = mean_along(result, 150).mean()
        assert all(of_point.keys() == {7, 8} for of_point in screened.values())
        rates, sizes, updates = (set(values) for values in zip(*screened, strict=True))
        assert rates == {0.0, 1e-2} and len(sizes) == 2 and updates == ({1} if arm == "own" else {1, 2})
        assert screened.keys() == set(itertools.product(rates, sizes, updates))
        scores = {point: sum(of_point.values()) / 2 for point, of_point in screened.items()}
        finalists = sorted(sorted(scores), key=lambda point: -scores[point])[:2]  # of two alike, the lower values
        means = dict.fromkeys(finalists, 0.0)
        for result in raw["tuning"]:
            if result["arm"] == arm:
                assert result["amount"] == 300
                means[point_of(result)] += mean_along(result, 300).mean() / 3
        assert means.keys() == set(finalists)
        (chosen,) = {point_of(result) for result in raw["runs"] if result["arm"] == arm}
        assert chosen == max(finalists, key=lambda point: means[point])
        for rate, cell in zip((0.0, 1e-2), table[arm], strict=False):
            best = max(score for point, score in scores.items() if point[0] == rate)
            assert cell == (f"**{best:.3f}**" if rate == chosen[0] else f"{best:.3f}")
    assert len(raw["tuning"]) == 2 * 2 * 3
    check_kept(raw, monkeypatch, capsys)


def check_kept(raw, monkeypatch, capsys):
    """The files that are made anew of what is kept are those that the run wrote; so are the pooled figures."""
    kept = Path("runs/other.jsonl.gz")
    kept.parent.mkdir()
    kept.write_bytes(Path("out/kept.jsonl.gz").read_bytes())
    # A package of later makes no difference: what is told is what the runs were made with
    monkeypatch.setattr("benchmarks.report.revision", lambda: {"fr3e-trl": "9.9"})
    capsys.readouterr()
    cli.main(["pooled", str(kept), "--reference", "own", "--reports", "reports"])
    from_file = capsys.readouterr().out
    written = {path.name: path.read_text() for path in Path("out").rglob("*.svg")}
    assert written and {path.name: path.read_text() for path in Path("reports").rglob("*.svg")} == written
    beside = ". Every run is in `results.json`, and its curve in `kept.jsonl.gz`."
    assert Path("reports/other/report.md").read_text() == Path("out/report.md").read_text().replace(beside, ".")
    cli.main(["pooled", "out", "--reference", "own"])
    assert capsys.readouterr().out == from_file.replace("other", "out")
    # By hand, from its lines
    head, *lines = map(json.loads, gzip.decompress(kept.read_bytes()).splitlines())
    assert head["arms"]["own"]["learning_rate"] in (0.0, 1e-2) and head["arguments"]["task"] == "ones"
    of_runs = [line for line in lines if "stage" not in line]
    assert {line["stage"] for line in lines if "stage" in line} == {"screening", "tuning"}
    for line, result in zip(of_runs, raw["runs"], strict=True):
        assert all(line[name] == result[name] for name in ("arm", "seed", "revision")) and line["revision"]["trl"]
        assert line["evaluations"]["generated_tokens"] == spent_by(result)
        expected = [*pass_at_1(result).mean(1), mean_along(result, 300).mean()]
        assert [*line["pass@1"], line["mean"]] == pytest.approx(expected, abs=1e-6)


def point_of(result):
    return tuple(result["settings"][name] for name in TUNED)


@pytest.mark.parametrize(("schedule", "warmup"), [("linear", 0.25), ("cosine", 0)])
def test_the_rate_falls_with_the_budget(schedule, warmup, monkeypatch):
    """From its full value to nothing, by the share of the tokens that were spent before a batch."""
    rates = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            rates.append(optimizer.param_groups[0]["lr"])

    def watched(*args, **kwargs):
        trainer = make_trainer(*args, **kwargs)
        trainer.add_callback(Watch())
        return trainer

    monkeypatch.setattr("benchmarks.runs.make_trainer", watched)
    scheduled = {"lr_scheduler_type": schedule, "warmup_steps": warmup, "num_iterations": 2}
    (result,) = run(arms={"grpo": GRPO | scheduled})["runs"]
    expected = []
    for spent in [0, *(batch["generated_tokens"] for batch in result["batches"][:-1])]:
        share = spent / 500
        linear, cosine = min(share / 0.25, (1 - share) / 0.75), 0.5 + 0.5 * math.cos(math.pi * share)
        expected += 2 * [1e-3 * (linear if schedule == "linear" else cosine)]
    assert len(expected) > 8 and rates == pytest.approx(expected, abs=1e-10)


def test_batches_of_equal_tokens():
    arms = {"fr3e": FR3E | {"num_generations": 8}, "grpo": GRPO, "given": GRPO | {"num_prompts": 3}}
    raw = run(
        base=UNTUNED | {"learning_rate": 1e-3}, arms=arms, tokens_per_batch=600, generated_tokens=2000, num_evals=1
    )
    for result in raw["runs"]:
        if result["arm"] == "given":
            assert result["settings"]["num_prompts"] == 3
        else:
            assert result["batches"][-1]["generated_tokens"] / len(result["batches"]) == pytest.approx(600, rel=0.15)


def write_config(**settings):
    config = {name: value for name, value in vars(arguments(**settings)).items() if value is not None}
    Path("config.yaml").write_text(yaml.safe_dump(config))


def weights_in(output_dir):
    return {path.parent.name: path.read_bytes() for path in Path(output_dir).glob("policies/*/model.safetensors")}


def test_killed_comparison_goes_on_as_the_uncut_one(monkeypatch):
    """Each run from its last evaluation, at a random moment after the second one, to the same weights."""
    arms = {"fr3e": FR3E | {"lr_scheduler_type": "linear"}, "grpo": GRPO | {"num_iterations": 2}}
    settings = {"arms": arms, "generated_tokens": 3000, "num_evals": 5}
    uncut = run(output_dir="uncut", **settings)

    write_config(output_dir="cut", **settings)
    script = [sys.executable, SCRIPT, "--config", "config.yaml", "--num_workers", "2"]
    process = subprocess.Popen(script, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while len(list(Path("cut").glob("under_way/*/*/measured.json"))) < 2 and not list(Path("cut").glob("runs/*.json")):
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(random.random())
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if child.is_running()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(workers, timeout=20)
    assert not [worker for worker in workers if worker.is_running()]  # none goes on by itself

    finished = {path: path.stat().st_mtime_ns for path in Path("cut").glob("runs/*.json")}
    num_saved = {}  # evaluations, of each run that goes on
    for path in Path("cut").glob("under_way/*/*/measured.json"):
        folder = path.parent.parent
        if not Path(f"cut/runs/{folder.name.removeprefix('runs-')}.json").exists():
            num_saved[folder] = max(num_saved.get(folder, 0), len(json.loads(path.read_text())["evaluations"]))
    assert all(number >= 2 for number in num_saved.values())
    for folder in num_saved:  # as if it had been cut while it wrote the next
        (folder / "checkpoint-999").mkdir()
    # For those who look at it, the curve so far
    for curve in Path("cut").glob("under_way/*/curve.jsonl"):
        lines = [json.loads(line) for line in curve.read_text().splitlines()]
        assert lines[0]["generated_tokens"] == 0 and all("pass@4" in line for line in lines)
    # They are as results are: not of other arguments
    with pytest.raises(ValueError, match="generated_tokens was 3000 and is 4000"):
        run(output_dir="cut", **settings | {"generated_tokens": 4000})
    evaluated = []
    monkeypatch.setattr("benchmarks.runs.evaluate", lambda *args: evaluated.append(args) or evaluate(*args))
    resumed = run(output_dir="cut", **settings)
    assert len(evaluated) == 6 * (2 - len(finished)) - sum(num_saved.values())
    assert without_times(resumed) == without_times(uncut)
    assert weights_in("cut") == weights_in("uncut") and len(weights_in("cut")) == 2
    assert {path: path.stat().st_mtime_ns for path in finished} == finished  # not run again
    assert not list(Path("cut/under_way").iterdir())


def test_results_of_other_arguments_are_not_mixed():
    shutil.copytree(model_on_disk(), "a/policy")
    settings = {"arms": {"grpo": GRPO}, "generated_tokens": 100, "policy": "a/policy"}
    run(**settings)
    content = gzip.decompress(Path("out/kept.jsonl.gz").read_bytes())
    assert content.count(b'"policy":"a/policy"') == 1
    Path("own.jsonl.gz").write_bytes(gzip.compress(content.replace(b'"policy":"a/policy"', b'"policy":null')))
    kept = {"kept": "out/kept.jsonl.gz", "output_dir": "second"}
    for overrides, message in (
        ({"generated_tokens": 200}, r"generated_tokens was 100 and is 200\. Use another"),
        ({"arms": {"grpo": GRPO | {"num_generations": 8}}}, r"arms\.grpo was"),
        (kept | {"generated_tokens": 400}, r"belongs to another comparison: generated_tokens was 100 and is 400\."),
        (
            kept | {"arms": {"grpo": GRPO | {"beta": 0.1}}},
            r"belongs to another comparison: arms\.grpo was .* and is .*beta",
        ),
        (kept | {"kept": "no.gz"}, r"kept='no\.gz' is not a file\. Pass the kept\.jsonl\.gz of a comparison\."),
        (kept | {"kept": "own.jsonl.gz"}, "has runs from the task's own policy, not from policy='a/policy'"),
    ):
        with pytest.raises(UsageError, match=message):
            run(**settings | overrides)
    assert not Path("second").exists()
    (path,) = Path("out/runs").glob("*.json")
    whole = path.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], r"out/runs/grpo.* is damaged"),
        (whole.replace(b'"amount": 100', b'"amount": 99'), r"out/runs/grpo.*amount was 99 and is 100"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            run(**settings)
    path.write_bytes(whole)
    # What no finished run depends on may change
    more = settings | {"arms": {"grpo": GRPO, "fr3e": FR3E}, "seeds": [0, 1]}
    assert len(run(**more, pass_at=[4])["runs"]) == 4
    assert [result["arm"] for result in run(**more, only=["grpo"])["runs"]] == ["grpo"] * 2
    # A policy of the same name that was trained on
    os.utime(next(Path("a/policy").glob("*.safetensors")))
    with pytest.raises(UsageError, match="has results of other arguments: weights was "):
        run(**settings)


def write_results(name, **means):
    """Of runs with one mean of pass@1 all along, by arm and seed."""
    runs = []
    for arm, of_arm in means.items():
        for seed, mean in enumerate(of_arm):
            evaluations = [{"generated_tokens": spent, "rewards": [[mean]]} for spent in (0, 10)]
            run = {"arm": arm, "seed": seed, "cost": "generated_tokens", "amount": 10}
            runs.append(run | {"evaluations": evaluations})
    Path(name).mkdir()
    Path(name, "results.json").write_text(json.dumps({"runs": runs}))


@pytest.mark.parametrize("family", ["chain", "hard", "rows_machine"])
def test_kept_runs_with_settings_that_are_gone(family):
    """Their arms are those of today's recipe, so that seeds can be added to them."""
    recipe = ROOT / "recipes" / "bench" / f"compare_{family}.yaml"
    (args,) = parse_arguments(RecipeParser([CompareArguments]), ["--config", str(recipe)])
    kept = read_kept(ROOT / "benchmarks" / "results" / f"{family}.jsonl.gz")
    assert len(kept.runs) >= 10
    assert not differing(kept.arguments, {"arms": args.arms, "base": args.base}, growing="arms")


def kept_lines(directory):
    """What is kept of a comparison, but for where it ran and how long it took."""
    head, *lines = map(json.loads, gzip.decompress(Path(directory, "kept.jsonl.gz").read_bytes()).splitlines())
    for line in lines:
        line.pop("evaluation_seconds", None)
        line.get("evaluations", {}).pop("seconds", None)
    return head["arms"], head["tokens_per_prompt"], lines


def test_further_seeds_and_arms_are_added_to_what_is_kept():
    """In another directory it comes to what all at once comes to, and runs nothing again that is kept."""
    settings = {"base": UNTUNED, "arms": {"grpo": GRPO, "fr3e": FR3E}, "learning_rates": [1e-3, 1e-2]}
    settings |= {"tokens_per_batch": 300, "tuning_seeds": [7, 8], "tuning_finalists": 1, "tuning_tokens": 200}
    run(**settings, seeds=[0, 1], output_dir="whole")
    run(**settings, seeds=[0], only=["grpo"], output_dir="first")
    Path("first/kept.jsonl.gz").rename("ones.jsonl.gz")
    Path("second").mkdir()
    Path("second/probes.json").write_text('{"grpo": {"tokens_per_prompt": 7.0}}')  # batches stay as kept
    run(**settings, seeds=[0, 1], kept="ones.jsonl.gz", output_dir="second")
    assert kept_lines("second") == kept_lines("whole")
    results = [json.loads(path.read_text()) for path in Path("second").glob("*/*.json")]
    executed = [(result["arm"], result["seed"]) for result in results if "batches" in result]
    assert sorted(executed) == [("fr3e", seed) for seed in (0, 1, 7, 7, 8, 8)] + [("grpo", 1)]


def test_pooled_differences(capsys):
    """tree − grpo: .1 and .3, and .2 with the one seed that both have."""
    write_results("one", grpo_4=[0.5, 0.5], grpo_8=[0.1, 0.1], tree=[0.6, 0.8])
    write_results("two", grpo_8=[0.4], tree=[0.6, 0.9], other=[0.5])
    cli.main(["pooled", "one", "two"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "reference: grpo_4 on one, grpo_8 on two"
    assert re.fullmatch(r"grpo_8: −0.267 ± \S+ pooled, ahead in 0 of 3", lines[1])
    # Means of −.4 and 0: a standard deviation of .2828 over two comparisons, and t = 12.706
    assert lines[2] == "    over the 2 comparisons: −0.200 ± 2.541"
    # A standard deviation of .1 over three pairs, and t = 4.303
    assert lines[5:] == [
        "tree: +0.200 ± 0.248 pooled, ahead in 3 of 3",
        "    over the 2 comparisons: +0.200 ± 0.000",
        "    one: +0.200 ± 1.271",
        "    two: +0.200",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere", "nowhere has no results.json. Run `compare` with output_dir=nowhere first."),
        ("one --reference prior_4", "--reference prior_4: one has the arms grpo_4."),
        ("cut.jsonl.gz", "cut.jsonl.gz is damaged"),
        *((name, f"{name}/results.json is damaged") for name in ("cut", "list", "empty")),
    ],
)
def test_pooled_differences_that_cannot_be(arguments, message, capsys):
    write_results("one", grpo_4=[0.5])
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"arms": {', mtime=0))
    for name, content in {"cut": '{"runs": [', "list": "[]", "empty": '{"runs": [{}]}'}.items():
        Path(name).mkdir()
        Path(name, "results.json").write_text(content)
    with pytest.raises(SystemExit):
        cli.main(["pooled", *arguments.split()])
    assert f"python -m benchmarks pooled: error: {message}" in capsys.readouterr().err


def grpo(**settings):
    return {"arms": {"grpo": GRPO | settings}}


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"task": "twos"}, "task='twos' must be one of .*ones"),
        ({"reference": "dapo"}, "reference='dapo' must be one of the arms: fr3e, grpo"),
        ({"pass_at": [8]}, r"pass_at=\[8\] must be from 1 to num_samples=4"),
        (grpo(trainer="ppo"), "Arm 'grpo': trainer='ppo' must be one of fr3e, grpo"),
        (grpo(**FR3E), "Arm 'grpo': There is no setting 'num_anchors' for trainer='grpo'.*FR3E's"),
        (grpo(trainer="fr3e", num_anchor=1), "no setting 'num_anchor' .* Did you mean num_anchors"),
        (grpo(lr_scheduler_type="inverse_sqrt"), "'inverse_sqrt' must be one of constant, .*warmup, linear, cosine"),
        (grpo(per_device_train_batch_size=5), "=5 must divide the 16 rows of a generation batch"),
        ({"arms": {"a/b": GRPO}, "reference": "a/b"}, "name of an arm is also a file name"),
        (
            {"base": {k: v for k, v in BASE.items() if k != "epsilon_high"}},
            "epsilon_high is not set.*the defaults of the trainers differ",
        ),
        ({"base": {k: v for k, v in BASE.items() if k != "num_prompts"}}, "num_prompts is not set"),
        ({"learning_rates": [1e-3]}, r"learning_rates=\[0.001\] lists values to try, but the base sets learning_rate"),
        ({"tuning_seeds": [0]}, "must not overlap"),
        ({"policy": "no/such"}, "policy='no/such' must be the directory of a model"),
        ({"seeds": [-1]}, "seeds=-1 must be a whole number of at least 0"),
        ({"base": UNTUNED, "learning_rates": [1e-3, 1e-3]}, r"learning_rates=\[0.001, 0.001\] contains a value twice"),
        (grpo(staleness=1), r"staleness=1 only works with trainer='fr3e', not with 'grpo'\.$"),
        (grpo(trainer="fr3e", staleness=2), r"staleness=2 must be a share of the updates of a batch, from 0 to 1\.$"),
        (grpo(num_prompts=65), "num_prompts=65 must be at most num_train_examples=64"),
        (grpo(steps_per_generation=2, per_device_train_batch_size=4), "=4 times steps_per_generation=2 must be the 16"),
        (grpo(learning_rate=-1e-3), "learning_rate=-0.001 must be a number of at least 0"),
        (grpo(warmup_steps=0.1), r"warmup_steps=0\.1 is a share of the steps.*a number of steps"),
        (grpo(lr_scheduler_type="linear", warmup_steps=10), "=10 is a number of steps, but .*='linear' follows the"),
        (grpo(max_steps=9), "max_steps=9 does not limit the runs of a comparison.*generated_tokens"),
        (
            {"task": "chain", "policy": None, "use_peft": True},
            "use_peft=True only works with a task of your own.*task='chain'",
        ),
    ],
)
def test_arguments_that_cannot_be(overrides, message):
    with pytest.raises(ValueError, match=message):
        arguments(**overrides)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "bench").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations(path):
    text = path.read_text()
    assert f"#     python -m benchmarks compare --config recipes/bench/{path.name}" in text
    (args,) = RecipeParser([CompareArguments]).parse_args_and_config(["--config", str(path), "--seeds", "5", "6"])
    assert args.seeds == [5, 6]
    assert args.output_dir == f"outputs/bench/{path.stem.removeprefix('compare_')}"
    if "extends: shared/families.yaml" in text:
        kinds = {(arm.get("trainer", args.base["trainer"]), arm.get("num_anchors")) for arm in args.arms.values()}
        assert {("grpo", None), ("fr3e", 0), ("fr3e", 3)} <= kinds


def test_arguments_of_the_command_line():
    write_config()
    command = ["--config", "config.yaml", "--arms", '{"grpo": {"trainer": "grpo", "learning_rate": "1e-2"}}']
    (args,) = RecipeParser([CompareArguments]).parse_args_and_config([*command, "--seeds", "3", "4"])
    assert args.arms == arguments().arms | {"grpo": {"trainer": "grpo", "learning_rate": 0.01}}  # added to the recipe's
    assert args.seeds == [3, 4]
