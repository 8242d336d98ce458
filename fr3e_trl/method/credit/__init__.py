"""
Credit: what each token learns from the rollouts of its tree.

`rule.py` says what a credit rule is. Each other file has one rule, but for `prior.py`: the baselines that they share.
"""

from collections.abc import Sequence

from ..plan import Plan
from ..rows import Row
from ..tree import Tree
from .prior import ValueTracker, prior_of
from .rollout import RolloutCredit
from .rule import CreditRule
from .tree import TreeCredit

# Credit rules by the setting `credit`
CREDIT_RULES: dict[str, CreditRule] = {
    "rollout": RolloutCredit(),
    "tree": TreeCredit(),
}


def credit_rows(rows: Sequence[Row], trees: Sequence[Tree], plan: Plan, tracker: ValueTracker | None = None) -> None:
    """
    Credit the rows of a step: write what the plan's rule makes of `trees` into these and their rows.

    Args:
        rows (`Sequence[Row]`): The rows of all of `trees`, in order.
        trees (`Sequence[Tree]`): Finished trees.
        plan ([`Plan`]): Settings.
        tracker ([`ValueTracker`], *optional*): What prompts were worth in the steps before. It does not learn here.
    """
    credit = CREDIT_RULES[plan.credit].credit(trees, plan, prior_of(trees, plan, tracker))
    for row, row_credit in zip(rows, credit.rows, strict=True):
        row.rollout.credit, row.advantage, row.in_loss = row_credit
    states = (state for tree in trees for state in tree.states)
    for state, state_credit in zip(states, credit.states, strict=True):
        state.value, state.modulation, state.rejected = state_credit
    for tree, value in zip(trees, credit.values.tolist(), strict=True):
        tree.value = value
