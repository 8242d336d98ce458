"""
A tiny tabular policy, and every tree that can be grown from it: base trajectories, choices of where to branch and
branches, each with its probability, so that an estimator's mean is a sum, not a sample.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fr3e_trl.method.credit.tree import Paths, Stretches, root_baselines, tree_credit, tree_values

Completion = tuple[int, ...]
# Ways to choose where to branch from a completion, each with its probability
Rule = Callable[["Policy", Completion], list[tuple[float, tuple[int, ...]]]]


class Policy:
    """
    A softmax over `vocabulary` tokens for every prefix, its logits drawn at random, and a reward for every completion.

    Args:
        vocabulary, length: of the completions, which have `length` tokens.
        seed: decides logits and rewards.
        rewards: `"some"`: each completion is right (1) with probability .3, else wrong (0); `"graded"`: in [0, 1].
        eos: whether a token 0 ends a completion.

    Attributes:
        completions, probabilities (C,), rewards (C,): all that can be sampled.
        scores (C, `length`+1, D): gradient by the logits of the log-probability of each completion's first tokens.
        gradient (D,): that of the expected reward.
    """

    def __init__(self, vocabulary: int, length: int, seed: int, rewards: str = "some", eos: bool = False):
        rng = random.Random(seed)
        prefixes = [p for n in range(length) for p in itertools.product(range(vocabulary), repeat=n)]
        logits = torch.tensor([[rng.gauss(0, 1.2) for _ in range(vocabulary)] for _ in prefixes], dtype=torch.float64)
        self.places = {prefix: i for i, prefix in enumerate(prefixes)}
        self.distributions = logits.softmax(dim=1)
        every = itertools.product(range(vocabulary), repeat=length)
        self.completions = list(dict.fromkeys(c[: c.index(0) + 1] if eos and 0 in c else c for c in every))
        self.probabilities = torch.tensor([self.probability(c) for c in self.completions], dtype=torch.float64)
        size = len(self.completions)
        drawn = [rng.random() for _ in range(2 * size)]
        of_completions = {"some": [float(value < 0.3) for value in drawn[:size]], "graded": drawn[size:]}
        self.rewards = torch.tensor(of_completions[rewards], dtype=torch.float64)
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
        p = self.distributions[[self.places[completion[:t]] for t in range(len(completion))]]
        return (-(p * p.log()).sum(dim=1)).tolist()

    def continuations(self, prefix: Completion) -> list[tuple[float, int]]:
        """Completions that begin so, as indices, each with its probability given the prefix."""
        return [
            (self.probability(completion, len(prefix)), i)
            for i, completion in enumerate(self.completions)
            if completion[: len(prefix)] == prefix
        ]


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


@dataclass
class Outcome:
    """Rows that may be sampled from one prompt, and the probability of these. Completions are indices."""

    probability: float
    completions: list[int]
    parents: list[int | None]
    positions: list[int]
    counts: list[int]

    def __add__(self, other: "Outcome") -> "Outcome":
        shift = len(self.parents)
        parents = self.parents + [None if parent is None else parent + shift for parent in other.parents]
        probability, completions = self.probability * other.probability, self.completions + other.completions
        return Outcome(probability, completions, parents, self.positions + other.positions, self.counts + other.counts)


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


def several(outcomes: list[Outcome], count: int) -> list[Outcome]:
    return [functools.reduce(Outcome.__add__, trees) for trees in itertools.product(outcomes, repeat=count)]


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
    """Tree credit. The outcome has no part in the prior, and completions that are `masked` are in no T and no U."""
    paths = paths_of(policy, outcomes)
    is_masked = torch.tensor([masked(policy.completions[i]) for outcome in outcomes for i in outcome.completions])
    paths = paths._replace(rewards=paths.rewards.masked_fill(is_masked, math.nan))
    priors = torch.full((len(outcomes),), prior, dtype=torch.float64)
    baselines = root_baselines(tree_values(paths), paths.prompts, priors, prior_strength)
    credit = tree_credit(paths, baselines, prior_strength, length_normalized)
    return estimate(policy, outcomes, credit)


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
