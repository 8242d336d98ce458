"""
First Return: which base trajectories to explore, and from where.

A position is an index into a completion's token ids, from 0. Branching at position p keeps the prefix
`completion_ids[:p]` and samples token p, and all that follow, anew: the uncertain choice is made again. Position 0 is
the prompt's own state, and never an anchor. (The paper counts tokens from 1: its a_j is p + 1.)

An anchor rule chooses positions. There are two kinds:
    - A [`StoppingRule`] looks at no token from the position on. It decides while a trajectory grows, so that rollouts
      may leave it then. A new one is a subclass with one method, and a line in `ANCHOR_RULES`.
    - A [`Ranking`] takes the highest scores of a finished trajectory.

Numbers along a trajectory may be NumPy arrays, or tensors on the CPU. Shapes are written with L, the length of a
completion, and arguments of these names are the same everywhere:
    - entropies, of shape (L,): entropy of the next-token distribution at each position, in nats
    - logprobs, of shape (L,): log-probability of each token, in nats
    - eligible, of shape (L,): boolean mask of the positions that may be chosen, see [`eligible_positions`]
    - num_anchors: how many to choose at most
    - min_gap: least distance of two anchors, in tokens
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .plan import Plan

# What weight the steps before have in the threshold of the next one
SMOOTHING = 0.7


class AnchorRule(Protocol):
    """Chooses the anchors of a trajectory."""

    def choose(self, entropies: Any, logprobs: Any, eligible: Any, num_anchors: int, seed: str) -> list[int]:
        """Positions of a finished trajectory to become anchors, the best first. `seed` decides what is random."""
        ...


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Chooses the first positions that [`is_uncertain`] names. What follows a position has no part in it."""

    min_gap: int = 1

    def is_uncertain(self, entropies: Any, positions: Any) -> Any:
        """
        Positions to branch from, if there is an anchor left.

        Args:
            entropies (`np.ndarray` or `torch.Tensor`):
                Entropy before each token, in nats: along one trajectory, or one of each of several that grow.
            positions (`np.ndarray` or `torch.Tensor`): Position of each token, of the same shape.

        Returns:
            Boolean mask of the same shape.
        """
        raise NotImplementedError

    def takes(self, position: int, anchors: Collection[int]) -> bool:
        """Whether a position that is uncertain becomes an anchor after those before it."""
        return position > 0 and (not anchors or position - max(anchors) >= self.min_gap)

    def further(
        self, entropies: Any, begin: int, num_anchors: int, anchors: Sequence[int] = (), eligible: Any = True
    ) -> list[int]:
        """
        Anchors among further tokens of a trajectory that grows: their positions, in order.

        Args:
            entropies, eligible (`np.ndarray` of shape (L,)): Of these tokens.
            begin (`int`): Position of the first of them.
            num_anchors (`int`): How many to choose at most, with those before.
            anchors (`Sequence[int]`): Those before.
        """
        found = list(anchors)
        uncertain = self.is_uncertain(entropies, np.arange(begin, begin + len(entropies)))
        for position in (begin + np.flatnonzero(uncertain & eligible)).tolist():
            if len(found) == num_anchors:
                break
            if self.takes(position, found):
                found.append(position)
        return found[len(anchors) :]

    def choose(self, entropies: Any, logprobs: Any, eligible: Any, num_anchors: int, seed: str = "") -> list[int]:
        """See [`AnchorRule.choose`]. The anchors are in order."""
        return self.further(np.asarray(entropies), 0, num_anchors, eligible=np.asarray(eligible))


@dataclass(frozen=True, kw_only=True)
class AboveThreshold(StoppingRule):
    """The first positions whose entropy reaches a threshold in nats, but for those where nothing is uncertain."""

    threshold: float

    def is_uncertain(self, entropies: Any, positions: Any) -> Any:
        # Where all entropies are alike they are the threshold, which follows them
        return (entropies >= self.threshold) & (entropies > 0)


@dataclass(frozen=True)
class Ranking:
    """The positions with the highest `scores` of a whole trajectory: (entropies, log-probs, seed) to an (L,) array."""

    scores: Callable[[Any, Any, str], Any]
    min_gap: int = 1

    def choose(self, entropies: Any, logprobs: Any, eligible: Any, num_anchors: int, seed: str) -> list[int]:
        """See [`AnchorRule.choose`]. The best comes first."""
        return rank_anchors(self.scores(entropies, logprobs, seed), eligible, num_anchors, self.min_gap)


def by_entropy(entropies: Any, logprobs: Any, seed: str) -> Any:
    return entropies


def by_surprisal(entropies: Any, logprobs: Any, seed: str) -> Any:
    return -logprobs


def at_random(entropies: Any, logprobs: Any, seed: str) -> Any:
    rng = random.Random(seed)
    return np.array([rng.random() for _ in range(len(entropies))], dtype=np.float32)


def _entropy_rule(threshold: float | None, min_gap: int) -> AnchorRule:
    """The stopping rule, where there is a threshold."""
    return Ranking(by_entropy, min_gap) if threshold is None else AboveThreshold(threshold=threshold, min_gap=min_gap)


# Anchor rules by the setting `anchor_score`, made of the threshold, which only entropies have, and the least gap
ANCHOR_RULES: dict[str, Callable[[float | None, int], AnchorRule]] = {
    "entropy": _entropy_rule,
    "surprisal": lambda threshold, min_gap: Ranking(by_surprisal, min_gap),
    "random": lambda threshold, min_gap: Ranking(at_random, min_gap),
}


def anchor_rule(plan: Plan, threshold: float | None = None) -> AnchorRule:
    """The rule of a step, of which `threshold` stands for `anchor_threshold="auto"`."""
    if not isinstance(plan.anchor_threshold, str):
        threshold = plan.anchor_threshold
    return ANCHOR_RULES[plan.anchor_score](threshold, plan.anchor_min_gap)


def select_bases(rewards: list[float], selection: str, seed: str) -> list[int]:
    """
    Choose the base trajectories to explore.

    Args:
        rewards (`list[float]`):
            Reward of each base trajectory, NaN where it is unscorable, or not scored yet: `"all"` does not look at it.
        selection (`str`):
            `"all"`; or `"mixed"`: one of the best-scored and one of the worst-scored when the scores differ, and one at
            random when they do not.
        seed (`str`): Decides among equals.

    Returns:
        `list[int]`: Indices of the chosen trajectories: in order, or the better before the worse.
    """
    if selection == "all":
        return list(range(len(rewards)))
    rng = random.Random(seed)
    scorable = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    if not scorable:
        return [rng.randrange(len(rewards))]
    best, worst = (extreme(rewards[i] for i in scorable) for extreme in (max, min))
    if best == worst:
        return [rng.choice(scorable)]
    return [rng.choice([i for i in scorable if rewards[i] == reward]) for reward in (best, worst)]


def eligible_positions(entropies: Any, budget: int) -> np.ndarray:
    """
    Positions of a trajectory that may become anchors, a mask (L,).

    Position 0 is never eligible, nor is a token of a tool, whose entropy is NaN, nor one that leaves nothing of the
    budget, the longest completion allowed in tokens.
    """
    eligible = ~np.isnan(np.asarray(entropies))
    eligible[:1] = eligible[max(budget, 0) :] = False
    return eligible


def rank_anchors(scores: Any, eligible: Any, num_anchors: int, min_gap: int = 1) -> list[int]:
    """
    Positions with the highest `scores` (L,), best first, ties going to the earlier one.

    A position closer than `min_gap` to a better anchor is not chosen, and fewer are if no more are eligible.
    """
    positions = np.flatnonzero(eligible)
    best_first = positions[np.argsort(-np.asarray(scores)[positions], kind="stable")]
    anchors: list[int] = []
    for position in best_first.tolist():
        if len(anchors) == num_anchors:
            break
        if all(abs(position - anchor) >= min_gap for anchor in anchors):
            anchors.append(position)
    return anchors


def uncertainty(entropies: Any, eligible: Any, num_anchors: int, min_gap: int = 1) -> float:
    """
    How uncertain a trajectory is where it is to branch: the threshold at which it has as many anchors as it gets.

    This is the entropy of the position that is `num_anchors`-th of the most uncertain ones, in nats; 0 if there are
    fewer, and NaN for no anchors.
    """
    if num_anchors == 0:
        return math.nan
    anchors = rank_anchors(entropies, eligible, num_anchors, min_gap)
    return np.asarray(entropies)[anchors[-1]].item() if len(anchors) == num_anchors else 0.0


def next_threshold(threshold: float | None, uncertainties: Sequence[float]) -> float:
    """
    The threshold of the next step: the median of this step's uncertainties, smoothed over steps.

    Args:
        threshold (`float`, *optional*): That of this step, in nats.
        uncertainties (`Sequence[float]`):
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

    `ranked` has the anchors of each trajectory, the better one first, best first. What one cannot use goes to the
    others. Returns those that each gets, sorted by position: fewer than `num_anchors` in all if they are too short.
    """
    turns = [(turn, i) for i, anchors in enumerate(ranked) for turn in range(len(anchors))]
    counts = Counter(i for _, i in sorted(turns)[:num_anchors])
    return [sorted(anchors[: counts[i]]) for i, anchors in enumerate(ranked)]
