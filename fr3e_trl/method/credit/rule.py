"""
The interface of credit rules, which turn the trees of a step into an advantage for each token.

A rule gets finished trees with rewards, the plan, and the prior of prompts. It returns [`Credit`], which keeps this
form up to the loss. A new rule is a subclass of [`CreditRule`] in a file of its own, and a line in the table of this
folder's `__init__`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..plan import Plan
from ..tree import Tree
from .prior import Prior


class RowCredit(NamedTuple):
    """
    The credit of a row.

    Args:
        stretches (`list[tuple[int, float, float]]`):
            Stretches of the row's own tokens, without its prefix, with equal credit, in order: number of tokens, weight
            and advantage of each token. A loss that is divided by its number of tokens counts a token by its weight.
            Advantages include that weight already.
        advantage (`float`):
            Mean advantage over the row's own tokens, for tables, metrics, and losses with one advantage per row. With
            `length_normalized` it is multiplied by the row's length, which gives it the unit of rewards.
        in_loss (`bool`): Whether the row is in the loss, or rejected.
    """

    stretches: list[tuple[int, float, float]]
    advantage: float
    in_loss: bool


class StateCredit(NamedTuple):
    """
    The value of a state, for tables and metrics.

    Args:
        value (`float`): V, the mean reward of its rollouts, NaN if none is scorable.
        modulation (`float`): α, the factor on the advantages of its rollouts.
        rejected (`bool`): Whether its rollouts are left out of the loss.
    """

    value: float
    modulation: float
    rejected: bool


@dataclass(frozen=True)
class Credit:
    """
    The result of a credit rule.

    Args:
        rows (`list[RowCredit]`): For each rollout of each state of each tree, in order.
        states (`list[StateCredit]`): For each state of each tree, in order.
        values (`torch.Tensor` of shape (P,)): Value of each tree's prompt for a value tracker, NaN if unknown.
    """

    rows: list[RowCredit]
    states: list[StateCredit]
    values: torch.Tensor


class CreditRule:
    """
    Credits the tokens of a step's rows. A subclass declares its requirements and implements [`credit`].

    Attributes:
        requires (`Mapping[str, Sequence]`):
            Settings of `FR3EConfig` that it restricts, and the values that it allows.
        needs_anchors (`bool`): Whether there must be anchors.
        wants_stopping_rule (`bool`):
            Whether anchors should not depend on later tokens. If so, `anchor_threshold="auto"` is kept, and anchors are
            shared evenly among base trajectories. Otherwise `"auto"` becomes `None`, and anchors that a trajectory
            is too short for go to others.
        copies_missing_branches (`bool`):
            What replaces the branches of anchors that were not found: copies of the base trajectory, without generating
            anything (`True`), or rollouts of the prompt (`False`).
        by_token (`bool`):
            Whether the loss gets an advantage and a weight for each token, or an advantage for each row.
        leaves_out_truncated (`bool`):
            Whether `mask_truncated_completions` excludes truncated rollouts from all comparisons, while other rollouts
            still credit the tokens that they share with these. Otherwise TRL masks truncated rows completely.
        without_prior (`str`):
            End of a warning: what goes wrong for a prompt with a single base trajectory and no prior.
    """

    requires: ClassVar[Mapping[str, Sequence[Any]]] = {}
    needs_anchors: ClassVar[bool] = False
    wants_stopping_rule: ClassVar[bool] = False
    copies_missing_branches: ClassVar[bool] = False
    by_token: ClassVar[bool] = True
    leaves_out_truncated: ClassVar[bool] = False
    without_prior: ClassVar[str] = "whose base trajectory then has nothing to be compared with and teaches nothing"

    def credit(self, trees: Sequence[Tree], plan: Plan, prior: Prior) -> Credit:
        """Credit the rows of a step, given its finished trees, the settings, and the prior of its prompts."""
        raise NotImplementedError


def batch_std(rewards: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the scorable rewards in (R,), plus 1e-4, as in GRPO; 1 if there are fewer than two."""
    scorable = rewards[~rewards.isnan()]
    return scorable.std() + 1e-4 if len(scorable) > 1 else rewards.new_ones(())
