"""Countdown: the first operation decides whether the target can still be reached."""

import functools
import itertools
import random
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from .task import Task

NUM_NUMBERS = 3
LARGEST = 13
LARGEST_RESULT = 99
MIN_TARGET, MAX_TARGET = 5, 60

INSIGHT = 0.3  # chance that the demonstrator sees which operations leave the target within reach

STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")

# An operation: left operand, sign, right operand, result
Operation = tuple[int, str, int, int]


@functools.cache
def scorer() -> Any:
    """What reasoning-gym scores by. Importing it imports all of its tasks, which takes a second."""
    from reasoning_gym.games.countdown import CountdownConfig, CountdownDataset

    return CountdownDataset(CountdownConfig(seed=0, size=1))


def apply(left: int, sign: str, right: int) -> int:
    """The result of an operation."""
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


@functools.cache
def operations(numbers: tuple[int, ...]) -> list[tuple[Operation, tuple[int, ...]]]:
    """Every operation on two of the numbers, sorted, with the sorted numbers that are left after it."""
    found = {}
    for i, j in itertools.combinations(range(len(numbers)), 2):
        small, large = sorted((numbers[i], numbers[j]))
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for sign in "+-*":
            result = apply(large, sign, small)
            if result <= LARGEST_RESULT:
                found[large, sign, small, result] = tuple(sorted([*rest, result]))
    return list(found.items())


@functools.cache
def reachable(numbers: tuple[int, ...]) -> frozenset[int]:
    """What can be made of all the numbers, sorted."""
    if len(numbers) == 1:
        return frozenset(numbers)
    return frozenset().union(*(reachable(rest) for _, rest in operations(numbers)))


@dataclass(frozen=True)
class Countdown(Task):
    """
    Make a target of three numbers, as `countdown` of reasoning-gym asks and scores, one operation after the other.

    The prompt `3 8 2 > 22 :` is continued by `8 + 3 = 11 ; 11 * 2 = 22`. The demonstrator often takes
    any first operation, right or not. He then does what he can: he sees whether two numbers make the target.
    """

    name: str = "countdown"
    max_completion_length: int = 12
    policy_steps: int = 1500

    words: ClassVar = [*map(str, range(LARGEST_RESULT + 1)), "+", "-", "*", "=", ";", ">", ":"]
    answer_columns: ClassVar = ("numbers", "target")

    def problem(self, rng: random.Random) -> dict[str, Any]:
        while True:
            numbers = [rng.randint(1, LARGEST) for _ in range(NUM_NUMBERS)]
            target = rng.randint(MIN_TARGET, MAX_TARGET)
            if target in reachable(tuple(sorted(numbers))):
                prompt = f"{' '.join(map(str, numbers))} > {target} :"
                return {"prompt": prompt, "numbers": numbers, "target": target}

    def demonstrate(self, problem: dict[str, Any], rng: random.Random, is_noisy: bool = True) -> str:
        numbers, steps = tuple(sorted(problem["numbers"])), []
        while len(numbers) > 1:
            choices = operations(numbers)
            good = [choice for choice in choices if problem["target"] in reachable(choice[1])]
            has_insight = len(numbers) == 2 or not is_noisy or rng.random() < INSIGHT
            (left, sign, right, result), numbers = rng.choice(good if good and has_insight else choices)
            steps.append(f"{left} {sign} {right} = {result}")
        return " ; ".join(steps)

    def is_right(self, completion: str, problem: dict[str, Any]) -> bool:
        expression = as_expression(completion, problem["numbers"])
        return scorer().score_answer(expression, {"metadata": problem}) == 1


def as_expression(completion: str, numbers: list[int]) -> str | None:
    """The one expression that the steps of a completion make, `None` if they do not make one or have a wrong result."""
    terms = [(str(number), str(number)) for number in numbers]  # what is left, each with how it was made
    for step in completion.split(" ; "):
        match = STEP.fullmatch(step)
        if not match:
            return None
        left, sign, right, result = match.groups()
        made = []
        for operand in (left, right):
            term = next((term for term in terms if term[0] == operand), None)
            if term is None:
                return None
            terms.remove(term)
            made.append(term[1])
        if int(result) != apply(int(left), sign, int(right)):
            return None
        terms.append((result, f"({made[0]} {sign} {made[1]})"))
    return terms[0][1] if len(terms) == 1 else None
