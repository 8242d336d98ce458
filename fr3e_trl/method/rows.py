"""A rollout as a row of the batch, and how rows are dealt out to processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .tree import Rollout, TokenIds, Tree, as_ids


@dataclass(frozen=True)
class RowSharding:
    """
    Rows of a batch dealt out to processes, in order, as evenly as they divide, wherever that cuts a group.

    Args:
        num_rows (`int`): Rows of all processes.
        num_processes, process (`int`): How many processes there are, and which of them this is.
    """

    num_rows: int
    num_processes: int = 1
    process: int = 0

    @property
    def own(self) -> range:
        """The rows of this process."""
        start, end = (i * self.num_rows // self.num_processes for i in (self.process, self.process + 1))
        return range(start, end)

    def owner(self, row: int) -> int:
        """The process that a row is dealt to."""
        return ((row + 1) * self.num_processes - 1) // self.num_rows


@dataclass(eq=False)
class Row:
    """
    A rollout as a row of the batch.

    Args:
        rollout ([`Rollout`]): The continuation, which is what the row has in the loss.
        holder (`int`): The process that holds its tokens, its example and its log-probabilities.
        prompt_ids, prefix_ids (`TokenIds`): What it continues.
        example (`dict`), index (`int`, *optional*):
            The dataset's example that it belongs to, and its place where the prompts come from a [`PromptStream`].
        advantage (`float`): The mean over its own tokens, see [`~fr3e_trl.method.credit.rule.RowCredit`].
        in_loss (`bool`): Whether it is learned from, or rejected.
        old_logprobs (`torch.Tensor` of shape (L,), *optional*):
            For a row left over from an earlier step, the log-probabilities of its whole completion under the policy
            that it was sampled from. If `None`, that policy is the one at the start of the step, or vLLM's correction
            takes care of the difference.
        is_left_over (`bool`): Whether it is a row left over from an earlier step.
    """

    rollout: Rollout
    holder: int
    prompt_ids: TokenIds = field(default_factory=as_ids)
    prefix_ids: TokenIds = field(default_factory=as_ids)
    example: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    advantage: float = 0.0
    in_loss: bool = True
    old_logprobs: torch.Tensor | None = None
    is_left_over: bool = False

    @property
    def teaches(self) -> bool:
        """Whether a token of it may be in the loss."""
        return self.in_loss and not self.rollout.score.is_left_out

    @property
    def completion_ids(self) -> TokenIds:
        """Of shape (L,): the prefix and the continuation."""
        return np.concatenate([self.prefix_ids, self.rollout.token_ids])

    @property
    def loss_mask(self) -> list[int]:
        """Of length L: 1 for each token that was sampled, 0 for those of the prefix and of tools, which are context."""
        own = [1] * self.rollout.length if self.rollout.mask is None else self.rollout.mask.astype(int).tolist()
        return [0] * len(self.prefix_ids) + own

    @property
    def path_mask(self) -> list[int]:
        """Of length L: 1 for each token of the prefix and the continuation that the policy wrote, 0 for tools'."""
        if self.rollout.dialogue is None:
            return [1] * len(self.prefix_ids) + self.loss_mask[len(self.prefix_ids) :]
        mask = np.zeros(len(self.prefix_ids) + self.rollout.length, int)
        for start, end in self.rollout.dialogue.turns:
            mask[start:end] = 1
        return mask.tolist()


def rows_of(
    trees: Sequence[Tree],
    sharding: RowSharding,
    examples: dict[int, dict[str, Any]],
    indices: Sequence[int | None],
) -> list[Row]:
    """
    The rows of finished `trees`: the rollouts of their states, in order, those of S_0 first.

    Args:
        sharding ([`RowSharding`]): Which process has sampled which of them.
        examples (`dict[int, dict]`):
            The dataset's example of each tree that has rows in this process, by the tree's index.
        indices (`Sequence[int | None]`): Places of the examples of all trees in the dataset.
    """
    rows: list[Row] = []
    for i, tree in enumerate(trees):
        for state in tree.states:
            for rollout in state.rollouts:
                holder = sharding.owner(len(rows))
                row = Row(rollout, holder, index=indices[i])
                if holder == sharding.process:
                    row.prompt_ids, row.prefix_ids, row.example = tree.prompt_ids, state.prefix_ids, examples[i]
                rows.append(row)
    return rows


def token_credit(rows: Sequence[Row], num_tokens: int) -> NDArray[np.float64]:
    """
    Credit of the tokens of R rows that this process holds, padded to `num_tokens` C: an array (2, R, C) of how many
    tokens each counts for, and its advantage; 0 for those of a prefix, and past a row's end.
    """
    stretches: list[tuple[int, float, float]] = []
    for row in rows:
        num_before = len(row.prefix_ids)
        stretches += [(num_before, 0, 0), *row.rollout.credit, (num_tokens - num_before - row.rollout.length, 0, 0)]
    lengths, weights, advantages = zip(*stretches, strict=True)
    return np.repeat(np.array([weights, advantages], float), lengths, axis=1).reshape(2, len(rows), num_tokens)
