"""
What several processes gain.

    fr3e cost processes

The same global batch is trained on by one process and by two, in turns, each process with one thread: the ratio of
their step times. Without a GPU the processes talk by gloo.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..arms import make_trainer
from ..runs import be_quiet
from .common import SETTINGS, add_task_options, followed, make_parser, over_turns, policy_of, task_of

NUM_PROMPTS, NUM_GENERATIONS = 8, 16  # of a step, in all processes


def train(options: argparse.Namespace) -> None:
    """Train in as many processes as there are, and write the time of each step."""
    be_quiet()
    settings = SETTINGS | {
        "trainer": "fr3e",
        "num_prompts": NUM_PROMPTS,
        "num_generations": NUM_GENERATIONS,
        "max_steps": options.num_steps + 1,
    }
    task, policy = task_of(options)
    trainer: Any = make_trainer(settings, policy, task, options.output.parent, seed=0)
    began = [time.perf_counter()]
    step = trainer.training_step

    def timed(*args, **kwargs):
        began.append(time.perf_counter())
        return step(*args, **kwargs)

    trainer.training_step = timed
    trainer.train()
    seconds = [later - earlier for earlier, later in pairwise([*began[2:], time.perf_counter()])]  # not the first
    if trainer.is_world_process_zero():
        options.output.write_text(json.dumps(seconds))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def step_times(num_processes: int, options: argparse.Namespace) -> list[float]:
    """Seconds of each step in so many processes."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "seconds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
        command += [
            "-m",
            "fr3e_trl.commands.cli",
            "cost",
            "processes",
            f"--output={output}",
            f"--num_steps={options.num_steps}",
        ]
        command += [f"--task={options.task}", f"--policy={options.policy}"]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{done.stderr}\nTraining in {num_processes} processes failed.")
        return json.loads(output.read_text())


def main(argv: list[str]) -> None:
    """Measure, and print the ratio."""
    parser = make_parser(
        __doc__,
        num_turns=(5, "turns"),
        num_steps=(11, "steps of each in a turn, beside a first one that is not counted"),
    )
    add_task_options(parser)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)  # what the processes are launched with
    options = parser.parse_args(argv)
    if options.output:
        train(options)
        return
    options.policy = policy_of(options)  # made before the first turn, if it has to be
    ratios = []
    for _ in followed(range(options.num_turns), "turn"):
        one, two = (statistics.median(step_times(n, options)) for n in (1, 2))
        ratios.append(two / one)
    print(
        f"Step time of two processes / one, {NUM_PROMPTS} prompts x {NUM_GENERATIONS} rows in all: {over_turns(ratios)}"
    )
