"""
A tiny tabular policy, and everything that can happen when trees are grown from it.

Every base trajectory, every choice of where to branch and every branch, with its probability: an estimator's mean is a
sum, not a sample.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fr3e_trl.method.credit.tree import Paths, Stretches, root_baselines, tree_credit, tree_values

Completion = tuple[int, ...]
# Ways to choose where to branch from a completion, each with its probability
Rule = Callable[["Policy", Completion], list[tuple[float, tuple[int, ...]]]]


class Policy:
    """
    A softmax over `vocabulary` tokens for every prefix, its logits drawn at random, and a reward for every completion.

    Args:
        vocabulary, length (`int`):
            Of the completions, which have `length` tokens.
        seed (`int`):
            Decides logits and rewards.
        rewards (`str`):
            `"some"`: each completion is right (1) with probability .3, else wrong (0); `"graded"`: uniform in [0, 1].
        eos (`bool`):
            Whether a token 0 ends a completion.

    Attributes:
        completions (`list[Completion]`), probabilities, rewards (`torch.Tensor` of shape (C,)):
            All that can be sampled.
        scores (`torch.Tensor` of shape (C, `length`+1, D)):
            Gradient by the logits of the log-probability of the first tokens of each completion.
        gradient (`torch.Tensor` of shape (D,)):
            That of the expected reward.
    """

    def __init__(self, vocabulary: int, length: int, seed: int, rewards: str = "some", eos: bool = False):
        rng = random.Random(seed)
        prefixes = [p for n in range(length) for p in itertools.product(range(vocabulary), repeat=n)]
        logits = torch.tensor([[rng.gauss(0, 1.2) for _ in range(vocabulary)] for _ in prefixes], dtype=torch.float64)
        self.places = {prefix: i for i, prefix in enumerate(prefixes)}
        self.distributions = logits.softmax(dim=1)
        self.completions = list(
            dict.fromkeys(_until_eos(c, eos) for c in itertools.product(range(vocabulary), repeat=length))
        )
        self.probabilities = torch.tensor([self.probability(c) for c in self.completions], dtype=torch.float64)
        size = len(self.completions)
        drawn = {
            "some": [float(rng.random() < 0.3) for _ in range(size)],
            "graded": [rng.random() for _ in range(size)],
        }
        self.rewards = torch.tensor(drawn[rewards], dtype=torch.float64)
        self.scores = torch.zeros(size, length + 1, *logits.shape, dtype=torch.float64)
        for i, completion in enumerate(self.completions):
            for t in range(length):
                self.scores[i, t + 1] = self.scores[i, t]
                if t < len(completion):
                    place = self.places[completion[:t]]
                    self.scores[i, t + 1, place] -= self.distributions[place]
                    self.scores[i, t + 1, place, completion[t]] += 1
        self.scores = self.scores.flatten(2)
        self.expected_reward = self.probabilities @ self.rewards
        self.gradient = self.gradient_of(self.rewards)

    def probability(self, completion: Completion, start: int = 0) -> float:
        """Of the tokens from `start` on, given those before."""
        p = 1.0
        for t in range(start, len(completion)):
            p *= float(self.distributions[self.places[completion[:t]], completion[t]])
        return p

    def gradient_of(self, values: torch.Tensor) -> torch.Tensor:
        """Gradient by the logits, of shape (D,), of the mean of the completions' `values` (C,)."""
        return (self.probabilities * values) @ self.scores[:, -1]

    def entropies(self, completion: Completion) -> list[float]:
        """Before each token is drawn."""
        p = self.distributions[[self.places[completion[:t]] for t in range(len(completion))]]
        return (-(p * p.log()).sum(dim=1)).tolist()

    def continuations(self, prefix: Completion) -> list[tuple[float, int]]:
        """Completions that begin so, as indices, each with its probability given the prefix."""
        return [
            (self.probability(completion, len(prefix)), i)
            for i, completion in enumerate(self.completions)
            if completion[: len(prefix)] == prefix
        ]


def _until_eos(completion: Completion, eos: bool) -> Completion:
    return completion[: completion.index(0) + 1] if eos and 0 in completion else completion


# Where to branch


def first_uncertain(threshold: float, num_anchors: int = 1) -> Rule:
    """The first positions whose entropy is above the threshold. A stopping rule; may find fewer."""

    def rule(policy, completion):
        entropies = policy.entropies(completion)
        return [(1.0, tuple([t for t in range(1, len(completion)) if entropies[t] > threshold][:num_anchors]))]

    return rule


def fixed(*positions: int) -> Rule:
    return lambda policy, completion: [(1.0, tuple(t for t in positions if t < len(completion)))]


def at_random(policy: Policy, completion: Completion) -> list[tuple[float, tuple[int, ...]]]:
    """One position, drawn from those that any completion has; none if this completion ends before it."""
    positions = range(1, policy.scores.shape[1] - 1)
    return [(1 / len(positions), (t,) if t < len(completion) else ()) for t in positions]


def most_uncertain(num_anchors: int = 1) -> Rule:
    """The positions with the highest entropies of all: looks ahead."""

    def rule(policy, completion):
        entropies = policy.entropies(completion)
        ranked = sorted(range(1, len(completion)), key=lambda t: -entropies[t])
        return [(1.0, tuple(sorted(ranked[:num_anchors])))]

    return rule


# What can happen


@dataclass
class Outcome:
    """
    Rows that may be sampled from one prompt, and the probability that they are.

    Args:
        probability (`float`):
            Of these rows.
        completions (`list[int]`):
            Completion of each row, as an index.
        parents (`list[int | None]`), positions (`list[int]`), counts (`list[int]`):
            As in [`Paths`].
    """

    probability: float
    completions: list[int]
    parents: list[int | None]
    positions: list[int]
    counts: list[int]

    def __add__(self, other: "Outcome") -> "Outcome":
        """Both, independently."""
        shift = len(self.parents)
        return Outcome(
            self.probability * other.probability,
            self.completions + other.completions,
            self.parents + [None if parent is None else parent + shift for parent in other.parents],
            self.positions + other.positions,
            self.counts + other.counts,
        )


def grow(policy: Policy, rule: Rule, num_branches: int) -> list[Outcome]:
    """Every tree of a base trajectory and a branch from each position that the rule names: `num_branches`, or fewer."""
    outcomes = []
    for i, completion in enumerate(policy.completions):
        for chance, positions in rule(policy, completion):
            choices = [policy.continuations(completion[:position]) for position in positions]
            copies = [1 + num_branches - len(positions)] + [1] * len(positions)
            for branches in itertools.product(*choices):
                probability = float(policy.probabilities[i]) * chance * math.prod(p for p, _ in branches)
                rows = [i, *(branch for _, branch in branches)]
                outcomes.append(Outcome(probability, rows, [None] + [0] * len(branches), [0, *positions], copies))
    return outcomes


def grow_further(policy: Policy, rule: Rule, outcomes: list[Outcome]) -> list[Outcome]:
    """From each branch another one, at the first position after its own beginning that the rule names."""
    for row in range(1, max(len(outcome.parents) for outcome in outcomes)):
        outcomes = [further for outcome in outcomes for further in _grow_from(policy, rule, outcome, row)]
    # The branches that a base trajectory has not would have had one each
    return [replace(outcome, counts=[2 * outcome.counts[0] - 1, *outcome.counts[1:]]) for outcome in outcomes]


def _grow_from(policy: Policy, rule: Rule, outcome: Outcome, row: int) -> list[Outcome]:
    if row >= len(outcome.parents) or outcome.parents[row] != 0:
        return [outcome]
    completion = policy.completions[outcome.completions[row]]
    ((_, positions),) = rule(policy, completion)
    later = [position for position in positions if position > outcome.positions[row]]
    if not later:
        return [replace(outcome, counts=[count + (i == row) for i, count in enumerate(outcome.counts)])]
    return [
        Outcome(
            outcome.probability * p,
            [*outcome.completions, i],
            [*outcome.parents, row],
            [*outcome.positions, later[0]],
            [*outcome.counts, 1],
        )
        for p, i in policy.continuations(completion[: later[0]])
    ]


def several(outcomes: list[Outcome], count: int) -> list[Outcome]:
    """Every way in which a prompt gets several trees."""
    return [functools.reduce(Outcome.__add__, trees) for trees in itertools.product(outcomes, repeat=count)]


# What estimators make of it


def estimate(policy: Policy, outcomes: list[Outcome], credit: Stretches) -> torch.Tensor:
    """The expected gradient (D,) by the credit of the outcomes' rows, which are one after the other."""
    probabilities = [outcome.probability for outcome in outcomes for _ in outcome.completions]
    completions = torch.tensor([i for outcome in outcomes for i in outcome.completions])[credit.rows]
    scores = policy.scores[completions, credit.ends] - policy.scores[completions, credit.starts]
    return (torch.tensor(probabilities, dtype=torch.float64)[credit.rows] * credit.advantages) @ scores


def of_trees(
    policy: Policy,
    outcomes: list[Outcome],
    prior: float,
    prior_strength: float = 4.0,
    length_normalized: bool = False,
    masked: Callable[[Completion], bool] = lambda completion: False,
) -> torch.Tensor:
    """
    Tree credit. The prior of the prompt is a number that the outcome has no part in.

    Completions that are `masked` are in no T and no U.
    """
    paths = paths_of(policy, outcomes)
    is_masked = torch.tensor([masked(policy.completions[i]) for outcome in outcomes for i in outcome.completions])
    paths = paths._replace(rewards=paths.rewards.masked_fill(is_masked, math.nan))
    priors = torch.full((len(outcomes),), prior, dtype=torch.float64)
    baselines = root_baselines(tree_values(paths), paths.prompts, priors, prior_strength)
    credit = tree_credit(paths, baselines, prior_strength, length_normalized)
    return estimate(policy, outcomes, credit)


def of_groups(policy: Policy, size: int) -> torch.Tensor:
    """GRPO with `loss_type="grpo"` and `scale_rewards="none"`: `size` rows, whose mean reward is the baseline."""
    outcomes = several(grow(policy, lambda *_: [(1.0, ())], 0), size)
    paths = paths_of(policy, outcomes)
    means = torch.zeros(len(outcomes), dtype=torch.float64).index_add(0, paths.prompts, paths.rewards) / size
    lengths = torch.tensor(paths.lengths)
    rows, weights = torch.arange(len(lengths)), 1 / lengths.double()
    advantages = (paths.rewards - means[paths.prompts]) * weights
    return estimate(policy, outcomes, Stretches(rows, torch.zeros_like(lengths), lengths, weights, advantages))


def paths_of(policy: Policy, outcomes: list[Outcome]) -> Paths:
    """The rows of all outcomes, each a prompt of its own."""
    rewards, parents, positions, lengths, prompts, counts = [], [], [], [], [], []
    for i, outcome in enumerate(outcomes):
        shift = len(parents)
        rewards.append(policy.rewards[outcome.completions])
        parents += [None if parent is None else parent + shift for parent in outcome.parents]
        positions += outcome.positions
        lengths += [len(policy.completions[completion]) for completion in outcome.completions]
        prompts += [i] * len(outcome.parents)
        counts += outcome.counts
    return Paths(torch.cat(rewards), parents, positions, lengths, torch.tensor(prompts), counts, lengths)
