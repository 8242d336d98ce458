"""
First Return, and Entropy-Eliciting Explore: the two stages in which trees of rollouts grow.

First Return samples base trajectories from each prompt. Explore branches new rollouts off them at their anchors.

Each process samples its own rows, scores them and finds candidates for anchors. Processes exchange the lengths and
rewards of rollouts and these candidates. They exchange tokens only of base trajectories whose prompt has rows in
several processes.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

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

# Scores completions: (index of each one's tree, token ids of whole completions, dialogues) to scores.
Scorer = Callable[[list[int], list[TokenIds], list[Dialogue | None]], list[Score]]

# Scores tokens with the policy: (prompts, completions, messages of prompts with images) to log-probs and entropies of
# each completion's tokens, (L,) each.
TokenStatistics = Callable[[list[TokenIds], list[TokenIds], list[Any]], list[tuple[torch.Tensor, torch.Tensor]]]

# Calls a function in every process, and returns the results of all processes.
InEveryProcess = Callable[[Callable[[], Any]], list[Any]]

# A base trajectory: the index of its tree, and its index in the tree
Base = tuple[int, int]

# A row: the index of its tree, its state, and its index among the state's rollouts
Slot = tuple[int, State, int]


class BaseReport(NamedTuple):
    """
    A process's report on a base trajectory to the other processes.

    Args:
        tree, base (`int`): Indices of the tree, and of the base trajectory in it.
        rollout ([`Rollout`]):
            Its length, and its score if it has one. Tokens and turns are included only if other processes have rows
            that may branch from it.
        anchors (`dict[int, float]`), num_written (`dict[int, int]`):
            Candidates for anchors, best first: the entropy at each position and, if tools wrote some of the tokens
            before it, the number of tokens before it that the policy wrote.
        mean_entropy, uncertainty (`float`):
            The policy's mean entropy along it, in nats, and its [`uncertainty`], which the next threshold depends on.
        digest (`str`): Hash of its tokens and the prompt's, used to seed random choices.
    """

    tree: int
    base: int
    rollout: Rollout
    anchors: dict[int, float]
    num_written: dict[int, int]
    mean_entropy: float
    uncertainty: float
    digest: str


class RowReport(NamedTuple):
    """A process's report on a row to the other processes, see [`Rollout`]."""

    length: int
    num_written: int
    score: Score
    differs: bool | None


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
    Grow `trees` until each has as many rollouts as a prompt has rows. Each stage handles all trees together.

    Args:
        trees (`list[Tree]`):
            One tree for each prompt of all processes, with its budget and, if this process has rows of it, its prompt.
        plan ([`Plan`]): Settings.
        sampler (`Sampler`): Draws the rollouts.
        score (`Scorer`):
            Scores the whole completions of this process's rows, all in one call, unless base trajectories are selected
            by their scores and have to be scored first.
        token_statistics (`TokenStatistics`):
            Computes the entropies of base trajectories whose sampler did not return them.
        seed (`tuple[int, ...]`):
            Seeds random choices together with the sampled tokens. They do not depend on the order or number of trees.
        sharding ([`RowSharding`], *optional*): Assigns rows to processes. If `None`, this process has all rows.
        in_every_process (`InEveryProcess`): Calls a function in every process.
        threshold (`float`, *optional*):
            Current value of `anchor_threshold="auto"`, in nats. If `None`, the highest entropies become anchors.

    Returns:
        `list[float]`: The [`uncertainty`] of each base trajectory, the same in every process. Empty without anchors.
    """
    sharding = sharding or RowSharding(len(trees) * plan.num_rows)
    anchors = AnchorFinder(plan, anchor_rule(plan, threshold), seed)
    exploration = _Exploration(trees, plan, sampler, score, token_statistics, sharding, anchors)
    bases = [report for reports in in_every_process(exploration.sample_bases) for report in reports]
    exploration.place_rows(bases)
    rows = [report for reports in in_every_process(exploration.sample_branches) for report in reports]
    exploration.record(rows)
    return [base.uncertainty for base in bases]


def own_bases(num_trees: int, plan: Plan, sharding: RowSharding) -> list[Base]:
    """The base trajectories that a process samples."""
    # They are the first rows of a group. There can be more than it has rows if they are dropped
    return [
        (i, b)
        for i in range(num_trees)
        for b in range(plan.shape.num_bases)
        if sharding.owner(i * plan.num_rows + b % plan.num_rows) == sharding.process
    ]


@dataclass(frozen=True)
class AnchorFinder:
    """
    Finds anchors in base trajectories. It is sent between processes with requests, so it only holds plain values.

    Args:
        rule ([`AnchorRule`]): Chooses positions.
        seed (`tuple[int, ...]`): Seeds random choices.
    """

    plan: Plan
    rule: AnchorRule
    seed: tuple[int, ...]

    @property
    def shares(self) -> list[int]:
        """The maximum number of anchors of each of a prompt's base trajectories if all are explored."""
        return even_shares(self.plan.shape.num_anchors, self.plan.shape.num_bases)

    @property
    def stopping_rule(self) -> StoppingRule | None:
        return self.rule if isinstance(self.rule, StoppingRule) else None

    def __call__(self, request: SamplingRequest, samples: Sequence[Sample]) -> list[list[int]]:
        """Anchors of all base trajectories of a prompt, given their samples."""
        ranked = []
        for b, sample in enumerate(samples):
            digest = _digest(request.prefix_ids, as_ids(sample.token_ids))
            entropies, logprobs = (torch.as_tensor(values).numpy() for values in (sample.entropies, sample.logprobs))
            eligible = eligible_positions(entropies, request.max_new_tokens)
            ranked.append(self.rank(b, digest, entropies, logprobs, eligible))
        return self.share(ranked)

    def rank(self, b: int, digest: Any, entropies: np.ndarray, logprobs: np.ndarray, eligible: np.ndarray) -> list[int]:
        """Candidates for anchors of a base trajectory, best first, at most as many as the prompt has anchors."""
        seed = repr((self.seed, b, digest.digest()))
        return self.rule.choose(entropies, logprobs, eligible, self.plan.shape.num_anchors, seed)

    def share(self, ranked: list[list[int]]) -> list[list[int]]:
        """Anchors of each explored base trajectory of a prompt, in order of position, given its candidates."""
        if self.stopping_rule is None and not CREDIT_RULES[self.plan.credit].wants_stopping_rule:
            return share_anchors(ranked, self.plan.shape.num_anchors)
        # Unused shares do not go to other trajectories: a tree's number of rows must not depend on its tokens, and
        # branches that are sampled while trajectories grow cannot wait for the others
        shares = even_shares(self.plan.shape.num_anchors, len(ranked))
        return [sorted(positions[:share]) for positions, share in zip(ranked, shares, strict=True)]


def base_requests(trees: list[Tree], plan: Plan, sharding: RowSharding, anchors: AnchorFinder) -> list[SamplingRequest]:
    """
    A process's first requests to its sampler: its base trajectories, with their branches if these depend on nothing
    but the base trajectories.
    """
    shape, requests = plan.shape, []
    for i, num_samples in Counter(i for i, _ in own_bases(len(trees), plan, sharding)).items():
        tree, branching = trees[i], None
        can_branch = plan.reuse_base and plan.base_selection == "all" and not _spans_processes(i, plan, sharding)
        if shape.num_anchors and can_branch:
            branching = Branching(shape.num_rollouts, anchors, anchors.shares, anchors.stopping_rule)
        requests.append(
            SamplingRequest(
                tree.prompt_ids,
                num_samples,
                tree.budget,
                plan.temperature,
                with_entropies=shape.num_anchors > 0,
                branching=branching,
                tree=i,
                multimodal=tree.multimodal,
            )
        )
    return requests


def _spans_processes(tree: int, plan: Plan, sharding: RowSharding) -> bool:
    """Whether several processes have rows of a tree."""
    first = tree * plan.num_rows
    return sharding.owner(first) != sharding.owner(first + plan.num_rows - 1)


@dataclass
class _Exploration:
    """
    A process's part in growing trees, with the arguments of [`explore`]. Its public methods are the stages, in order.

    Attributes:
        drawn (`dict[Base, dict[int, list[Sample]]]`):
            Branches that were sampled together with each base trajectory, by the position of their anchor.
    """

    trees: list[Tree]
    plan: Plan
    sampler: Sampler
    scorer: Scorer
    token_statistics: TokenStatistics
    sharding: RowSharding
    anchors: AnchorFinder
    drawn: dict[Base, dict[int, list[Sample]]] = field(default_factory=dict)

    # First Return

    def sample_bases(self) -> list[BaseReport]:
        """Sample this process's base trajectories, and find candidates for anchors."""
        num_bases = self.plan.shape.num_bases
        for tree in self.trees:
            tree.bases = [Rollout() for _ in range(num_bases)]
            tree.entropies, tree.mean_entropies = [None] * num_bases, [math.nan] * num_bases
        requests = base_requests(self.trees, self.plan, self.sharding, self.anchors)
        samples = [sample for samples in self.sampler.sample(requests) for sample in samples]
        bases = own_bases(len(self.trees), self.plan, self.sharding)
        for (i, b), sample in zip(bases, samples, strict=True):
            self.trees[i].bases[b] = _rollout(sample)
            if sample.entropies is not None:
                self.trees[i].entropies[b] = torch.as_tensor(sample.entropies)
            self.drawn[i, b] = sample.branches
        if self.plan.base_selection != "all":
            self._score([(i, self.trees[i].states[0], self.trees[i].bases[b]) for i, b in bases])
        if self.plan.shape.num_anchors == 0:
            return []
        logprobs = self._complete_statistics(bases)
        return [self._report(i, b, np.asarray(logprobs[i, b])) for i, b in bases]

    def _complete_statistics(self, bases: list[Base]) -> dict[Base, Any]:
        """Compute entropies that the sampler did not return, and return the log-probs of all `bases`, (L,) each."""
        trees = self.trees
        unknown = [(i, b) for i, b in bases if trees[i].entropies[b] is None]
        # Called even if there are none, because it may be a collective call
        statistics = self.token_statistics(
            [trees[i].prompt_ids for i, _ in unknown],
            [trees[i].bases[b].token_ids for i, b in unknown],
            [trees[i].multimodal for i, _ in unknown],
        )
        base_logprobs: dict[Base, Any] = {(i, b): trees[i].bases[b].logprobs for i, b in bases}
        for (i, b), (logprobs, entropies) in zip(unknown, statistics, strict=True):
            base_logprobs[i, b] = logprobs
            trees[i].entropies[b] = entropies.masked_fill(~torch.from_numpy(trees[i].bases[b].written), math.nan)
        return base_logprobs

    def _report(self, i: int, b: int, logprobs: np.ndarray) -> BaseReport:
        tree = self.trees[i]
        rollout, entropies = tree.bases[b], np.asarray(tree.entropies[b])
        digest = _digest(tree.prompt_ids, rollout.token_ids)
        eligible = eligible_positions(entropies, tree.budget)
        positions = self.anchors.rank(b, digest, entropies, logprobs, eligible)
        return BaseReport(
            tree=i,
            base=b,
            rollout=_for_others(rollout, holds_tokens=_spans_processes(i, self.plan, self.sharding)),
            mean_entropy=entropies[rollout.written].mean().item(),
            anchors={position: entropies[position].item() for position in positions},
            num_written={p: int(rollout.written[:p].sum()) for p in positions if rollout.mask is not None},
            uncertainty=uncertainty(entropies, eligible, self.anchors.shares[b], self.plan.anchor_min_gap),
            digest=digest.hexdigest(),
        )

    # Where to branch

    def place_rows(self, reports: list[BaseReport]) -> None:
        """Record base trajectories, choose anchors, and assign rows to states, the same in every process."""
        by_tree: list[list[BaseReport]] = [[] for _ in self.trees]
        for report in sorted(reports, key=lambda report: report.base):
            by_tree[report.tree].append(report)
        for tree, tree_reports in zip(self.trees, by_tree, strict=True):
            for report in tree_reports:
                tree.mean_entropies[report.base] = report.mean_entropy
                if len(tree.bases[report.base].token_ids) == 0:  # sampled by another process
                    has_rows = len(tree.prompt_ids) > 0
                    tree.bases[report.base] = report.rollout if has_rows else _for_others(report.rollout, False)
            if self.plan.reuse_base:
                tree.states[0].rollouts = list(tree.bases)
            if self.plan.shape.num_anchors:
                self._branch(tree, tree_reports)
            self._add_missing_rows(tree)

    def _branch(self, tree: Tree, reports: list[BaseReport]) -> None:
        """Add the states of a tree's anchors."""
        # Seeded by the tree itself, so that a prompt's anchors do not depend on the rest of the batch
        seed = repr((self.anchors.seed, [report.digest for report in reports]))
        rewards = [report.rollout.score.reward for report in reports]
        chosen = select_bases(rewards, self.plan.base_selection, seed)
        anchor_positions = self.anchors.share([list(reports[b].anchors) for b in chosen])
        for b, positions in zip(chosen, anchor_positions, strict=True):
            anchors = {position: reports[b].anchors[position] for position in positions}
            tree.branch(b, anchors, reports[b].num_written)

    def _add_missing_rows(self, tree: Tree) -> None:
        """Add the rollouts to sample. Those of anchors that were not found belong to S_0."""
        num_rollouts = self.plan.shape.num_rollouts
        if CREDIT_RULES[self.plan.credit].copies_missing_branches:
            num_found = Counter(state.base for state in tree.states)
            for b, share in enumerate(self.anchors.shares):
                num_copies = (share - num_found[b]) * num_rollouts
                tree.states[0].rollouts += [replace(tree.bases[b], copy_of=b) for _ in range(num_copies)]
        size = self.plan.num_rows - (len(tree.states) - 1) * num_rollouts
        for state in tree.states:
            num_missing = (size if state.parent is None else num_rollouts) - len(state.rollouts)
            state.rollouts += [Rollout() for _ in range(num_missing)]

    # Entropy-Eliciting Explore

    def sample_branches(self) -> list[RowReport]:
        """Sample the missing rows of this process, and score its rows."""
        own = self._slots()[self.sharding.own.start : self.sharding.own.stop]
        for i, state, k in own:
            samples = [] if state.base is None else self.drawn.get((i, state.base), {}).get(state.position, [])
            if k < len(samples):
                state.rollouts[k] = _rollout(samples[k])
        self._sample_missing([slot for slot in own if slot[1].rollouts[slot[2]].length == 0])
        rows = [(i, state, state.rollouts[k]) for i, state, k in own]
        for i, state, rollout in rows:
            if state.base is not None:
                base_token = self.trees[i].bases[state.base].token_ids[state.position]
                rollout.differs = bool(rollout.token_ids[0] != base_token)
        # Including copies, although they get their original's score, because some reward functions need whole groups
        self._score([row for row in rows if not row[2].score.rewards])
        return [RowReport(r.length, r.num_written, replace(r.score, logs={}), r.differs) for _, _, r in rows]

    def _slots(self) -> list[Slot]:
        """The rows of all processes, in order."""
        return [
            (i, state, k)
            for i, tree in enumerate(self.trees)
            for state in tree.states
            for k in range(len(state.rollouts))
        ]

    def _sample_missing(self, missing: list[Slot]) -> None:
        by_state = [list(slots) for _, slots in groupby(missing, key=lambda slot: id(slot[1]))]
        requests = [self._branch_request(*slots[0][:2], len(slots)) for slots in by_state]
        for slots, samples in zip(by_state, self.sampler.sample(requests), strict=True):
            for (_, state, k), sample in zip(slots, samples, strict=True):
                state.rollouts[k] = _rollout(sample)

    def _branch_request(self, i: int, state: State, num_samples: int) -> SamplingRequest:
        tree = self.trees[i]
        return SamplingRequest(
            prefix_ids=np.concatenate([tree.prompt_ids, state.prefix_ids]),
            num_samples=num_samples,
            max_new_tokens=tree.budget - state.position,
            temperature=self.plan.temperature,
            num_prompt_tokens=len(tree.prompt_ids),
            tree=i,
            dialogue=None if state.base is None else tree.bases[state.base].dialogue,
            multimodal=tree.multimodal,
        )

    def _score(self, rollouts: list[tuple[int, State, Rollout]]) -> None:
        """Score rollouts, given the index of the tree and the state of each."""
        completions = [np.concatenate([state.prefix_ids, rollout.token_ids]) for _, state, rollout in rollouts]
        scores = self.scorer([i for i, _, _ in rollouts], completions, [rollout.dialogue for _, _, rollout in rollouts])
        for (_, _, rollout), score in zip(rollouts, scores, strict=True):
            rollout.score = score

    def record(self, reports: list[RowReport]) -> None:
        """Record the rows of other processes, and the scores of copies."""
        for (_, state, k), report in zip(self._slots(), reports, strict=True):
            rollout = state.rollouts[k]
            if not rollout.score.rewards:
                rollout.length, rollout.num_written, rollout.score, rollout.differs = report
        for tree in self.trees:
            tree.score_copies()


def _rollout(sample: Sample) -> Rollout:
    return Rollout(as_ids(sample.token_ids), sample.logprobs, mask=sample.mask, dialogue=sample.dialogue)


def _for_others(rollout: Rollout, holds_tokens: bool) -> Rollout:
    """A copy of a rollout for other processes."""
    score = replace(rollout.score, logs={})
    if not holds_tokens:
        return Rollout(score=score, length=rollout.length, num_written=rollout.num_written)
    dialogue = None if rollout.dialogue is None else rollout.dialogue.without_environment()
    return replace(rollout, score=score, dialogue=dialogue)


def _digest(prompt_ids: TokenIds, token_ids: TokenIds) -> Any:
    """Hash of a base trajectory and its prompt."""
    return hashlib.blake2b(prompt_ids.tobytes() + b"|" + token_ids.tobytes(), digest_size=8)
