"""Refill: further prompts are explored, so that the batch is full of rows to learn from in spite of rejection."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from .tree import Rollout, Score


@dataclass
class Row:
    """
    A rollout as a row of the batch.

    Args:
        example (`dict`):
            The dataset's example that it belongs to.
        index (`int`, *optional*):
            The example's place in the dataset, where the prompts come from a [`PromptStream`].
        prompt_ids, prefix_ids (`list[int]`):
            What it continues.
        rollout ([`Rollout`]):
            The continuation.
        temperature (`float`):
            What it was sampled at.
        advantage (`float`):
            Its modulated advantage.
        in_loss (`bool`):
            Whether it is learned from, or rejected.
        old_logprobs (`torch.Tensor` of shape (L,), *optional*):
            For a row left over from an earlier step, the log-probabilities of its whole completion under the policy
            that it was sampled from. If `None`, that policy is the one at the start of the step, or vLLM's correction
            takes care of the difference.
    """

    example: dict[str, Any]
    index: int | None
    prompt_ids: list[int]
    prefix_ids: list[int]
    rollout: Rollout
    temperature: float
    advantage: float = 0.0
    in_loss: bool = True
    old_logprobs: torch.Tensor | None = None

    @property
    def completion_ids(self) -> list[int]:
        return self.prefix_ids + self.rollout.token_ids


class PromptStream:
    """
    Indices of the training set, epoch after epoch, in the order that TRL's sampler gives each: none twice in an epoch.

    Args:
        num_examples (`int`):
            Size of the training set.
        shuffle (`bool`):
            Whether each epoch has an order of its own.
        seed (`int`):
            Decides these.

    Attributes:
        num_drawn (`int`):
            How many were drawn since the first epoch began.
    """

    def __init__(self, num_examples: int, shuffle: bool, seed: int):
        self._new_sampler = lambda: RepeatSampler(range(num_examples), mini_repeat_count=1, shuffle=shuffle, seed=seed)
        self.go_to(0)

    def go_to(self, num_drawn: int) -> None:
        """Go on as after `num_drawn` draws."""
        sampler = self._new_sampler()
        self._indices: Iterator[int] = chain.from_iterable(repeat(sampler))  # iterating a sampler begins an epoch
        self.num_drawn = 0
        self.draw(num_drawn)

    def draw(self, num_indices: int) -> list[int]:
        """The next indices."""
        self.num_drawn += num_indices
        return list(islice(self._indices, num_indices))


def num_to_draw(num_missing: int, num_informative: int, num_explored: int, limit: int) -> int:
    """
    How many prompts to explore next.

    Args:
        num_missing (`int`):
            Rows that the batch lacks.
        num_informative (`int`):
            Rows to learn from that the prompts explored in this step have given.
        num_explored (`int`):
            How many prompts that were.
        limit (`int`):
            The most prompts to explore at once.

    Returns:
        `int`: As many as it takes if they give what the others gave, from 1 to `limit`.
    """
    if num_informative == 0:
        return limit
    return min(limit, math.ceil(num_missing * num_explored / num_informative))


def fill_batch(rows: list[Row], leftovers: list[Row], size: int) -> tuple[list[Row], list[Row], int]:
    """
    Put a batch together.

    Args:
        rows (`list[Row]`):
            The step's own, at least `size`: those of its prompts, then those of further prompts.
        leftovers (`list[Row]`):
            Informative rows left over from the step before.
        size (`int`):
            Rows of a batch.

    Returns:
        `tuple[list[Row], list[Row], int]`: The batch: the first `size` of `rows`, the rejected ones replaced by
        informative ones from the rest and, where these do not suffice, from `leftovers`; then the informative ones of
        this step that there was no place for; and how many of `leftovers` were used.
    """
    rest = [row for row in rows[size:] if row.in_loss]
    spare = iter([*rest, *leftovers])
    batch = [row if row.in_loss else next(spare, row) for row in rows[:size]]
    num_used = sum(row.in_loss for row in batch) - sum(row.in_loss for row in rows[:size])
    return batch, rest[num_used:], max(num_used - len(rest), 0)


def state_of(row: Row) -> dict[str, Any]:
    """A row for a checkpoint, in plain values. What reward functions logged of it is left out."""
    return {
        "index": row.index,
        "prompt_ids": row.prompt_ids,
        "prefix_ids": row.prefix_ids,
        "token_ids": row.rollout.token_ids,
        "logprobs": row.rollout.logprobs,
        "rewards": row.rollout.score.rewards,
        "reward": row.rollout.score.reward,
        "temperature": row.temperature,
        "advantage": row.advantage,
        "old_logprobs": row.old_logprobs,
    }


def row_from(state: dict[str, Any], train_dataset: Dataset) -> Row:
    """The row that [`state_of`] was told of."""
    return Row(
        example=train_dataset[state["index"]],
        index=state["index"],
        prompt_ids=state["prompt_ids"],
        prefix_ids=state["prefix_ids"],
        rollout=Rollout(state["token_ids"], state["logprobs"], Score(state["rewards"], state["reward"])),
        temperature=state["temperature"],
        advantage=state["advantage"],
        old_logprobs=state["old_logprobs"],
    )
