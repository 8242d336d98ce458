"""
Credit: the advantage of each token, computed from the rollouts of its tree.

`rule.py` has the interface of credit rules and `prior.py` the priors that they share. The other files have one rule
each.
"""

from collections.abc import Sequence

from ..plan import Plan
from ..rows import Row
from ..tree import Tree
from .prior import ValueTracker, step_prior
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
    Credit the rows of a step by the plan's rule, and store the result in `rows` and `trees`.

    Args:
        rows (`Sequence[Row]`): The rows of all of `trees`, in order.
        trees (`Sequence[Tree]`): Finished trees.
        plan ([`Plan`]): Settings.
        tracker ([`ValueTracker`], *optional*): Values of prompts in earlier steps. It does not learn here.
    """
    credit = CREDIT_RULES[plan.credit].credit(trees, plan, step_prior(trees, plan, tracker))
    for row, row_credit in zip(rows, credit.rows, strict=True):
        row.rollout.credit, row.advantage, row.in_loss = row_credit
    states = (state for tree in trees for state in tree.states)
    for state, state_credit in zip(states, credit.states, strict=True):
        state.value, state.modulation, state.rejected = state_credit
    for tree, value in zip(trees, credit.values.tolist(), strict=True):
        tree.value = value
