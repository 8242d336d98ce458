"""A machine that reads a loop of letters, with words that mean nothing: most of what is uncertain does not matter."""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from .machine import StateMachine

FILLERS = ["well", "now"]
NUM_FILLERS = 2


@dataclass(frozen=True)
class Distractors(StateMachine):
    """
    The states of a machine that goes through a loop of three letters, 10 steps, with words that mean nothing.

    The prompt `s0 : : 7 c a f` is continued by `s1 7 c 10 now well a f c s2 10 a 4 well well f c a …`. Each word after
    a state is one of two by a fair coin: of twenty words that do not matter the policy is as uncertain as it can be of
    a state that does.
    """

    name: str = "distractors"
    max_completion_length: int = 10 * 9 + 1
    policy_steps: int = 700
    num_steps: int = 10
    num_careful: int = 4
    loop_length: int = 3

    words: ClassVar = [*StateMachine.words, *FILLERS]

    def demonstrate(self, problem: dict[str, Any], rng: random.Random, is_noisy: bool = True) -> str:
        words = []
        for i, word in enumerate(super().demonstrate(problem, rng, is_noisy).split()):
            is_state = i % (self.loop_length + 4) == 3
            words += [word, *rng.choices(FILLERS, k=NUM_FILLERS)] if is_state else [word]
        return " ".join(words)
