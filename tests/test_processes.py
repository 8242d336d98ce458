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


@pytest.mark.parametrize(
    "loss_type, num_generations, layouts",
    [
        # Processes, rows of a micro-batch, micro-batches of a process: 24 rows in all
        ("dapo", 8, [(1, 24, 1), (2, 12, 1), (2, 4, 3), (3, 8, 1)]),
        ("grpo", 12, [(1, 24, 1), (3, 4, 2)]),
    ],
    ids=["dapo", "grpo"],
)
def test_the_same_completions_give_the_same_training(loss_type, num_generations, layouts, tmp_path):
    """Groups that straddle processes included: the same trees, values, losses, gradients and weights."""
    results = []
    for i, (num_processes, batch_size, micro_batches) in enumerate(layouts):
        settings = {
            "num_generations": num_generations,
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": micro_batches,
            "loss_type": loss_type,
            "num_base_trajectories": 2,
            "num_anchors": num_generations - 2,
            "optim": "sgd",  # moves the weights by their gradients, and by no more
            "log_trees": 2,
        }
        of_processes = launch(tmp_path / str(i), num_processes, settings, "fake")
        results.append((of_processes, weights_of(tmp_path / str(i))))
    (alone, *others) = results
    logged = [read_step(tmp_path / str(i) / "output", 1) for i in range(len(layouts))]
    assert all(rollout["tokens"] for tree in logged[0]["trees"] for rollout in tree["rollouts"])
    expected = json.loads(json.dumps(logged[0]), parse_float=lambda x: pytest.approx(float(x), abs=2e-3))
    assert logged == [expected] * len(layouts)
    for of_processes, weights in others:
        main = of_processes[0]
        assert same(trees_of(of_processes), trees_of(alone[0]))
        for mine, theirs in zip(main["logs"], alone[0][0]["logs"], strict=True):
            names = ["fr3e/value/S0", "fr3e/advantage/std", "fr3e/tokens/generated", "fr3e/branches/distinct"]
            for name in ("loss", "grad_norm", "reward", *names):
                assert name not in theirs or math.isclose(mine[name], theirs[name], rel_tol=1e-5, abs_tol=1e-6), name
        torch.testing.assert_close(weights, alone[1], atol=1e-6, rtol=1e-6)
        # Each completion is scored once, in some process, and some in each
        assert sorted(text for result in of_processes for text in result["scored"]) == sorted(alone[0][0]["scored"])
        assert all(result["scored"] for result in of_processes)


@pytest.mark.parametrize(
    "recipe", ["fsdp2", pytest.param("zero2", marks=DEEPSPEED), pytest.param("zero3", marks=DEEPSPEED)]
)
def test_sharded_training_is_the_same_as_in_one_process(recipe, tmp_path):
    """FSDP2 and DeepSpeed in three processes: they have different work, and run the model equally often."""
    settings = {
        "num_generations": 12,
        "per_device_train_batch_size": 8,
        "optim": "sgd",
    }
    alone = launch(tmp_path / "alone", 1, settings | {"per_device_train_batch_size": 24}, "fake")
    sharded = launch(tmp_path / "sharded", 3, settings, "fake", "sharded", recipe=recipe)
    assert sharded[0]["backend"] == ("DistributedType.FSDP" if recipe == "fsdp2" else "DistributedType.DEEPSPEED")
    assert same(trees_of(sharded), trees_of(alone))
    for mine, theirs in zip(sharded[0]["logs"], alone[0]["logs"], strict=True):
        for name in ("loss", "reward", "fr3e/value/S0", "fr3e/advantage/std"):
            assert name not in theirs or math.isclose(mine[name], theirs[name], rel_tol=1e-5, abs_tol=1e-6), name
    torch.testing.assert_close(weights_of(tmp_path / "sharded"), weights_of(tmp_path / "alone"), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["ddp", "fsdp2"])
def test_two_nodes_train_as_one_process(recipe, tmp_path):
    """Nodes are launches of their own, here on one machine, with groups that straddle them."""
    settings = {"num_generations": 8, "per_device_train_batch_size": 12, "optim": "sgd"}
    alone = launch(tmp_path / "alone", 1, settings | {"per_device_train_batch_size": 24}, "fake")
    options = [] if recipe == "ddp" else ["sharded"]
    nodes = launch_nodes(tmp_path / "nodes", 2, 2, settings, "fake", *options, recipe=recipe)
    assert same(trees_of(nodes), trees_of(alone))
    torch.testing.assert_close(weights_of(tmp_path / "nodes"), weights_of(tmp_path / "alone"), atol=1e-6, rtol=1e-6)


def test_the_slurm_file_launches_each_node_with_its_rank(tmp_path):
    """SLURM's commands are stand-ins: `srun` runs what it is given once for each node."""
    commands = {
        "scontrol": "printf 'node7\\nnode8\\n'",
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
        launch_arguments = launch_command_parser().parse_args(line.split()[1:])  # after `launch`
        assert (launch_arguments.machine_rank, launch_arguments.num_machines) == (rank, 2)
        assert launch_arguments.num_processes == 16 and launch_arguments.main_process_ip == "node7"
        assert (root / launch_arguments.config_file).exists()
        assert line.endswith("-m fr3e_trl.commands.cli train --config recipes/gsm8k_lora.yaml --output_dir a folder")
    assert rank == 1


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_the_same_dialogues_give_the_same_training(kind, tmp_path):
    """Processes have different numbers of turns, and a branch of a later turn may be another's than its base."""
    # The first uncertain positions: all digits are about as uncertain, and rounding would choose among them
    settings = {"num_generations": 8, "max_completion_length": 40, "optim": "sgd", "anchor_threshold": 0.5}
    alone = launch(tmp_path / "alone", 1, settings | {"per_device_train_batch_size": 24}, "fake", kind)
    for num_processes in (2, 3):
        output = tmp_path / str(num_processes)
        others = launch(
            output, num_processes, settings | {"per_device_train_batch_size": 24 // num_processes}, "fake", kind
        )
        assert same(trees_of(others), trees_of(alone))
        for mine, theirs in zip(others[0]["logs"], alone[0]["logs"], strict=True):
            for name in ("loss", "reward", "tools/call_frequency", "fr3e/tokens/generated"):
                assert name not in theirs or math.isclose(mine[name], theirs[name], rel_tol=1e-5, abs_tol=1e-6), name
        torch.testing.assert_close(weights_of(output), weights_of(tmp_path / "alone"), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("moody", "EnvironmentFailure: The environment MoodyWalk answered the same actions"),
        ("dice", "EnvironmentFailure: An environment says one thing and another when it is reset for one example in"),
    ],
)
def test_an_environment_that_cannot_be_the_same_in_two_processes_ends_all(kind, says, tmp_path):
    settings = {"num_generations": 8, "per_device_train_batch_size": 12, "max_completion_length": 40}
    went_well, _ = launch(tmp_path / "run", 2, settings, "fake", kind, check=False)
    assert not went_well
    for process in range(2):
        error = (tmp_path / "run" / f"{process}.error").read_text()
        assert error.startswith(says)


def test_sharded_dialogues(tmp_path):
    """FSDP2: a forward pass is every process's, however many turns it has."""
    settings = {"num_generations": 6, "num_anchors": 2, "per_device_train_batch_size": 2, "max_completion_length": 40}
    of_processes = launch(tmp_path / "run", 3, settings, "sharded", "tools", recipe="fsdp2")
    assert of_processes[0]["logs"][0]["tools/call_frequency"] > 0
    assert all(math.isfinite(entry["loss"]) for entry in of_processes[0]["logs"] if "loss" in entry)


@pytest.mark.parametrize("recipe", ["fsdp2", pytest.param("zero3", marks=DEEPSPEED)])
def test_sharded_sampling(recipe, tmp_path):
    """Two base trajectories in the first round, for three processes."""
    settings = {
        "num_generations": 6,
        "num_anchors": 2,
        "per_device_train_batch_size": 2,
        "num_iterations": 2,
    }
    of_processes = launch(tmp_path / "run", 3, settings, "sharded", recipe=recipe)
    assert len(trees_of(of_processes)) == 2
    assert all(math.isfinite(entry["loss"]) for entry in of_processes[0]["logs"] if "loss" in entry)


@pytest.mark.parametrize("recipe", ["fsdp2", pytest.param("zero3", marks=DEEPSPEED)])
def test_a_sharded_reward_model_with_nothing_to_score(recipe, tmp_path):
    """Two base trajectories, which are scored before their anchors are chosen, for three processes."""
    settings = {
        "num_generations": 6,
        "num_anchors": 2,
        "per_device_train_batch_size": 2,
        "base_selection": "mixed",
        "max_steps": 2,
    }
    of_processes = launch(tmp_path / "run", 3, settings, "sharded", "reward_model", recipe=recipe)
    of_model = [name for name in of_processes[0]["logs"][0] if name.startswith("rewards/") and name.endswith("/std")][1]
    assert all(entry[of_model] > 0 for entry in of_processes[0]["logs"][:2])
    assert len(trees_of(of_processes)) == 2


def test_real_sampling_in_two_processes(tmp_path):
    settings = {"num_generations": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    settings |= {"num_base_trajectories": 2, "num_anchors": 2, "anchor_threshold": None}
    first, second = launch(tmp_path / "run", 2, settings)
    trees = trees_of([first, second])
    assert [len(of_step) for of_step in trees] == [8, 8, 8]
    assert all(math.isfinite(entry["loss"]) for entry in first["logs"] if "loss" in entry)
    assert all(map(torch.equal, *(weights_of(tmp_path / "run", process) for process in range(2))))
    rollouts = [tuple(token_ids) for of_step in trees for _, token_ids, *_ in of_step]
    assert len(set(rollouts)) > len(rollouts) / 2  # the processes do not draw the same


@pytest.mark.parametrize("recipe", ["ddp", "fsdp2", pytest.param("zero3", marks=DEEPSPEED)])
def test_resuming_is_exact_in_several_processes(recipe, tmp_path):
    """In the middle of a batch, with rows left over from a refill."""
    options = [] if recipe == "ddp" else ["sharded"]
    settings = {
        "num_generations": 6,
        "per_device_train_batch_size": 6,
        "steps_per_generation": 2,
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_refills": 4,
        "value_prior_strength": 0,
        "num_rewards": 2,  # that many, and no prior, for states to be rejected
        "seed": 4,  # with which rows are left over, and used
    }
    whole = launch(tmp_path / "whole", 2, settings, *options, recipe=recipe)
    assert sum(entry.get("fr3e/refill/reused", 0) for entry in whole[0]["logs"]) > 0
    checkpoint = str(tmp_path / "whole" / "output" / "checkpoint-3")
    resumed = launch(tmp_path / "resumed", 2, settings | {"resume": checkpoint}, *options, recipe=recipe)
    assert [result["trees"] for result in resumed] == [result["trees"][-1:] for result in whole]
    for mine, theirs in zip(resumed[0]["logs"], whole[0]["logs"], strict=True):
        for name in mine.keys() - {"step_time", "train_runtime", "train_loss"}:
            assert name.endswith("per_second") or mine[name] == theirs[name], (name, mine["step"])
    assert all(map(torch.equal, weights_of(tmp_path / "resumed"), weights_of(tmp_path / "whole")))


def test_refill_is_the_same_in_several_processes(tmp_path):
    settings = {
        "num_generations": 8,  # in states of 4 rows, which no process boundary cuts: the sampler numbers what it draws
        "per_device_train_batch_size": 24,
        "max_refills": 3,
        "value_prior_strength": 0,
        "num_rewards": 2,
        "optim": "sgd",
    }
    alone = launch(tmp_path / "alone", 1, settings, "fake")
    shared = launch(tmp_path / "shared", 2, settings | {"per_device_train_batch_size": 12}, "fake")
    assert sum(entry.get("fr3e/refill/prompts", 0) for entry in alone[0]["logs"]) > 0
    assert same(trees_of(shared), trees_of(alone))
    torch.testing.assert_close(weights_of(tmp_path / "shared"), weights_of(tmp_path / "alone"), atol=1e-6, rtol=1e-6)


def test_rows_that_are_dropped_are_credited_the_same_in_all_processes(tmp_path):
    """Those too that refill has moved from one process to another."""
    settings = {
        "credit": "tree",
        "num_generations": 8,
        "per_device_train_batch_size": 12,
        "num_iterations": 2,  # with which TRL has old log-probs, as with vLLM
        "max_refills": 3,
        "value_prior_strength": 0,
        "num_rewards": 2,
    }
    results = launch(tmp_path / "run", 2, settings, "fake", "drops")
    assert sum(entry.get("fr3e/refill/prompts", 0) for entry in results[0]["logs"]) > 0
    assert len(trees_of(results)) == 2


def test_processes_that_are_told_log_probs_and_others_score_together(tmp_path):
    """A forward pass of sharded weights is one of all processes, or of none."""
    settings = {"num_generations": 8, "per_device_train_batch_size": 8, "num_iterations": 2}
    results = launch(tmp_path / "run", 2, settings, "sharded", "fake", "half_told", recipe="fsdp2")
    assert all(math.isfinite(entry["loss"]) for entry in results[0]["logs"] if "loss" in entry)


def test_a_process_with_nothing_to_do(tmp_path):
    """Two base trajectories, for three processes."""
    settings = {"num_generations": 6, "num_anchors": 2, "per_device_train_batch_size": 2}
    assert len(trees_of(launch(tmp_path / "run", 3, settings))) == 3


@pytest.mark.parametrize(
    "recipe, options, settings",
    # Where base trajectories are selected by their rewards, sharded weights are needed after these
    [("ddp", [], {}), ("fsdp2", ["sharded"], {"base_selection": "mixed"})],
)
def test_a_process_that_raises_ends_all(recipe, options, settings, tmp_path):
    settings = settings | {"num_generations": 8, "per_device_train_batch_size": 8}
    went_well, _ = launch(tmp_path / "run", 2, settings, "fail", *options, recipe=recipe, check=False)
    assert not went_well
    for i in range(2):
        assert (tmp_path / "run" / f"{i}.error").read_text() == "OSError: the reward model is gone"


def test_a_process_that_fails_amid_calls_of_all_is_not_waited_for(tmp_path):
    """Sharded weights: the others wait in a forward pass, and the launcher ends them."""
    settings = {"num_generations": 8, "per_device_train_batch_size": 8}
    went_well, _ = launch(tmp_path / "run", 2, settings, "fail_to_sample", "sharded", recipe="fsdp2", check=False)
    assert not went_well
    assert (tmp_path / "run" / "1.error").read_text() == "MemoryError: no memory for these rollouts"


def test_what_fails_in_one_process_is_raised_in_all(tmp_path):
    """A server in an evaluation, where TRL asks it; and in a turn that one process alone takes."""
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
