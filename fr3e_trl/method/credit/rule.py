"""
What a credit rule is: from the trees of a step to what each of their tokens learns.

A rule is given finished trees with rewards, the plan, and what prompts are worth. It returns [`Credit`]: this one form
is kept from there to the loss. A new rule is a subclass of [`CreditRule`] in a file of its own, and a line in the table
of this folder's `__init__`.
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
    What a row learns.

    Args:
        stretches (`list[tuple[int, float, float]]`):
            The row's own tokens, without its prefix, by stretches of equal credit, in order: how many there are, how
            many each counts for, and the advantage of each. Where a loss is divided by its number of tokens, a token
            that counts for two counts twice. Its advantage has that factor already.
        advantage (`float`):
            That of the row as a whole, the mean over its own tokens: for tables, metrics, and losses of whole rows.
            With `length_normalized` it is multiplied by the row's length, which gives it the unit of rewards.
        in_loss (`bool`): Whether the row is learned from, or rejected.
    """

    stretches: list[tuple[int, float, float]]
    advantage: float
    in_loss: bool


class StateCredit(NamedTuple):
    """
    What a state is worth, for tables and metrics.

    Args:
        value (`float`): V, the mean reward of its rollouts, NaN if none is scorable.
        modulation (`float`): α, the factor on the advantages of its rollouts.
        rejected (`bool`): Whether its rollouts leave the loss.
    """

    value: float
    modulation: float
    rejected: bool


@dataclass(frozen=True)
class Credit:
    """
    What a credit rule makes of trees.

    Args:
        rows (`list[RowCredit]`): Of each rollout of each state of each tree, in order.
        states (`list[StateCredit]`): Of each state of each tree, in order.
        values (`torch.Tensor` of shape (P,)):
            What each tree's prompt turned out to be worth, NaN where that is unknown: what a value tracker learns.
    """

    rows: list[RowCredit]
    states: list[StateCredit]
    values: torch.Tensor


class CreditRule:
    """
    Credits the tokens of a step's rows. A subclass says what it needs, and implements [`credit`].

    Attributes:
        requires (`Mapping[str, Sequence]`):
            Settings of `FR3EConfig` that it does not go with any value of, and the values that it takes.
        needs_anchors (`bool`): Whether there must be anchors.
        wants_stopping_rule (`bool`):
            Whether where to branch should depend on no later token. `anchor_threshold="auto"` is then kept, and anchors
            are shared out evenly among base trajectories. Otherwise `"auto"` is `None`, and anchors that a trajectory
            has no place for go to others.
        copies_missing_branches (`bool`):
            What becomes of the rows of anchors without a place. `True`: the base trajectory counts once more for each,
            and nothing is generated. `False`: they are rollouts of the prompt.
        by_token (`bool`):
            Whether the loss takes an advantage for each token, and counts tokens by their weights, or one for each row.
        leaves_out_truncated (`bool`):
            Whether rollouts that are cut off are compared with nothing where `mask_truncated_completions` is set, and
            others that pass through their tokens still credit these. Otherwise TRL masks them whole.
        without_prior (`str`):
            Ends a warning: what the only base trajectory of a prompt teaches nothing of if its prompt has no prior.
    """

    requires: ClassVar[Mapping[str, Sequence[Any]]] = {}
    needs_anchors: ClassVar[bool] = False
    wants_stopping_rule: ClassVar[bool] = False
    copies_missing_branches: ClassVar[bool] = False
    by_token: ClassVar[bool] = True
    leaves_out_truncated: ClassVar[bool] = False
    without_prior: ClassVar[str] = "whose base trajectory then has nothing to be compared with and teaches nothing"

    def credit(self, trees: Sequence[Tree], plan: Plan, prior: Prior) -> Credit:
        """Credit the rows of a step, given its finished trees, the settings, and what is expected of its prompts."""
        raise NotImplementedError


def batch_std(rewards: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the scorable rewards of (R,), plus 1e-4, as GRPO takes it; 1 where fewer than two are."""
    scorable = rewards[~rewards.isnan()]
    return scorable.std() + 1e-4 if len(scorable) > 1 else rewards.new_ones(())
