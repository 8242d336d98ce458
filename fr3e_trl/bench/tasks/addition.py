"""Long addition: many settled steps, then a few uncertain ones, all of which must be right."""

import random
import re
import string
from dataclasses import dataclass
from typing import Any, ClassVar

from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

from .task import Task

NUM_DIGITS = 24
COLUMNS = string.ascii_uppercase[:NUM_DIGITS]

# The demonstrator's attention is gone after as many columns. From then on, how often he is right in an entry of his
# table of sums, and the share of such entries
NUM_CAREFUL = 16
RELIABILITIES, SHARES = (1.0, 0.60, 0.40), (0.4, 0.4, 0.2)

PROBLEMS = ChainSumDataset(
    ChainSumConfig(min_terms=2, max_terms=2, min_digits=NUM_DIGITS, max_digits=NUM_DIGITS, seed=0, size=1_000_000_000)
)

LINE = re.compile(r"([A-Z]) \d \+ \d \+ \d = (\d) (\d)")


def _make_table() -> dict[tuple[int, int], tuple[float, int]]:
    """For each two digits, how often the tired demonstrator is right, and how far off he is when he is not."""
    rng = random.Random(24)
    return {
        (a, b): (rng.choices(RELIABILITIES, SHARES)[0], rng.randrange(1, 10)) for a in range(10) for b in range(10)
    }


TABLE = _make_table()


@dataclass(frozen=True)
class LongAddition(Task):
    """
    Two numbers of 24 digits, added column by column from the right: a `chain_sum` of reasoning-gym, scored by it.

    The prompt has the digits of each column, `A 3 9 B 5 0 … :`, and is continued by
    `A 3 + 9 + 0 = 1 2 ; B 5 + 0 + 1 = 0 6 ; …`. The demonstrator starts to slip in the last columns, in some sums more
    than in others.
    """

    name: str = "addition"
    max_completion_length: int = 220
    policy_steps: int = 800

    words: ClassVar = [*COLUMNS, *string.digits, "+", "=", ";", ":"]

    def problem(self, rng: random.Random) -> dict[str, Any]:
        while True:
            problem = PROBLEMS[rng.randrange(len(PROBLEMS))]
            first, sign, second = problem["metadata"]["expression"].split()
            if sign == "+":
                digits = zip(COLUMNS, reversed(first), reversed(second), strict=True)
                return {"prompt": f"{' '.join(map(' '.join, digits))} :", "answer": problem["answer"]}

    def demonstrate(self, problem: dict[str, Any], rng: random.Random, is_noisy: bool = True) -> str:
        words = problem["prompt"].split()
        carry, lines = 0, []
        for i, column in enumerate(COLUMNS):
            a, b = int(words[3 * i + 1]), int(words[3 * i + 2])
            tens, units = divmod(a + b + carry, 10)
            reliability, error = TABLE[a, b]
            if is_noisy and i >= NUM_CAREFUL and rng.random() > reliability:
                units = (units + error) % 10
            lines.append(f"{column} {a} + {b} + {carry} = {tens} {units}")
            carry = tens
        return " ; ".join(lines)

    def is_right(self, completion: str, *, answer: str) -> bool:
        return PROBLEMS.score_answer(read_sum(completion), {"answer": answer}) == 1


def read_sum(completion: str) -> str | None:
    """The sum that stands under the columns of a completion, `None` if a column is missing or out of place."""
    lines = [LINE.fullmatch(line) for line in completion.split(" ; ")]
    if not all(lines) or "".join(line[1] for line in lines if line) != COLUMNS:
        return None
    units = [line[3] for line in lines if line]
    carry = lines[-1][2] if lines[-1] else ""
    return (carry + "".join(reversed(units))).lstrip("0")
