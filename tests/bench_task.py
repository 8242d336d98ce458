"""`fr3e compare` with a task of the tests, run as a script: python tests/bench_task.py ARGUMENTS."""

import sys
from dataclasses import dataclass

import pytest
from datasets import Dataset

from fr3e_trl.bench.compare import main
from fr3e_trl.bench.tasks import TASKS


@dataclass(frozen=True)
class Ones:
    """A completion is right if it has a 1. The policies of `models.py` write one now and then, and learn it soon."""

    name: str = "ones"
    max_completion_length: int = 8
    tools = ()
    max_tool_calling_iterations = None

    def examples(self, split, seed, size):
        first = {"train": 1000 * seed, "heldout": 10**6}[split]
        return Dataset.from_list([{"prompt": f"{first + i}=", "right": "1"} for i in range(size)])

    def reward(self, completions, right, **kwargs):
        return [float(digit in completion) for completion, digit in zip(completions, right, strict=True)]


TASKS["ones"] = Ones()  # in the workers too, which import this file


def but_for_rounding(results):
    """To compare results with: how a product is rounded can depend on where in memory its matrices lie."""
    if isinstance(results, dict):
        return {name: but_for_rounding(result) for name, result in results.items()}
    if isinstance(results, list):
        return [but_for_rounding(result) for result in results]
    return pytest.approx(results, rel=1e-4, nan_ok=True) if isinstance(results, float) else results


if __name__ == "__main__":
    main(sys.argv[1:])
