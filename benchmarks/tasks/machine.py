"""A machine that reads a loop of letters: long, mostly settled, and uncertain in a few late steps."""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from .task import Task

NUM_STATES = 13
LETTERS = "abcdefghijkl"

# How often the tired demonstrator is right in an entry of the machine's table, and the share of such entries
RELIABILITIES, SHARES = (0.98, 0.60, 0.35), (0.3, 0.4, 0.3)

_rng = random.Random(14)
TABLE = {(state, letter): _rng.randrange(NUM_STATES) for state in range(NUM_STATES) for letter in LETTERS}

# For each state and letter, how often the tired demonstrator is right, and what he writes when he is not
SLIPS = {
    entry: (_rng.choices(RELIABILITIES, SHARES)[0], (state + _rng.randrange(1, NUM_STATES)) % NUM_STATES)
    for entry, state in TABLE.items()
}


@dataclass(frozen=True)
class StateMachine(Task):
    """
    The states of a machine that goes through a loop of five letters, 23 steps.

    The prompt `s0 : : 7 c a f a k` is continued by `s1 7 c 10 a f a k c s2 10 a 4 f a k c a …`, up to `s23`: in each
    step the state, the letter that it reads, the next state, and the loop from there. The demonstrator is careful at
    first, and in the last steps slips at some entries of the machine's table, more often at some than at others. The
    reward wants every state to be right.
    """

    name: str = "machine"
    max_completion_length: int = 208
    policy_steps: int = 500
    policy_batch_size: int = 32
    num_steps: int = 23
    num_careful: int = 17
    loop_length: int = 5

    words: ClassVar = [*map(str, range(NUM_STATES)), *LETTERS, *(f"s{i}" for i in range(24)), ":"]
    letters: ClassVar = LETTERS  # that a loop is made of

    def problem(self, rng: random.Random) -> dict[str, Any]:
        state, loop = rng.randrange(NUM_STATES), rng.choices(self.letters, k=self.loop_length)
        prompt = f"s0 : : {state} {' '.join(loop)}"
        states = []
        for i in range(self.num_steps):
            state = TABLE[state, loop[i % self.loop_length]]
            states.append(state)
        return {"prompt": prompt, "answer": " ".join(map(str, states))}

    def demonstrate(self, problem: dict[str, Any], rng: random.Random, is_noisy: bool = True) -> str:
        _, _, _, start, *loop = problem["prompt"].split()
        state, steps = int(start), []
        for i in range(1, self.num_steps + 1):
            letter, *rest = loop
            reliability, wrong = SLIPS[state, letter]
            slips = is_noisy and i > self.num_careful and rng.random() > reliability
            after = wrong if slips else TABLE[state, letter]
            loop = [*rest, letter]
            steps.append(f"s{i} {state} {letter} {after} {' '.join(loop)}")
            state = after
        return " ".join(steps)

    def is_right(self, completion: str, problem: dict[str, Any]) -> bool:
        return states_of(completion) == problem["answer"].split()


def states_of(completion: str) -> list[str]:
    """The states that a completion goes through."""
    words = completion.split()
    return [state for label, state in zip(words, words[3:], strict=False) if label.startswith("s")]
