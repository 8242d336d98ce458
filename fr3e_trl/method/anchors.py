"""
First Return: which base trajectories to explore, and where to branch.

A position is an index into a completion's token ids, from 0. Branching at position p keeps the prefix
`completion_ids[:p]` and samples token p and all later tokens again, so that the uncertain choice is repeated. Position
0 is the prompt's own state, and never an anchor. (The paper counts tokens from 1, so that its a_j is p + 1.)

An anchor rule chooses positions. There are two kinds:
    - A [`StoppingRule`] decides without the token at the position and those after it, so that rollouts can branch off a
      trajectory that still grows. A new one is a subclass with one method, and a line in `ANCHOR_RULES`.
    - A [`Ranking`] takes the highest scores of a finished trajectory.

Arguments may be NumPy arrays or tensors on the CPU. L is the length of a completion, and these names mean the same
everywhere:
    - entropies, of shape (L,): entropy of the next-token distribution at each position, in nats
    - logprobs, of shape (L,): log-probability of each token, in nats
    - eligible, of shape (L,): boolean mask of the positions that may be chosen, see [`eligible_positions`]
    - num_anchors: maximum number of anchors to choose
    - min_gap: minimum distance between two anchors, in tokens
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

# Weight of earlier steps in the next threshold
SMOOTHING = 0.7


class AnchorRule(Protocol):
    """Chooses the anchors of a trajectory."""

    def choose(self, entropies: Any, logprobs: Any, eligible: Any, num_anchors: int, seed: str) -> list[int]:
        """The anchors of a finished trajectory, best first. `seed` determines random choices."""
        ...


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Chooses the first positions for which [`is_uncertain`] holds, whatever follows them."""

    min_gap: int = 1

    def is_uncertain(self, entropies: Any, positions: Any) -> Any:
        """
        Whether to branch at each position, if anchors are left.

        Args:
            entropies (`np.ndarray` or `torch.Tensor`):
                Entropy before each token, in nats: along one trajectory, or of one token of each of several.
            positions (`np.ndarray` or `torch.Tensor`): Position of each token, of the same shape.

        Returns:
            Boolean mask of the same shape.
        """
        raise NotImplementedError

    def takes(self, position: int, anchors: Collection[int]) -> bool:
        """Whether an uncertain position becomes an anchor, given the anchors before it."""
        return position > 0 and (not anchors or position - max(anchors) >= self.min_gap)

    def new_anchors(
        self, entropies: Any, begin: int, num_anchors: int, anchors: Sequence[int] = (), eligible: Any = True
    ) -> list[int]:
        """
        New anchors among the latest tokens of a growing trajectory, in order.

        Args:
            entropies, eligible (`np.ndarray` of shape (L,)): Of the latest tokens.
            begin (`int`): Position of the first of these.
            num_anchors (`int`): Maximum number of anchors, including earlier ones.
            anchors (`Sequence[int]`): Earlier anchors.
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
        """See [`AnchorRule.choose`]. Anchors are in order of position."""
        return self.new_anchors(np.asarray(entropies), 0, num_anchors, eligible=np.asarray(eligible))


@dataclass(frozen=True, kw_only=True)
class AboveThreshold(StoppingRule):
    """The first positions whose entropy reaches a threshold in nats and is not 0."""

    threshold: float

    def is_uncertain(self, entropies: Any, positions: Any) -> Any:
        # A threshold that follows entropies can reach 0
        return (entropies >= self.threshold) & (entropies > 0)


@dataclass(frozen=True)
class Ranking:
    """The positions with the highest `scores` of a whole trajectory: (entropies, log-probs, seed) to an (L,) array."""

    scores: Callable[[Any, Any, str], Any]
    min_gap: int = 1

    def choose(self, entropies: Any, logprobs: Any, eligible: Any, num_anchors: int, seed: str) -> list[int]:
        """See [`AnchorRule.choose`]."""
        return rank_anchors(self.scores(entropies, logprobs, seed), eligible, num_anchors, self.min_gap)


def by_entropy(entropies: Any, logprobs: Any, seed: str) -> Any:
    return entropies


def by_surprisal(entropies: Any, logprobs: Any, seed: str) -> Any:
    return -logprobs


def at_random(entropies: Any, logprobs: Any, seed: str) -> Any:
    rng = random.Random(seed)
    return np.array([rng.random() for _ in range(len(entropies))], dtype=np.float32)


def _entropy_rule(threshold: float | None, min_gap: int) -> AnchorRule:
    return Ranking(by_entropy, min_gap) if threshold is None else AboveThreshold(threshold=threshold, min_gap=min_gap)


# Anchor rules by the setting `anchor_score`, given the threshold, which only entropies have, and the minimum gap
ANCHOR_RULES: dict[str, Callable[[float | None, int], AnchorRule]] = {
    "entropy": _entropy_rule,
    "surprisal": lambda threshold, min_gap: Ranking(by_surprisal, min_gap),
    "random": lambda threshold, min_gap: Ranking(at_random, min_gap),
}


def anchor_rule(plan: Plan, threshold: float | None = None) -> AnchorRule:
    """The rule of a step. `threshold` is the current value of `anchor_threshold="auto"`."""
    if not isinstance(plan.anchor_threshold, str):
        threshold = plan.anchor_threshold
    return ANCHOR_RULES[plan.anchor_score](threshold, plan.anchor_min_gap)


def select_bases(rewards: list[float], selection: str, seed: str) -> list[int]:
    """
    Choose the base trajectories to explore.

    Args:
        rewards (`list[float]`):
            Reward of each base trajectory, NaN if it is unscorable. `"all"` ignores rewards.
        selection (`str`):
            `"all"`; or `"mixed"`: one of the best and one of the worst if the rewards differ, otherwise a random one.
        seed (`str`): Breaks ties.

    Returns:
        `list[int]`: Indices of the chosen trajectories, in order, or the best before the worst.
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

    Not eligible are position 0, tokens of tools, whose entropy is NaN, and positions beyond the budget, the maximum
    length of a completion in tokens.
    """
    eligible = ~np.isnan(np.asarray(entropies))
    eligible[:1] = eligible[max(budget, 0) :] = False
    return eligible


def rank_anchors(scores: Any, eligible: Any, num_anchors: int, min_gap: int = 1) -> list[int]:
    """
    Positions with the highest `scores` (L,), best first, ties going to the earlier one.

    A position closer than `min_gap` to a better anchor is skipped. There may be fewer than `num_anchors`.
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
    The highest threshold at which a trajectory has `num_anchors` anchors.

    This is the entropy of its `num_anchors`-th most uncertain position, in nats; 0 if there are fewer positions, and
    NaN without anchors.
    """
    if num_anchors == 0:
        return math.nan
    anchors = rank_anchors(entropies, eligible, num_anchors, min_gap)
    return np.asarray(entropies)[anchors[-1]].item() if len(anchors) == num_anchors else 0.0


def next_threshold(threshold: float | None, uncertainties: Sequence[float]) -> float:
    """
    The threshold of the next step: the median of this step's uncertainties, smoothed over steps.

    Args:
        threshold (`float`, *optional*): The threshold of this step, in nats.
        uncertainties (`Sequence[float]`):
            The [`uncertainty`] of each base trajectory of this step, NaN for those without anchors.
    """
    median = statistics.median(value for value in uncertainties if not math.isnan(value))
    return median if threshold is None else SMOOTHING * threshold + (1 - SMOOTHING) * median


def even_shares(num_anchors: int, num_bases: int) -> list[int]:
    """Number of anchors of each base trajectory of a prompt if all are explored. The first get one more if needed."""
    share, odd = divmod(num_anchors, num_bases)
    return [share + (b < odd) for b in range(num_bases)]


def share_anchors(ranked: list[list[int]], num_anchors: int) -> list[list[int]]:
    """
    Divide a prompt's anchors among the chosen trajectories as evenly as possible.

    `ranked` has each trajectory's candidates, best first, and better trajectories first, which get odd anchors. Anchors
    that a trajectory has no candidates for go to the others. Returns each trajectory's anchors, sorted by position.
    """
    turns = [(turn, i) for i, anchors in enumerate(ranked) for turn in range(len(anchors))]
    counts = Counter(i for _, i in sorted(turns)[:num_anchors])
    return [sorted(anchors[: counts[i]]) for i, anchors in enumerate(ranked)]
