"""
Families of problems in English, for a policy that is a language model.

A problem is a row for TRL: `prompt`, with one message of the user, and what the reward needs. Held out are patterns of
sentences, and not numbers alone.
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from . import patterns
from .patterns import HELDOUT_PATTERNS, HELDOUT_STOCKS, PATTERNS, STOCKS, Pattern, Stock


@dataclass(frozen=True)
class Family(ABC):
    """
    A family of problems, in each of which one of `levels` numbers of things happen, with equal chances.

    `num_examples` worked examples, with `example_levels` where these are others, warm up the starting policy. Every one
    fits into `max_completion_length` tokens of SmolLM2. The reward function is named as `fr3e train` takes it.
    """

    name: str
    levels: tuple[int, ...]
    num_examples: int
    max_completion_length: int
    reward_func: str = "math_reward"
    example_levels: tuple[int, ...] | None = None

    @property
    @abstractmethod
    def patterns(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Patterns to train on, and patterns that are held out."""

    @abstractmethod
    def problem(self, pattern: Any, level: int, rng: random.Random) -> tuple[str, str, str]:
        """A problem of a pattern, its solution as the reward takes it, and how the demonstrator writes it down."""

    def examples(self, split: str, seed: int, size: int) -> Dataset:
        """
        Problems of a split with worked solutions, the first `size` of an endless sequence that the seed decides.

        `"policy"` and `"train"` have the same patterns and no problem in common; `"test"` has other patterns. Columns
        are `prompt` and `completion` (messages), `solution` (`str`) and `level` (`int`).
        """
        rng = random.Random(f"{self.name} {split} {seed}")
        known, heldout = self.patterns
        levels = (split == "policy" and self.example_levels) or self.levels
        rows: list[dict[str, Any]] = []
        while len(rows) < size:
            level = rng.choice(levels)
            question, solution, worked = self.problem(rng.choice(heldout if split == "test" else known), level, rng)
            # Of problems with known patterns, one in five is for the starting policy
            if split != "test" and (random.Random(question).random() < 0.2) != (split == "policy"):
                continue
            rows.append(
                {
                    "prompt": [{"role": "user", "content": question}],
                    "completion": [{"role": "assistant", "content": worked}],
                    "solution": solution,
                    "level": level,
                }
            )
        return Dataset.from_list(rows)


@dataclass(frozen=True)
class Words(Family):
    r"""
    Problems in a dozen scenes, whose solution names each step: of up to four, as many kinds as there are.

    `Anna has 12 apples in a basket. Anna loses 4 apples. … How many apples are in the basket now?` is continued by
    `There are 12 apples to start with. Without those 4 there are 12 - 4 = 8 apples. … So the answer is \boxed{23}.`

    Args:
        num_asides (`int`):
            Sentences that do not matter: so many in each part of the story, and of the solution.
    """

    num_asides: int = 0

    @property
    def patterns(self) -> tuple[Sequence[Pattern], Sequence[Pattern]]:
        return PATTERNS, HELDOUT_PATTERNS

    def problem(self, pattern: Pattern, level: int, rng: random.Random) -> tuple[str, str, str]:
        who, total = rng.choice(patterns.NAMES), rng.randint(4, 12)
        story = [pattern.start.format(who=who, n=total)]
        worked = [rng.choice(patterns.OPENINGS).format(a=total, things=pattern.things)]
        for kind in rng.sample([*patterns.STEPS], level):
            numbers: dict[str, Any] = {"a": total, "n": rng.randint(2, 9), "k": rng.randint(2, 5)}
            if kind == "more":
                total += numbers["n"]
            elif kind == "fewer":
                numbers["n"] = rng.randint(2, min(total - 2, 9))  # neither is 1: words are plural
                total -= numbers["n"]
            elif kind == "groups":
                numbers["n"] = rng.randint(2, 4)
                numbers["p"] = numbers["n"] * numbers["k"]
                total += numbers["p"]
            else:
                total *= 2
            story += rng.sample(patterns.ASIDES, self.num_asides)
            story.append(rng.choice(pattern.events[kind]).format(who=who, things=pattern.things, **numbers))
            worked += rng.sample(patterns.REMARKS, self.num_asides)
            worked.append(rng.choice(patterns.STEPS[kind]).format(b=total, things=pattern.things, **numbers))
        worked.append(rng.choice(patterns.ENDINGS).format(b=total, things=pattern.things))
        question = pattern.question.format(who=who)
        return " ".join([*story, question]), f"\\boxed{{{total}}}", " ".join(worked)


@dataclass(frozen=True)
class Stocks(Family):
    """
    How many of four kinds there are after some have come and gone. The reward is the share of the kinds that are right.

    The solution has a line for each kind, in the order of the list. The last number of its line counts.
    """

    @property
    def patterns(self) -> tuple[Sequence[Stock], Sequence[Stock]]:
        return STOCKS, HELDOUT_STOCKS

    def problem(self, pattern: Stock, level: int, rng: random.Random) -> tuple[str, str, str]:
        who = rng.choice(patterns.NAMES)
        start = {things: rng.randint(10, 40) for things in pattern.things}
        total, sums = dict(start), {things: str(n) for things, n in start.items()}
        story = [pattern.start.format(who=who, list=", ".join(f"{n} {things}" for things, n in start.items()))]
        for _ in range(level):
            things, n = rng.choice(pattern.things), rng.randint(2, 19)
            comes = total[things] <= n or rng.random() < 0.5
            total[things] += n if comes else -n
            sums[things] += f" {'+' if comes else '-'} {n}"
            story.append((pattern.more if comes else pattern.fewer).format(who=who, n=n, things=things))
        lines = [
            rng.choice(patterns.LINES).format(things=things, sum=sums[things], a=start[things], b=n)
            if sums[things] != str(n)
            else f"{things}: {n}"
            for things, n in total.items()
        ]
        question = "How many of each are there now? Write a line for each."
        solution = " ".join(f"{things}:{n}" for things, n in total.items())
        return " ".join([*story, question]), solution, "\n".join(lines)


def share_right(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    """
    Reward of [`Stocks`]: the share of the kinds of which a completion says rightly how many there are.

    A solution has the kinds and their numbers: `pens:12 rulers:3 folders:8 erasers:40`.
    """
    rewards = []
    for completion, answer in zip(completions, solution, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        right = dict(pair.split(":") for pair in answer.split())
        counted: dict[str, str] = {}
        for line in text.splitlines():
            numbers = re.findall(r"-?\d+(?:\.\d+)?", line)
            if numbers:
                counted.setdefault(line.split(":")[0].strip(), numbers[-1])
        rewards.append(sum(counted.get(things) == n for things, n in right.items()) / len(right))
    return rewards


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # Learned from stories of two events too, the policy writes well and solves few
        Words(name="short", levels=(1,), num_examples=240, max_completion_length=56, example_levels=(1, 2)),
        Words(name="words", levels=(1, 2, 3), num_examples=480, max_completion_length=88),
        Words(name="stories", levels=(1, 2), num_examples=480, max_completion_length=160, num_asides=3),
        # From a number that only has to be read to every kind of event: many groups are all right or all wrong
        Words(name="mixed", levels=(0, 1, 2, 3, 4), num_examples=480, max_completion_length=108),
        Stocks(
            name="stocks",
            levels=(1, 2, 3),
            num_examples=480,
            max_completion_length=140,
            reward_func="benchmarks.language.families.share_right",
        ),
    )
}
