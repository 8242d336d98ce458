"""What `python -m benchmarks compare --plan` says, and a report of arms that did not improve."""

import json
from pathlib import Path

import numpy as np
from models import model_on_disk
from simulated import simulated

from benchmarks.arguments import CompareArguments
from benchmarks.compare import plan_of
from benchmarks.report import costs, verdict
from benchmarks.tables import speed


def test_plan():
    """Runs and tokens of each stage, and nothing is run; hours by what an earlier call has measured."""
    args = CompareArguments(
        task="chain",
        policy=model_on_disk(),
        output_dir="out",
        base={"num_generations": 4, "num_iterations": 3, "epsilon_high": 0.28, "scale_rewards": "none"},
        arms={"fr3e": {"trainer": "fr3e"}, "grpo": {"trainer": "grpo"}},
        generated_tokens=500,
        seeds=[0, 1],
        num_evals=2,
        learning_rates=[1e-3, 3e-3, 1e-2],
        tokens_per_batch=[300],
        tuning_tokens=100,
        tuning_finalists=2,
        tuning_seeds=[7, 8, 9],
        plan=True,
    )
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


def test_where_no_arm_improved_nothing_is_measured():
    fallen = simulated(np.random.default_rng(0), 3, ("grpo", "fr3e"))
    for run in fallen.runs:
        for evaluation in run["evaluations"][1:]:
            evaluation["rewards"] = [[0.0] * len(rewards) for rewards in evaluation["rewards"]]
    assert verdict(fallen).startswith("No arm improved. ") and "¾" not in costs(fallen)
    assert speed(fallen, "fr3e", "grpo", "generated_tokens", fallen.levels()["¾"]) == "not measured"
