"""The same training in one process or several."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import is_deepspeed_available
from hypothesis import given
from hypothesis import strategies as st
from launches import RECIPES, launch, launch_nodes

from fr3e_trl.method.rows import RowSharding
from fr3e_trl.tree_log.record import read_step

DEEPSPEED = pytest.mark.skipif(not is_deepspeed_available(), reason="deepspeed is not installed: see the Makefile")


def weights_of(output: Path, process: int = 0) -> list[torch.Tensor]:
    return list(torch.load(output / f"{process}.pt").values())


def trees_of(results: list[dict]) -> list[list[list]]:
    """The rows that the processes saw in each step. All know each row's shape and worth, and some hold its tokens."""
    steps = []
    for of_processes in zip(*(result["trees"] for result in results), strict=True):
        steps.append([])
        for row in zip(*of_processes, strict=True):
            tokens = [of_process["tokens"] for of_process in row if of_process["tokens"] is not None]
            assert tokens and all(held == tokens[0] for held in tokens)
            assert all(of_process["known"] == row[0]["known"] for of_process in row)
            steps[-1].append([*tokens[0], *row[0]["known"]])
    return steps


def same(x, y) -> bool:
    if isinstance(x, float):
        return math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return x == y


def assert_same_training(mine: tuple, theirs: tuple, *names: str) -> None:
    """The same trees, logs under `names` and weights: of two launches, what the processes wrote, and where to."""
    (results, output), (others, other_output) = mine, theirs
    assert same(trees_of(results), trees_of(others))
    for entry, expected in zip(results[0]["logs"], others[0]["logs"], strict=True):
        for name in expected.keys() & {"loss", "reward", *names}:
            assert same(entry[name], expected[name]), name
    torch.testing.assert_close(weights_of(output), weights_of(other_output), atol=1e-6, rtol=1e-6)


def assert_finite(results: list[dict]) -> None:
    assert all(math.isfinite(entry["loss"]) for entry in results[0]["logs"] if "loss" in entry)


# Recipe, nodes, processes, rows of a micro-batch, micro-batches of a process: 24 rows in all
LAYOUTS = [("ddp", 1, 2, 12, 1), ("ddp", 1, 2, 4, 3), ("ddp", 1, 3, 8, 1), ("ddp", 2, 2, 12, 1), ("fsdp2", 2, 2, 12, 1)]


@pytest.mark.parametrize(
    "loss_type, num_generations, layouts",
    [("dapo", 8, LAYOUTS), ("grpo", 12, [("ddp", 1, 3, 4, 2)])],
    ids=["dapo", "grpo"],
)
def test_the_same_completions_give_the_same_training(loss_type, num_generations, layouts, tmp_path):
    """Groups that straddle processes included. Nodes are launches of their own, here on one machine."""
    runs = []
    for recipe, num_nodes, num_processes, batch_size, micro_batches in [("ddp", 1, 1, 24, 1), *layouts]:
        settings = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": micro_batches}
        settings |= {"num_generations": num_generations, "num_anchors": num_generations - 2, "num_base_trajectories": 2}
        # SGD moves the weights by their gradients, and by no more
        settings |= {"loss_type": loss_type, "optim": "sgd", "log_trees": 2}
        output, options = tmp_path / str(len(runs)), ["fake"] if recipe == "ddp" else ["fake", "sharded"]
        if num_nodes == 1:
            results = launch(output, num_processes, settings, *options, recipe=recipe)
        else:
            results = launch_nodes(output, num_nodes, num_processes, settings, *options, recipe=recipe)
        runs.append((results, output))
    (alone, *others) = runs
    logged = [read_step(output / "output", 1) for _, output in runs]
    assert all(rollout["tokens"] for tree in logged[0]["trees"] for rollout in tree["rollouts"])
    expected = json.loads(json.dumps(logged[0]), parse_float=lambda x: pytest.approx(float(x), abs=2e-3))
    assert logged == [expected] * len(runs)
    names = ["fr3e/value/S0", "fr3e/advantage/std", "fr3e/tokens/generated", "fr3e/branches/distinct"]
    scored = sorted(alone[0][0]["scored"])
    for run, (recipe, *_) in zip(others, layouts, strict=True):
        assert_same_training(run, alone, *names, *["grad_norm"] * (recipe == "ddp"))
        # Each completion is scored once, in some process, and some in each
        assert sorted(text for result in run[0] for text in result["scored"]) == scored
        assert all(result["scored"] for result in run[0])


@pytest.mark.parametrize(
    "recipe", ["fsdp2", pytest.param("zero2", marks=DEEPSPEED), pytest.param("zero3", marks=DEEPSPEED)]
)
def test_sharded_training_is_the_same_as_in_one_process(recipe, tmp_path):
    """FSDP2 and DeepSpeed in three processes: they have different work, and run the model equally often."""
    settings, output = {"num_generations": 12, "optim": "sgd"}, tmp_path / "sharded"
    alone = launch(tmp_path / "alone", 1, settings | {"per_device_train_batch_size": 24}, "fake")
    settings |= {"per_device_train_batch_size": 8}
    sharded = launch(output, 3, settings, "fake", "sharded", recipe=recipe)
    assert sharded[0]["backend"] == ("DistributedType.FSDP" if recipe == "fsdp2" else "DistributedType.DEEPSPEED")
    assert_same_training((sharded, output), (alone, tmp_path / "alone"), "fr3e/value/S0", "fr3e/advantage/std")


def test_the_slurm_file_launches_each_node_with_its_rank(tmp_path):
    """SLURM's commands are stand-ins: `srun` runs what it is given once for each node."""
    commands = {
        "scontrol": "echo node7; sleep 0.2; echo node8",  # who reads the first line alone makes the second one fail
        "srun": 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "accelerate": """printf '%s\\n' "$*" """,
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "123"}
    root = RECIPES.parents[1]
    given = ["recipes/gsm8k_lora.yaml", "--output_dir", "a folder"]
    command = ["bash", str(root / "recipes" / "slurm" / "train.slurm"), *given]
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    for rank, line in enumerate(result.stdout.splitlines()):
        launched = launch_command_parser().parse_args(line.split()[1:])  # after `launch`
        assert (launched.machine_rank, launched.num_machines, launched.num_processes) == (rank, 2, 16)
        assert launched.main_process_ip == "node7" and (root / launched.config_file).exists()
        assert line.endswith("-m fr3e_trl.commands.cli train --config recipes/gsm8k_lora.yaml --output_dir a folder")
    assert rank == 1


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_the_same_dialogues_give_the_same_training(kind, tmp_path):
    """Processes have different numbers of turns, and a branch of a later turn may be another's than its base."""
    # The first uncertain positions: all digits are about as uncertain, and rounding would choose among them
    settings = {"num_generations": 8, "max_completion_length": 40, "optim": "sgd", "anchor_threshold": 0.5}
    runs = []
    for num_processes in (1, 2, 3):
        output, size = tmp_path / str(num_processes), {"per_device_train_batch_size": 24 // num_processes}
        runs.append((launch(output, num_processes, settings | size, "fake", kind), output))
    for run in runs[1:]:
        assert_same_training(run, runs[0], "tools/call_frequency", "fr3e/tokens/generated")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("moody", "EnvironmentFailure: The environment MoodyWalk answered "),
        ("dice", "EnvironmentFailure: The rows of a prompt are spread over several processes, in which reset(**ex"),
    ],
)
def test_an_environment_that_cannot_be_the_same_in_two_processes_ends_all(kind, says, tmp_path):
    settings = {"num_generations": 8, "per_device_train_batch_size": 12, "max_completion_length": 40}
    went_well, _ = launch(tmp_path / "run", 2, settings, "fake", kind, check=False)
    assert not went_well
    for process in range(2):
        error = (tmp_path / "run" / f"{process}.error").read_text()
        assert error.startswith(says)


@pytest.mark.parametrize("recipe", ["fsdp2", pytest.param("zero3", marks=DEEPSPEED)])
def test_sharded_sampling_and_a_sharded_reward_model_with_nothing_to_score(recipe, tmp_path):
    settings = {"num_generations": 6, "num_anchors": 2, "per_device_train_batch_size": 2}
    settings |= {"num_iterations": 2, "base_selection": "mixed"}
    of_processes = launch(tmp_path / "run", 3, settings, "sharded", "reward_model", recipe=recipe)
    logs = of_processes[0]["logs"]
    of_model = [name for name in logs[0] if name.startswith("rewards/") and name.endswith("/std")][1]
    assert len(trees_of(of_processes)) == 2 == sum(entry.get(of_model, 0) > 0 for entry in logs)
    assert_finite(of_processes)


def test_real_sampling_in_two_processes(tmp_path):
    settings = {"num_generations": 8, "per_device_train_batch_size": 4}
    settings |= {"num_base_trajectories": 2, "num_anchors": 2, "anchor_threshold": None}
    first, second = launch(tmp_path / "run", 2, settings)
    trees = trees_of([first, second])
    assert [len(of_step) for of_step in trees] == [8, 8, 8]
    assert_finite([first])
    assert all(map(torch.equal, *(weights_of(tmp_path / "run", process) for process in range(2))))
    rollouts = [tuple(token_ids) for of_step in trees for _, token_ids, *_ in of_step]
    assert len(set(rollouts)) > len(rollouts) / 2  # the processes do not draw the same


@pytest.mark.parametrize("recipe", ["ddp", "fsdp2", pytest.param("zero3", marks=DEEPSPEED)])
def test_resuming_is_exact_in_several_processes(recipe, tmp_path):
    options = [] if recipe == "ddp" else ["sharded"]
    settings = {"num_generations": 6, "per_device_train_batch_size": 6, "steps_per_generation": 2, "max_steps": 5}
    # With two rewards and no prior, states are rejected. With this seed rows are left over, and used
    settings |= {"max_refills": 4, "value_prior_strength": 0, "num_rewards": 2, "seed": 4}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    whole = launch(tmp_path / "whole", 2, settings, *options, recipe=recipe)
    assert sum(entry.get("fr3e/refill/reused", 0) for entry in whole[0]["logs"]) > 0
    checkpoint = str(tmp_path / "whole" / "output" / "checkpoint-3")
    resumed = launch(tmp_path / "resumed", 2, settings | {"resume": checkpoint}, *options, recipe=recipe)
    assert [result["trees"] for result in resumed] == [result["trees"][-1:] for result in whole]
    for mine, theirs in zip(resumed[0]["logs"], whole[0]["logs"], strict=True):
        for name in mine.keys() - {"step_time", "train_runtime", "train_loss"}:
            assert name.endswith("per_second") or mine[name] == theirs[name], (name, mine["step"])
    assert all(map(torch.equal, weights_of(tmp_path / "resumed"), weights_of(tmp_path / "whole")))


# With two rewards and no prior, states are rejected
REFILL = {"num_generations": 8, "max_refills": 3, "value_prior_strength": 0, "num_rewards": 2}


def test_refill_is_the_same_in_several_processes(tmp_path):
    settings = REFILL | {"optim": "sgd"}
    alone = launch(tmp_path / "alone", 1, settings | {"per_device_train_batch_size": 24}, "fake")
    shared = launch(tmp_path / "shared", 2, settings | {"per_device_train_batch_size": 12}, "fake")
    assert sum(entry.get("fr3e/refill/prompts", 0) for entry in alone[0]["logs"]) > 0
    assert_same_training((shared, tmp_path / "shared"), (alone, tmp_path / "alone"))


def test_rows_that_are_dropped_are_credited_the_same_in_all_processes(tmp_path):
    # With several iterations TRL has old log-probs, as with vLLM
    settings = REFILL | {"credit": "tree", "per_device_train_batch_size": 12, "num_iterations": 2}
    results = launch(tmp_path / "run", 2, settings, "fake", "drops")
    assert sum(entry.get("fr3e/refill/prompts", 0) for entry in results[0]["logs"]) > 0
    assert len(trees_of(results)) == 2


def test_forward_passes_of_sharded_weights_are_of_all_processes_or_of_none(tmp_path):
    settings = {"num_generations": 6, "num_anchors": 2, "per_device_train_batch_size": 2, "max_completion_length": 40}
    of_processes = launch(tmp_path / "turns", 3, settings, "sharded", "tools", recipe="fsdp2")
    assert of_processes[0]["logs"][0]["tools/call_frequency"] > 0
    assert_finite(of_processes)
    settings = {"num_generations": 8, "per_device_train_batch_size": 8, "num_iterations": 2}
    assert_finite(launch(tmp_path / "told", 2, settings, "sharded", "fake", "half_told", recipe="fsdp2"))


REWARD = "OSError: the reward model is gone"


@pytest.mark.parametrize(
    "recipe, options, settings, errors",
    [
        ("ddp", ["fail"], {}, {0: REWARD, 1: REWARD}),
        # Where base trajectories are selected by their rewards, sharded weights are needed after these
        ("fsdp2", ["fail", "sharded"], {"base_selection": "mixed"}, {0: REWARD, 1: REWARD}),
        # The other waits in a forward pass of sharded weights, and the launcher ends it
        ("fsdp2", ["fail_to_sample", "sharded"], {}, {1: "MemoryError: no memory for these rollouts"}),
    ],
    ids=["ddp", "fsdp2", "amid calls of all"],
)
def test_a_process_that_raises_ends_all(recipe, options, settings, errors, tmp_path):
    settings = settings | {"num_generations": 8, "per_device_train_batch_size": 8}
    went_well, _ = launch(tmp_path / "run", 2, settings, *options, recipe=recipe, check=False)
    assert not went_well
    for process, error in errors.items():
        assert (tmp_path / "run" / f"{process}.error").read_text() == error


def test_what_fails_in_one_process_is_raised_in_all(tmp_path):
    script = Path(__file__).with_name("failing_together.py")
    first, second = launch(tmp_path / "run", 2, {}, script=script)
    assert first == second == dict.fromkeys(["generate", "take_turns"], "VLLMServerError('the server is gone')")


@given(st.integers(1, 9), st.integers(0, 80))
def test_rows_are_dealt_out_in_order_and_evenly(num_processes, num_rows):
    deals = [RowSharding(num_rows, num_processes, process) for process in range(num_processes)]
    assert [row for sharding in deals for row in sharding.own] == list(range(num_rows))
    assert all(sharding.owner(row) == sharding.process for sharding in deals for row in sharding.own)
    sizes = [len(sharding.own) for sharding in deals]
    assert max(sizes) - min(sizes) <= 1
