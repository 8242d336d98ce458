"""Reward function of the smoke recipes, and an example of one of your own."""

import re


def answer_reward(completions: list[str], solution: list[str], **kwargs) -> list[float]:
    """1 where a completion's `<answer>` is the solution, else 0."""
    answers = [re.search(r"<answer>(.*?)</answer>", completion) for completion in completions]
    return [float(a is not None and a[1] == s) for a, s in zip(answers, solution, strict=True)]
