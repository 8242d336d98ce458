"""
Tree credit: every token is credited with all the rollouts that pass through it.

A base trajectory, its branches, and their branches form a tree of tokens. For a token t, let T be the rows that pass
through it, which are the row that sampled it and all that left that row's path later, and U the tree's other rows,
which left the path before t. With rewards r, a prior strength κ, and β, the value of the prompt estimated without this
tree:

    A(t) = |T| · (mean of r over T - (κ β + Σ of r over U) / (κ + |U|))

A changes only where a branch leaves, so it is stored for stretches of tokens. A row has stretches for the tokens that
it sampled itself; those before belong to the row that sampled them.

The sum of A ∇ log π over the tokens is, up to the baseline, the sum of r ∇ log π over the rows, each with its whole
path, as in GRPO with the same number of rows. Its mean is the number of rows of a tree, times the gradient of the
expected reward, under three conditions.
    - Where to branch is decided without looking ahead: whether a row leaves before a token may depend on the tokens
      before it, but not on the token itself or those after it. This holds for the first positions whose entropy is
      above a threshold, and for positions drawn before the trajectory. It does not hold for the most uncertain
      positions of a whole trajectory, for random ones, which depend on its length, or for trajectories selected by
      their reward. If nothing looks ahead, neither |T|, nor |U|, nor the rewards of U depend on the token, so any
      baseline computed from them is valid. If anchors look ahead, |T| depends on the token, and even the error of β
      becomes a bias.
    - Every tree has the same number of rows. A trajectory that ends before all of its branches have left counts for
      those too, because they would have left at its end and been its copies. See `counts`.
    - The denominator of the loss does not depend on the rows.
Without the factor |T|, each token would count once for each time it was sampled, and tokens before a branch would get
less weight than they have in the expected reward.

**Means over rows.** GRPO with `loss_type="grpo"` divides each row's tokens by L, the number of the row's tokens that
the policy wrote. L depends on the tokens, so that 1/L has a gradient of its own, and the baseline b is part of the
objective, the mean of (r - b) / L. In GRPO, b is the mean reward of the prompt's rows, and for a tree it is β. So with
`length_normalized` a row earns (r - β) / L instead of r, and its tokens are compared with the earnings of other rows:

    A(t) = |T| · (mean of (r - β) / L over T - (Σ of (r - β) / L over U) / (κ + |U|))

which is the formula above for these earnings, whose prior is 0. The mean of the sum of A ∇ log π is then the number of
rows of a tree, times ∇ E[(r - β) / L]: exactly GRPO's with the same number of rows and β as the baseline, under the
same conditions. Subtracting (κ β + Σ r) / (κ + |U|) from each r before dividing would give another objective, because
that baseline changes along the path. L includes the prefix of a branch. If there is no β, the tree's own mean replaces
it, which is as biased as GRPO's group mean.

If a loss is divided by its number of tokens, each token counts |T| times. The loss is then the mean over the tokens of
all rows' whole paths, as in GRPO, and has the same scale. With `length_normalized` each token counts Σ 1/L over T, so
that the weights of a tree's tokens sum to its number of rows.

Notation used for tensor shapes:
    - R: rows of the batch, each a completion
    - P: prompts
    - N: stretches of the batch
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from ..plan import Plan
from ..tree import Tree
from .prior import Prior, state_values
from .rule import Credit, CreditRule, RowCredit, StateCredit, batch_std

# Losses that accept an advantage per token. For "grpo" and "sapo", which average over the tokens of each row first, the
# plan sets `length_normalized`
TREE_LOSSES = ("dapo", "bnpo", "dr_grpo", "cispo", "luspo", "vespo", "grpo", "sapo")


class TreeCredit(CreditRule):
    """A row has a stretch up to each branch that leaves it, and one for the rest."""

    requires: ClassVar[Mapping[str, Sequence[Any]]] = {
        "loss_type": TREE_LOSSES,
        "importance_sampling_level": ("token",),
        "scale_rewards": ("none", "batch"),
        "multi_objective_aggregation": ("sum_then_normalize",),
        "reuse_base": (True,),
        "base_selection": ("all",),
        "modulation": ("none",),
    }
    needs_anchors = True
    wants_stopping_rule = True
    copies_missing_branches = True
    leaves_out_truncated = True
    without_prior = "whose base trajectory then teaches nothing before its first anchor"

    def credit(self, trees: Sequence[Tree], plan: Plan, prior: Prior) -> Credit:
        paths = paths_of(trees)
        values = tree_values(paths)
        prompt_values = state_values(values, paths.prompts, len(trees))  # each tree of a prompt counts once
        baselines = root_baselines(values, paths.prompts, prior.of(prompt_values), prior.strength)
        stretches = tree_credit(paths, baselines, prior.strength, plan.length_normalized)
        if plan.scale == "batch":
            stretches = replace(stretches, advantages=stretches.advantages / path_std(paths))
        rows = _row_credit(stretches, paths, trees, plan)
        return Credit(rows, _state_credit(rows, paths.rewards, trees), prompt_values)


class Paths(NamedTuple):
    """
    The rows of trees, and where they branch off each other.

    Args:
        rewards (`torch.Tensor` of shape (R,)): Rewards, NaN where unscorable.
        parents (`list[int | None]`): For each row, the row that it branched off; `None` for a base trajectory.
        positions (`list[int]`):
            For each row, the number of leading tokens that it shares with its parent, which is the index of its first
            own token. 0 for a base trajectory.
        lengths (`list[int]`): Number of tokens of each row's whole completion.
        prompts (`torch.Tensor` of shape (R,)): Index of each row's prompt.
        counts (`list[int]`):
            Number of rows that each row counts as. A base trajectory that ended before two of its three branches could
            leave counts as three.
        num_written (`list[int]`): L: number of tokens of each row's whole completion that the policy wrote.
    """

    rewards: torch.Tensor
    parents: list[int | None]
    positions: list[int]
    lengths: list[int]
    prompts: torch.Tensor
    counts: list[int]
    num_written: list[int]


def paths_of(trees: Sequence[Tree]) -> Paths:
    """The rows of `trees`, in order. Copies are unscorable rows, and their base trajectory counts for them."""
    paths = Paths(torch.empty(0), [], [], [], torch.empty(0), [], [])
    rewards: list[float] = []
    prompts: list[int] = []
    for i, tree in enumerate(trees):
        root = len(rewards)
        for state in tree.states:
            for rollout in state.rollouts:
                rewards.append(rollout.reward)
                prompts.append(i)
                paths.parents.append(None if state.base is None else root + state.base)
                paths.positions.append(state.position)
                paths.lengths.append(state.position + rollout.length)
                paths.counts.append(1)
                paths.num_written.append(state.num_written + rollout.num_written)
                if rollout.copy_of is not None:
                    paths.counts[root + rollout.copy_of] += 1
    return paths._replace(rewards=torch.tensor(rewards, dtype=torch.float64), prompts=torch.tensor(prompts))


@dataclass(frozen=True)
class Stretches:
    """
    The credit of a batch's tokens, by stretches of equal credit, in order of row and position.

    Args:
        rows (`torch.Tensor` of shape (N,)): Row that each stretch belongs to.
        starts, ends (`torch.Tensor` of shape (N,)):
            First position of each stretch in its row's completion, and the position after its last.
        weights (`torch.Tensor` of shape (N,)):
            Weight of each token of the stretch: |T|, or Σ 1/L over T with `length_normalized`.
        advantages (`torch.Tensor` of shape (N,)):
            A, exactly 0 if a stretch teaches nothing: no scorable row passes through it, there is nothing to compare
            with, or the difference is within rounding.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor


def tree_values(paths: Paths) -> torch.Tensor:
    """
    The mean reward of each base trajectory's tree, (R,). NaN for branches, and if no row of the tree is scorable.
    """
    counts, rewards = _counts(paths), paths.rewards.double().nan_to_num(0)
    bases = torch.tensor(_bases(paths.parents), device=rewards.device)
    sums, numbers = (torch.zeros_like(counts).index_add(0, bases, terms) for terms in (rewards * counts, counts))
    return sums / numbers


def root_baselines(
    values: torch.Tensor, prompts: torch.Tensor, priors: torch.Tensor, prior_strength: float
) -> torch.Tensor:
    """
    β: the value of a base trajectory's prompt, estimated without its own tree; (R,), NaN if unknown.

    (κ prior + Σ of the values of the prompt's other trees) / (κ + their number). A tree counts as one rollout however
    many rows it has, because they share their beginning. β is the prior if the prompt has no other tree, even if κ = 0,
    and the mean of the other trees if there is no prior. Entries of branches have no meaning.

    Args:
        values, prompts (`torch.Tensor` of shape (R,)):
            Values of trees, see [`tree_values`], and the index of each row's prompt.
        priors (`torch.Tensor` of shape (P,)):
            Expected value of each prompt before its own rewards, NaN if unknown.
        prior_strength (`float`): κ, in rollouts.
    """
    known, exist = values.nan_to_num(0), (~values.isnan()).to(values.dtype)
    zeros = values.new_zeros(len(priors))
    sums, counts = (zeros.index_add(0, prompts, terms)[prompts] for terms in (known, exist))
    return _shrink(sums - known, counts - exist, priors.to(values.dtype)[prompts], prior_strength)


def tree_credit(
    paths: Paths, baselines: torch.Tensor, prior_strength: float, length_normalized: bool = False
) -> Stretches:
    """
    A(t) of every row's own tokens. Unscorable rows are in no T and no U.

    If U is empty, the baseline is β, even if κ = 0; if there is no β, it is the mean of U. A token with neither has
    nothing to be compared with, and its advantage is 0.

    Args:
        paths ([`Paths`]): R rows.
        baselines (`torch.Tensor` of shape (R,)):
            β of each base trajectory, see [`root_baselines`]; NaN if there is none. Entries of branches are ignored.
        prior_strength (`float`): κ, in rollouts.
        length_normalized (`bool`): Whether each row earns (r - β) / L instead of r, as with GRPO's `loss_type="grpo"`.

    Raises:
        `ValueError`: If a row does not leave its parent among the parent's own tokens.
    """
    _check_branches(paths)
    bases = torch.tensor(_bases(paths.parents), device=paths.rewards.device)
    earned, counts, priors = paths.rewards.double(), _counts(paths), baselines.double()[bases]
    weights = counts
    rounding = 1000 * torch.finfo(counts.dtype).eps * earned.nan_to_num(0).abs().max()
    if length_normalized:
        lengths = counts.new_tensor(paths.num_written).clamp(min=1)  # copies have none
        earned = (earned - torch.where(priors.isnan(), tree_values(paths)[bases], priors)) / lengths
        weights, priors, rounding = counts / lengths, 0 * priors, rounding / lengths.min()

    own = torch.stack([earned.nan_to_num(0) * counts, counts, weights], dim=1).tolist()
    below = _with_descendants(paths.parents, own)
    places, through = zip(*_stretches(paths, own, below), strict=True)
    rows, starts, ends = torch.tensor(places, device=counts.device).T
    sums, numbers, weights = counts.new_tensor(through).T
    all_sums, all_numbers, _ = counts.new_tensor(below)[bases[rows]].T
    compared_with = _shrink(all_sums - sums, all_numbers - numbers, priors[rows], prior_strength)
    advantages = (sums / numbers - compared_with).nan_to_num(0)
    advantages = advantages.masked_fill(advantages.abs() <= rounding, 0)
    return Stretches(rows, starts, ends, weights, numbers * advantages)


def path_std(paths: Paths) -> torch.Tensor:
    """
    Standard deviation of the batch's rewards, see [`batch_std`]. A row that counts as several is repeated, because the
    rewards of short trajectories would count too little without their copies.
    """
    return batch_std(paths.rewards.repeat_interleave(torch.tensor(paths.counts, device=paths.rewards.device)))


def _row_credit(stretches: Stretches, paths: Paths, trees: Sequence[Tree], plan: Plan) -> list[RowCredit]:
    """Stretches by row. Rows that teach nothing are rejected: copies and masked ones always, others if `reject`."""
    rollouts = [rollout for tree in trees for rollout in tree.rollouts]
    negative = stretches.advantages < 0
    scaled = torch.where(negative, plan.negative_scale * stretches.advantages, stretches.advantages)
    by_row: list[list[tuple[int, float, float]]] = [[] for _ in rollouts]
    columns = (stretches.rows, stretches.ends - stretches.starts, stretches.weights, scaled)
    for row, length, weight, advantage in zip(*(column.tolist() for column in columns), strict=True):
        by_row[row].append((length, weight, advantage))
    informative = set(stretches.rows[stretches.advantages != 0].tolist())
    credit = []
    for i, (own, rollout) in enumerate(zip(by_row, rollouts, strict=True)):
        advantage = sum(n * a for n, _, a in own) / rollout.length
        if plan.length_normalized:
            advantage *= paths.num_written[i]
        leaves_loss = plan.reject or rollout.copy_of is not None or rollout.score.is_masked
        credit.append(RowCredit(own, advantage, i in informative or not leaves_loss))
    return credit


def _state_credit(rows: list[RowCredit], rewards: torch.Tensor, trees: Sequence[Tree]) -> list[StateCredit]:
    """V of each state. A state counts as rejected if all of its rows are."""
    states = [state for tree in trees for state in tree.states]
    row_states = [i for i, state in enumerate(states) for _ in state.rollouts]
    in_loss = {i for i, row in zip(row_states, rows, strict=True) if row.in_loss}
    values = state_values(rewards, torch.tensor(row_states), len(states)).tolist()
    return [StateCredit(value, 1.0, i not in in_loss) for i, value in enumerate(values)]


def _check_branches(paths: Paths) -> None:
    rows = zip(paths.parents, paths.positions, paths.lengths, strict=True)
    for row, (parent, position, length) in enumerate(rows):
        first, last = (0, 0) if parent is None else (paths.positions[parent], paths.lengths[parent])
        if not first <= position <= min(last, length):
            raise ValueError(
                f"Row {row}, of {length} tokens, has position {position}; it can be {first} to {min(last, length)}. "
                "Its parent is the row that sampled the token there, and a base trajectory begins at 0."
            )


def _counts(paths: Paths) -> torch.Tensor:
    """Number of rows that each row counts as, (R,); 0 if it is unscorable."""
    counts = torch.tensor(paths.counts, dtype=torch.float64, device=paths.rewards.device)
    return counts.masked_fill(paths.rewards.isnan(), 0)


def _bases(parents: list[int | None]) -> list[int]:
    """The base trajectory of each row."""
    bases = []
    for row, parent in enumerate(parents):
        while parent is not None:
            row, parent = parent, parents[parent]
        bases.append(row)
    return bases


def _with_descendants(parents: list[int | None], own: list[list[float]]) -> list[list[float]]:
    """Sums of the numbers in `own` over each row and all its descendants."""
    below = list(own)
    for numbers, parent in zip(own, parents, strict=True):
        while parent is not None:
            below[parent] = _sum([below[parent], numbers])
            parent = parents[parent]
    return below


def _stretches(
    paths: Paths, own: list[list[float]], below: list[list[float]]
) -> Iterator[tuple[tuple[int, int, int], list[float]]]:
    """
    (row, start, end) of each stretch, in order of row and position, and the sums of the rows' numbers over its T.

    `own` has each row's numbers, `below` their sums over the row and all its descendants.
    """
    branches: list[list[int]] = [[] for _ in own]
    for row, parent in enumerate(paths.parents):
        if parent is not None:
            branches[parent].append(row)
    for row, leaving in enumerate(branches):
        stretches = []
        end, through = paths.lengths[row], own[row]
        by_position = sorted(leaving, key=paths.positions.__getitem__, reverse=True)
        for position, group in itertools.groupby(by_position, key=paths.positions.__getitem__):
            if position < end:
                stretches.append(((row, position, end), through))
                end = position
            through = _sum([through, _sum([below[branch] for branch in group])])
        if paths.positions[row] < end:
            stretches.append(((row, paths.positions[row], end), through))
        yield from reversed(stretches)


def _sum(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _shrink(sums: torch.Tensor, counts: torch.Tensor, priors: torch.Tensor, strength: float) -> torch.Tensor:
    """(strength prior + sum) / (strength + count); the prior if the count is 0, the mean if there is no prior."""
    shrunk = torch.where(priors.isnan(), sums / counts, (strength * priors + sums) / (strength + counts))
    return torch.where(counts == 0, priors, shrunk)
