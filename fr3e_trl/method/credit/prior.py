"""
Priors for the baselines of credit rules: the expected value of each prompt before its own rewards are used.

[`Prior`] computes them for the prompts of a batch. By default a prompt's prior is the mean over the other prompts,
which is noisy for a few prompts and does not exist for one. A [`ValueTracker`] remembers prompts from step to step, so
that a small batch is enough:

    prior = level + slope · offset

    - level: the mean over the batch's other prompts and a number of prompts of earlier steps.
    - offset: how much the prompt's value exceeded the level on earlier visits, a mean in which older visits weigh
      less; 0 without an earlier visit. As the policy improves, the level moves, and the priors of all prompts with it.
    - slope: the share of their offset that prompts keep until the next visit, on average: the slope of a regression
      through 0.

The tracker also estimates κ, the weight of a prior relative to rewards. The rewards of a prompt deviate from its prior
jointly, because the prior is wrong, and independently. With ρ the correlation of two rewards about the prior, the best
weight is that of James and Stein, the variance of the independent part over that of the prior's error:
κ = (1 - ρ) / ρ.

The priors and the κ of a step depend on no rewards of that step, except those of the batch's other prompts. So no
baseline depends on the reward that it is compared with.

Notation used for tensor shapes:
    - P: prompts of a batch
    - R: their rows
    - S: states of a batch
    - N: known prompts
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ..plan import Plan
from ..tree import TokenIds, Tree

# Maximum number of prompts that the level counts as. On `chain`, 32 and 64 were best, 16 and 128 slightly worse
LEVEL_PROMPTS = 64

# Factor on the weight of earlier visits in a prompt's offset at each new visit. 0.75 was better than 0.5 and 1
VISIT_DECAY = 0.75

# Number of prompts that a ratio is estimated from, and number of prompts that its start counts as
RATIO_PROMPTS = 256
START_PROMPTS = 16

# ρ at the start, κ = 4 as in the default without a tracker, and its minimum, κ = 99
START_CORRELATION = 0.2
MIN_CORRELATION = 0.01


def prompt_key(prompt_ids: TokenIds, images: Sequence[Any] = ()) -> int:
    """The key by which a prompt is remembered: a 64-bit hash of its tokens and the pixels of its images."""
    digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=8)
    for pixels in map(np.asarray, images):
        digest.update(repr(pixels.shape).encode() + pixels.tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


@dataclass
class Ratio:
    """
    A ratio of two means over recent prompts.

    Args:
        start (`float`): Its value before any prompts.
        numerator, denominator (`float`): Sums over prompts, in which older ones weigh less.
        num_prompts (`float`): Number of prompts that the sums count as.
    """

    start: float
    numerator: float = 0.0
    denominator: float = 0.0
    num_prompts: float = 0.0

    @property
    def value(self) -> float:
        """The estimate, in which the start counts as `START_PROMPTS` prompts."""
        if self.denominator == 0:
            return self.start
        seen = self.num_prompts * self.numerator / self.denominator
        return (seen + START_PROMPTS * self.start) / (self.num_prompts + START_PROMPTS)

    def add(self, numerators: torch.Tensor, denominators: torch.Tensor) -> None:
        """Add the prompts of a batch."""
        decay = (1 - 1 / RATIO_PROMPTS) ** len(numerators)
        self.numerator = self.numerator * decay + numerators.sum().item()
        self.denominator = self.denominator * decay + denominators.sum().item()
        self.num_prompts = self.num_prompts * decay + len(numerators)


class OffsetTable:
    """
    The offset of each prompt by its key, and the number of visits that it counts as.

    A hash table with open addressing, at most half full, so that the time of a step does not grow with the number of
    known prompts. A prompt takes 32 to 64 bytes.
    """

    def __init__(self, size: int = 1024):
        self.num_known = 0
        self.keys = torch.zeros(size, dtype=torch.int64)
        self.offsets = torch.zeros(size)
        self.weights = torch.zeros(size)  # 0 in a free slot

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """The slot of each key, or the free slot where it belongs, (P,)."""
        last = len(self.keys) - 1
        slots, moving = keys & last, torch.arange(len(keys))
        while len(moving):
            there = slots[moving]
            moving = moving[(self.weights[there] > 0) & (self.keys[there] != keys[moving])]
            slots[moving] = (slots[moving] + 1) & last
        return slots

    def write(self, keys: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> None:
        """Set the offsets and weights of distinct keys, (P,) each."""
        while 2 * (self.num_known + len(keys)) > len(self.keys):
            is_taken = self.weights > 0
            known = self.keys[is_taken], self.offsets[is_taken], self.weights[is_taken]
            self.__init__(2 * len(self.keys))  # type: ignore[misc]
            self.write(*known)
        while len(keys):
            slots = self.find(keys)
            self.num_known -= int((self.weights[slots] > 0).sum())
            self.keys[slots] = keys
            is_stored = self.keys[slots] == keys  # of several keys for one free slot, one wins
            self.offsets[slots[is_stored]], self.weights[slots[is_stored]] = offsets[is_stored], weights[is_stored]
            self.num_known += int(is_stored.sum())
            keys, offsets, weights = keys[~is_stored], offsets[~is_stored], weights[~is_stored]

    def state(self) -> dict[str, torch.Tensor]:
        """Keys, offsets and weights of all known prompts, (N,) each, by ascending key."""
        slots = (self.weights > 0).nonzero().flatten()
        slots = slots[self.keys[slots].argsort()]
        return {name: getattr(self, name)[slots] for name in ("keys", "offsets", "weights")}


@dataclass(eq=False)
class ValueTracker:
    """
    Values of prompts in earlier steps.

    Args:
        level, num_prompts (`float`):
            Mean value of earlier prompts, in which older ones weigh less, and the number of prompts that it counts as.
        slope ([`Ratio`]): The share of its offset that a prompt keeps.
        correlation ([`Ratio`]): ρ.
        table ([`OffsetTable`]): The offset of each prompt that was visited, by its [`prompt_key`].
    """

    level: float = 0.0
    num_prompts: float = 0.0
    slope: Ratio = field(default_factory=lambda: Ratio(start=0.0))
    correlation: Ratio = field(default_factory=lambda: Ratio(START_CORRELATION))
    table: OffsetTable = field(default_factory=OffsetTable)

    @property
    def prior_strength(self) -> float:
        """κ, in rollouts."""
        correlation = max(self.correlation.value, MIN_CORRELATION)
        return (1 - correlation) / correlation

    def priors(self, keys: list[int], values: torch.Tensor) -> torch.Tensor:
        """
        The expected value of each prompt of a batch, (P,), independent of its own rewards; NaN if unknown. The level
        includes the other prompts' actual `values` (P,), some of which may be NaN.
        """
        slope = min(max(self.slope.value, 0.0), 1.0)
        return self._levels(values) + slope * self._recall(torch.tensor(keys))[0]

    def num_known(self, keys: list[int]) -> int:
        """Number of these prompts that were visited before."""
        return int((self._recall(torch.tensor(keys))[1] > 0).sum())

    def learn(self, keys: list[int], values: torch.Tensor, rewards: torch.Tensor, prompts: torch.Tensor) -> None:
        """
        Learn from a step whose priors are not needed any more.

        Args:
            keys (`list[int]`), values (`torch.Tensor` of shape (P,)):
                Key and actual value of each prompt. Prompts with the value NaN are ignored.
            rewards, prompts (`torch.Tensor` of shape (R,)):
                Reward of each row, NaN if unscorable, and the index of its prompt.
        """
        self._learn_correlation(rewards - self.priors(keys, values)[prompts], prompts, len(keys))
        offsets = values - self._levels(values)
        self._learn_offsets(torch.tensor(keys)[~offsets.isnan()], offsets[~offsets.isnan()])
        num_prompts = self.num_prompts + int((~values.isnan()).sum())
        if num_prompts:
            self.level = (self.num_prompts * self.level + values.nansum().item()) / num_prompts
            self.num_prompts = min(num_prompts, LEVEL_PROMPTS)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, in plain values and tensors."""
        ratios = {name: asdict(getattr(self, name)) for name in ("slope", "correlation")}
        return {"level": self.level, "num_prompts": self.num_prompts, **ratios, **self.table.state()}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore what [`state`] returned."""
        self.level, self.num_prompts = state["level"], state["num_prompts"]
        self.slope, self.correlation = Ratio(**state["slope"]), Ratio(**state["correlation"])
        self.table = OffsetTable()
        self.table.write(state["keys"], state["offsets"], state["weights"])

    def _levels(self, values: torch.Tensor) -> torch.Tensor:
        """The level for each prompt of a batch, from the others' values and earlier steps, (P,)."""
        return leave_one_out_means(values, self.level, self.num_prompts)

    def _recall(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The offset of each prompt and its weight, both 0 for unknown prompts, (P,) each."""
        slots = self.table.find(keys)
        return self.table.offsets[slots], self.table.weights[slots]

    def _learn_offsets(self, keys: torch.Tensor, found: torch.Tensor) -> None:
        """Update prompts with the offsets that were found in a batch. A prompt that is in it twice counts once."""
        keys, inverse = keys.unique(return_inverse=True)
        sums = found.new_zeros(len(keys)).index_add(0, inverse, found)
        found = (sums / inverse.bincount(minlength=len(keys))).float()
        offsets, weights = self._recall(keys)
        known = weights > 0
        self.slope.add((offsets * found)[known].double(), (offsets**2)[known].double())
        weights = VISIT_DECAY * weights
        self.table.write(keys, (weights * offsets + found) / (weights + 1), weights + 1)

    def _learn_correlation(self, errors: torch.Tensor, prompts: torch.Tensor, num_prompts: int) -> None:
        """Update ρ with the errors of rows about their priors, using products of pairs of rows of a prompt."""
        zeros, known = errors.new_zeros(num_prompts), errors.nan_to_num(0)
        counts = zeros.index_add(0, prompts, (~errors.isnan()).to(errors.dtype))
        squares = zeros.index_add(0, prompts, known**2)
        products = zeros.index_add(0, prompts, known) ** 2 - squares
        paired = counts > 1
        self.correlation.add(products[paired] / (counts * (counts - 1))[paired], squares[paired] / counts[paired])


def state_values(rewards: torch.Tensor, states: torch.Tensor, num_states: int) -> torch.Tensor:
    """
    V(S_j), (S,): mean of the `rewards` (R,) of a state's rollouts that are not NaN; NaN if there are none. `states`
    (R,) has the index of each row's state, below `num_states`.
    """
    zeros = rewards.new_zeros(num_states)
    sums = zeros.index_add(0, states, rewards.nan_to_num(0))
    return sums / zeros.index_add(0, states, (~rewards.isnan()).to(rewards.dtype))


def leave_one_out_means(values: torch.Tensor, mean: float = 0.0, weight: float = 0.0) -> torch.Tensor:
    """
    Mean of the other values for each of `values` (P,), ignoring NaN; NaN if there are no others. `weight` further
    values, whose mean is `mean`, are included for all.
    """
    exist = (~values.isnan()).to(values.dtype)
    others = values.nansum() - values.nan_to_num(0)
    return (weight * mean + others) / (weight + exist.sum() - exist)


@dataclass(frozen=True)
class Prior:
    """
    The expected values of a batch's prompts, and their weight relative to rewards.

    Args:
        strength (`float`): κ, in rollouts. With 0 the prior is only used if there is nothing else to compare with.
        is_zero (`bool`): Whether each prompt's prior is 0, because rewards are normalized over its rows.
        tracker ([`ValueTracker`], *optional*):
            Values of prompts in earlier steps. If `None`, a prompt's prior is the mean over the batch's other prompts.
        keys (`list[int]`): The tracker's keys of the batch's prompts.
    """

    strength: float = 0.0
    is_zero: bool = False
    tracker: ValueTracker | None = None
    keys: list[int] = field(default_factory=list)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """
        The prior of each prompt, (P,), given the actual values of prompts, (P,); NaN if unknown. A prompt's prior does
        not depend on its own value.
        """
        if self.tracker is not None:
            return self.tracker.priors(self.keys, values)
        return torch.zeros_like(values) if self.is_zero else leave_one_out_means(values)


# Each row is only compared with the others of its state
NO_PRIOR = Prior()


def step_prior(trees: Sequence[Tree], plan: Plan, tracker: ValueTracker | None = None) -> Prior:
    """The prior of a step's prompts. The tracker does not learn here."""
    strength = plan.prior_strength
    if strength is None and tracker is not None:
        strength = tracker.prior_strength
    return Prior(strength or 0.0, plan.normalization != "none", tracker, _tree_keys(trees) if tracker else [])


def track_values(trees: Sequence[Tree], plan: Plan, tracker: ValueTracker) -> dict[str, float]:
    """Let `tracker` learn the values of the prompts of a credited step, and return metrics to log."""
    keys = _tree_keys(trees)
    strength = plan.prior_strength
    metrics = {
        "fr3e/prior/strength": tracker.prior_strength if strength is None else strength,
        "fr3e/prior/known": tracker.num_known(keys) / len(keys),
    }
    values = torch.tensor([tree.value for tree in trees], dtype=torch.float64)
    rows = [(rollout.reward, i) for i, tree in enumerate(trees) for rollout in tree.rollouts]
    rewards, prompts = zip(*rows, strict=True)
    tracker.learn(keys, values, torch.tensor(rewards, dtype=torch.float64), torch.tensor(prompts))
    return metrics


def _tree_keys(trees: Sequence[Tree]) -> list[int]:
    return [tree.key for tree in trees if tree.key is not None]
