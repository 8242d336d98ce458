"""Metrics of a generation step, in addition to GRPO's."""

import math
from collections.abc import Iterable

import torch

from .tree import Rollout, Tree


def tree_metrics(trees: list[Tree], advantages: torch.Tensor, num_rows: int) -> dict[str, float]:
    """
    Metrics of the exploration of a step.

    A completion counts as right if its reward is above 0. A metric that does not exist in a step, such as the share of
    rescued prompts among failed ones when none failed, is left out.

    Args:
        trees (`list[Tree]`): The step's trees, after credit.
        advantages (`torch.Tensor` of shape (R,)): Modulated advantages of the rows in the loss.
        num_rows (`int`): Number of rows of the batch.
    """
    states = [state for tree in trees for state in tree.states]
    anchors = [state for state in states if state.parent is not None]
    branches = [rollout for state in anchors for rollout in state.rollouts]
    state_outcomes = [_outcomes(state.rollouts) for state in states]
    prompt_outcomes = [_outcomes(tree.rollouts) for tree in trees]
    rollouts = [rollout for tree in trees for rollout in tree.rollouts]
    failed = [tree for tree in trees if not any(rollout.score.reward > 0 for rollout in _sampled(tree))]
    num_generated = sum(_num_generated(tree) for tree in trees)
    metrics = {
        "fr3e/value/S0": _mean(_mean(rollout.score.reward for rollout in _sampled(tree)) for tree in trees),
        "fr3e/value/anchors": _mean(state.value for state in anchors),
        "fr3e/value_gain": _mean(
            state.value - tree.states[state.parent].value
            for tree in trees
            for state in tree.states
            if state.parent is not None
        ),
        "fr3e/alpha/mean": _mean(state.modulation for state in states),
        "fr3e/alpha/min": min(state.modulation for state in states),
        "fr3e/alpha/max": max(state.modulation for state in states),
        "fr3e/anchor/entropy": _mean(state.entropy for state in anchors if state.entropy is not None),
        "fr3e/entropy": _mean_over_tokens(trees),
        "fr3e/anchor/position": _mean(
            (state.position + 1) / tree.bases[state.base].length
            for tree in trees
            for state in tree.states
            if state.base is not None
        ),
        "fr3e/anchor/count": len(anchors) / len(trees),
        "fr3e/branches/distinct": _mean(branch.differs for branch in branches if branch.differs is not None),
        "fr3e/states/all_right": _mean(outcomes == {True} for outcomes in state_outcomes),
        "fr3e/states/all_wrong": _mean(outcomes == {False} for outcomes in state_outcomes),
        "fr3e/states/rejected": _mean(state.rejected for state in states),
        "fr3e/prompts/all_right": _mean(outcomes == {True} for outcomes in prompt_outcomes),
        "fr3e/prompts/all_wrong": _mean(outcomes == {False} for outcomes in prompt_outcomes),
        "fr3e/prompts/rescued": _mean(
            any(rollout.score.reward > 0 for state in tree.states[1:] for rollout in state.rollouts) for tree in failed
        ),
        "fr3e/tokens/generated": num_generated,
        "fr3e/tokens/per_row": num_generated / sum(rollout.copy_of is None for rollout in rollouts),
        "fr3e/tokens/per_informative_row": num_generated / len(advantages) if len(advantages) else math.nan,
        "fr3e/rows/informative": len(advantages) / num_rows,
        "fr3e/rows/copied": _mean(rollout.copy_of is not None for rollout in rollouts),
        "fr3e/advantage/mean": advantages.mean().item(),
        "fr3e/advantage/std": _mean(((advantages - advantages.mean()) ** 2).tolist()) ** 0.5,
    }
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _sampled(tree: Tree) -> list[Rollout]:
    """
    Completions sampled from the prompt, including truncated ones. Rows that S_0 got in place of missing branches of
    a short base trajectory are left out, because they would give short trajectories more weight.
    """
    bases = {id(base) for base in tree.bases}
    sampled = tree.states[0].rollouts
    return [rollout for rollout in sampled if id(rollout) in bases] or sampled  # all, if base trajectories are dropped


def _mean_over_tokens(trees: list[Tree]) -> float:
    """Mean entropy over all tokens of base trajectories that the policy wrote."""
    means = [
        (mean, base.num_written)
        for tree in trees
        for mean, base in zip(tree.mean_entropies, tree.bases, strict=True)
        if not math.isnan(mean)
    ]
    num_tokens = sum(number for _, number in means)
    return sum(mean * number for mean, number in means) / num_tokens if num_tokens else math.nan


def _num_generated(tree: Tree) -> int:
    """Number of tokens sampled for a tree, including base trajectories that are not rows."""
    rollouts = {id(rollout): rollout for rollout in [*tree.bases, *tree.rollouts]}
    return sum(rollout.num_written for rollout in rollouts.values())


def _outcomes(rollouts: Iterable[Rollout]) -> set[bool]:
    """The outcomes among scorable rollouts: `{True}` if all are right, `{False}` if none is."""
    rewards = (rollout.score.reward for rollout in rollouts)
    return {reward > 0 for reward in rewards if not math.isnan(reward)}


def _mean(x: Iterable[float]) -> float:
    values = [value for value in x if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan
