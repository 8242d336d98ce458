"""First Return, and Entropy-Eliciting Explore: the two stages in which trees of rollouts grow."""

import random
from collections.abc import Callable

import torch

from ..config import FR3EConfig
from ..generation.sampler import Sampler, SamplingRequest
from .anchors import anchor_scores, eligible_positions, rank_anchors, select_bases, share_anchors
from .tree import Rollout, Score, Tree

# Scores completions: (index of each one's tree, their whole token ids) to what they scored.
Scorer = Callable[[list[int], list[list[int]]], list[Score]]

# The policy's view of completions: (prompts, completions) to log-probs and entropies of their tokens, each (L,).
TokenStatistics = Callable[[list[list[int]], list[list[int]]], list[tuple[torch.Tensor, torch.Tensor]]]


def explore(
    trees: list[Tree],
    args: FR3EConfig,
    sampler: Sampler,
    score: Scorer,
    token_statistics: TokenStatistics,
    seed: tuple[int, ...],
) -> None:
    """
    Grow `trees`, each to `num_generations` rollouts, all of them together in each stage.

    Args:
        trees (`list[Tree]`):
            One for each prompt, with nothing but its prompt and budget.
        args (`FR3EConfig`):
            Settings.
        sampler (`Sampler`):
            Draws the rollouts.
        score (`Scorer`):
            Scores them. Each is scored once, on its whole completion.
        token_statistics (`TokenStatistics`):
            Gives the entropies at which to look for anchors.
        seed (`tuple[int, ...]`):
            Decides, with the sampled tokens, every choice made at random: not the order or number of trees.
    """
    _first_return(trees, args, sampler, score)
    if args.num_anchors:
        _place_anchors(trees, args, token_statistics, seed)
    _explore(trees, args, sampler, score)


def _first_return(trees: list[Tree], args: FR3EConfig, sampler: Sampler, score: Scorer) -> None:
    """Sample and score the base trajectories."""
    requests = [SamplingRequest(tree.prompt_ids, args.num_bases, tree.budget, args.temperature) for tree in trees]
    for tree, samples in zip(trees, sampler.sample(requests), strict=True):
        tree.bases = [Rollout(sample.token_ids, sample.logprobs) for sample in samples]
        if args.reuse_base:
            tree.states[0].rollouts = list(tree.bases)
    _score([(i, [], base) for i, tree in enumerate(trees) for base in tree.bases], score)


def _place_anchors(
    trees: list[Tree], args: FR3EConfig, token_statistics: TokenStatistics, seed: tuple[int, ...]
) -> None:
    """Select base trajectories, and branch at their most uncertain positions."""
    num_anchors = args.num_states - 1
    statistics = iter(
        token_statistics(
            [tree.prompt_ids for tree in trees for _ in tree.bases],
            [base.token_ids for tree in trees for base in tree.bases],
        )
    )
    for tree in trees:
        of_bases = [next(statistics) for _ in tree.bases]
        tree.entropies = [entropies for _, entropies in of_bases]
        # Seeded by the tree itself, so that a prompt's anchors do not depend on what shares its batch
        rng = random.Random(repr((seed, tree.prompt_ids, [base.token_ids for base in tree.bases])))
        chosen = select_bases([base.score.reward for base in tree.bases], args.base_selection, rng)
        ranked = []
        for i in chosen:
            logprobs, entropies = of_bases[i]
            scores = anchor_scores(args.anchor_score, entropies, logprobs, rng)
            eligible = eligible_positions(entropies, tree.budget, args.anchor_min_budget, args.anchor_quantile)
            ranked.append(rank_anchors(scores, eligible, num_anchors, args.anchor_min_gap))
        for i, positions in zip(chosen, share_anchors(ranked, num_anchors), strict=True):
            tree.branch(i, positions)


def _explore(trees: list[Tree], args: FR3EConfig, sampler: Sampler, score: Scorer) -> None:
    """Sample and score what is missing of each state's rollouts. Those of anchors without a position go to S_0."""
    explore_temperature = args.temperature * args.explore_temperature_scale
    requests, targets = [], []
    for i, tree in enumerate(trees):
        for state in tree.states:
            is_root = state.parent is None
            size = args.num_generations - (len(tree.states) - 1) * args.num_rollouts if is_root else args.num_rollouts
            if size > len(state.rollouts):
                requests.append(
                    SamplingRequest(
                        prefix_ids=tree.prompt_ids + state.prefix_ids,
                        num_samples=size - len(state.rollouts),
                        max_new_tokens=tree.budget - len(state.prefix_ids),
                        temperature=args.temperature if is_root else explore_temperature,
                    )
                )
                targets.append((i, state))
    if not requests:
        return
    scored: list[tuple[int, list[int], Rollout]] = []
    for (i, state), samples in zip(targets, sampler.sample(requests), strict=True):
        rollouts = [Rollout(sample.token_ids, sample.logprobs) for sample in samples]
        state.rollouts.extend(rollouts)
        scored.extend((i, state.prefix_ids, rollout) for rollout in rollouts)
    _score(scored, score)


def _score(rollouts: list[tuple[int, list[int], Rollout]], score: Scorer) -> None:
    """Score rollouts, given with their tree's index and their prefix, and keep what they got."""
    scores = score([i for i, _, _ in rollouts], [prefix + rollout.token_ids for _, prefix, rollout in rollouts])
    for (_, _, rollout), rollout_score in zip(rollouts, scores, strict=True):
        rollout.score = rollout_score
