"""pass@k and maj@k of sampled completions, whose answers are extracted and grouped."""

import math
import re
from dataclasses import asdict
from statistics import fmean
from typing import Any

from ..rewards import math_answers, math_reward
from .statistics import best_of_k, majority_of_k, mean_interval, share_interval

# Rewards whose answers are those of math-verify
MATH_REWARDS = ("math_reward", "accuracy_reward", "reasoning_accuracy_reward")


def measures(
    problems: list[list[dict[str, Any]]], reward_funcs: list[str], ks: list[int], answer_regex: str | None
) -> dict[str, Any]:
    """
    pass@k and maj@k of each reward function, and their intervals over problems.

    Args:
        problems (`list[list[dict[str, Any]]]`):
            The completions of each problem, as lines of `completions.jsonl`.
        reward_funcs (`list[str]`):
            Names of the reward functions.
        ks (`list[int]`):
            Values of k.
        answer_regex (`str`, *optional*):
            Pattern of the answers that vote. If `None`, see [`extract_answers`].
    """
    by_maths = answer_regex is None and any(name.rpartition(".")[2] in MATH_REWARDS for name in reward_funcs)
    groups = [group_answers(answers, by_maths) for answers in extract_answers(problems, answer_regex, by_maths)]
    result = {}
    for name in reward_funcs:
        values: dict[str, list[float]] = {}
        all_rewards = [[line["rewards"][name] for line in lines] for lines in problems]
        unscored = [[r is None or not math.isfinite(r) for r in rewards] for rewards in all_rewards]
        scored = [i for i, flags in enumerate(unscored) if not any(flags)]  # otherwise the solution is unreadable
        for i in scored:
            rewards = all_rewards[i]
            votes = [(len(members), fmean(rewards[j] for j in members)) for members in groups[i]]
            num_without = len(rewards) - sum(count for count, _ in votes)
            for k in ks:
                values.setdefault(f"pass@{k}", []).append(best_of_k(rewards, k))
            for k in (k for k in ks if k > 1):
                values.setdefault(f"maj@{k}", []).append(majority_of_k(votes, num_without, k))
        are_shares = all(0 <= reward <= 1 for i in scored for reward in all_rewards[i])
        result[name] = {
            "num_scored": len(scored),
            "num_unscored": sum(map(sum, unscored)),
            "are_shares": are_shares,
            **{measure: with_interval(means, are_shares) for measure, means in values.items()},
        }
    return result


def with_interval(values: list[float], are_shares: bool) -> dict[str, float]:
    """Mean over problems, with its interval if there are several. `are_shares`: whether all are in [0, 1]."""
    if len(values) == 1:
        return {"mean": values[0]}
    return asdict(share_interval(values) if are_shares else mean_interval(values))


def extract_answers(problems: list[list[dict[str, Any]]], regex: str | None, by_maths: bool) -> list[list[str | None]]:
    """
    The answer of each completion of each problem: the last match of the pattern, or without one what math-verify
    extracts (`by_maths`) or the whole text. `None` if a completion has no answer.
    """
    texts = [line["completion"] for lines in problems for line in lines]
    answers: list[str | None]
    if regex is not None:
        answers = [last_match(regex, text) for text in texts]
    else:
        answers = math_answers(texts) if by_maths else [text.strip() for text in texts]
    remaining = iter(answers)
    return [[next(remaining) for _ in lines] for lines in problems]


def last_match(regex: str, text: str) -> str | None:
    """The last match of a pattern, or its first group, stripped. `None` if there is none."""
    found = None
    for match in re.finditer(regex, text, re.DOTALL):
        found = match[1 if match.re.groups else 0]
    return None if found is None else found.strip()


def group_answers(answers: list[str | None], by_maths: bool) -> list[list[int]]:
    r"""
    Group a problem's equal answers, and return the indices of each group, in the order of their first answers.

    With `by_maths`, math-verify decides which are equal, such as `\frac{1}{2}` and `0.5`; otherwise their texts do.
    `None` is in no group.
    """
    groups: dict[str, list[int]] = {}  # by their first answers
    same: dict[str, str] = {}  # the first answer of each text's group
    for i, answer in enumerate(answers):
        if answer is None:
            continue
        if answer not in same:
            others = [rf"\boxed{{{other}}}" for other in groups] if by_maths else []
            verdicts = math_reward([rf"\boxed{{{answer}}}"] * len(others), others) if others else []
            same[answer] = next((other for other, equal in zip(groups, verdicts, strict=False) if equal), answer)
        groups.setdefault(same[answer], []).append(i)
    return list(groups.values())
