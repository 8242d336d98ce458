"""vLLM in the trainer's process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from policies import SIZES

HERE = Path(__file__).parent


@pytest.mark.timeout(420)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_it_trains(num_processes):
    """
    TRL merges the adapter into the engine's weights at each step, here in float32 into bfloat16.

    In two processes branches begin with other tokens than their base trajectories.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if num_processes == 2 else []
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    completed = subprocess.run(
        [sys.executable, *launcher, HERE / "colocate_train.py"],
        env=os.environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert completed.returncode == 0 and "Traceback" not in completed.stderr, completed.stderr[-3000:]
    result = json.loads(completed.stdout.splitlines()[-1])
    steps = [entry for entry in result["log"] if "loss" in entry]
    assert len(steps) == 4
    for step in steps:
        assert step["fr3e/anchor/count"] > 0
        assert step["sampling/sampling_logp_difference/mean"] < 0.05
    assert result["longest"] <= SIZES["max_completion_length"]
    # Two rounds of generation for each sync; asleep outside a step, and awake from its first round to its last
    assert result["awake"] == ["sync", "generate", "generate"] * 4
    assert result["with_sleep"] == 2 * [
        "sync",
        "wake_up ['weights']",
        "wake_up ['kv_cache']",
        "generate",
        "generate",
        "sleep 2",
    ]
