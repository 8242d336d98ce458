"""Rows of a batch, and their assignment to processes."""

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
    Assigns consecutive rows of a batch to processes, as evenly as possible. A group may span several processes.

    Args:
        num_rows (`int`): Number of rows of all processes.
        num_processes, process (`int`): Number of processes, and the index of this one.
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
        """The process that has a row."""
        return ((row + 1) * self.num_processes - 1) // self.num_rows


@dataclass(eq=False)
class Row:
    """
    A rollout as a row of the batch.

    Args:
        rollout ([`Rollout`]): The continuation. Only its tokens can be in the loss.
        holder (`int`): The process that holds its tokens, its example and its log-probabilities.
        prompt_ids, prefix_ids (`TokenIds`): Tokens before the continuation.
        example (`dict`), index (`int`, *optional*):
            Its example of the dataset, and the example's index if the prompt comes from a [`PromptStream`].
        advantage (`float`): Mean over its own tokens, see [`~fr3e_trl.method.credit.rule.RowCredit`].
        in_loss (`bool`): Whether it is in the loss, or rejected.
        old_logprobs (`torch.Tensor` of shape (L,), *optional*):
            For a row left over from an earlier step, log-probabilities of its whole completion under the policy that
            sampled it. If `None`, that policy is the one at the start of the step, or vLLM's correction accounts for
            the difference.
        is_left_over (`bool`): Whether it is left over from an earlier step.
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
        """Whether any of its tokens may be in the loss."""
        return self.in_loss and not self.rollout.score.is_left_out

    @property
    def completion_ids(self) -> TokenIds:
        """The prefix and the continuation, (L,)."""
        return np.concatenate([self.prefix_ids, self.rollout.token_ids])

    @property
    def loss_mask(self) -> list[int]:
        """1 for each token that was sampled, 0 for context: tokens of the prefix and of tools. Of length L."""
        own = [1] * self.rollout.length if self.rollout.mask is None else self.rollout.mask.astype(int).tolist()
        return [0] * len(self.prefix_ids) + own

    @property
    def path_mask(self) -> list[int]:
        """1 for each token that the policy wrote, in the prefix too, 0 for tokens of tools. Of length L."""
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
        sharding ([`RowSharding`]): The process that sampled each row.
        examples (`dict[int, dict]`): Example of each tree that has rows in this process, by the tree's index.
        indices (`Sequence[int | None]`): Index of each tree's example in the dataset.
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
    Credit of the tokens of R rows that this process holds, padded to `num_tokens` C: an array (2, R, C) with the weight
    and the advantage of each token, 0 in prefixes and in padding.
    """
    stretches: list[tuple[int, float, float]] = []
    for row in rows:
        num_before = len(row.prefix_ids)
        stretches += [(num_before, 0, 0), *row.rollout.credit, (num_tokens - num_before - row.rollout.length, 0, 0)]
    lengths, weights, advantages = zip(*stretches, strict=True)
    return np.repeat(np.array([weights, advantages], float), lengths, axis=1).reshape(2, len(rows), num_tokens)
