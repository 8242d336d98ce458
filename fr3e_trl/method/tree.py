"""
The tree of rollouts that was explored from a prompt.

With several processes, each knows the shape, the lengths and the rewards of all trees, but only holds the tokens of its
own rows and of the base trajectories that these branch from. Tokens held by other processes are an empty array.
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
    The rewards of a completion.

    Args:
        rewards (`list[float]`):
            Reward by each function, NaN if it returned none.
        reward (`float`):
            Their weighted sum, NaN for an unscorable completion, for which no function returned a reward.
        logs (`dict[str, Any]`):
            What the functions logged, in the process that scored the completion.
        is_masked (`bool`):
            Whether `mask_truncated_completions` applies to the completion, and the credit rule ignores its outcome.
        is_left_out (`bool`):
            Whether `mask_truncated_completions` applies, and the credit rule counts its outcome although TRL leaves its
            tokens out of the loss.
        is_broken (`bool`):
            Whether the replay of its prefix failed, see [`Dialogue`], so that it has no reward.
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
    A completion with tools.

    Args:
        messages (`list[dict]`): The completion's messages, those of the policy and of tools.
        turns (`list[tuple[int, int]]`):
            The policy's turns, as token ranges of the completion: first token, and the one after the last.
        environment (`Any`, *optional*), snapshots (`list[Any]`):
            Its environment, in the process that sampled it, and copies of the environment before each turn, if it can
            be copied.
        is_broken (`bool`):
            Whether tools answered differently when the calls of its prefix were replayed.
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
        """A copy for other processes."""
        return replace(self, environment=None, snapshots=[])


@dataclass(eq=False)
class Rollout:
    """
    A continuation of a state's prefix.

    Args:
        token_ids (`TokenIds`): Its tokens without the prefix, at least one, including answers of tools.
        logprobs (`np.ndarray` of shape (L,), *optional*):
            Their log-probabilities, if the sampler returned them, see [`~fr3e_trl.method.sampling.Sample`].
        score ([`Score`]): Score of the whole completion, including the prefix.
        length (`int`): Number of tokens. Taken from `token_ids` if this process holds them.
        credit (`list[tuple[int, float, float]]`):
            Stretches of its tokens with equal credit, in order: number of tokens, weight and advantage of each token.
            The prefix is not included.
        mask (`np.ndarray` of shape (L,), *optional*): Tokens that the policy wrote, not tools. If `None`, all.
        num_written (`int`): Number of tokens that the policy wrote; 0 for a copy.
        dialogue ([`Dialogue`], *optional*): The turns of the whole completion, if there are tools.
        copy_of (`int`, *optional*):
            For a copy, which replaces a branch whose anchor was not found: index of the base trajectory. A copy was not
            sampled, and is not in the loss.
        differs (`bool`, *optional*):
            For a branch: whether its first token differs from the base trajectory's token there.
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
        """Mask of the tokens that the policy wrote, (L,)."""
        return np.ones(len(self.token_ids), bool) if self.mask is None else self.mask

    @property
    def reward(self) -> float:
        """The reward for comparisons. NaN if it is unscorable or masked, or a copy, for which the original counts."""
        return float("nan") if self.copy_of is not None or self.score.is_masked else self.score.reward


@dataclass(eq=False)
class State:
    """
    A point from which rollouts are sampled: the prompt and the first tokens of a base trajectory.

    Args:
        position (`int`), prefix_ids (`TokenIds`):
            Number of tokens of the base trajectory before it, and these tokens. 0 for S_0, the prompt alone.
        parent, base (`int`, *optional*):
            Indices, in the tree, of the state before it in its chain, and of its base trajectory. `None` for S_0.
        entropy (`float`, *optional*): Entropy of the policy at the anchor, in nats. `None` for S_0.
        rollouts (`list[Rollout]`): Rollouts from it.
        value, modulation (`float`), rejected (`bool`):
            Its credit, see [`~fr3e_trl.method.credit.rule.StateCredit`].
        num_written (`int`): Number of tokens of its prefix that the policy wrote, as opposed to tools. By default, all.
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
    The tree that was explored from one prompt, `prompt_ids`.

    Args:
        budget (`int`): Maximum length of a completion in tokens, including the prefix.
        bases (`list[Rollout]`): Base trajectories. With `reuse_base`, they are S_0's first rollouts too.
        entropies (`list[torch.Tensor]`), mean_entropies (`list[float]`):
            Entropies along each base trajectory, of shape (L,), in nats, in the process that sampled it, and their
            means in every process. NaN at tokens that the policy did not write.
        states (`list[State]`): S_0, then the anchors' states, each after the one before it in its chain.
        value (`float`): Value of the prompt by the credit rule, NaN if unknown.
        key (`int`, *optional*): The value tracker's key of the prompt, in every process.
        multimodal (`list[dict]`, *optional*):
            The prompt's messages, if they contain images, in the processes that have rows of it.
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

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of all states, in order."""
        return [rollout for state in self.states for rollout in state.rollouts]

    def score_copies(self) -> None:
        """Give each copy the score of its base trajectory."""
        for rollout in self.states[0].rollouts:
            if rollout.copy_of is not None:
                rollout.score = self.bases[rollout.copy_of].score

    def branch(self, base: int, anchors: Mapping[int, float], num_written: Mapping[int, int] | None = None) -> None:
        """
        Add the chain of states on a base trajectory, given the entropy at each anchor's position and, if tools wrote
        tokens before it, the number of tokens before it that the policy wrote.
        """
        parent = 0
        for position, entropy in sorted(anchors.items()):
            prefix_ids = self.bases[base].token_ids[:position]
            written = (num_written or {}).get(position, position)
            self.states.append(State(position, prefix_ids, parent, base, entropy, num_written=written))
            parent = len(self.states) - 1


def chains_of(trees: Sequence[Tree]) -> tuple[list[State], list[int | None]]:
    """The states of a batch, and the index of each one's previous state in its chain, `None` for an S_0."""
    states: list[State] = []
    parents: list[int | None] = []
    for tree in trees:
        parents += [None if state.parent is None else len(states) + state.parent for state in tree.states]
        states += tree.states
    return states, parents
