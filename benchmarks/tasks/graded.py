"""A long way through the states of a machine, of which each late step counts, and a bet at its end."""

import itertools
import random
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

from .machine import LETTERS, StateMachine, states_of

KEEP, BET = "keep", "bet"

# What each is worth: keeping, by whether the last state is odd; a bet, by a coin. On average that is between the two
KEPT = (0.6, 0.8)
WON = (0.5, 1.0)

PHRASE = "then round it goes and on from there the loop is read anew"  # after each step


@dataclass(frozen=True)
class GradedMachine(StateMachine):
    """
    The states of a machine that goes through a loop of five letters, 23 steps with much talk between them, and a bet.

    After the last step the completion says `keep` or `bet`. The reward is the share of the steps in which the
    demonstrator is not careful, up to the first wrong state, times what the last word earns: `keep` .6 where the right
    states end with an even one, .8 where with an odd one, `bet` .5 or 1 by a fair coin. The coin is a checksum of the
    completion: the same completion always earns the same. Best is to bet for an even state, and to keep the sure .8 of
    an odd one.
    """

    name: str = "graded"
    max_completion_length: int = 508
    policy_steps: int = 1300
    policy_batch_size: int = 8

    words: ClassVar = [*StateMachine.words, *PHRASE.split(), KEEP, BET]
    letters: ClassVar = LETTERS[:4]  # long completions are dear: a small table takes few of them to learn

    def demonstrate(self, problem: dict[str, Any], rng: random.Random, is_noisy: bool = True) -> str:
        words, length = super().demonstrate(problem, rng, is_noisy).split(), 4 + self.loop_length
        steps = [" ".join([*words[i : i + length], PHRASE]) for i in range(0, len(words), length)]
        best = KEEP if int(problem["answer"].split()[-1]) % 2 else BET
        return f"{' '.join(steps)} {rng.choice([KEEP, BET]) if is_noisy else best}"

    def score(self, completion: str, problem: dict[str, Any]) -> float:
        right, written = problem["answer"].split(), states_of(completion)
        num_right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(right, written, strict=False))))
        earned = {KEEP: KEPT[int(right[-1]) % 2], BET: WON[zlib.crc32(completion.encode()) % 2]}
        last = completion.split()[-1] if written else ""
        share = max(num_right - self.num_careful, 0) / (self.num_steps - self.num_careful)
        return earned.get(last, 0.0) * share
