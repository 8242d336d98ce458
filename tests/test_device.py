"""Training on a device that is not the CPU."""

import os
import subprocess
import sys
from pathlib import Path


def test_on_a_second_device():
    """In a process of its own: a device that is known once stays, and others' tests would see it."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", Path(__file__).with_name("on_second_device.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # or transformers would take the GPU
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-1000:]
