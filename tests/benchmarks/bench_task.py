"""`python -m benchmarks compare` with a task of the tests, run as a script with its arguments."""

import sys
from dataclasses import dataclass

from datasets import Dataset

from benchmarks.compare import main
from benchmarks.tasks import TASKS


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

if __name__ == "__main__":
    main(sys.argv[1:])
