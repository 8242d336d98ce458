"""What was explored of a prompt: a tree of rollouts."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Score:
    """
    What the reward functions made of a completion.

    Args:
        rewards (`list[float]`):
            Reward by each of them, NaN where it gave none.
        reward (`float`):
            Their weighted sum, NaN if none gave any: the completion is unscorable.
        logs (`dict[str, Any]`):
            What they logged of it.
    """

    rewards: list[float]
    reward: float
    logs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Rollout:
    """
    A continuation of a state's prefix.

    Args:
        token_ids (`list[int]`):
            The tokens that were sampled, without the prefix.
        logprobs (`list[float]`, *optional*):
            Their log-probabilities under the distribution that they were sampled from, if the sampler gave them.
        score (`Score`):
            What its whole completion scored, prefix included.
    """

    token_ids: list[int]
    logprobs: list[float] | None = None
    score: Score = Score([], float("nan"))


@dataclass
class State:
    """
    A point to which exploration returns: the prompt and the first tokens of a base trajectory.

    Args:
        prefix_ids (`list[int]`):
            Tokens of the base trajectory before the anchor, passed on as ids. Empty for S_0, the prompt alone.
        parent (`int`, *optional*):
            Index, in the tree, of the state before it in its chain. `None` for S_0.
        base (`int`, *optional*):
            Index of the base trajectory that it lies on. `None` for S_0.
        entropy (`float`, *optional*):
            Entropy of the policy at the anchor, in nats. `None` for S_0.
        rollouts (`list[Rollout]`):
            What was sampled from it.
        value (`float`):
            V, the mean reward of its rollouts, NaN if none is scorable.
        modulation (`float`):
            α, the factor on the advantages of its rollouts.
        rejected (`bool`):
            Whether its rollouts leave the loss.
    """

    prefix_ids: list[int] = field(default_factory=list)
    parent: int | None = None
    base: int | None = None
    entropy: float | None = None
    rollouts: list[Rollout] = field(default_factory=list)
    value: float = float("nan")
    modulation: float = 1.0
    rejected: bool = False


@dataclass
class Tree:
    """
    What was explored of one prompt.

    Args:
        prompt_ids (`list[int]`):
            The prompt.
        budget (`int`):
            Longest completion allowed, in tokens, prefix included.
        bases (`list[Rollout]`):
            Base trajectories. They are S_0's first rollouts too, unless they were thrown away.
        entropies (`list[torch.Tensor]`):
            Entropies along each base trajectory, of shape (L,), in nats.
        states (`list[State]`):
            S_0, then the anchors' states, each after the one before it in its chain.
    """

    prompt_ids: list[int]
    budget: int
    bases: list[Rollout] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=lambda: [State()])

    def branch(self, base: int, positions: list[int]) -> None:
        """Add the chain of states at `positions`, sorted, of a base trajectory."""
        parent = 0
        for position in positions:
            prefix_ids = self.bases[base].token_ids[:position]
            self.states.append(State(prefix_ids, parent, base, self.entropies[base][position].item()))
            parent = len(self.states) - 1


def rollouts_of(trees: list[Tree]) -> list[tuple[Tree, State, Rollout]]:
    """The rows of a batch: the rollouts of every state of every tree, with what they belong to."""
    return [(tree, state, rollout) for tree in trees for state in tree.states for rollout in state.rollouts]


def chains_of(trees: list[Tree]) -> tuple[list[State], list[int | None]]:
    """The states of a batch, and for each the index of the state before it in its chain, `None` for an S_0."""
    states: list[State] = []
    parents: list[int | None] = []
    for tree in trees:
        parents += [None if state.parent is None else len(states) + state.parent for state in tree.states]
        states += tree.states
    return states, parents
