"""
Makes the tables of language-results.md, and the one of language.md that sums them up, from the runs beside them:

    python -m benchmarks.results.language
"""

from statistics import fmean
from typing import Any

from ..estimates import difference, final_rates, interval_of, mean_rates, rates, rates_at
from ..kept import read_kept
from ..outcomes import Results
from ..statistics import DIFFERENCE_OF_SHARES
from ..tables import Table, tuned
from .families import RUNS, difference_text, short

# By file: which arms are compared, each with the one behind it
PAIRS = {
    "words": [
        ("tree_4_slow", "grpo_4_slow"),
        ("tree_4", "grpo_4"),
        ("tree_4", "grpo_4_slow"),
    ],
    "short": [
        ("prior_4_slow", "grpo_4_slow"),
        ("tree_4_slow", "grpo_4_slow"),
        ("tree_4_distinct_slow", "grpo_4_slow"),
        ("tree_4_slow", "prior_4_slow"),
        ("tree_4_distinct_slow", "prior_4_slow"),
        ("tree_4", "grpo_4"),
    ],
    "short_rows": [
        ("grpo_2_slow", "grpo_4_slow"),
        ("grpo_8_slow", "grpo_4_slow"),
        ("grpo_dapo_slow", "grpo_4_slow"),
        ("tree_2_slow", "grpo_4_slow"),
        ("tree_8_slow", "grpo_4_slow"),
        ("tree_2_slow", "grpo_2_slow"),
        ("tree_2_slow", "prior_2_slow"),
        ("tree_8_slow", "grpo_8_slow"),
    ],
    "short_linear": [
        ("prior_4", "grpo_4"),
        ("tree_4", "grpo_4"),
        ("tree_4_distinct", "grpo_4"),
        ("tree_4", "prior_4"),
        ("tree_4_distinct", "prior_4"),
    ],
    "short_low": [("tree_4", "grpo_4")],
    "short_low_arms": [
        ("prior_4", "grpo_4"),
        ("tree_4", "prior_4"),
        ("tree_4_slow", "grpo_4_slow"),
        ("tree_4", "grpo_4_slow"),
    ],
    "short_low_again": [("tree_4", "grpo_4")],
    "short_low_half": [
        ("grpo_4_half", "grpo_4"),
        ("tree_4_half", "tree_4"),
        ("tree_4_half", "grpo_4_half"),
    ],
    "stocks": [
        ("prior_4", "grpo_4"),
        ("tree_4", "grpo_4"),
        ("tree_4_distinct", "grpo_4"),
        ("tree_4", "prior_4"),
        ("tree_4_distinct", "prior_4"),
    ],
    "stocks_rows": [
        *((arm, "grpo_4") for arm in ("grpo_8", "grpo_dapo", "tree_2", "tree_4", "tree_8")),
        ("tree_8", "grpo_8"),
    ],
    "stories": [("tree_4", "grpo_4")],
    "words_cpu": [("tree_4", "grpo_4")],
}

# By file: what it is called where the comparisons are summed up, and the defaults beside GRPO, four rows each
SUMMARY = {
    "short_low": ("`short`, solves few at first", "tree_4", "grpo_4"),
    "short_low_again": ("the same, from another such policy", "tree_4", "grpo_4"),
    "short": ("`short`", "tree_4_slow", "grpo_4_slow"),
    "short_linear": ("`short`, with a rate that falls", "tree_4", "grpo_4"),
    "words": ("`words`, on a GPU", "tree_4_slow", "grpo_4_slow"),
    "words_cpu": ("`words`, with smaller batches", "tree_4", "grpo_4"),
    "stocks": ("`stocks`", "tree_4", "grpo_4"),
    "stocks_rows": ("the same, from another policy", "tree_4", "grpo_4"),
    "stories": ("`stories`", "tree_4", "grpo_4"),
}


def summary_table() -> Table:
    """The defaults beside GRPO in every comparison: pass@1 before, how far ahead, and the ratio of seconds."""
    rows = []
    for name, (title, arm, other) in SUMMARY.items():
        results = read_kept(RUNS / f"{name}.jsonl.gz")
        runs = results.runs_of(other)
        both = (str(len(runs)), _rate(start_of(runs)), *differences(results, arm, other))
        rows.append([title, *both, f"{seconds_of(results, arm) / seconds_of(results, other):.2f}"])
    header = ["", "seeds", "pass@1 before", "FR3E − GRPO along the run", "in the end", "seconds, of GRPO's"]
    return Table(header, rows)


def start_of(runs: list[dict[str, Any]]) -> float:
    """pass@1 before training."""
    return fmean(rates(run["evaluations"][0]).mean() for run in runs)


def seconds_of(results: Results, arm: str) -> float:
    """Of training, in the mean over an arm's runs."""
    return fmean(run["evaluations"][-1]["seconds"] for run in results.runs_of(arm))


def arms_table(results: Results) -> Table:
    """pass@1 of each arm before, after each part of its budget, with each seed in the end, and along the run."""
    amount, num_evals, k = (results.arguments[name] for name in ("generated_tokens", "num_evals", "num_samples"))
    amounts = [amount * i / num_evals for i in range(1, num_evals)]
    header = ["", "rate", "before", *(f"{spent:,.0f}" for spent in amounts), f"{amount:,} tokens, with each seed"]
    header += ["their mean", "mean along the run", f"pass@{k} in the end", "seconds"]
    rows = []
    for arm in results.arms:
        runs = results.runs_of(arm)
        ends = [final_rates(run).mean() for run in runs]
        means = [start_of(runs)]
        means += [fmean(rates_at(run, run["cost"], spent).mean() for run in runs) for spent in amounts]
        along = fmean(mean_rates(run).mean() for run in runs)
        cells = [", ".join(map(_rate, ends)), *map(_rate, (fmean(ends), along))]
        cells += [_rate(fmean(final_rates(run, k).mean() for run in runs))]
        rate = f"{tuned(results.arms[arm], 'learning_rate'):.0e}".replace("e-0", "e-")
        rows.append([f"`{arm}`", rate, *map(_rate, means), *cells, f"{seconds_of(results, arm):,.0f}"])
    return Table(header, rows)


def differences_table(results: Results, pairs: list[tuple[str, str]]) -> Table:
    """By how much arms are ahead of others, along the run and in the end."""
    rows = [[f"`{arm}` − `{other}`", *differences(results, arm, other)] for arm, other in pairs]
    return Table(["with 95% intervals over seeds and prompts", "mean along the run", "in the end"], rows)


def differences(results: Results, arm: str, other: str) -> list[str]:
    """Along the run and in the end, each with its interval."""
    both = zip(results.runs_of(arm), results.runs_of(other), strict=True)
    ends = interval_of([final_rates(run) - final_rates(beside) for run, beside in both], DIFFERENCE_OF_SHARES)
    return [difference_text(interval) for interval in (difference(results, arm, other), ends)]


def _rate(rate: float) -> str:
    return short(f"{rate:.3f}")


def tables() -> list[Table]:
    found = []
    for name, pairs in PAIRS.items():
        results = read_kept(RUNS / f"{name}.jsonl.gz")
        found += [arms_table(results), differences_table(results, pairs)]
    return found


if __name__ == "__main__":
    print("\n\n".join(table.markdown() for table in (summary_table(), *tables())))
