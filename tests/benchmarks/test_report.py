"""The report of a comparison: intervals that hold the truth as often as they say, and a page that one can read."""

import re
from functools import partial

import numpy as np
import pytest
from simulated import GAINS, PROMPTS, expected, share, simulated, truth

from benchmarks.estimates import difference, final_rates, mean_rates, of_arm, verdict_of
from benchmarks.outcomes import has_collapsed
from benchmarks.report import markdown, sections, write_report
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
    true = {"mean": means["fr3e"], "end": truth("fr3e"), "pass@4": truth("fr3e", 4)}
    true |= {"difference": means["fr3e"] - means["grpo"], "no difference": 0.0}
    held, of_seeds = dict.fromkeys(true, 0), 0
    for _ in range(NUM_DRAWN):
        results = simulated(generator, num_seeds, arms)
        intervals = {
            "mean": of_arm(results, "fr3e", mean_rates, SHARE),
            "end": of_arm(results, "fr3e", final_rates, SHARE),
            "pass@4": of_arm(results, "fr3e", partial(final_rates, k=4), SHARE),
            "difference": difference(results, "fr3e"),
            "no difference": difference(results, "shared"),
        }
        for name, interval in intervals.items():
            low, high = DIFFERENCE_OF_SHARES if "difference" in name else SHARE
            assert low <= interval.low <= interval.mean <= interval.high <= high
            held[name] += interval.low <= true[name] <= interval.high
        alone = mean_interval([float(mean_rates(run).mean()) for run in results.of_arm("fr3e")])
        of_seeds += alone.low <= true["mean"] <= alone.high
    shares = {name: count / NUM_DRAWN for name, count in held.items()}
    print(num_seeds, shares, of_seeds / NUM_DRAWN)
    # The standard deviation of a share is .015. With few seeds, the two parts of the chance, each with its own
    # Student's t, hold the truth more often, and never less
    assert all(held_share >= 0.92 for held_share in shares.values()), shares
    assert all(held_share <= (0.98 if num_seeds >= 5 else 1) for held_share in shares.values()), shares
    if num_seeds == 10:  # of which the interval over seeds alone, with the prompts as they are, says nothing
        assert of_seeds / NUM_DRAWN < 0.85


@pytest.mark.parametrize("log_odds", [-2.5, -0.5, 1.0, 3.0])
@pytest.mark.parametrize("num_problems", [12, 50, 200])
def test_intervals_of_an_evaluation_hold_the_truth(num_problems, log_odds):
    """With eight samples or one of each problem, from rates of .1 to .998."""
    generator, num_drawn = np.random.default_rng(num_problems), 400
    by_name = {"pass@1": [], "pass@4": [], "one sample": []}
    for _ in range(num_drawn):
        rates = share(log_odds + PROMPTS * generator.normal(size=num_problems))
        right = generator.binomial(8, rates).tolist()
        for k in (1, 4):
            by_name[f"pass@{k}"].append(with_interval([OF_EIGHT[k][n] for n in right], are_shares=True))
        by_name["one sample"].append(with_interval(generator.binomial(1, rates).tolist(), are_shares=True))
    one, best = (expected(log_odds, PROMPTS, k) for k in (1, 4))
    true = {"pass@1": one, "pass@4": best, "one sample": one}
    for name, intervals in by_name.items():
        held = sum(interval["low"] <= true[name] <= interval["high"] for interval in intervals)
        assert held >= 0.92 * num_drawn, (name, held)
        # The standard deviation is .011. Next to 0 and 1 they are to hold it more often, and elsewhere not
        assert held <= (0.98 if num_problems > 12 and 0.2 < true[name] < 0.8 else 1) * num_drawn, (name, held)


OF_EIGHT = {k: [best_of_k([1.0] * n + [0.0] * (8 - n), k) for n in range(9)] for k in (1, 4)}


def test_an_evaluation_with_all_right_is_not_sure():
    """
    Of 48 problems: with a 0 and a 1 more, 49 of 50 are right, and the variance of their mean is .02 · .98 / 49.

    So it is Wilson's interval of 49 draws, 49 / (49 + 2.0096²) to 1.
    """
    assert with_interval([1.0] * 48, are_shares=True) == pytest.approx(
        {"mean": 1.0, "low": 49 / (49 + 2.0096**2), "high": 1.0}, abs=1e-4
    )
    alike = with_interval([0.3] * 5, are_shares=True)
    assert alike["low"] < 0.2 and alike["high"] > 0.4
    assert with_interval([0.2, 0.4], are_shares=False)["low"] < 0  # with rewards of other bounds
    assert with_interval([1.0], are_shares=True) == {"mean": 1.0}


# What the report says


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
    assert "No arm is surely ahead: `fr3e` is before `grpo` by +0." in two and "which may be chance" in two
    assert "with one seed, by +0." in one and "no verdict" in one
    assert "no other arm beside it" in alone
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


def test_a_level_that_a_run_begins_at_has_no_ratio():
    assert speed(compared(3), "fr3e", "grpo", "generated_tokens", level=0.0) == "3 runs"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.1, 0.5, 0.2], True),
        ([0.1, 0.5, 0.3, 0.26], False),
        ([0.1, 0.5, 0.2, 0.5], False),  # it came back
        ([0.02, 0.04, 0.01], False),  # that is noise
        ([-0.9, -0.3, -0.34], False),  # of rewards below 0, by half of what it gained
        ([-0.9, -0.3, -0.8], True),
    ],
)
def test_collapse(rewards, expected):
    assert has_collapsed({"evaluations": [{"rewards": [[reward]]} for reward in rewards]}) == expected


def test_a_batch_size_is_told_in_its_column():
    """Of 1,000 tokens a prompt: 2,000 and 2,500 tokens come to two prompts both."""
    grid = {"learning_rates": [1e-3], "tokens_per_batch": [2000, 2500, 6000], "num_iterations": [1]}
    results = compared(2, extra=grid)
    for arm, settings in results.arms.items():
        results.tokens_per_prompt[arm] = 1000.0
        for run in list(results.of_arm(arm)):
            for num_prompts in (2, 6):
                point = {**settings, "num_prompts": num_prompts, "num_iterations": 1}
                results.screening.append({**run, "settings": point})
                results.tuning.append({**run, "settings": point})
        results.arms[arm] = settings | {"num_prompts": 6, "num_iterations": 1}
    for row in tuning_table(results).rows:
        _, _, first, second, third, *_ = row
        assert first == second and not first.startswith("**") and third == f"**{first}**"


def test_runs_that_do_not_start_alike_are_told_of():
    results = compared(2)
    assert "Runs begin at" not in report_of(results)
    results.runs[0]["evaluations"][0]["rewards"][0] = [1.0] * 4
    results.runs[1]["evaluations"][0]["rewards"][0] = [0.0] * 4
    assert re.search(r"Runs begin at pass@1 of 0\.\d{4} to 0\.\d{4}: ", report_of(results))


def test_a_run_whose_trees_never_branched_is_reported(tmp_path):
    results = compared(2)
    for batch in results.runs[0]["batches"]:
        batch["differing"] = float("nan")
    write_report(results, tmp_path)
    assert (tmp_path / "report.md").exists()


def test_prompts_without_a_score_leave_intervals_over_seeds():
    results = compared(3)
    first = results.runs[0]["evaluations"][0]
    first["num_unscored"], first["rewards"] = 1, first["rewards"][1:]
    assert "intervals are over seeds alone" in report_of(results)
    values = [float(np.mean(mean_rates(run))) for run in results.of_arm("grpo")]
    assert of_arm(results, "grpo", mean_rates, SHARE) == mean_interval(values, SHARE)
