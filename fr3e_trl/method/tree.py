"""
What was explored of a prompt: a tree of rollouts.

Where several processes train, each knows the shape, the lengths and the rewards of all trees, and holds the tokens of
its own rows and of the base trajectories that these branch from. Tokens that it does not hold are an empty array.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]  # of shape (L,)


def as_ids(token_ids: Sequence[int] | TokenIds = ()) -> TokenIds:
    """Token ids as a compact array."""
    return np.asarray(token_ids, dtype=np.int32)


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
            What they logged of it, in the process that scored it.
        is_masked (`bool`):
            Whether the completion was cut off and nothing is learned from its outcome: `mask_truncated_completions`,
            where the credit rule leaves such rollouts out.
        is_left_out (`bool`):
            The same where the rule counts its outcome: TRL leaves its tokens out of the loss.
        is_broken (`bool`):
            Whether it could not go on from its prefix, see [`Dialogue`]: it has no reward.
    """

    rewards: list[float]
    reward: float
    logs: dict[str, Any] = field(default_factory=dict)
    is_masked: bool = False
    is_left_out: bool = False
    is_broken: bool = False


@dataclass(eq=False)
class Dialogue:
    """
    A completion in which tools may have been called.

    Args:
        messages (`list[dict]`): The completion's messages, the policy's and the tools'.
        turns (`list[tuple[int, int]]`):
            Where the policy wrote, in tokens of the completion: the first of each turn, and the one after its last.
        environment (`Any`, *optional*), snapshots (`list[Any]`):
            The instance that it went through, in the process that sampled it, and copies of that before each turn, if
            it can be copied.
        is_broken (`bool`):
            Whether it could not go on from its prefix, whose tools answered otherwise when they were asked again.
    """

    messages: list[dict[str, Any]]
    turns: list[tuple[int, int]]
    environment: Any = None
    snapshots: list[Any] = field(default_factory=list)
    is_broken: bool = False

    def turn_at(self, position: int) -> int:
        """Index of the turn that the token at `position` belongs to."""
        return max(i for i, (start, _) in enumerate(self.turns) if start <= position)

    def without_environment(self) -> "Dialogue":
        """As other processes know it."""
        return replace(self, environment=None, snapshots=[])


@dataclass(eq=False)
class Rollout:
    """
    A continuation of a state's prefix.

    Args:
        token_ids (`TokenIds`): Its tokens, at least one, without the prefix: what was sampled, and what tools answered.
        logprobs (`np.ndarray` of shape (L,), *optional*):
            Their log-probabilities, if the sampler gave them, see [`~fr3e_trl.method.sampling.Sample`].
        score ([`Score`]): What its whole completion scored, prefix included.
        length (`int`): How many tokens there are. Taken from `token_ids` where these are held.
        credit (`list[tuple[int, float, float]]`):
            Its tokens by stretches of equal credit, in order: how many there are, how many each counts for, and the
            advantage of each. Nothing before it is credited.
        mask (`np.ndarray` of shape (L,), *optional*): Which tokens the policy wrote, and no tool. If `None`, all.
        num_written (`int`): How many these are; 0 of a copy.
        dialogue ([`Dialogue`], *optional*): Its whole completion's turns, where there are tools.
        copy_of (`int`, *optional*):
            The base trajectory that it is again, in the place of a branch that had no anchor there. It was not sampled
            anew, and is not learned from.
        differs (`bool`, *optional*):
            Of a branch: whether it begins with another token than the base trajectory has there.
    """

    token_ids: TokenIds = field(default_factory=as_ids)
    logprobs: NDArray[np.float32] | None = None
    score: Score = Score([], float("nan"))
    length: int = 0
    credit: list[tuple[int, float, float]] = field(default_factory=list)
    mask: NDArray[np.bool_] | None = None
    num_written: int = 0
    dialogue: Dialogue | None = None
    copy_of: int | None = None
    differs: bool | None = None

    def __post_init__(self) -> None:
        self.token_ids = as_ids(self.token_ids)
        self.length = len(self.token_ids) or self.length
        if self.copy_of is not None:
            self.num_written = 0
        elif self.num_written == 0:
            self.num_written = self.length if self.mask is None else int(self.mask.sum())
        if self.logprobs is not None:
            self.logprobs = np.asarray(self.logprobs, dtype=np.float32)

    @property
    def written(self) -> NDArray[np.bool_]:
        """Which of its tokens the policy wrote, (L,)."""
        return np.ones(len(self.token_ids), bool) if self.mask is None else self.mask

    @property
    def reward(self) -> float:
        """What it is compared by. NaN if it is unscorable or masked, or a copy: its original counts for that."""
        return float("nan") if self.copy_of is not None or self.score.is_masked else self.score.reward


@dataclass(eq=False)
class State:
    """
    A point to which exploration returns: the prompt and the first tokens of a base trajectory.

    Args:
        position (`int`), prefix_ids (`TokenIds`):
            How many tokens of the base trajectory precede it, and these tokens. 0 for S_0, the prompt alone.
        parent, base (`int`, *optional*):
            Indices, in the tree, of the state before it in its chain, and of the base trajectory that it lies on.
            `None` for S_0.
        entropy (`float`, *optional*): Entropy of the policy at the anchor, in nats. `None` for S_0.
        rollouts (`list[Rollout]`): What was sampled from it.
        value, modulation (`float`), rejected (`bool`):
            What the credit rule made of it, see [`~fr3e_trl.method.credit.rule.StateCredit`].
        num_written (`int`): How many tokens of its prefix the policy wrote, and no tool. By default, all.
    """

    position: int = 0
    prefix_ids: TokenIds = field(default_factory=as_ids)
    parent: int | None = None
    base: int | None = None
    entropy: float | None = None
    rollouts: list[Rollout] = field(default_factory=list)
    value: float = float("nan")
    modulation: float = 1.0
    rejected: bool = False
    num_written: int = -1

    def __post_init__(self) -> None:
        if self.num_written < 0:
            self.num_written = self.position


@dataclass(eq=False)
class Tree:
    """
    What was explored of one prompt, `prompt_ids`.

    Args:
        budget (`int`): Longest completion allowed, in tokens, prefix included.
        bases (`list[Rollout]`): Base trajectories. They are S_0's first rollouts too, unless they were thrown away.
        entropies (`list[torch.Tensor]`), mean_entropies (`list[float]`):
            Entropies along each base trajectory, of shape (L,), in nats, in the process that sampled it, and their
            means in every process. NaN at tokens that the policy did not write.
        states (`list[State]`): S_0, then the anchors' states, each after the one before it in its chain.
        value (`float`): What the prompt turned out to be worth, by the credit rule, NaN if nothing is known.
        key (`int`, *optional*): What the prompt is remembered by, in every process.
        multimodal (`list[dict]`, *optional*):
            The prompt's messages, if there are images in them, in the processes that have rows of it.
    """

    prompt_ids: TokenIds
    budget: int
    bases: list[Rollout] = field(default_factory=list)
    entropies: list[Any] = field(default_factory=list)
    mean_entropies: list[float] = field(default_factory=list)
    states: list[State] = field(default_factory=lambda: [State()])
    value: float = float("nan")
    key: int | None = None
    multimodal: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.prompt_ids = as_ids(self.prompt_ids)

    def branch(self, base: int, anchors: Mapping[int, float], num_written: Mapping[int, int] | None = None) -> None:
        """
        Add the chain of states on a base trajectory, given the entropies at the positions of its anchors and, where
        tools wrote some of the tokens before these, how many the policy wrote.
        """
        parent = 0
        for position, entropy in sorted(anchors.items()):
            prefix_ids = self.bases[base].token_ids[:position]
            written = (num_written or {}).get(position, position)
            self.states.append(State(position, prefix_ids, parent, base, entropy, num_written=written))
            parent = len(self.states) - 1


def chains_of(trees: Sequence[Tree]) -> tuple[list[State], list[int | None]]:
    """The states of a batch, and for each the index of the state before it in its chain; `None` for an S_0."""
    states: list[State] = []
    parents: list[int | None] = []
    for tree in trees:
        parents += [None if state.parent is None else len(states) + state.parent for state in tree.states]
        states += tree.states
    return states, parents
