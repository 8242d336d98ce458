"""A chain of operations modulo 13: uncertain in a few steps, and lost by one wrong step."""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from .task import Task

MODULUS = 13
OPERATIONS = [f"{sign}{operand}" for sign in "+-*" for operand in range(2, 10)]
NUM_OPERATIONS = 10

# How often the demonstrator is right in an entry of his tables, and the share of such entries
RELIABILITIES, SHARES = (0.985, 0.60, 0.33), (0.74, 0.16, 0.10)


def apply(value: int, operation: str) -> int:
    """The right result of an operation."""
    sign, operand = operation[0], int(operation[1:])
    return {"+": value + operand, "-": value - operand, "*": value * operand}[sign] % MODULUS


def _make_tables() -> dict[tuple[int, str], tuple[float, int]]:
    """For each value and operation, how often the demonstrator is right, and what he writes when he is not."""
    rng = random.Random(13)
    return {
        (value, operation): (
            rng.choices(RELIABILITIES, SHARES)[0],
            (apply(value, operation) + rng.randrange(1, MODULUS)) % MODULUS,
        )
        for value in range(MODULUS)
        for operation in OPERATIONS
    }


TABLES = _make_tables()


@dataclass(frozen=True)
class ModularChain(Task):
    """
    Ten operations modulo 13, each written with its result, and the last result as the answer.

    The prompt `7 +3 *5 … :` is continued by `+3 10 *5 11 … = 4`. The demonstrator knows most entries of his tables, and
    has a wrong idea of the others that he writes now and then.
    """

    name: str = "chain"
    max_completion_length: int = 24
    policy_steps: int = 1200

    words: ClassVar = [*map(str, range(MODULUS)), *OPERATIONS, ":", "="]

    def num_operations(self, rng: random.Random) -> int:
        """How many a problem has."""
        return NUM_OPERATIONS

    def problem(self, rng: random.Random) -> dict[str, Any]:
        number = self.num_operations(rng)
        value, operations = rng.randrange(MODULUS), rng.choices(OPERATIONS, k=number)
        prompt = f"{value} {' '.join(operations)} :"
        for operation in operations:
            value = apply(value, operation)
        return {"prompt": prompt, "answer": value}

    def demonstrate(self, problem: dict[str, Any], rng: random.Random, is_noisy: bool = True) -> str:
        start, *operations, _ = problem["prompt"].split()
        value, steps = int(start), []
        for operation in operations:
            reliability, wrong = TABLES[value, operation]
            value = wrong if is_noisy and rng.random() > reliability else apply(value, operation)
            steps.append(f"{operation} {value}")
        return f"{' '.join(steps)} = {value}"

    def is_right(self, completion: str, problem: dict[str, Any]) -> bool:
        return completion.split()[-2:] == ["=", str(problem["answer"])]
