"""Refill: explores further prompts, so that the batch is full of informative rows in spite of rejection."""

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
    Indices of the training set, epoch after epoch. `num_drawn` counts those drawn since the first epoch began.

    `new_sampler` returns the same sampler of indices each time. It is iterated once per epoch.
    """

    def __init__(self, new_sampler: Callable[[], Iterable[int]]):
        self._new_sampler = new_sampler
        self.go_to(0)

    def go_to(self, num_drawn: int) -> None:
        """Continue as if `num_drawn` indices had been drawn."""
        sampler = self._new_sampler()
        self._indices: Iterator[int] = chain.from_iterable(repeat(sampler))  # iterating a sampler begins an epoch
        self._peeked: list[int] = []
        self.num_drawn = 0
        self.draw(num_drawn)

    def draw(self, num_indices: int) -> list[int]:
        """Draw the next indices."""
        self.num_drawn += num_indices
        drawn, self._peeked = self.peek(num_indices), self._peeked[num_indices:]
        return drawn

    def peek(self, num_indices: int) -> list[int]:
        """The next indices, without drawing them."""
        self._peeked += islice(self._indices, max(num_indices - len(self._peeked), 0))
        return self._peeked[:num_indices]


def num_to_draw(num_missing: int, num_informative: int, num_explored: int, limit: int) -> int:
    """
    How many prompts to explore next, from 1 to `limit`: enough for the `num_missing` rows of the batch, if their share
    of informative rows is that of this step so far, `num_informative` rows from `num_explored` prompts.
    """
    if num_informative == 0:
        return limit
    return min(limit, math.ceil(num_missing * num_explored / num_informative))


def fill_batch(rows: list[Row], leftovers: list[Row], size: int) -> tuple[list[Row], list[Row], int]:
    """
    Assemble a batch of `size` rows.

    Args:
        rows (`list[Row]`): At least `size` rows of the step: those of its prompts, then those of further prompts.
        leftovers (`list[Row]`): Informative rows left over from the previous step.

    Returns:
        `tuple[list[Row], list[Row], int]`: The batch, which is the first `size` of `rows` with rejected ones replaced
        by informative ones from the rest and, if these do not suffice, from `leftovers`; the informative rows of this
        step that did not fit; and the number of `leftovers` that were used.
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
            Maximum number of times per step that further prompts are drawn.

    Attributes:
        leftovers (`list[Row]`):
            Informative rows that did not fit into the last batch.
        metrics (`dict[str, float]`):
            Metrics of the last batch.
    """

    def __init__(self, train_dataset: Examples, new_sampler: Callable[[], Iterable[int]], max_rounds: int):
        self.train_dataset = train_dataset
        self.max_rounds = max_rounds
        self.prompts = PromptStream(new_sampler)
        self.leftovers: list[Row] = []
        self.metrics: dict[str, float] = {}

    def begin(self, num_prompts: int) -> list[int]:
        """Draw the prompts of a step, and return their indices in the training set."""
        self._num_drawn_before = self.prompts.num_drawn
        self._first = self.prompts.draw(num_prompts)
        return self._first

    def undo(self) -> None:
        """Return to the beginning of a step that failed."""
        self.prompts.go_to(self._num_drawn_before)

    def fill(self, explore: Callable[[list[int]], list[Row]], num_prompts: int, num_rows: int) -> list[Row]:
        """
        Explore until a batch is full.

        Args:
            explore (`Callable`):
                Explores the prompts at given indices, and returns the rows of all prompts of the step so far. It is
                first called with the indices that [`begin`] drew.
            num_prompts, num_rows (`int`):
                Number of prompts of a step, and of rows of its batch.

        Returns:
            `list[Row]`: The batch. `leftovers` and `metrics` are updated.
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
        """State for a process's checkpoint, in plain values and tensors."""
        return {
            "num_drawn": self.prompts.num_drawn,
            "num_processes": num_processes,
            "leftovers": [row_state(row, with_tokens=row.holder == process) for row in self.leftovers],
        }

    def resume(self, state: dict[str, Any], num_processes: int) -> None:
        """
        Restore what [`state`] returned.

        Rows left over are dropped if the number of processes has changed, or the training set lacks their examples.
        """
        self.prompts.go_to(state["num_drawn"])
        has_examples = all(row["index"] < len(self.train_dataset) for row in state["leftovers"])
        if state["num_processes"] == num_processes and has_examples:
            self.leftovers = [row_from(row, self.train_dataset) for row in state["leftovers"]]


# Attributes of a row, its rollout and its score that are in the row's state, in addition to tokens
ROW_FIELDS = ("holder", "index", "advantage", "in_loss", "is_left_over")
ROLLOUT_FIELDS = ("length", "num_written", "credit")
SCORE_FIELDS = ("rewards", "reward", "is_masked", "is_left_out")


def row_state(row: Row, with_tokens: bool = True) -> dict[str, Any]:
    """A row in plain values and tensors, for a checkpoint or another process, without logs of reward functions."""
    state = {
        **{name: getattr(row, name) for name in ROW_FIELDS},
        **{name: getattr(row.rollout, name) for name in ROLLOUT_FIELDS},
        **{name: getattr(row.rollout.score, name) for name in SCORE_FIELDS},
    }
    if not with_tokens:
        return state
    arrays = {name: getattr(row, name) for name in ("prompt_ids", "prefix_ids")}
    arrays |= {name: getattr(row.rollout, name) for name in ("token_ids", "logprobs", "mask")}
    tensors = {name: None if array is None else torch.from_numpy(array.copy()) for name, array in arrays.items()}
    return state | tensors | {"old_logprobs": row.old_logprobs}


def row_from(state: dict[str, Any], train_dataset: Examples) -> Row:
    """The row of a state that [`row_state`] made, in this version or an earlier one, which may lack some values."""
    # Earlier checkpoints have the credit of tokens only under tree credit
    state = state | {"credit": state["credit"] or [(state["length"], 1.0, state["advantage"])]}
    score = Score(**{name: state[name] for name in SCORE_FIELDS if name in state})
    rollout = Rollout(score=score, **{name: state[name] for name in ROLLOUT_FIELDS})
    row = Row(rollout, **{name: state[name] for name in ROW_FIELDS})
    if "token_ids" in state:
        _load_tokens(row, state, train_dataset)
    return row


def _load_tokens(row: Row, state: dict[str, Any], train_dataset: Examples) -> None:
    """Load a row's tokens from its state."""
    row.rollout.token_ids = state["token_ids"].numpy()
    row.rollout.logprobs, row.rollout.mask = (
        None if state[name] is None else state[name].numpy() for name in ("logprobs", "mask")
    )
    row.prompt_ids, row.prefix_ids = state["prompt_ids"].numpy(), state["prefix_ids"].numpy()
    row.old_logprobs = state["old_logprobs"]
    row.example = train_dataset[state["index"]]


def redistribute(
    batch: list[Row],
    sharding: RowSharding,
    in_every_process: Callable[[Callable[[], Any]], list[Any]],
    train_dataset: Examples,
) -> None:
    """
    Send rows that refill has moved to the processes that `sharding` assigns them to, in place. They stay the rows of
    their trees, which may be credited again.

    `in_every_process` calls a function in every process, and returns the results of all processes.
    """
    moving = {k: row for k, row in enumerate(batch) if row.holder != sharding.owner(k)}
    if not moving:
        return
    held = {k: row for k, row in moving.items() if row.holder == sharding.process}
    process_states = in_every_process(lambda: {k: row_state(row) for k, row in held.items()})
    states = {k: state for held_states in process_states for k, state in held_states.items()}
    for k in moving:
        batch[k].holder = sharding.owner(k)
        if batch[k].holder == sharding.process:
            _load_tokens(batch[k], states[k], train_dataset)
