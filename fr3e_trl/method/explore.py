"""
First Return, and Entropy-Eliciting Explore: the two stages in which trees of rollouts grow.

Each process samples, scores and looks for anchors in the rows that are dealt to it. What the processes tell each other
is how long and how good their rollouts are and where anchors might be; tokens only of the base trajectories of prompts
whose rows are dealt to several of them.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ..config import FR3EConfig
from .anchors import (
    anchor_scores,
    eligible_positions,
    even_shares,
    first_anchors,
    rank_anchors,
    select_bases,
    share_anchors,
    uncertainty,
)
from .rows import RowSharding
from .sampling import Branching, Sample, Sampler, SamplingRequest
from .tree import Dialogue, Rollout, Score, State, TokenIds, Tree, as_ids

# Scores completions: (index of each one's tree, their whole token ids, their turns) to what they scored.
Scorer = Callable[[list[int], list[TokenIds], list[Dialogue | None]], list[Score]]

# The policy's view of completions: (prompts, completions, messages of those prompts that have images) to log-probs and
# entropies of their tokens, each (L,).
TokenStatistics = Callable[[list[TokenIds], list[TokenIds], list[Any]], list[tuple[torch.Tensor, torch.Tensor]]]

# Calls a function in every process, and returns what it returned in each.
InEveryProcess = Callable[[Callable[[], Any]], list[Any]]

# Rollouts that were drawn with their base trajectory: of each (tree, base), by the position of the anchor
Drawn = dict[tuple[int, int], dict[int, list[Sample]]]

# Ways to select base trajectories that look at what these scored
BY_SCORE = ("mixed", "best", "worst")


@dataclass(frozen=True)
class Survey:
    """
    What a process tells the others of a base trajectory.

    Args:
        tree, base (`int`):
            Which it is.
        rollout ([`Rollout`]):
            How long it is, and what it scored, if it was scored already. Its tokens and turns only if other processes
            have rows that may branch from it.
        mean_entropy (`float`):
            Of the policy along it, in nats.
        anchors (`dict[int, float]`):
            Positions that may become anchors, best first, and the entropies there.
        uncertainty (`float`):
            Its part in the next threshold, see [`uncertainty`].
        digest (`str`):
            Of its tokens and the prompt's, which random choices are seeded by.
    """

    tree: int
    base: int
    rollout: Rollout
    mean_entropy: float
    anchors: dict[int, float]
    uncertainty: float
    digest: str


def explore(
    trees: list[Tree],
    args: FR3EConfig,
    sampler: Sampler,
    score: Scorer,
    token_statistics: TokenStatistics,
    seed: tuple[int, ...],
    sharding: RowSharding | None = None,
    in_every_process: InEveryProcess = lambda function: [function()],
    threshold: float | None = None,
) -> list[float]:
    """
    Grow `trees`, each to `num_generations` rollouts, all of them together in each stage.

    Args:
        trees (`list[Tree]`):
            One for each prompt of all processes, with nothing but its budget and, if this process has rows of it, its
            prompt.
        args (`FR3EConfig`):
            Settings.
        sampler (`Sampler`):
            Draws the rollouts.
        score (`Scorer`):
            Scores them: this process's rows, in one call unless base trajectories are selected by their scores, which
            then are scored before. Each is scored once, on its whole completion.
        token_statistics (`TokenStatistics`):
            Gives the entropies at which to look for anchors, of base trajectories whose sampler did not.
        seed (`tuple[int, ...]`):
            Decides, with the sampled tokens, every choice made at random: not the order or number of trees.
        sharding ([`RowSharding`], *optional*):
            Which rows are this process's. If `None`, all are.
        in_every_process (`InEveryProcess`):
            Calls a function in every process.
        threshold (`float`, *optional*):
            What stands for `anchor_threshold="auto"`, in nats. If `None`, the highest entropies become anchors.

    Returns:
        `list[float]`: How uncertain each base trajectory was, see [`uncertainty`]: the same in every process. None
        without anchors.
    """
    sharding = sharding or RowSharding(len(trees) * args.num_generations)
    drawn: Drawn = {}
    if not isinstance(args.anchor_threshold, str):
        threshold = args.anchor_threshold

    def first_return() -> list[Survey]:
        bases = _first_return(trees, args, sampler, seed, sharding, drawn, threshold)
        if args.base_selection in BY_SCORE:
            _score([(i, trees[i].states[0], trees[i].bases[b]) for i, b in bases], score)
        return _survey(trees, bases, args, token_statistics, seed, sharding, threshold) if args.num_anchors else []

    surveys = [survey for of_process in in_every_process(first_return) for survey in of_process]
    _branch(trees, args, surveys, seed, sharding)
    outcomes = in_every_process(lambda: _explore(trees, args, sampler, score, sharding, drawn))
    _know_all(trees, outcomes)
    return [survey.uncertainty for survey in surveys]


def own_bases(num_trees: int, args: FR3EConfig, sharding: RowSharding) -> list[tuple[int, int]]:
    """The base trajectories that a process samples: (tree, base) each."""
    group = args.num_generations
    # The first rows of a group; more than it has rows only where they are thrown away
    return [
        (i, b)
        for i in range(num_trees)
        for b in range(args.num_bases)
        if sharding.owner(i * group + b % group) == sharding.process
    ]


def _first_return(
    trees: list[Tree],
    args: FR3EConfig,
    sampler: Sampler,
    seed: tuple[int, ...],
    sharding: RowSharding,
    drawn: Drawn,
    threshold: float | None,
) -> list[tuple[int, int]]:
    """
    Sample this process's base trajectories, and return which these are: (tree, base) each.

    What branches off them is asked for too, where that depends on nothing but the prompt's own base trajectories, and
    all its rows are this process's. What the sampler had of it goes into `drawn`.
    """
    bases = own_bases(len(trees), args, sharding)
    branching = None
    if args.num_anchors and args.reuse_base and args.base_selection == "all":
        branching = Branching(
            args.num_rollouts,
            args.temperature * args.explore_temperature_scale,
            partial(_anchors, args, seed, threshold),
            even_shares(args.num_anchors, args.num_bases),
            threshold,
            args.anchor_min_gap,
            args.anchor_min_budget,
        )
    requests = [
        SamplingRequest(
            trees[i].prompt_ids,
            num_samples,
            trees[i].budget,
            args.temperature,
            with_entropies=bool(args.num_anchors),
            branching=None if _straddles(i, args, sharding) else branching,
            tree=i,
            multimodal=trees[i].multimodal,
        )
        for i, num_samples in Counter(i for i, _ in bases).items()
    ]
    for tree in trees:
        tree.bases = [Rollout() for _ in range(args.num_bases)]
        tree.entropies = [None] * args.num_bases
        tree.mean_entropies = [math.nan] * args.num_bases
    samples = (sample for of_request in sampler.sample(requests) for sample in of_request)
    for (i, b), sample in zip(bases, samples, strict=True):
        trees[i].bases[b] = _rollout(sample)
        if sample.entropies is not None:
            trees[i].entropies[b] = torch.as_tensor(sample.entropies)
        drawn[i, b] = sample.branches
    return bases


def _rollout(sample: Sample) -> Rollout:
    return Rollout(as_ids(sample.token_ids), sample.logprobs, mask=sample.mask, dialogue=sample.dialogue)


def _survey(
    trees: list[Tree],
    bases: list[tuple[int, int]],
    args: FR3EConfig,
    token_statistics: TokenStatistics,
    seed: tuple[int, ...],
    sharding: RowSharding,
    threshold: float | None,
) -> list[Survey]:
    """Rank the positions of this process's base trajectories."""
    unknown = [(i, b) for i, b in bases if trees[i].entropies[b] is None]
    # Also where none is: it may be a collective call
    statistics = token_statistics(
        [trees[i].prompt_ids for i, _ in unknown],
        [trees[i].bases[b].token_ids for i, b in unknown],
        [trees[i].multimodal for i, _ in unknown],
    )
    logprobs_of: dict[tuple[int, int], Any] = {(i, b): trees[i].bases[b].logprobs for i, b in bases}
    for (i, b), (logprobs, entropies) in zip(unknown, statistics, strict=True):
        logprobs_of[i, b] = logprobs
        mask = trees[i].bases[b].mask
        written = torch.ones(len(entropies), dtype=torch.bool) if mask is None else torch.from_numpy(mask)
        trees[i].entropies[b] = torch.where(written, entropies, math.nan)
    surveys = []
    shares = even_shares(args.num_anchors or 0, args.num_bases)
    for i, b in bases:
        tree = trees[i]
        rollout, entropies = tree.bases[b], tree.entropies[b]
        digest = _digest(tree.prompt_ids, rollout.token_ids)
        values, logps = np.asarray(entropies), np.asarray(logprobs_of[i, b])
        of_base = (seed, b, digest.digest())
        eligible = _eligible(values, args, tree.budget, rollout.dialogue)
        positions = _ranked(values, logps, eligible, args, of_base, threshold)
        surveys.append(
            Survey(
                tree=i,
                base=b,
                rollout=_for_others(rollout, holds_tokens=_straddles(i, args, sharding)),
                mean_entropy=(values if rollout.mask is None else values[rollout.mask]).mean().item(),
                anchors=dict(zip(positions, values[positions].tolist(), strict=True)),
                uncertainty=uncertainty(values, eligible, shares[b]),
                digest=digest.hexdigest(),
            )
        )
    return surveys


def _for_others(rollout: Rollout, holds_tokens: bool) -> Rollout:
    """A rollout as other processes know it."""
    score = Score(rollout.score.rewards, rollout.score.reward)
    if not holds_tokens:
        return Rollout(score=score, length=rollout.length, num_written=rollout.num_written)
    dialogue = None if rollout.dialogue is None else rollout.dialogue.without_environment()
    return replace(rollout, score=score, dialogue=dialogue)


def _straddles(tree: int, args: FR3EConfig, sharding: RowSharding) -> bool:
    """Whether several processes have rows of a tree."""
    group = tree * args.num_generations
    return sharding.owner(group) != sharding.owner(group + args.num_generations - 1)


def _digest(prompt_ids: TokenIds, token_ids: TokenIds) -> Any:
    """Of a base trajectory and its prompt."""
    return hashlib.blake2b(prompt_ids.tobytes() + b"|" + token_ids.tobytes(), digest_size=8)


def _ranked(
    entropies: np.ndarray,
    logprobs: np.ndarray,
    eligible: np.ndarray,
    args: FR3EConfig,
    seed: Any,
    threshold: float | None,
) -> list[int]:
    """Eligible positions of a base trajectory to become anchors, best first, no more than the prompt has."""
    most = (args.num_anchors or 0, args.anchor_min_gap)
    if threshold is not None:
        return first_anchors(entropies, eligible, threshold, *most)
    scores = anchor_scores(args.anchor_score, entropies, logprobs, repr(seed))
    return rank_anchors(scores, eligible, *most)


def _eligible(entropies: np.ndarray, args: FR3EConfig, budget: int, dialogue: Dialogue | None = None) -> np.ndarray:
    """Positions of a base trajectory that may become anchors."""
    starts = None
    if args.anchor_positions == "turns" and dialogue is not None:
        starts = [start for start, _ in dialogue.turns]
    return eligible_positions(entropies, budget, args.anchor_min_budget, args.anchor_quantile, starts)


def _anchors(
    args: FR3EConfig,
    seed: tuple[int, ...],
    threshold: float | None,
    request: SamplingRequest,
    samples: Sequence[Sample],
) -> list[list[int]]:
    """Anchors of all base trajectories of a prompt, as they are sampled."""
    ranked = []
    for b, sample in enumerate(samples):
        digest = _digest(request.prefix_ids, as_ids(sample.token_ids))
        entropies, logprobs = (torch.as_tensor(values).numpy() for values in (sample.entropies, sample.logprobs))
        of_base = (seed, b, digest.digest())
        eligible = _eligible(entropies, args, request.max_new_tokens)
        ranked.append(_ranked(entropies, logprobs, eligible, args, of_base, threshold))
    return _shared(ranked, args)


def _shared(ranked: list[list[int]], args: FR3EConfig) -> list[list[int]]:
    """Anchors of each of a prompt's base trajectories that are explored, in order, of those that it may have."""
    if args.credit == "tree" or args.anchor_threshold is not None:
        # Tree credit: how many rows a tree has must not depend on its tokens. What one cannot use goes to none, nor is
        # it known in time where rollouts leave while it grows
        shares = even_shares(args.num_anchors or 0, len(ranked))
        return [sorted(positions[:share]) for positions, share in zip(ranked, shares, strict=True)]
    return share_anchors(ranked, args.num_anchors or 0)


def _branch(
    trees: list[Tree], args: FR3EConfig, surveys: list[Survey], seed: tuple[int, ...], sharding: RowSharding
) -> None:
    """Select base trajectories, and branch at their most uncertain positions: the same in every process."""
    of_trees: list[list[Survey]] = [[] for _ in trees]
    for survey in sorted(surveys, key=lambda survey: survey.base):
        of_trees[survey.tree].append(survey)
    for tree, of_tree in zip(trees, of_trees, strict=True):
        for survey in of_tree:
            tree.mean_entropies[survey.base] = survey.mean_entropy
            if len(tree.bases[survey.base].token_ids) == 0:
                has_rows = len(tree.prompt_ids) > 0
                tree.bases[survey.base] = survey.rollout if has_rows else _for_others(survey.rollout, False)
        if args.reuse_base:
            tree.states[0].rollouts = list(tree.bases)
        if args.num_anchors:
            # Seeded by the tree itself, so that a prompt's anchors do not depend on what shares its batch
            of_prompt = repr((seed, [survey.digest for survey in of_tree]))
            chosen = select_bases([survey.rollout.score.reward for survey in of_tree], args.base_selection, of_prompt)
            ranked = [list(of_tree[b].anchors) for b in chosen]
            for b, positions in zip(chosen, _shared(ranked, args), strict=True):
                tree.branch(b, {position: of_tree[b].anchors[position] for position in positions})
        # Every row has its place. Those of anchors without a position are S_0's: under tree credit the base trajectory
        # stands for them, which then is there again
        if args.credit == "tree":
            num_found = Counter(state.base for state in tree.states)
            for b, share in enumerate(even_shares(args.num_anchors or 0, args.num_bases)):
                copied = [replace(tree.bases[b], copy_of=b) for _ in range((share - num_found[b]) * args.num_rollouts)]
                tree.states[0].rollouts += copied
        size = args.num_generations - (len(tree.states) - 1) * args.num_rollouts
        for state in tree.states:
            num_missing = (size if state.parent is None else args.num_rollouts) - len(state.rollouts)
            state.rollouts += [Rollout() for _ in range(num_missing)]


def _explore(
    trees: list[Tree], args: FR3EConfig, sampler: Sampler, score: Scorer, sharding: RowSharding, drawn: Drawn
) -> list[tuple[int, int, list[float], float]]:
    """Sample and score what is missing of this process's rows; return lengths, rewards and reward of each row."""
    own = _slots(trees)[sharding.own.start : sharding.own.stop]
    for i, state, k in own:
        samples = [] if state.base is None else drawn.get((i, state.base), {}).get(state.position, [])
        if k < len(samples):
            state.rollouts[k] = _rollout(samples[k])
    missing = [slot for slot in own if slot[1].rollouts[slot[2]].length == 0]
    of_states = [list(slots) for _, slots in groupby(missing, key=lambda slot: id(slot[1]))]
    explore_temperature = args.temperature * args.explore_temperature_scale
    requests = [
        SamplingRequest(
            prefix_ids=np.concatenate([trees[i].prompt_ids, state.prefix_ids]),
            num_samples=len(slots),
            max_new_tokens=trees[i].budget - state.position,
            temperature=args.temperature if state.parent is None else explore_temperature,
            num_prompt_tokens=len(trees[i].prompt_ids),
            tree=i,
            dialogue=None if state.base is None else trees[i].bases[state.base].dialogue,
            multimodal=trees[i].multimodal,
        )
        for slots in of_states
        for i, state, _ in slots[:1]
    ]
    for slots, samples in zip(of_states, sampler.sample(requests), strict=True):
        for (_, state, k), sample in zip(slots, samples, strict=True):
            state.rollouts[k] = _rollout(sample)
    rows = [(i, state, state.rollouts[k]) for i, state, k in own]
    # Copies too, for reward functions to see whole groups; but an environment was asked for a dialogue's score already
    unscored = [row for row in rows if not row[2].score.rewards and (row[2].copy_of is None or not row[2].dialogue)]
    _score(unscored, score)
    return [
        (rollout.length, rollout.num_written, rollout.score.rewards, rollout.score.reward) for _, _, rollout in rows
    ]


def _slots(trees: list[Tree]) -> list[tuple[int, State, int]]:
    """The rows of all processes, in order: (tree, state, number of the rollout) each."""
    return [(i, state, k) for i, tree in enumerate(trees) for state in tree.states for k in range(len(state.rollouts))]


def _score(rollouts: list[tuple[int, State, Rollout]], score: Scorer) -> None:
    """Score rollouts, given with their tree's index and their state, and keep what they got."""
    completions = [np.concatenate([state.prefix_ids, rollout.token_ids]) for _, state, rollout in rollouts]
    scores = score([i for i, _, _ in rollouts], completions, [rollout.dialogue for _, _, rollout in rollouts])
    for (_, _, rollout), rollout_score in zip(rollouts, scores, strict=True):
        rollout.score = rollout_score


def _know_all(trees: list[Tree], outcomes: list[list[tuple[int, int, list[float], float]]]) -> None:
    """Take down what other processes told of their rows."""
    of_rows = (outcome for of_process in outcomes for outcome in of_process)
    for (_, state, k), (length, num_written, rewards, reward) in zip(_slots(trees), of_rows, strict=True):
        rollout = state.rollouts[k]
        if not rollout.score.rewards:
            rollout.length, rollout.num_written, rollout.score = length, num_written, Score(rewards, reward)
    for tree in trees:
        for rollout in tree.states[0].rollouts:
            if rollout.copy_of is not None and not rollout.score.rewards:
                rollout.score = tree.bases[rollout.copy_of].score
