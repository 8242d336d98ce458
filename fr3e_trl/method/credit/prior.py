"""
Baselines that credit rules share: what prompts are expected to be worth before their own rewards are looked at.

[`Prior`] gives this for the prompts of a batch. By itself it is the mean over the others, which is noise for a few of
them, and does not exist for one. A [`ValueTracker`] remembers prompts from step to step, so that it needs no crowd:

    prior = level + slope · offset

    - level: the mean over the batch's other prompts and, as if they were so many more, those of the steps before.
    - offset: by how much the prompt was worth more than the level when it came before, in a mean in which each visit
      weighs less than the one after it; 0 if it never came. What the policy learns moves the level, and with it all.
    - slope: how much of its offset a prompt has kept, on average, when it came again: the slope of a regression
      through 0.

The tracker also estimates κ, how much a prior weighs against rewards. Rewards of a prompt differ from its prior
together, because the prior is wrong, and each by itself. With ρ the correlation of two of them about the prior, the
best weight is that of James and Stein: the variance of a reward by itself over that of the prior's error,
κ = (1 - ρ) / ρ.

Nothing of a step is in its own priors, but that of a batch's other prompts, nor in its κ, so that no baseline depends
on what it is for.

Notation used for tensor shapes:
    - P: prompts of a batch
    - R: their rows
    - S: states of a batch
    - N: prompts that are known
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ..plan import Plan
from ..tree import TokenIds, Tree

# Prompts that the level counts as, at most: on `chain` 32 and 64 were best, and 16 and 128 little worse
LEVEL_PROMPTS = 64

# What a visit's weight in a prompt's offset becomes with the next visit: .75 was better than .5 and 1
VISIT_DECAY = 0.75

# Prompts that a ratio is estimated over, and how many its start counts as
RATIO_PROMPTS = 256
START_PROMPTS = 16

# ρ where nothing is known: κ = 4, which is the default without a tracker. And the least that it may be: κ = 99
START_CORRELATION = 0.2
LEAST_CORRELATION = 0.01


def prompt_key(prompt_ids: TokenIds, images: Sequence[Any] = ()) -> int:
    """What a prompt is remembered by, 64 bits of a hash of its tokens and the pixels of its images."""
    digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=8)
    for pixels in map(np.asarray, images):
        digest.update(repr(pixels.shape).encode() + pixels.tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


@dataclass
class Ratio:
    """
    A ratio of two means over the last prompts, which begins at `start`.

    Args:
        start (`float`): What it is where nothing is known.
        numerator, denominator (`float`): Sums over prompts, older ones weighing less.
        num_prompts (`float`): How many these count as.
    """

    start: float
    numerator: float = 0.0
    denominator: float = 0.0
    num_prompts: float = 0.0

    @property
    def value(self) -> float:
        """As if `START_PROMPTS` prompts had shown the start."""
        if self.denominator == 0:
            return self.start
        seen = self.num_prompts * self.numerator / self.denominator
        return (seen + START_PROMPTS * self.start) / (self.num_prompts + START_PROMPTS)

    def add(self, numerators: torch.Tensor, denominators: torch.Tensor) -> None:
        """Add what a batch's prompts have shown."""
        decay = (1 - 1 / RATIO_PROMPTS) ** len(numerators)
        self.numerator = self.numerator * decay + numerators.sum().item()
        self.denominator = self.denominator * decay + denominators.sum().item()
        self.num_prompts = self.num_prompts * decay + len(numerators)


class OffsetTable:
    """
    The offsets of prompts by their keys, and how many visits each counts as.

    A hash table with open addressing, at most half full, so that a step takes the same time however many prompts are
    known. A prompt takes 32 to 64 bytes.
    """

    def __init__(self, size: int = 1024):
        self.num_known = 0
        self.keys = torch.zeros(size, dtype=torch.int64)
        self.offsets = torch.zeros(size)
        self.weights = torch.zeros(size)  # 0 where a place is free

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """The place of each key, or the free one where it belongs, (P,)."""
        last = len(self.keys) - 1
        places, moving = keys & last, torch.arange(len(keys))
        while len(moving):
            there = places[moving]
            moving = moving[(self.weights[there] > 0) & (self.keys[there] != keys[moving])]
            places[moving] = (places[moving] + 1) & last
        return places

    def write(self, keys: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> None:
        """Set the offsets and weights of keys that differ from each other, (P,) each."""
        while 2 * (self.num_known + len(keys)) > len(self.keys):
            is_taken = self.weights > 0
            known = self.keys[is_taken], self.offsets[is_taken], self.weights[is_taken]
            self.__init__(2 * len(self.keys))  # type: ignore[misc]
            self.write(*known)
        while len(keys):
            places = self.find(keys)
            self.num_known -= int((self.weights[places] > 0).sum())
            self.keys[places] = keys
            is_placed = self.keys[places] == keys  # of several keys in one free place, one is
            self.offsets[places[is_placed]], self.weights[places[is_placed]] = offsets[is_placed], weights[is_placed]
            self.num_known += int(is_placed.sum())
            keys, offsets, weights = keys[~is_placed], offsets[~is_placed], weights[~is_placed]

    def state(self) -> dict[str, torch.Tensor]:
        """Keys, offsets and weights of all prompts that are known, (N,) each, by ascending key."""
        places = (self.weights > 0).nonzero().flatten()
        places = places[self.keys[places].argsort()]
        return {name: getattr(self, name)[places] for name in ("keys", "offsets", "weights")}


@dataclass(eq=False)
class ValueTracker:
    """
    What prompts are worth, by the steps before.

    Args:
        level, num_prompts (`float`):
            Mean value of the prompts so far, older ones weighing less, and how many prompts it counts as.
        slope ([`Ratio`]): How much of its offset a prompt keeps.
        correlation ([`Ratio`]): ρ.
        table ([`OffsetTable`]): The offset of each prompt that came, by its [`prompt_key`].
    """

    level: float = 0.0
    num_prompts: float = 0.0
    slope: Ratio = field(default_factory=lambda: Ratio(start=0.0))
    correlation: Ratio = field(default_factory=lambda: Ratio(START_CORRELATION))
    table: OffsetTable = field(default_factory=OffsetTable)

    @property
    def prior_strength(self) -> float:
        """κ, in rollouts."""
        correlation = max(self.correlation.value, LEAST_CORRELATION)
        return (1 - correlation) / correlation

    def priors(self, keys: list[int], values: torch.Tensor) -> torch.Tensor:
        """
        What each prompt of a batch is expected to be worth, (P,), whatever its own rewards; NaN where nothing is known.
        `values` (P,) is what each turned out to be worth, or NaN: the others' part of the level.
        """
        slope = min(max(self.slope.value, 0.0), 1.0)
        return self._levels(values) + slope * self._recall(torch.tensor(keys))[0]

    def num_known(self, keys: list[int]) -> int:
        """How many of these prompts came before."""
        return int((self._recall(torch.tensor(keys))[1] > 0).sum())

    def learn(self, keys: list[int], values: torch.Tensor, rewards: torch.Tensor, prompts: torch.Tensor) -> None:
        """
        Remember a step, of which the priors were taken before.

        Args:
            keys (`list[int]`), values (`torch.Tensor` of shape (P,)):
                Of each prompt, and what it turned out to be worth, NaN where that is unknown: it then teaches nothing.
            rewards, prompts (`torch.Tensor` of shape (R,)):
                Reward of each row, NaN where unscorable, and its prompt, as an index.
        """
        self._learn_correlation(rewards - self.priors(keys, values)[prompts], prompts, len(keys))
        found = values - self._levels(values)
        self._learn_offsets(torch.tensor(keys)[~found.isnan()], found[~found.isnan()])
        num_prompts = self.num_prompts + int((~values.isnan()).sum())
        if num_prompts:
            self.level = (self.num_prompts * self.level + values.nansum().item()) / num_prompts
            self.num_prompts = min(num_prompts, LEVEL_PROMPTS)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, in plain values and tensors."""
        ratios = {name: asdict(getattr(self, name)) for name in ("slope", "correlation")}
        return {"level": self.level, "num_prompts": self.num_prompts, **ratios, **self.table.state()}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from what [`state`] returned."""
        self.level, self.num_prompts = state["level"], state["num_prompts"]
        self.slope, self.correlation = Ratio(**state["slope"]), Ratio(**state["correlation"])
        self.table = OffsetTable()
        self.table.write(state["keys"], state["offsets"], state["weights"])

    def _levels(self, values: torch.Tensor) -> torch.Tensor:
        """The level as each of a batch's prompts sees it, by the others' values and the steps before, (P,)."""
        return leave_one_out_means(values, self.level, self.num_prompts)

    def _recall(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The offset of each prompt, and its weight: both 0 for one that never came. (P,) each."""
        places = self.table.find(keys)
        return self.table.offsets[places], self.table.weights[places]

    def _learn_offsets(self, keys: torch.Tensor, found: torch.Tensor) -> None:
        """Add the offsets that prompts were found to have. One that is in the batch twice is taken as one visit."""
        keys, of_keys = keys.unique(return_inverse=True)
        sums = found.new_zeros(len(keys)).index_add(0, of_keys, found)
        found = (sums / of_keys.bincount(minlength=len(keys))).float()
        offsets, weights = self._recall(keys)
        known = weights > 0
        self.slope.add((offsets * found)[known].double(), (offsets**2)[known].double())
        weights = VISIT_DECAY * weights
        self.table.write(keys, (weights * offsets + found) / (weights + 1), weights + 1)

    def _learn_correlation(self, errors: torch.Tensor, prompts: torch.Tensor, num_prompts: int) -> None:
        """Add the errors of rows about their priors: over pairs of rows of a prompt, and over rows."""
        zeros, known = errors.new_zeros(num_prompts), errors.nan_to_num(0)
        counts = zeros.index_add(0, prompts, (~errors.isnan()).to(errors.dtype))
        squares = zeros.index_add(0, prompts, known**2)
        products = zeros.index_add(0, prompts, known) ** 2 - squares
        paired = counts > 1
        self.correlation.add(products[paired] / (counts * (counts - 1))[paired], squares[paired] / counts[paired])


def state_values(rewards: torch.Tensor, states: torch.Tensor, num_states: int) -> torch.Tensor:
    """
    V(S_j), (S,): mean of the `rewards` (R,) of a state's rollouts, of which those that are NaN are left out; NaN for a
    state without others. `states` (R,) has the state of each row, as an index below `num_states`.
    """
    zeros = rewards.new_zeros(num_states)
    sums = zeros.index_add(0, states, rewards.nan_to_num(0))
    return sums / zeros.index_add(0, states, (~rewards.isnan()).to(rewards.dtype))


def leave_one_out_means(values: torch.Tensor, mean: float = 0.0, weight: float = 0.0) -> torch.Tensor:
    """
    Mean of the others, for each of `values` (P,), NaN where no other exists. Values that are NaN do not exist, and
    `weight` further ones, whose mean is `mean`, count for all.
    """
    exist = (~values.isnan()).to(values.dtype)
    others = values.nansum() - values.nan_to_num(0)
    return (weight * mean + others) / (weight + exist.sum() - exist)


@dataclass(frozen=True)
class Prior:
    """
    What the prompts of a batch are expected to be worth, and how much that weighs against rewards.

    Args:
        strength (`float`): κ, in rollouts. With 0 there is no prior where there is anything else to compare with.
        is_zero (`bool`): Whether each prompt's prior is 0, because rewards are normalized over its rows.
        tracker ([`ValueTracker`], *optional*):
            What prompts were worth in the steps before. If `None`, the others of the batch are each prompt's prior.
        keys (`list[int]`): What the tracker knows the batch's prompts by.
    """

    strength: float = 0.0
    is_zero: bool = False
    tracker: ValueTracker | None = None
    keys: list[int] = field(default_factory=list)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """
        The prior of each prompt, (P,), given what prompts turned out to be worth, (P,); NaN where nothing is known. It
        does not depend on the prompt's own value.
        """
        if self.tracker is not None:
            return self.tracker.priors(self.keys, values)
        return torch.zeros_like(values) if self.is_zero else leave_one_out_means(values)


# What compares each row with the others of its state alone
NO_PRIOR = Prior()


def prior_of(trees: Sequence[Tree], plan: Plan, tracker: ValueTracker | None = None) -> Prior:
    """The prior of a step's prompts. The tracker is asked, and learns nothing."""
    strength = plan.prior_strength
    if strength is None and tracker is not None:
        strength = tracker.prior_strength
    return Prior(strength or 0.0, plan.normalization != "none", tracker, _keys_of(trees) if tracker else [])


def track_values(trees: Sequence[Tree], plan: Plan, tracker: ValueTracker) -> dict[str, float]:
    """Have `tracker` learn what the prompts of a credited step turned out to be worth, and return what to log."""
    keys = _keys_of(trees)
    strength = plan.prior_strength
    metrics = {
        "fr3e/prior/strength": tracker.prior_strength if strength is None else strength,
        "fr3e/prior/known": tracker.num_known(keys) / len(keys),
    }
    values = torch.tensor([tree.value for tree in trees], dtype=torch.float64)
    of_rows = [(r.reward, i) for i, tree in enumerate(trees) for state in tree.states for r in state.rollouts]
    rewards, prompts = zip(*of_rows, strict=True)
    tracker.learn(keys, values, torch.tensor(rewards, dtype=torch.float64), torch.tensor(prompts))
    return metrics


def _keys_of(trees: Sequence[Tree]) -> list[int]:
    return [tree.key for tree in trees if tree.key is not None]
