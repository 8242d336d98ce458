"""
Tree credit: every token is credited with all the rollouts that pass through it.

The rows of a base trajectory are a tree of tokens: it, the branches that left it, and theirs. For a token t, let T be
the rows that pass through it, which are the row that sampled it and all that left that row's path later, and U the
tree's other rows, which left the path before t. Rewards r, a prior strength κ, and β, what the prompt is worth by all
but this tree:

    A(t) = w · (mean of r over T - (κ β + Σ of r over U) / (κ + |U|)),    w = |T| or 1

A changes only where a branch leaves, so that it is given for stretches of tokens. A row has stretches over its own
tokens alone, those that it sampled itself: the tokens before are the row's that they were sampled in.

With w = |T| the sum of A ∇ log π over the tokens is, up to the baseline, the sum of r ∇ log π over the rows, each with
its whole path: what GRPO has for as many rows. Its mean is the number of rows of a tree, times the gradient of the
expected reward, under three conditions.
    - Where to branch is decided without looking ahead: whether a row leaves before a token may depend on the tokens
      before it, but not on it or what comes after. So are the first positions whose entropy is over a threshold, and
      random ones; the most uncertain ones of a whole trajectory are not, nor are branches of trajectories that were
      chosen by their reward. Then neither |T|, nor |U|, nor the rewards of U depend on the token, and any baseline of
      them is legitimate. When anchors look ahead, |T| depends on the token, and so even the error of β, which
      otherwise is no more than noise, becomes a bias.
    - Every tree has as many rows. Where a trajectory ends before all of its branches have left, it stands for those
      too: they would have left at its end, and be its copies. See `copies`.
    - What the loss is divided by does not depend on the rows.
With w = 1 the tokens before a branch weigh less than the expected reward gives them, and the objective is another one:
each token counts as often as it is sampled.

Where a loss is divided by its number of tokens, one with w = |T| counts |T| times, see [`count_tokens`]: it is then the
mean over the tokens of all rows' whole paths, as GRPO's, and has the same scale.

Notation used for tensor shapes:
    - R: rows of the batch, each a completion
    - P: prompts
    - N: stretches of the batch
    - C: tokens of a completion of the batch, padded
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .rollout import leave_one_out_means

WEIGHTS = ("paths", "none")


@dataclass(frozen=True)
class Credit:
    """
    What the tokens of a batch are credited with, by stretches of equal credit, in order of row and position.

    Args:
        rows (`torch.Tensor` of shape (N,)):
            Row whose own tokens each stretch is of.
        starts, ends (`torch.Tensor` of shape (N,)):
            First position of each stretch in its row's completion, and the position after its last.
        weights (`torch.Tensor` of shape (N,)):
            w: how many tokens each token of the stretch counts for.
        advantages (`torch.Tensor` of shape (N,)):
            A, of exactly 0 where a stretch teaches nothing: no scorable row passes through it, there is nothing to
            compare with, or no difference beyond rounding.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor


def compute_credit(
    rewards: torch.Tensor,
    parents: list[int | None],
    positions: list[int],
    lengths: list[int],
    prompts: torch.Tensor,
    prior_strength: float,
    weight: str = "paths",
    copies: list[int] | None = None,
    priors: torch.Tensor | None = None,
) -> Credit:
    """
    Credit of a batch.

    Args:
        rewards (`torch.Tensor` of shape (R,)):
            Rewards, NaN where unscorable.
        parents, positions, lengths, weight, copies:
            See [`tree_credit`].
        prompts (`torch.Tensor` of shape (R,)):
            Prompt of each row, as an index.
        prior_strength (`float`):
            κ, in rollouts.
        priors (`torch.Tensor` of shape (P,), *optional*):
            See [`root_baselines`]. If `None`, the batch's prompts are each other's: the mean of the others.

    Returns:
        `Credit`: Credit of every row's own tokens.
    """
    values = tree_values(rewards, parents, copies)
    if priors is None:
        priors = leave_one_out_means(prompt_values(values, prompts, int(prompts.max()) + 1))
    baselines = root_baselines(values, prompts, priors, prior_strength)
    return tree_credit(rewards, parents, positions, lengths, baselines, prior_strength, weight, copies)


def tree_values(rewards: torch.Tensor, parents: list[int | None], copies: list[int] | None = None) -> torch.Tensor:
    """
    What each base trajectory's prompt is worth by its tree: the mean reward of the tree's rows.

    Args:
        rewards (`torch.Tensor` of shape (R,)):
            Rewards, NaN where unscorable.
        parents, copies:
            See [`tree_credit`].

    Returns:
        `torch.Tensor` of shape (R,): Value of each base trajectory's tree, NaN where none of its rows is scorable, and
        for branches.
    """
    totals = _totals(rewards, copies)
    bases = torch.tensor(_bases(parents), device=rewards.device)
    sums, counts = torch.zeros_like(totals).index_add(0, bases, totals).T
    return sums / counts


def prompt_values(values: torch.Tensor, prompts: torch.Tensor, num_prompts: int) -> torch.Tensor:
    """
    What each prompt is worth: the mean over its trees, each of which counts once.

    Args:
        values (`torch.Tensor` of shape (R,)):
            Values of trees, see [`tree_values`].
        prompts (`torch.Tensor` of shape (R,)):
            Prompt of each row, as an index.
        num_prompts (`int`):
            P.

    Returns:
        `torch.Tensor` of shape (P,): Values, NaN where no row is scorable.
    """
    sums, counts = _prompt_totals(values, prompts, num_prompts)
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
    sums, counts = (totals[prompts] for totals in _prompt_totals(values, prompts, len(priors)))
    exist = (~values.isnan()).to(values.dtype)
    return _shrink(sums - values.nan_to_num(0), counts - exist, priors.to(values.dtype)[prompts], prior_strength)


def tree_credit(
    rewards: torch.Tensor,
    parents: list[int | None],
    positions: list[int],
    lengths: list[int],
    baselines: torch.Tensor,
    prior_strength: float,
    weight: str = "paths",
    copies: list[int] | None = None,
) -> Credit:
    """
    A(t) of every row's own tokens. Unscorable rows are in no T and no U.

    Where U is empty the baseline is β, even if κ = 0; where there is no β it is the mean of U. A token with neither has
    nothing to be compared with, and the advantage 0.

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
        baselines (`torch.Tensor` of shape (R,)):
            β of each base trajectory, see [`root_baselines`]; NaN where there is none. Those of branches are not read.
        prior_strength (`float`):
            κ, in rollouts.
        weight (`str`):
            w: `"paths"` for |T|, `"none"` for 1.
        copies (`list[int]`, *optional*):
            How many rows each stands for, 1 if not given. A base trajectory that was to have three branches, and ended
            before two of them could leave, stands for three.

    Returns:
        `Credit`: Credit of every row's own tokens.

    Raises:
        `ValueError`: If a weight is unknown, or a row does not leave its parent among the parent's own tokens.
    """
    if weight not in WEIGHTS:
        raise ValueError(f"weight is {weight!r}; it can be {' or '.join(map(repr, WEIGHTS))}.")
    _check_branches(parents, positions, lengths)
    own = _totals(rewards, copies).tolist()
    below = _with_descendants(parents, own)
    *places, sums, counts = zip(*_stretches(parents, positions, lengths, own, below), strict=True)
    rows, starts, ends = torch.tensor(places, device=rewards.device)
    sums, counts = torch.tensor([sums, counts], dtype=torch.float64, device=rewards.device)

    bases = torch.tensor(_bases(parents), device=rewards.device)[rows]
    all_sums, all_counts = sums.new_tensor(below)[bases].T
    compared_with = _shrink(all_sums - sums, all_counts - counts, baselines.to(sums)[bases], prior_strength)
    advantages = (sums / counts - compared_with).nan_to_num(0)
    rounding = 1000 * torch.finfo(sums.dtype).eps * rewards.nan_to_num(0).abs().max()
    advantages = advantages.masked_fill(advantages.abs() <= rounding, 0)
    weights = counts if weight == "paths" else torch.ones_like(counts)
    return Credit(rows, starts, ends, weights, weights * advantages)


def token_advantages(credit: Credit, num_rows: int, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """
    Credit as advantages of tokens.

    Args:
        credit (`Credit`):
            Credit of R rows.
        num_rows, num_tokens (`int`):
            R and C.
        dtype (`torch.dtype`):
            Of the result.

    Returns:
        `torch.Tensor` of shape (R, C): Advantage of each token of each row's completion, 0 for those that are another
        row's, and past its end.
    """
    lengths = credit.ends - credit.starts
    firsts = credit.rows * num_tokens + credit.starts - (lengths.cumsum(0) - lengths)
    places = firsts.repeat_interleave(lengths) + torch.arange(int(lengths.sum()), device=firsts.device)
    advantages = torch.zeros(num_rows, num_tokens, dtype=dtype, device=firsts.device)
    advantages.view(-1)[places] = credit.advantages.to(dtype).repeat_interleave(lengths)
    return advantages


def informative_rows(credit: Credit, num_rows: int) -> torch.Tensor:
    """
    Rows of which any token has an advantage other than 0.

    Args:
        credit (`Credit`):
            Credit of R rows.
        num_rows (`int`):
            R.

    Returns:
        `torch.Tensor` of shape (R,): Boolean mask.
    """
    informative = torch.zeros(num_rows, dtype=torch.bool, device=credit.rows.device)
    informative[credit.rows[credit.advantages != 0]] = True
    return informative


def count_tokens(credit: Credit, in_loss: torch.Tensor) -> torch.Tensor:
    """
    What a loss that is averaged over tokens divides by.

    With w = |T|, the lengths of the scorable rows' whole paths, as far as their tokens are in the loss: as GRPO counts
    them for as many rows. With w = 1, the tokens in the loss.

    Args:
        credit (`Credit`):
            Credit of R rows.
        in_loss (`torch.Tensor` of shape (R,)):
            Whether the own tokens of each row are in the loss.

    Returns:
        `torch.Tensor` of shape (): Number of tokens.
    """
    return (credit.weights * (credit.ends - credit.starts) * in_loss[credit.rows]).sum()


def _check_branches(parents: list[int | None], positions: list[int], lengths: list[int]) -> None:
    for row, (parent, position, length) in enumerate(zip(parents, positions, lengths, strict=True)):
        first, last = (0, 0) if parent is None else (positions[parent], lengths[parent])
        if not first <= position <= min(last, length):
            raise ValueError(
                f"Row {row}, of {length} tokens, has position {position}; it can be {first} to {min(last, length)}. "
                "Its parent is the row that sampled the token there, and a base trajectory begins at 0."
            )


def _totals(rewards: torch.Tensor, copies: list[int] | None) -> torch.Tensor:
    """Reward and number of what each row stands for, (R, 2); 0 and 0 for an unscorable one."""
    counts = torch.ones_like(rewards).double() if copies is None else rewards.new_tensor(copies).double()
    counts = counts.masked_fill(rewards.isnan(), 0)
    return torch.stack([rewards.double().nan_to_num(0) * counts, counts], dim=1)


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
    parents: list[int | None],
    positions: list[int],
    lengths: list[int],
    own: list[list[float]],
    below: list[list[float]],
) -> Iterator[tuple[int, int, int, float, float]]:
    """
    (row, start, end, reward of T, number of T), in order of row and position.

    `own` has the reward and number of each row, `below` those of the row and all that descend from it.
    """
    branches: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if parent is not None:
            branches[parent].append(row)
    for row, leaving in enumerate(branches):
        stretches = []
        end, (total, count) = lengths[row], own[row]
        for branch in sorted(leaving, key=positions.__getitem__, reverse=True):
            if positions[branch] < end:
                stretches.append((row, positions[branch], end, total, count))
                end = positions[branch]
            total, count = total + below[branch][0], count + below[branch][1]
        if positions[row] < end:
            stretches.append((row, positions[row], end, total, count))
        yield from reversed(stretches)


def _prompt_totals(values: torch.Tensor, prompts: torch.Tensor, num_prompts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and number of the values of each prompt's trees, (P,) each."""
    zeros = values.new_zeros(num_prompts)
    exist = (~values.isnan()).to(values.dtype)
    return zeros.index_add(0, prompts, values.nan_to_num(0)), zeros.index_add(0, prompts, exist)


def _shrink(sums: torch.Tensor, counts: torch.Tensor, priors: torch.Tensor, strength: float) -> torch.Tensor:
    """(strength prior + sum) / (strength + count); the prior where nothing was counted, the mean where no prior is."""
    shrunk = torch.where(priors.isnan(), sums / counts, (strength * priors + sums) / (strength + counts))
    return torch.where(counts == 0, priors, shrunk)
