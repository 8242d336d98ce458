"""Refill: further prompts are explored, so that the batch is full of rows to learn from in spite of rejection."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any, Protocol

import torch

from .rows import Row, RowSharding
from .tree import Rollout, Score


class Examples(Protocol):
    """A training set: any sequence of examples, or a [`~datasets.Dataset`]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class PromptStream:
    """
    Indices of the training set, epoch after epoch, of which `num_drawn` were drawn since the first epoch began.

    `new_sampler` makes a sampler of indices, the same each time. It is iterated once for each epoch.
    """

    def __init__(self, new_sampler: Callable[[], Iterable[int]]):
        self._new_sampler = new_sampler
        self.go_to(0)

    def go_to(self, num_drawn: int) -> None:
        """Go on as after `num_drawn` draws."""
        sampler = self._new_sampler()
        self._indices: Iterator[int] = chain.from_iterable(repeat(sampler))  # iterating a sampler begins an epoch
        self._peeked: list[int] = []
        self.num_drawn = 0
        self.draw(num_drawn)

    def draw(self, num_indices: int) -> list[int]:
        """The next indices."""
        self.num_drawn += num_indices
        drawn, self._peeked = self.peek(num_indices), self._peeked[num_indices:]
        return drawn

    def peek(self, num_indices: int) -> list[int]:
        """The next indices, which stay the next."""
        self._peeked += islice(self._indices, max(num_indices - len(self._peeked), 0))
        return self._peeked[:num_indices]


def num_to_draw(num_missing: int, num_informative: int, num_explored: int, limit: int) -> int:
    """
    How many prompts to explore next, from 1 to `limit`: as many as it takes to get the `num_missing` rows of the batch,
    if they give as many rows to learn from as the `num_explored` prompts of this step have given, `num_informative`.
    """
    if num_informative == 0:
        return limit
    return min(limit, math.ceil(num_missing * num_explored / num_informative))


def fill_batch(rows: list[Row], leftovers: list[Row], size: int) -> tuple[list[Row], list[Row], int]:
    """
    Put a batch of `size` rows together.

    Args:
        rows (`list[Row]`): The step's own, at least `size`: those of its prompts, then those of further prompts.
        leftovers (`list[Row]`): Informative rows left over from the step before.

    Returns:
        `tuple[list[Row], list[Row], int]`: The batch: the first `size` of `rows`, the rejected ones replaced by
        informative ones from the rest and, where these do not suffice, from `leftovers`; then the informative ones of
        this step that there was no place for; and how many of `leftovers` were used.
    """
    rest = [row for row in rows[size:] if row.teaches]
    spare = iter([*rest, *leftovers])
    batch = [row if row.teaches else next(spare, row) for row in rows[:size]]
    num_used = sum(row.teaches for row in batch) - sum(row.teaches for row in rows[:size])
    return batch, rest[num_used:], max(num_used - len(rest), 0)


class Refill:
    """
    Draws the prompts of each step, and further ones while rejection leaves its batch short of rows.

    Args:
        train_dataset (`Examples`):
            Training set.
        new_sampler (`Callable`):
            See [`PromptStream`].
        max_rounds (`int`):
            How many times in a step further prompts are drawn.

    Attributes:
        leftovers (`list[Row]`):
            Rows to learn from that the last batch had no place for.
        metrics (`dict[str, float]`):
            What to log of the last batch.
    """

    def __init__(self, train_dataset: Examples, new_sampler: Callable[[], Iterable[int]], max_rounds: int):
        self.train_dataset = train_dataset
        self.max_rounds = max_rounds
        self.prompts = PromptStream(new_sampler)
        self.leftovers: list[Row] = []
        self.metrics: dict[str, float] = {}

    def begin(self, num_prompts: int) -> list[int]:
        """Draw the prompts of a step: their places in the training set."""
        self._num_drawn_before = self.prompts.num_drawn
        self._first = self.prompts.draw(num_prompts)
        return self._first

    def undo(self) -> None:
        """Go back to where the step began, which has failed."""
        self.prompts.go_to(self._num_drawn_before)

    def fill(self, explore: Callable[[list[int]], list[Row]], num_prompts: int, num_rows: int) -> list[Row]:
        """
        Explore until a batch is full.

        Args:
            explore (`Callable`):
                Explores the prompts at these indices, and returns the rows of all prompts of the step so far. It is
                called first for those that [`begin`] has drawn.
            num_prompts, num_rows (`int`):
                Prompts of a step, and rows of its batch.

        Returns:
            `list[Row]`: The batch. `leftovers` are then this step's, and `metrics` tells what to log of it.
        """
        rows = explore(self._first)
        num_explored, num_rounds = num_prompts, 0
        while num_rounds < self.max_rounds:
            num_informative = sum(row.teaches for row in rows)
            num_missing = num_rows - num_informative - len(self.leftovers)
            if num_missing <= 0:
                break
            drawn = self.prompts.draw(num_to_draw(num_missing, num_informative, num_explored, num_prompts))
            num_explored, num_rounds = num_explored + len(drawn), num_rounds + 1
            rows = explore(drawn)
        batch, left_over, num_reused = fill_batch(rows, self.leftovers, num_rows)
        self.metrics = {
            "fr3e/refill/rounds": num_rounds,
            "fr3e/refill/prompts": num_explored - num_prompts,
            "fr3e/refill/rows": sum(row.teaches for row in batch) - sum(row.teaches for row in rows[:num_rows]),
            "fr3e/refill/reused": num_reused,
            "fr3e/refill/dropped": len(self.leftovers) - num_reused,
        }
        self.leftovers = left_over
        return batch

    def state(self, num_processes: int, process: int) -> dict[str, Any]:
        """For the checkpoint of a process, in plain values and tensors."""
        return {
            "num_drawn": self.prompts.num_drawn,
            "num_processes": num_processes,
            "leftovers": [state_of(row, with_tokens=row.holder == process) for row in self.leftovers],
        }

    def resume(self, state: dict[str, Any], num_processes: int) -> None:
        """
        Go on from what [`state`] returned.

        The rows left over are dropped if there are other processes to hold them, or the training set has become too
        small to have their examples.
        """
        self.prompts.go_to(state["num_drawn"])
        has_examples = all(row["index"] < len(self.train_dataset) for row in state["leftovers"])
        if state["num_processes"] == num_processes and has_examples:
            self.leftovers = [row_from(row, self.train_dataset) for row in state["leftovers"]]


# What a row's state has of the row itself, of its rollout, and of that one's score, beside tokens
OF_ROW = ("holder", "index", "advantage", "in_loss", "is_left_over")
OF_ROLLOUT = ("length", "num_written", "credit")
OF_SCORE = ("rewards", "reward", "is_masked", "is_left_out")


def state_of(row: Row, with_tokens: bool = True) -> dict[str, Any]:
    """A row in plain values and tensors, for a checkpoint or another process, without what reward functions logged."""
    state = {
        **{name: getattr(row, name) for name in OF_ROW},
        **{name: getattr(row.rollout, name) for name in OF_ROLLOUT},
        **{name: getattr(row.rollout.score, name) for name in OF_SCORE},
    }
    if not with_tokens:
        return state
    arrays = {name: getattr(row, name) for name in ("prompt_ids", "prefix_ids")}
    arrays |= {name: getattr(row.rollout, name) for name in ("token_ids", "logprobs", "mask")}
    tensors = {name: None if array is None else torch.from_numpy(array.copy()) for name, array in arrays.items()}
    return state | tensors | {"old_logprobs": row.old_logprobs}


def row_from(state: dict[str, Any], train_dataset: Examples) -> Row:
    """The row that [`state_of`] made `state` of, or an earlier version: what it does not know is left out."""
    # Checkpoints used to have no credit of tokens but under tree credit
    state = state | {"credit": state["credit"] or [(state["length"], 1.0, state["advantage"])]}
    score = Score(**{name: state[name] for name in OF_SCORE if name in state})
    rollout = Rollout(score=score, **{name: state[name] for name in OF_ROLLOUT})
    row = Row(rollout, **{name: state[name] for name in OF_ROW})
    if "token_ids" in state:
        _hold(row, state, train_dataset)
    return row


def _hold(row: Row, state: dict[str, Any], train_dataset: Examples) -> None:
    """Have a row hold its tokens."""
    row.rollout.token_ids = state["token_ids"].numpy()
    row.rollout.logprobs, row.rollout.mask = (
        None if state[name] is None else state[name].numpy() for name in ("logprobs", "mask")
    )
    row.prompt_ids, row.prefix_ids = state["prompt_ids"].numpy(), state["prefix_ids"].numpy()
    row.old_logprobs = state["old_logprobs"]
    row.example = train_dataset[state["index"]]


def hand_over(
    batch: list[Row],
    sharding: RowSharding,
    in_every_process: Callable[[Callable[[], Any]], list[Any]],
    train_dataset: Examples,
) -> None:
    """
    Give the rows of a batch, of which each process holds some, to the processes that `sharding` deals them to, in
    place, where refill has moved them. They stay the rows of their trees, which may be credited anew.

    `in_every_process` calls a function in every process, and returns what it returned in each.
    """
    moving = {k: row for k, row in enumerate(batch) if row.holder != sharding.owner(k)}
    if not moving:
        return
    held = {k: row for k, row in moving.items() if row.holder == sharding.process}
    of_processes = in_every_process(lambda: {k: state_of(row) for k, row in held.items()})
    states = {k: state for of_process in of_processes for k, state in of_process.items()}
    for k in moving:
        batch[k].holder = sharding.owner(k)
        if batch[k].holder == sharding.process:
            _hold(batch[k], states[k], train_dataset)
