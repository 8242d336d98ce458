"""A comparison's plan, and its report: intervals that hold the truth as often as they say, and a readable page."""

import itertools
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from models import model_on_disk
from simulated import GAINS, PROMPTS, expected, share, simulated, truth

from benchmarks.arguments import CompareArguments
from benchmarks.compare import plan_of
from benchmarks.estimates import arm_interval, difference, final_rates, mean_rates, verdict_of
from benchmarks.outcomes import has_collapsed
from benchmarks.report import costs, markdown, sections, verdict, write_report
from benchmarks.statistics import DIFFERENCE_OF_SHARES, SHARE, mean_interval
from benchmarks.tables import speed, tuning_table
from fr3e_trl.commands.answers import with_interval
from fr3e_trl.commands.statistics import best_of_k

NUM_DRAWN = 200


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 10])
def test_intervals_hold_the_truth(num_seeds):
    """As often as they say: each kind that is printed, in comparisons drawn from the same arms."""
    generator = np.random.default_rng(num_seeds)
    arms = ("grpo", "shared", "fr3e")  # the first two are as good
    means = {arm: (truth(arm) + truth(None)) / 2 for arm in arms}  # along runs that are evaluated at their ends
    ends, differences = (truth("fr3e"), truth("fr3e", 4)), (means["fr3e"] - means["grpo"], 0.0)
    true = np.array([means["fr3e"], *ends, *differences, means["fr3e"]])
    measures = (mean_rates, final_rates, partial(final_rates, k=4))
    held = []
    for _ in range(NUM_DRAWN):
        results = simulated(generator, num_seeds, arms)
        intervals = [arm_interval(results, "fr3e", measure, SHARE) for measure in measures]
        intervals += [difference(results, arm) for arm in ("fr3e", "shared")]
        for interval, (low, high) in zip(intervals, [SHARE] * 3 + [DIFFERENCE_OF_SHARES] * 2, strict=True):
            assert low <= interval.low <= interval.mean <= interval.high <= high
        intervals.append(mean_interval([float(mean_rates(run).mean()) for run in results.runs_of("fr3e")]))
        held.append([interval.low <= value <= interval.high for interval, value in zip(intervals, true, strict=True)])
    *shares, of_seeds = np.mean(held, axis=0)
    # The standard deviation of a share is .015. With few seeds, the two parts of the chance, each with its own
    # Student's t, hold the truth more often, and never less
    assert min(shares) >= 0.92 and max(shares) <= (0.98 if num_seeds >= 5 else 1), shares
    if num_seeds == 10:  # of which the interval over seeds alone, with the prompts as they are, says nothing
        assert of_seeds < 0.85


@pytest.mark.parametrize("log_odds", [-2.5, -0.5, 1.0, 3.0])
@pytest.mark.parametrize("num_problems", [12, 50, 200])
def test_intervals_of_an_evaluation_hold_the_truth(num_problems, log_odds):
    """With eight samples or one of each problem, from rates of .1 to .998."""
    generator, num_drawn = np.random.default_rng(num_problems), 400
    true = {k: expected(log_odds, PROMPTS, k) for k in (1, 4)}
    of_eight = {k: [best_of_k([1.0] * n + [0.0] * (8 - n), k) for n in range(9)] for k in (1, 4)}
    held = np.zeros(3)  # pass@1, pass@4, and one sample of each
    for _ in range(num_drawn):
        rates = share(log_odds + PROMPTS * generator.normal(size=num_problems))
        right = generator.binomial(8, rates)
        samples = [np.take(of_eight[k], right) for k in (1, 4)] + [generator.binomial(1, rates)]
        intervals = [with_interval(of_one.tolist(), are_shares=True) for of_one in samples]
        held += [one["low"] <= true[k] <= one["high"] for one, k in zip(intervals, (1, 4, 1), strict=True)]
    # The standard deviation is .011. Next to 0 and 1 they are to hold it more often, and elsewhere not
    for number, k in zip(held / num_drawn, (1, 4, 1), strict=True):
        assert 0.92 <= number <= (0.98 if num_problems > 12 and 0.2 < true[k] < 0.8 else 1), held


def test_an_evaluation_with_all_right_is_not_sure():
    """With 48 problems, a 0 and a 1: Wilson's interval of 49 draws (of .02 · .98 / 49), 49 / (49 + 2.0096²) to 1."""
    of_all = {"mean": 1.0, "low": 49 / (49 + 2.0096**2), "high": 1.0}
    assert with_interval([1.0] * 48, are_shares=True) == pytest.approx(of_all, abs=1e-4)
    alike = with_interval([0.3] * 5, are_shares=True)
    assert alike["low"] < 0.2 and alike["high"] > 0.4
    assert with_interval([0.2, 0.4], are_shares=False)["low"] < 0  # with rewards of other bounds
    assert with_interval([1.0], are_shares=True) == {"mean": 1.0}


ARMS = tuple(GAINS)


def compared(num_seeds, arms=ARMS[:2], seed=0, **settings):
    return simulated(np.random.default_rng(seed), num_seeds, arms, **settings)


def report_of(results):
    return markdown(results, [], sections(results))


def test_the_verdict_is_sure_where_its_interval_is_above_0():
    """With ten seeds the better arm is ahead. Two cannot say, one says nothing, and an arm alone is ahead of none."""
    ten, two, one, alone = (report_of(compared(*case)) for case in [(10,), (2,), (1,), (3, ("grpo",))])
    found = verdict_of(compared(10))
    assert (found.leader, found.other, found.is_sure) == ("fr3e", "grpo", True)
    said = r"^\*\*`fr3e` is ahead of `grpo` by \+0\.\d{3} \(\+0\.\d{3} to \+0\.\d{3}\) in mean"
    assert re.search(said, ten, re.MULTILINE)
    assert "No arm is clearly ahead: `fr3e` leads `grpo` by +0." in two and "which may be chance" in two
    assert "by +0." in one and "no verdict" in one
    assert "no other arm to compare it with" in alone
    # The reference is ahead of the next best where it is the best
    turned = verdict_of(compared(10, ("fr3e", "grpo")))
    assert (turned.leader, turned.other) == ("fr3e", "grpo")


@pytest.mark.parametrize("num_seeds", [1, 2, 3, 5, 10])
def test_no_figure_is_impossible(num_seeds):
    """No share below 0 or above 1, and none that looks exact while it was sampled."""
    report = report_of(compared(num_seeds, ARMS[:4], num_evals=3)).partition("## Diversity")[0]
    assert "±" not in report.replace("leave ±", "")
    shares = re.findall(r"(\d\.\d{3}) \((\d\.\d{3})–(\d\.\d{3})\)", report)
    assert len(shares) == (0 if num_seeds == 1 else 4 * (2 + 4))
    for mean, low, high in shares:
        assert 0 <= float(low) < float(mean) < float(high) <= 1


def test_where_no_arm_improved_nothing_is_measured():
    """A level that a run begins at has no ratio."""
    assert speed(compared(3), "fr3e", "grpo", "generated_tokens", level=0.0) == "3 runs"
    fallen = compared(3)
    for run in fallen.runs:
        for evaluation in run["evaluations"][1:]:
            evaluation["rewards"] = [[0.0] * len(rewards) for rewards in evaluation["rewards"]]
    assert verdict(fallen).startswith("No arm improved. ") and "75%" not in costs(fallen)
    assert speed(fallen, "fr3e", "grpo", "generated_tokens", fallen.levels()["75%"]) == "not measured"
    # Collapse
    for is_so, *rewards in (
        (True, 0.1, 0.5, 0.2),
        (False, 0.1, 0.5, 0.3, 0.26),
        (False, 0.1, 0.5, 0.2, 0.5),  # it came back
        (False, 0.02, 0.04, 0.01),  # that is noise
        (False, -0.9, -0.3, -0.34),  # of rewards below 0, by half of what it gained
        (True, -0.9, -0.3, -0.8),
    ):
        assert has_collapsed({"evaluations": [{"rewards": [[reward]]} for reward in rewards]}) == is_so, rewards


def test_a_batch_size_is_told_in_its_column():
    """Of 1,000 tokens a prompt: 2,000 and 2,500 tokens come to two prompts both."""
    grid = {"learning_rates": [1e-3], "tokens_per_batch": [2000, 2500, 6000], "num_iterations": [1]}
    results = compared(2, extra=grid)
    for arm, settings in results.arms.items():
        results.tokens_per_prompt[arm] = 1000.0
        for run, num_prompts in itertools.product(results.runs_of(arm), (2, 6)):
            point = {**run, "settings": {**settings, "num_prompts": num_prompts, "num_iterations": 1}}
            results.screening.append(point)
            results.tuning.append(point)
        results.arms[arm] = settings | {"num_prompts": 6, "num_iterations": 1}
    for row in tuning_table(results).rows:
        _, _, first, second, third, *_ = row
        assert first == second and not first.startswith("**") and third == f"**{first}**"


def test_what_is_out_of_the_ordinary_is_told(tmp_path):
    """Runs that do not start alike, trees that never branched, and prompts without a score."""
    results = compared(3)
    assert "Runs begin at" not in report_of(results)
    first, second = (run["evaluations"][0] for run in results.runs[:2])
    first["rewards"][0], second["rewards"][0] = [1.0] * 4, [0.0] * 4
    for batch in results.runs[0]["batches"]:
        batch["differing"] = float("nan")
    write_report(results, tmp_path)
    assert re.search(r"Runs begin at pass@1 of 0\.\d{4} to 0\.\d{4}: ", (tmp_path / "report.md").read_text())
    first["num_unscored"], first["rewards"] = 1, first["rewards"][1:]
    assert "intervals are over seeds alone" in report_of(results)
    values = [float(np.mean(mean_rates(run))) for run in results.runs_of("grpo")]
    assert arm_interval(results, "grpo", mean_rates, SHARE) == mean_interval(values, SHARE)


def test_plan():
    """Runs and tokens of each stage, and nothing is run; hours by what an earlier call has measured."""
    base = {"num_generations": 4, "num_iterations": 3, "epsilon_high": 0.28, "scale_rewards": "none"}
    arms = {"fr3e": {"trainer": "fr3e"}, "grpo": {"trainer": "grpo"}}
    budget = {"generated_tokens": 500, "seeds": [0, 1], "num_evals": 2, "output_dir": "out"}
    grid = {"learning_rates": [1e-3, 3e-3, 1e-2], "tokens_per_batch": [300]}
    tuning = {"tuning_tokens": 100, "tuning_finalists": 2, "tuning_seeds": [7, 8, 9]}
    given = {"task": "chain", "policy": model_on_disk(), "plan": True}
    args = CompareArguments(base=base, arms=arms, **budget, **grid, **tuning, **given)
    # 2 arms: 3 rates × 2 seeds of 100 tokens; 2 finalists × 3 seeds, and 2 seeds, of 500
    assert plan_of(args).splitlines() == [
        "Plan: 9,200 generated tokens, with what is done already",
        "  screening: 12 runs of 100 generated tokens",
        "  finalists: 12 runs of 500 generated tokens",
        "  runs: 4 runs of 500 generated tokens",
    ]
    assert not Path("out").exists()
    # A token takes 1 + 2 · 0.5 seconds with three updates. Runs of 100 tokens have two evaluations, and others three
    probed = {"tokens_per_prompt": 100.0, "batch": 1.0, "update": 0.5, "evaluation": 90.0}
    Path("out").mkdir()
    Path("out/probes.json").write_text(json.dumps({"fr3e": probed, "grpo": probed}))
    told = [line.rpartition(", with")[0] or line for line in plan_of(args).splitlines()]
    assert [line.rpartition(", ")[2] for line in told] == [f"{h} hours of one worker" for h in (6.9, 1.3, 4.2, 1.4)]
    probed |= {"batch": 0.01, "update": 0.0, "evaluation": 0.1}
    Path("out/probes.json").write_text(json.dumps({"fr3e": probed, "grpo": probed}))
    assert "generated tokens, 2 minutes of one worker, with" in plan_of(args)
