"""
First Return: which base trajectories to explore, and from where.

A position is an index into a completion's token ids, from 0. Branching at position p keeps the prefix
`completion_ids[:p]` and samples token p, and all that follow, anew: the uncertain choice is made again. Position 0 is
the prompt's own state, and never an anchor. (The paper counts tokens from 1: its a_j is p + 1.)

Numbers along a trajectory may be NumPy arrays, or tensors on the CPU. Shapes are written with
    - L: length of a completion
"""

import math
import random
import statistics
from collections import Counter
from typing import Any

import numpy as np
import torch

# What weight the steps before have in the threshold of the next one
SMOOTHING = 0.7


def select_bases(rewards: list[float], selection: str, seed: str) -> list[int]:
    """
    Choose the base trajectories to explore.

    Args:
        rewards (`list[float]`):
            Reward of each base trajectory, NaN where it is unscorable, or not scored yet: `"all"` and `"random"` do not
            look at it.
        selection (`str`):
            `"mixed"` (one of the best-scored and one of the worst-scored when the scores differ, one at random when
            they do not), `"best"` or `"worst"`, each among the scorable unless none is; `"random"` or `"all"`.
        seed (`str`):
            Decides among equals.

    Returns:
        `list[int]`: Indices of the chosen trajectories: the better before the worse, or in order.
    """
    if selection == "all":
        return list(range(len(rewards)))
    rng = random.Random(seed)
    scorable = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    if selection == "random" or not scorable:
        return [rng.randrange(len(rewards))]
    best = max(rewards[i] for i in scorable)
    worst = min(rewards[i] for i in scorable)
    wanted = {"mixed": [best, worst], "best": [best], "worst": [worst]}[selection]
    if best == worst:
        return [rng.choice(scorable)]
    return [rng.choice([i for i in scorable if rewards[i] == reward]) for reward in wanted]


def anchor_scores(score: str, entropies: Any, logprobs: Any, seed: str) -> Any:
    """
    How much each position of a trajectory calls for exploration.

    Args:
        score (`str`):
            `"entropy"`, `"surprisal"` or `"random"`.
        entropies (`np.ndarray` of shape (L,)):
            Entropy of the next-token distribution at each position, in nats.
        logprobs (`np.ndarray` of shape (L,)):
            Log-probability of each token, in nats.
        seed (`str`):
            Decides the random scores.

    Returns:
        `np.ndarray` of shape (L,): The higher, the better an anchor.
    """
    if score == "entropy":
        return entropies
    if score == "surprisal":
        return -logprobs
    rng = random.Random(seed)
    return np.array([rng.random() for _ in range(len(entropies))], dtype=np.float32)


def eligible_positions(
    entropies: Any, budget: int, min_budget: int = 1, quantile: float | None = None, starts: list[int] | None = None
) -> np.ndarray:
    """
    Positions of a trajectory that may become anchors.

    Args:
        entropies (`np.ndarray` of shape (L,)):
            Entropy of the next-token distribution at each position, in nats; NaN at tokens of tools.
        budget (`int`):
            Longest completion allowed, in tokens.
        min_budget (`int`):
            Least number of tokens that an anchor must leave of `budget`.
        quantile (`float`, *optional*):
            Only positions whose entropy is above this quantile of `entropies` are eligible.
        starts (`list[int]`, *optional*):
            Only these are eligible.

    Returns:
        `np.ndarray` of shape (L,): Boolean mask. Position 0 is never eligible, nor is a token of a tool.
    """
    entropies = np.asarray(entropies)
    eligible = ~np.isnan(entropies)
    eligible[:1] = eligible[max(budget - min_budget + 1, 0) :] = False
    if quantile is not None:
        eligible &= entropies > torch.nanquantile(torch.from_numpy(entropies), quantile).item()
    if starts is not None:
        eligible &= np.isin(np.arange(len(entropies)), starts)
    return eligible


def rank_anchors(scores: Any, eligible: Any, num_anchors: int, min_gap: int = 1) -> list[int]:
    """
    Positions with the highest scores, best first, ties going to the earlier one.

    Args:
        scores (`np.ndarray` of shape (L,)):
            Score of each position.
        eligible (`np.ndarray` of shape (L,)):
            Boolean mask of the positions that may be chosen.
        num_anchors (`int`):
            How many to choose at most.
        min_gap (`int`):
            A position closer than this, in tokens, to a better anchor is not chosen.

    Returns:
        `list[int]`: At most `num_anchors` positions; fewer if no more are eligible.
    """
    positions = np.flatnonzero(eligible)
    best_first = positions[np.argsort(-np.asarray(scores)[positions], kind="stable")]
    return _apart(best_first.tolist(), num_anchors, min_gap)


def first_anchors(entropies: Any, eligible: Any, threshold: float, num_anchors: int, min_gap: int = 1) -> list[int]:
    """
    The first positions with an entropy above a threshold: whether one is an anchor depends on nothing that follows.

    Args:
        entropies (`np.ndarray` of shape (L,)):
            Entropy of the next-token distribution at each position, in nats.
        eligible, num_anchors, min_gap:
            See [`rank_anchors`].
        threshold (`float`):
            In nats.

    Returns:
        `list[int]`: At most `num_anchors` positions, in order.
    """
    above = np.flatnonzero(np.asarray(eligible) & (np.asarray(entropies) > threshold))
    return _apart(above.tolist(), num_anchors, min_gap)


def _apart(positions: list[int], num_anchors: int, min_gap: int) -> list[int]:
    """The first `num_anchors` of `positions`, without those that are too close to one before."""
    anchors: list[int] = []
    for position in positions:
        if len(anchors) == num_anchors:
            break
        if all(abs(position - anchor) >= min_gap for anchor in anchors):
            anchors.append(position)
    return anchors


def uncertainty(entropies: Any, eligible: Any, num_anchors: int) -> float:
    """
    How uncertain a trajectory is where it is to branch: the threshold at which it has as many anchors as it gets.

    Args:
        entropies, eligible, num_anchors:
            See [`first_anchors`].

    Returns:
        `float`: Entropy of the position that is `num_anchors`-th of the most uncertain ones, in nats; 0 if there are
        fewer, and NaN for no anchors.
    """
    if num_anchors == 0:
        return math.nan
    known = np.sort(np.asarray(entropies)[np.asarray(eligible)])
    return known[-num_anchors].item() if len(known) >= num_anchors else 0.0


def next_threshold(threshold: float | None, uncertainties: list[float]) -> float:
    """
    The threshold of the next step: their median, smoothed over steps.

    Args:
        threshold (`float`, *optional*):
            That of this step, in nats.
        uncertainties (`list[float]`):
            How uncertain this step's base trajectories were, see [`uncertainty`], NaN for those without anchors.
    """
    found = statistics.median(value for value in uncertainties if not math.isnan(value))
    return found if threshold is None else SMOOTHING * threshold + (1 - SMOOTHING) * found


def even_shares(num_anchors: int, num_bases: int) -> list[int]:
    """Anchors of each base trajectory of a prompt where all are explored, the odd ones to the first."""
    share, odd = divmod(num_anchors, num_bases)
    return [share + (b < odd) for b in range(num_bases)]


def share_anchors(ranked: list[list[int]], num_anchors: int) -> list[list[int]]:
    """
    Divide a prompt's anchors among the chosen trajectories as evenly as they allow, the odd ones to the better.

    Args:
        ranked (`list[list[int]]`):
            For each trajectory, the better first: its anchors, best first.
        num_anchors (`int`):
            Anchors of the prompt.

    Returns:
        `list[list[int]]`: For each trajectory its anchors, sorted by position. What one cannot use goes to the others;
        fewer than `num_anchors` in all if they are too short.
    """
    turns = [(turn, i) for i, anchors in enumerate(ranked) for turn in range(len(anchors))]
    counts = Counter(i for _, i in sorted(turns)[:num_anchors])
    return [sorted(anchors[: counts[i]]) for i, anchors in enumerate(ranked)]
