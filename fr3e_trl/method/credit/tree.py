"""
Tree credit: every token is credited with all the rollouts that pass through it.

The rows of a base trajectory are a tree of tokens: it, the branches that left it, and theirs. For a token t, let T be
the rows that pass through it, which are the row that sampled it and all that left that row's path later, and U the
tree's other rows, which left the path before t. Rewards r, a prior strength κ, and β, what the prompt is worth by all
but this tree:

    A(t) = |T| · (mean of r over T - (κ β + Σ of r over U) / (κ + |U|))

A changes only where a branch leaves, so that it is given for stretches of tokens. A row has stretches over its own
tokens alone, those that it sampled itself: the tokens before are the row's that they were sampled in.

The sum of A ∇ log π over the tokens is, up to the baseline, the sum of r ∇ log π over the rows, each with its whole
path: what GRPO has for as many rows. Its mean is the number of rows of a tree, times the gradient of the
expected reward, under three conditions.
    - Where to branch is decided without looking ahead: whether a row leaves before a token may depend on the tokens
      before it, but not on it or what comes after. So are the first positions whose entropy is over a threshold, and
      positions that were drawn before the trajectory; the most uncertain ones of a whole trajectory are not, nor are
      random ones of it, which depend on its length, nor branches of trajectories that were chosen by their reward. Then
      neither |T|, nor |U|, nor the rewards of U depend on the token, and any baseline of them is legitimate. When
      anchors look ahead, |T| depends on the token, and so even the error of β, which otherwise is no more than noise,
      becomes a bias.
    - Every tree has as many rows. Where a trajectory ends before all of its branches have left, it stands for those
      too: they would have left at its end, and be its copies. See `copies`.
    - What the loss is divided by does not depend on the rows.
Without the factor |T| the tokens before a branch weigh less than the expected reward gives them, and the objective is
another one: each token counts as often as it is sampled.

Where a loss is divided by its number of tokens, each counts |T| times. It is then the mean over the tokens of all rows'
whole paths, as GRPO's, and has the same scale.

Notation used for tensor shapes:
    - R: rows of the batch, each a completion
    - P: prompts
    - N: stretches of the batch
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..plan import Plan
from ..tree import State, Tree
from .prior import Prior, state_values
from .rule import Credit, CreditRule, RowCredit, StateCredit

# Losses for advantages of tokens. "grpo" and "sapo" take the mean over a row's own tokens, in which those of a short
# branch weigh more than those of the prefix that it left
TREE_LOSSES = ("dapo", "bnpo", "dr_grpo", "cispo", "luspo", "vespo")


class TreeCredit(CreditRule):
    """Each row has a stretch for each branch that leaves it, and one for the rest."""

    requires: ClassVar[Mapping[str, Sequence[Any]]] = {
        "loss_type": TREE_LOSSES,
        "importance_sampling_level": ("token",),
        "scale_rewards": ("none",),
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
        of_prompts = state_values(values, paths.prompts, len(trees))  # each tree of a prompt counts once
        baselines = root_baselines(values, paths.prompts, prior.of(of_prompts), prior.strength)
        stretches = tree_credit(paths, baselines, prior.strength)
        rows = _row_credit(stretches, trees, plan)
        return Credit(rows, _state_credit(rows, paths.rewards, trees), of_prompts)


class Paths(NamedTuple):
    """
    The rows of trees, and where they leave each other.

    Args:
        rewards (`torch.Tensor` of shape (R,)):
            Rewards, NaN where unscorable.
        parents (`list[int | None]`):
            For each row, the row that it branched off; `None` for a base trajectory.
        positions (`list[int]`):
            For each row, how many of its tokens are its parent's: those before are, the one at that position, counted
            from 0, is the first of its own. 0 for a base trajectory.
        lengths (`list[int]`):
            Tokens of each row's whole completion.
        prompts (`torch.Tensor` of shape (R,)):
            Prompt of each row, as an index.
        counts (`list[int]`):
            How many rows each stands for. A base trajectory that was to have three branches, and ended before two of
            them could leave, stands for three.
    """

    rewards: torch.Tensor
    parents: list[int | None]
    positions: list[int]
    lengths: list[int]
    prompts: torch.Tensor
    counts: list[int]


def paths_of(trees: Sequence[Tree]) -> Paths:
    """The rows of `trees`, in order. Copies are unscorable rows, which their base trajectories count for."""
    rewards: list[float] = []
    parents: list[int | None] = []
    positions, lengths, prompts, counts = [], [], [], []
    for i, tree in enumerate(trees):
        root = len(rewards)
        for state in tree.states:
            for rollout in state.rollouts:
                rewards.append(rollout.reward)
                parents.append(None if state.base is None else root + state.base)
                positions.append(state.position)
                lengths.append(state.position + rollout.length)
                prompts.append(i)
                counts.append(1)
            for copy in (rollout.copy_of for rollout in state.rollouts if rollout.copy_of is not None):
                counts[root + copy] += 1
    rewards_R = torch.tensor(rewards, dtype=torch.float64)
    return Paths(rewards_R, parents, positions, lengths, torch.tensor(prompts), counts)


@dataclass(frozen=True)
class Stretches:
    """
    What the tokens of a batch are credited with, by stretches of equal credit, in order of row and position.

    Args:
        rows (`torch.Tensor` of shape (N,)):
            Row whose own tokens each stretch is of.
        starts, ends (`torch.Tensor` of shape (N,)):
            First position of each stretch in its row's completion, and the position after its last.
        weights (`torch.Tensor` of shape (N,)):
            |T|: how many tokens each token of the stretch counts for.
        advantages (`torch.Tensor` of shape (N,)):
            A, of exactly 0 where a stretch teaches nothing: no scorable row passes through it, there is nothing to
            compare with, or no difference beyond rounding.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor


def tree_values(paths: Paths) -> torch.Tensor:
    """
    What each base trajectory's prompt is worth by its tree: the mean reward of the tree's rows.

    Returns:
        `torch.Tensor` of shape (R,): Value of each base trajectory's tree, NaN where none of its rows is scorable, and
        for branches.
    """
    totals = _totals(paths)
    bases = torch.tensor(_bases(paths.parents), device=totals.device)
    sums, counts = torch.zeros_like(totals).index_add(0, bases, totals).T
    return sums / counts


def root_baselines(
    values: torch.Tensor, prompts: torch.Tensor, priors: torch.Tensor, prior_strength: float
) -> torch.Tensor:
    """
    β: what a base trajectory's prompt is worth, by all but its own tree.

    (κ prior + Σ of the values of the prompt's other trees) / (κ + their number). A tree counts as one rollout however
    many rows it has, as they share their beginning. It is the prior if the prompt has no other tree, even if κ = 0,
    and the mean of the other trees if there is no prior.

    Args:
        values (`torch.Tensor` of shape (R,)):
            Values of trees, see [`tree_values`].
        prompts (`torch.Tensor` of shape (R,)):
            Prompt of each row, as an index.
        priors (`torch.Tensor` of shape (P,)):
            What each prompt is expected to be worth without having been tried, NaN where nothing is known.
        prior_strength (`float`):
            κ, in rollouts.

    Returns:
        `torch.Tensor` of shape (R,): β for base trajectories, NaN where there is none; of no meaning for branches.
    """
    known, exist = values.nan_to_num(0), (~values.isnan()).to(values.dtype)
    zeros = values.new_zeros(len(priors))
    sums, counts = (zeros.index_add(0, prompts, of_trees)[prompts] for of_trees in (known, exist))
    return _shrink(sums - known, counts - exist, priors.to(values.dtype)[prompts], prior_strength)


def tree_credit(paths: Paths, baselines: torch.Tensor, prior_strength: float) -> Stretches:
    """
    A(t) of every row's own tokens. Unscorable rows are in no T and no U.

    Where U is empty the baseline is β, even if κ = 0; where there is no β it is the mean of U. A token with neither has
    nothing to be compared with, and the advantage 0.

    Args:
        paths ([`Paths`]):
            R rows.
        baselines (`torch.Tensor` of shape (R,)):
            β of each base trajectory, see [`root_baselines`]; NaN where there is none. Those of branches are not read.
        prior_strength (`float`):
            κ, in rollouts.

    Raises:
        `ValueError`: If a row does not leave its parent among the parent's own tokens.
    """
    _check_branches(paths)
    own = _totals(paths).tolist()
    below = _with_descendants(paths.parents, own)
    *places, sums, counts = zip(*_stretches(paths, own, below), strict=True)
    device = paths.rewards.device
    rows, starts, ends = torch.tensor(places, device=device)
    sums, counts = torch.tensor([sums, counts], dtype=torch.float64, device=device)

    bases = torch.tensor(_bases(paths.parents), device=device)[rows]
    all_sums, all_counts = sums.new_tensor(below)[bases].T
    compared_with = _shrink(all_sums - sums, all_counts - counts, baselines.to(sums)[bases], prior_strength)
    advantages = (sums / counts - compared_with).nan_to_num(0)
    rounding = 1000 * torch.finfo(sums.dtype).eps * paths.rewards.nan_to_num(0).abs().max()
    advantages = advantages.masked_fill(advantages.abs() <= rounding, 0)
    return Stretches(rows, starts, ends, counts, counts * advantages)


def _row_credit(stretches: Stretches, trees: Sequence[Tree], plan: Plan) -> list[RowCredit]:
    """Stretches by row. A row that teaches nothing is rejected. So are copies and masked rows, whatever the plan."""
    rollouts = [rollout for tree in trees for state in tree.states for rollout in state.rollouts]
    informative = torch.zeros(len(rollouts), dtype=torch.bool)
    informative[stretches.rows[stretches.advantages != 0]] = True
    negative = stretches.advantages < 0
    scaled = torch.where(negative, plan.negative_scale * stretches.advantages, stretches.advantages)
    of_rows: list[list[tuple[int, float, float]]] = [[] for _ in rollouts]
    columns = (stretches.rows, stretches.ends - stretches.starts, stretches.weights, scaled)
    for row, length, weight, advantage in zip(*(column.tolist() for column in columns), strict=True):
        of_rows[row].append((length, weight, advantage))
    return [
        RowCredit(
            of_row,
            sum(n * advantage for n, _, advantage in of_row) / rollout.length,
            is_informative or not (plan.reject or rollout.copy_of is not None or rollout.score.is_masked),
        )
        for of_row, rollout, is_informative in zip(of_rows, rollouts, informative.tolist(), strict=True)
    ]


def _state_credit(rows: list[RowCredit], rewards: torch.Tensor, trees: Sequence[Tree]) -> list[StateCredit]:
    """V of each state, whose rollouts leave the loss if all of its rows are rejected."""
    states: list[State] = [state for tree in trees for state in tree.states]
    of_rows = [i for i, state in enumerate(states) for _ in state.rollouts]
    in_loss = {i for i, row in zip(of_rows, rows, strict=True) if row.in_loss}
    values = state_values(rewards, torch.tensor(of_rows), len(states)).tolist()
    return [StateCredit(value, 1.0, i not in in_loss) for i, value in enumerate(values)]


def _check_branches(paths: Paths) -> None:
    _, parents, positions, lengths, *_ = paths
    for row, (parent, position, length) in enumerate(zip(parents, positions, lengths, strict=True)):
        first, last = (0, 0) if parent is None else (positions[parent], lengths[parent])
        if not first <= position <= min(last, length):
            raise ValueError(
                f"Row {row}, of {length} tokens, has position {position}; it can be {first} to {min(last, length)}. "
                "Its parent is the row that sampled the token there, and a base trajectory begins at 0."
            )


def _totals(paths: Paths) -> torch.Tensor:
    """Reward and number of what each row stands for, (R, 2); 0 and 0 for an unscorable one."""
    counts = torch.tensor(paths.counts, dtype=torch.float64).to(paths.rewards.device)
    counts = counts.masked_fill(paths.rewards.isnan(), 0)
    return torch.stack([paths.rewards.double().nan_to_num(0) * counts, counts], dim=1)


def _bases(parents: list[int | None]) -> list[int]:
    """The base trajectory of each row."""
    bases = []
    for row, parent in enumerate(parents):
        while parent is not None:
            row, parent = parent, parents[parent]
        bases.append(row)
    return bases


def _with_descendants(parents: list[int | None], totals: list[list[float]]) -> list[list[float]]:
    """Reward and number of each row and all that descend from it."""
    below = [list(of_row) for of_row in totals]
    for (reward, number), parent in zip(totals, parents, strict=True):
        while parent is not None:
            below[parent][0] += reward
            below[parent][1] += number
            parent = parents[parent]
    return below


def _stretches(
    paths: Paths, own: list[list[float]], below: list[list[float]]
) -> Iterator[tuple[int, int, int, float, float]]:
    """
    (row, start, end, reward of T, number of T), in order of row and position.

    `own` has the reward and number of each row, `below` those of the row and all that descend from it.
    """
    branches: list[list[int]] = [[] for _ in paths.parents]
    for row, parent in enumerate(paths.parents):
        if parent is not None:
            branches[parent].append(row)
    for row, leaving in enumerate(branches):
        stretches = []
        end, (total, count) = paths.lengths[row], own[row]
        by_position = sorted(leaving, key=paths.positions.__getitem__, reverse=True)
        for position, group in itertools.groupby(by_position, key=paths.positions.__getitem__):
            if position < end:
                stretches.append((row, position, end, total, count))
                end = position
            at_position = list(group)
            total += sum(below[branch][0] for branch in at_position)
            count += sum(below[branch][1] for branch in at_position)
        if paths.positions[row] < end:
            stretches.append((row, paths.positions[row], end, total, count))
        yield from reversed(stretches)


def _shrink(sums: torch.Tensor, counts: torch.Tensor, priors: torch.Tensor, strength: float) -> torch.Tensor:
    """(strength prior + sum) / (strength + count); the prior where nothing was counted, the mean where no prior is."""
    shrunk = torch.where(priors.isnan(), sums / counts, (strength * priors + sums) / (strength + counts))
    return torch.where(counts == 0, priors, shrunk)
