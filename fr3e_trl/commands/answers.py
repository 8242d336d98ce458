"""pass@k and maj@k of sampled completions: extracts their answers, and groups equal ones."""

import math
import re
from collections.abc import Sequence
from typing import Any

from ..rewards import math_answers, math_reward
from .statistics import best_of_k, majority_of_k, mean_interval, share_interval

# Rewards whose answers are those of math-verify
MATH_REWARDS = ("math_reward", "accuracy_reward", "reasoning_accuracy_reward")


def measures(
    of_problems: list[list[dict[str, Any]]], reward_funcs: list[str], ks: list[int], answer_regex: str | None
) -> dict[str, Any]:
    """
    pass@k and maj@k of each reward function, and their intervals over problems.

    Args:
        of_problems (`list[list[dict[str, Any]]]`):
            The completions of each problem, as lines of `completions.jsonl`.
        reward_funcs (`list[str]`):
            Names of the reward functions.
        ks (`list[int]`):
            Values of k.
        answer_regex (`str`, *optional*):
            Pattern of the answers by which completions vote. If `None`, see [`answers_of`].
    """
    by_maths = answer_regex is None and any(name.rpartition(".")[2] in MATH_REWARDS for name in reward_funcs)
    groups = [group_answers(answers, by_maths) for answers in answers_of(of_problems, answer_regex, by_maths)]
    result = {}
    for name in reward_funcs:
        values: dict[str, list[float]] = {}
        num_scored = num_unscored = 0
        scores = [line["rewards"][name] for lines in of_problems for line in lines]
        are_shares = all(0 <= score <= 1 for score in scores if score is not None and math.isfinite(score))
        for lines, answers in zip(of_problems, groups, strict=True):
            rewards = [line["rewards"][name] for line in lines]
            unscored = [reward for reward in rewards if reward is None or not math.isfinite(reward)]
            num_unscored += len(unscored)
            if unscored:  # the solution cannot be read, for one
                continue
            num_scored += 1
            votes = [(len(members), mean([rewards[i] for i in members])) for members in answers]
            num_without = len(lines) - sum(count for count, _ in votes)
            for k in ks:
                values.setdefault(f"pass@{k}", []).append(best_of_k(rewards, k))
            for k in ks:
                if k > 1:
                    values.setdefault(f"maj@{k}", []).append(majority_of_k(votes, num_without, k))
        result[name] = {
            "num_scored": num_scored,
            "num_unscored": num_unscored,
            "are_shares": are_shares,
            **{measure: with_interval(of_measure, are_shares) for measure, of_measure in values.items()},
        }
    return result


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def with_interval(values: list[float], are_shares: bool) -> dict[str, float]:
    """Mean over problems with its interval, if there are several. `are_shares`: all rewards are in [0, 1]."""
    if len(values) == 1:
        return {"mean": values[0]}
    interval = share_interval(values) if are_shares else mean_interval(values)
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def answers_of(of_problems: list[list[dict[str, Any]]], regex: str | None, by_maths: bool) -> list[list[str | None]]:
    """
    The answer of each completion of each problem, `None` where it has none.

    It is the last match of a pattern. Without a pattern, it is what math-verify extracts, or the whole text.
    """
    texts = [line["completion"] for lines in of_problems for line in lines]
    answers: list[str | None]
    if regex is not None:
        answers = [last_match(regex, text) for text in texts]
    elif by_maths:
        answers = math_answers(texts)
    else:
        answers = [text.strip() for text in texts]
    left = iter(answers)
    return [[next(left) for _ in lines] for lines in of_problems]


def last_match(regex: str, text: str) -> str | None:
    """The last match of a pattern, or its first group, stripped. `None` if there is none."""
    matches = list(re.finditer(regex, text, re.DOTALL))
    found = matches[-1][1 if matches[-1].re.groups else 0] if matches else None
    return None if found is None else found.strip()


def group_answers(answers: list[str | None], by_maths: bool) -> list[list[int]]:
    r"""
    Group a problem's equal answers, using math-verify's `verify`, or their text.

    Args:
        answers (`list[str | None]`):
            The answer of each completion; `None` is in no group.
        by_maths (`bool`):
            Whether `\frac{1}{2}` is the same as `0.5`.

    Returns:
        `list[list[int]]`: Indices of each group, in the order of their first answers.
    """
    groups: dict[str, list[int]] = {}  # by the first answer of each
    same: dict[str, str] = {}  # of each text, that first answer
    for i, answer in enumerate(answers):
        if answer is None:
            continue
        if answer not in same:
            others = [rf"\boxed{{{other}}}" for other in groups] if by_maths else []
            verdicts = math_reward([rf"\boxed{{{answer}}}"] * len(others), others) if others else []
            same[answer] = next((other for other, equal in zip(groups, verdicts, strict=False) if equal), answer)
        groups.setdefault(same[answer], []).append(i)
    return list(groups.values())
