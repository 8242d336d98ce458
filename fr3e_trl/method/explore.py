"""
First Return, and Entropy-Eliciting Explore: the two stages in which trees of rollouts grow.

First Return samples base trajectories from each prompt. Explore branches new rollouts off them at their anchors.

Each process samples, scores and looks for anchors in the rows that are dealt to it. What the processes tell each other
is how long and how good their rollouts are and where anchors might be; tokens only of the base trajectories of prompts
whose rows are dealt to several of them.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from .anchors import (
    AnchorRule,
    StoppingRule,
    anchor_rule,
    eligible_positions,
    even_shares,
    select_bases,
    share_anchors,
    uncertainty,
)
from .credit import CREDIT_RULES
from .plan import Plan
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

# A base trajectory: the index of its tree, and which of the tree's it is
Base = tuple[int, int]

# A row: the index of its tree, its state, and which of the state's rollouts it is
Slot = tuple[int, State, int]

# What a process tells of a row: its length, how many of its tokens the policy wrote, its score, and whether it begins
# with another token than its base trajectory has there
Outcome = tuple[int, int, Score, bool | None]


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
    plan: Plan,
    sampler: Sampler,
    score: Scorer,
    token_statistics: TokenStatistics,
    seed: tuple[int, ...],
    sharding: RowSharding | None = None,
    in_every_process: InEveryProcess = lambda function: [function()],
    threshold: float | None = None,
) -> list[float]:
    """
    Grow `trees`, each to as many rollouts as a prompt has rows, all of them together in each stage.

    Args:
        trees (`list[Tree]`):
            One for each prompt of all processes, with nothing but its budget and, if this process has rows of it, its
            prompt.
        plan ([`Plan`]):
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
    sharding = sharding or RowSharding(len(trees) * plan.num_rows)
    exploration = _Exploration(trees, plan, sampler, score, token_statistics, seed, sharding, threshold)
    surveys = [survey for of_process in in_every_process(exploration.first_return) for survey in of_process]
    exploration.branch(surveys)
    exploration.take_down(in_every_process(exploration.explore))
    return [survey.uncertainty for survey in surveys]


def own_bases(num_trees: int, plan: Plan, sharding: RowSharding) -> list[Base]:
    """The base trajectories that a process samples."""
    # The first rows of a group; more than it has rows only where they are thrown away
    return [
        (i, b)
        for i in range(num_trees)
        for b in range(plan.shape.num_bases)
        if sharding.owner(i * plan.num_rows + b % plan.num_rows) == sharding.process
    ]


@dataclass(frozen=True)
class _Anchors:
    """
    Finds anchors in base trajectories. It goes from process to process with requests, so it holds plain values alone.

    Args:
        plan ([`Plan`]):
            Settings.
        rule ([`AnchorRule`]):
            Chooses positions.
        seed (`tuple[int, ...]`):
            Decides what is chosen at random.
    """

    plan: Plan
    rule: AnchorRule
    seed: tuple[int, ...]

    def __call__(self, request: SamplingRequest, samples: Sequence[Sample]) -> list[list[int]]:
        """Anchors of all base trajectories of a prompt, as they are sampled."""
        ranked = []
        for b, sample in enumerate(samples):
            digest = _digest(request.prefix_ids, as_ids(sample.token_ids))
            entropies, logprobs = (torch.as_tensor(values).numpy() for values in (sample.entropies, sample.logprobs))
            eligible = eligible_positions(entropies, request.max_new_tokens)
            ranked.append(self.rank(b, digest, entropies, logprobs, eligible))
        return self.share(ranked)

    def rank(self, b: int, digest: Any, entropies: np.ndarray, logprobs: np.ndarray, eligible: np.ndarray) -> list[int]:
        """Positions of a base trajectory to become anchors, best first, no more than the prompt has."""
        seed = repr((self.seed, b, digest.digest()))
        return self.rule.choose(entropies, logprobs, eligible, self.plan.shape.num_anchors, seed)

    def share(self, ranked: list[list[int]]) -> list[list[int]]:
        """Anchors of each of a prompt's base trajectories that are explored, in order, of those that it may have."""
        wants_stopping_rule = CREDIT_RULES[self.plan.credit].wants_stopping_rule
        if not (wants_stopping_rule or isinstance(self.rule, StoppingRule)):
            return share_anchors(ranked, self.plan.shape.num_anchors)
        # What one cannot use goes to none: how many rows a tree has must not depend on its tokens. Nor is it known in
        # time where rollouts leave while it grows
        shares = even_shares(self.plan.shape.num_anchors, len(ranked))
        return [sorted(positions[:share]) for positions, share in zip(ranked, shares, strict=True)]


@dataclass
class _Exploration:
    """
    A process's part in growing trees, with what [`explore`] takes. Its stages are in order.

    Attributes:
        drawn (`dict[Base, dict[int, list[Sample]]]`):
            Rollouts that were drawn with their base trajectory: of each, by the position of the anchor.
    """

    trees: list[Tree]
    plan: Plan
    sampler: Sampler
    score: Scorer
    token_statistics: TokenStatistics
    seed: tuple[int, ...]
    sharding: RowSharding
    threshold: float | None
    drawn: dict[Base, dict[int, list[Sample]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.anchors = _Anchors(self.plan, anchor_rule(self.plan, self.threshold), self.seed)
        self.credit_rule = CREDIT_RULES[self.plan.credit]

    # First Return

    def first_return(self) -> list[Survey]:
        """Sample this process's base trajectories, and rank their positions."""
        bases = own_bases(len(self.trees), self.plan, self.sharding)
        self._sample_bases(bases)
        if self.plan.base_selection != "all":
            self._score([(i, self.trees[i].states[0], self.trees[i].bases[b]) for i, b in bases])
        return self._survey(bases) if self.plan.shape.num_anchors else []

    def _sample_bases(self, bases: list[Base]) -> None:
        """Sample base trajectories. What the sampler drew of their branches goes into `drawn`."""
        for tree in self.trees:
            tree.bases = [Rollout() for _ in range(self.plan.shape.num_bases)]
            tree.entropies = [None] * self.plan.shape.num_bases
            tree.mean_entropies = [math.nan] * self.plan.shape.num_bases
        branching = self._branching()
        requests = [
            SamplingRequest(
                self.trees[i].prompt_ids,
                num_samples,
                self.trees[i].budget,
                self.plan.temperature,
                with_entropies=self.plan.shape.num_anchors > 0,
                branching=None if self._straddles(i) else branching,
                tree=i,
                multimodal=self.trees[i].multimodal,
            )
            for i, num_samples in Counter(i for i, _ in bases).items()
        ]
        samples = (sample for of_request in self.sampler.sample(requests) for sample in of_request)
        for (i, b), sample in zip(bases, samples, strict=True):
            self.trees[i].bases[b] = _rollout(sample)
            if sample.entropies is not None:
                self.trees[i].entropies[b] = torch.as_tensor(sample.entropies)
            self.drawn[i, b] = sample.branches

    def _branching(self) -> Branching | None:
        """What branches off, if that depends on nothing but the prompt's own base trajectories."""
        shape = self.plan.shape
        if not (shape.num_anchors and self.plan.reuse_base and self.plan.base_selection == "all"):
            return None
        rule = self.anchors.rule if isinstance(self.anchors.rule, StoppingRule) else None
        shares = even_shares(shape.num_anchors, shape.num_bases)
        return Branching(shape.num_rollouts, self.anchors, shares, rule)

    def _straddles(self, tree: int) -> bool:
        """Whether several processes have rows of a tree."""
        first = tree * self.plan.num_rows
        return self.sharding.owner(first) != self.sharding.owner(first + self.plan.num_rows - 1)

    # Where to branch

    def _survey(self, bases: list[Base]) -> list[Survey]:
        """Rank the positions of this process's base trajectories."""
        logprobs = self._fill_in_statistics(bases)
        shares = even_shares(self.plan.shape.num_anchors, self.plan.shape.num_bases)
        return [
            self._survey_base(i, b, np.asarray(of_base), shares[b])
            for (i, b), of_base in zip(bases, logprobs, strict=True)
        ]

    def _fill_in_statistics(self, bases: list[Base]) -> list[Any]:
        """Have the entropies along all base trajectories, and return log-probs of their tokens, (L,) each."""
        trees = self.trees
        unknown = [(i, b) for i, b in bases if trees[i].entropies[b] is None]
        # Also where none is: it may be a collective call
        statistics = self.token_statistics(
            [trees[i].prompt_ids for i, _ in unknown],
            [trees[i].bases[b].token_ids for i, b in unknown],
            [trees[i].multimodal for i, _ in unknown],
        )
        logprobs_of: dict[Base, Any] = {(i, b): trees[i].bases[b].logprobs for i, b in bases}
        for (i, b), (logprobs, entropies) in zip(unknown, statistics, strict=True):
            logprobs_of[i, b] = logprobs
            mask = trees[i].bases[b].mask
            written = torch.ones(len(entropies), dtype=torch.bool) if mask is None else torch.from_numpy(mask)
            trees[i].entropies[b] = torch.where(written, entropies, math.nan)
        return [logprobs_of[base] for base in bases]

    def _survey_base(self, i: int, b: int, logprobs: np.ndarray, share: int) -> Survey:
        tree = self.trees[i]
        rollout, entropies = tree.bases[b], np.asarray(tree.entropies[b])
        digest = _digest(tree.prompt_ids, rollout.token_ids)
        eligible = eligible_positions(entropies, tree.budget)
        positions = self.anchors.rank(b, digest, entropies, logprobs, eligible)
        return Survey(
            tree=i,
            base=b,
            rollout=_for_others(rollout, holds_tokens=self._straddles(i)),
            mean_entropy=(entropies if rollout.mask is None else entropies[rollout.mask]).mean().item(),
            anchors=dict(zip(positions, entropies[positions].tolist(), strict=True)),
            uncertainty=uncertainty(entropies, eligible, share, self.plan.anchor_min_gap),
            digest=digest.hexdigest(),
        )

    def branch(self, surveys: list[Survey]) -> None:
        """Select base trajectories, and branch at their anchors: the same in every process."""
        of_trees: list[list[Survey]] = [[] for _ in self.trees]
        for survey in sorted(surveys, key=lambda survey: survey.base):
            of_trees[survey.tree].append(survey)
        for tree, of_tree in zip(self.trees, of_trees, strict=True):
            _take_down_bases(tree, of_tree)
            if self.plan.reuse_base:
                tree.states[0].rollouts = list(tree.bases)
            if self.plan.shape.num_anchors:
                self._branch_tree(tree, of_tree)
            self._place_rows(tree)

    def _branch_tree(self, tree: Tree, surveys: list[Survey]) -> None:
        # Seeded by the tree itself, so that a prompt's anchors do not depend on what shares its batch
        seed = repr((self.seed, [survey.digest for survey in surveys]))
        rewards = [survey.rollout.score.reward for survey in surveys]
        chosen = select_bases(rewards, self.plan.base_selection, seed)
        shared = self.anchors.share([list(surveys[b].anchors) for b in chosen])
        for b, positions in zip(chosen, shared, strict=True):
            tree.branch(b, {position: surveys[b].anchors[position] for position in positions})

    def _place_rows(self, tree: Tree) -> None:
        """Give every row its place. Those of anchors without a position are S_0's."""
        shape = self.plan.shape
        if self.credit_rule.copies_missing_branches:
            num_found = Counter(state.base for state in tree.states)
            for b, share in enumerate(even_shares(shape.num_anchors, shape.num_bases)):
                num_copies = (share - num_found[b]) * shape.num_rollouts
                tree.states[0].rollouts += [replace(tree.bases[b], copy_of=b) for _ in range(num_copies)]
        size = self.plan.num_rows - (len(tree.states) - 1) * shape.num_rollouts
        for state in tree.states:
            num_missing = (size if state.parent is None else shape.num_rollouts) - len(state.rollouts)
            state.rollouts += [Rollout() for _ in range(num_missing)]

    # Entropy-Eliciting Explore

    def explore(self) -> list[Outcome]:
        """Sample and score what is missing of this process's rows."""
        own = self._slots()[self.sharding.own.start : self.sharding.own.stop]
        self._take_drawn(own)
        self._sample_missing([slot for slot in own if slot[1].rollouts[slot[2]].length == 0])
        rows = [(i, state, state.rollouts[k]) for i, state, k in own]
        for i, state, rollout in rows:
            if state.base is not None:
                rollout.differs = bool(rollout.token_ids[0] != self._token_at(self.trees[i], state))
        self._score([row for row in rows if not row[2].score.rewards and row[2].copy_of is None])
        return [(r.length, r.num_written, replace(r.score, logs={}), r.differs) for _, _, r in rows]

    def _slots(self) -> list[Slot]:
        """The rows of all processes, in order."""
        return [
            (i, state, k)
            for i, tree in enumerate(self.trees)
            for state in tree.states
            for k in range(len(state.rollouts))
        ]

    def _take_drawn(self, own: list[Slot]) -> None:
        """Put rollouts that were drawn with their base trajectories in their places."""
        for i, state, k in own:
            samples = [] if state.base is None else self.drawn.get((i, state.base), {}).get(state.position, [])
            if k < len(samples):
                state.rollouts[k] = _rollout(samples[k])

    def _sample_missing(self, missing: list[Slot]) -> None:
        of_states = [list(slots) for _, slots in groupby(missing, key=lambda slot: id(slot[1]))]
        requests = [self._request(*slots[0][:2], len(slots)) for slots in of_states]
        for slots, samples in zip(of_states, self.sampler.sample(requests), strict=True):
            for (_, state, k), sample in zip(slots, samples, strict=True):
                state.rollouts[k] = _rollout(sample)

    def _request(self, i: int, state: State, num_samples: int) -> SamplingRequest:
        tree = self.trees[i]
        base = None if state.base is None else tree.bases[state.base]
        return SamplingRequest(
            prefix_ids=np.concatenate([tree.prompt_ids, state.prefix_ids]),
            num_samples=num_samples,
            max_new_tokens=tree.budget - state.position,
            temperature=self.plan.temperature,
            num_prompt_tokens=len(tree.prompt_ids),
            tree=i,
            dialogue=None if base is None else base.dialogue,
            multimodal=tree.multimodal,
        )

    def _token_at(self, tree: Tree, state: State) -> int:
        """The base trajectory's token at an anchor."""
        assert state.base is not None
        return int(tree.bases[state.base].token_ids[state.position])

    def _score(self, rollouts: list[tuple[int, State, Rollout]]) -> None:
        """Score rollouts, given with their tree's index and their state, and keep what they got."""
        completions = [np.concatenate([state.prefix_ids, rollout.token_ids]) for _, state, rollout in rollouts]
        scores = self.score([i for i, _, _ in rollouts], completions, [rollout.dialogue for _, _, rollout in rollouts])
        for (_, _, rollout), score in zip(rollouts, scores, strict=True):
            rollout.score = score

    def take_down(self, outcomes: list[list[Outcome]]) -> None:
        """Take down what other processes told of their rows."""
        of_rows = (outcome for of_process in outcomes for outcome in of_process)
        for (_, state, k), outcome in zip(self._slots(), of_rows, strict=True):
            length, num_written, score, differs = outcome
            rollout = state.rollouts[k]
            if not rollout.score.rewards:
                rollout.length, rollout.num_written = length, num_written
                rollout.differs, rollout.score = differs, score
        for tree in self.trees:
            for rollout in tree.states[0].rollouts:
                if rollout.copy_of is not None:
                    rollout.score = tree.bases[rollout.copy_of].score


def _rollout(sample: Sample) -> Rollout:
    return Rollout(as_ids(sample.token_ids), sample.logprobs, mask=sample.mask, dialogue=sample.dialogue)


def _for_others(rollout: Rollout, holds_tokens: bool) -> Rollout:
    """A rollout as other processes know it."""
    score = replace(rollout.score, logs={})
    if not holds_tokens:
        return Rollout(score=score, length=rollout.length, num_written=rollout.num_written)
    dialogue = None if rollout.dialogue is None else rollout.dialogue.without_environment()
    return replace(rollout, score=score, dialogue=dialogue)


def _digest(prompt_ids: TokenIds, token_ids: TokenIds) -> Any:
    """Of a base trajectory and its prompt."""
    return hashlib.blake2b(prompt_ids.tobytes() + b"|" + token_ids.tobytes(), digest_size=8)


def _take_down_bases(tree: Tree, surveys: list[Survey]) -> None:
    """Take down what other processes told of a tree's base trajectories, with tokens if this one has rows of it."""
    has_rows = len(tree.prompt_ids) > 0
    for survey in surveys:
        tree.mean_entropies[survey.base] = survey.mean_entropy
        if len(tree.bases[survey.base].token_ids) == 0:
            tree.bases[survey.base] = survey.rollout if has_rows else _for_others(survey.rollout, False)
