"""
Rows that share prefixes, forwarded once.

Completions of a prompt have it in common, and a branch has all that comes before its anchor in common with its base
trajectory. Rows are folded into a trie, whose nodes are laid end to end without padding: what a model does with a token
alone, which is nearly all, is done once a node. Attention is between tokens of a row, so there, and only there, the
rows are put together again: the new nodes of each row look back along its whole path, with no mask but the causal one.
It costs no more than in the rows apart, and nothing grows with the square of the trie. Kernels of attention take rows
in one of two forms: end to end without padding, or padded, in groups (`attention.py`).

A node is a token together with the one that follows it, as in TRL's asynchronous trainer: it has a single label, at the
price of one more node a branch. The last token of a row predicts nothing, and has no node.

Notation used for tensor shapes:
    - R: rows
    - T: columns, prompts and completions, padded
    - C: the last columns, completions
    - U: nodes
    - P: nodes of all paths, one path after the other
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# What one more call of attention costs, in pairs of a token and one that it looks at: see `_split`
PAIRS_PER_CALL = 2**14


@dataclass(frozen=True)
class Trie:
    """
    Rows folded into a trie.

    Args:
        input_ids, position_ids, labels (`torch.Tensor` of shape (1, U)):
            The token of each node, its column, and the token that follows, -100 where no row scores it.
        paths (`list[tuple[int, torch.Tensor]]`):
            The nodes that rows pass through, by groups of rows for which attention is called, shape (r, t) each. Of a
            group, positions from the first number on are new to the trie or computed for nothing; those after a row's
            end are any.
        nodes (`torch.Tensor` of shape (U,)):
            Where each node is in what these calls return, end to end.
        path (`torch.Tensor` of shape (P,)):
            The nodes that rows with new nodes pass through, end to end. New nodes are in the same order.
        lengths (`dict`):
            How many nodes are new, and how long the path is, row by row: sums and maxima, as FlashAttention's
            functions for rows end to end take them, by the names that transformers has for them.
        of_rows, scored (`torch.Tensor` of shape (R, C)):
            The node before each token of a completion, and whether the token is scored.
        windows (`set`):
            The windows that attention was called with, `None` for none.
        masks (`dict`):
            Masks that calls of attention have in common, by what they depend on.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    paths: list[tuple[int, torch.Tensor]]
    nodes: torch.Tensor
    path: torch.Tensor
    lengths: dict[str, Any]
    of_rows: torch.Tensor
    scored: torch.Tensor
    windows: set[int | None] = field(default_factory=set)
    masks: dict[Any, Any] = field(default_factory=dict)

    @property
    def model_inputs(self) -> dict[str, Any]:
        """What a model is called with, once `share` has seen it. The mask is given for it to make none itself."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device),
            "shared_prefixes": self,
        }

    def to_rows(self, of_nodes: torch.Tensor) -> torch.Tensor:
        """Numbers of shape (1, U), a node's each, as (R, C), 0 where no token is scored."""
        of_rows = of_nodes[0].index_select(0, self.of_rows.flatten()).view(self.of_rows.shape)
        return of_rows.masked_fill(~self.scored, 0)


def fold(input_ids: torch.Tensor, attention_mask: torch.Tensor, scored: torch.Tensor) -> Trie:
    """
    Fold rows into a trie.

    Args:
        input_ids, attention_mask (`torch.Tensor` of shape (R, T)):
            The rows. Each has its tokens in a stretch without gaps, and shares a prefix with rows whose own begins in
            the same column.
        scored (`torch.Tensor` of shape (R, C)):
            Boolean mask of the tokens whose log-probabilities are wanted.
    """
    tokens = torch.where(attention_mask.bool(), input_ids, -1).cpu().numpy()
    scored_tokens = scored.cpu().numpy() & (tokens[:, -scored.size(1) :] >= 0)
    # Rows that share most come one after the other, and each has its longest common prefix with the one before it
    order = np.array(sorted(range(len(tokens)), key=lambda row: tokens[row].tobytes()))
    nodes, is_new = _number(tokens[order])
    paths, places = _calls(nodes, is_new)
    path, lengths = _end_to_end(nodes, is_new)
    nodes, is_new = nodes[inverse := order.argsort()], is_new[inverse]
    before = nodes[:, -scored.size(1) - 1 : -1]  # the node that predicts each token of a completion
    of_node = nodes[is_new].argsort()
    labels = np.full(len(of_node), -100)
    labels[before[scored_tokens]] = tokens[:, -scored.size(1) :][scored_tokens]

    def on_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(input_ids.device)

    return Trie(
        input_ids=on_device(tokens[is_new][of_node][None]),
        position_ids=on_device(is_new.nonzero()[1][of_node][None]),
        labels=on_device(labels[None]),
        paths=[(start, on_device(path)) for start, path in paths],
        nodes=on_device(places),
        path=on_device(path),
        lengths={key: on_device(value) if isinstance(value, np.ndarray) else value for key, value in lengths.items()},
        of_rows=on_device(np.where(scored_tokens, before, 0)),
        scored=on_device(scored_tokens),
    )


def _number(tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """
    Number the nodes of rows in lexicographic order.

    Args:
        tokens (`np.ndarray` of shape (R, T)):
            Token ids, -1 for padding.

    Returns:
        `tuple`: The node of each token, -1 where it has none, and whether the row is the first that has it, both of
        shape (R, T).
    """
    has_node = np.zeros_like(tokens, dtype=bool)
    has_node[:, :-1] = (tokens[:, :-1] >= 0) & (tokens[:, 1:] >= 0)
    num_columns = tokens.shape[1]
    differs = tokens[1:] != tokens[:-1]
    num_common = np.where(differs.any(1), differs.argmax(1), num_columns + 1)
    num_shared = np.concatenate([[0], (num_common - 1).clip(0)])  # the next token is common too
    is_new = has_node & (np.arange(num_columns) >= num_shared[:, None])
    nodes = np.full(tokens.shape, -1)
    nodes[is_new] = np.arange(is_new.sum())
    for row in range(1, len(tokens)):
        nodes[row, : num_shared[row]] = nodes[row - 1, : num_shared[row]]
    return nodes, is_new


def _end_to_end(nodes: NDArray[np.int64], is_new: NDArray[np.bool_]) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """`path` and `lengths` of a [`Trie`], for rows as [`_number`] numbers them."""
    has_new = is_new.any(1)
    paths = nodes[has_new]
    num_new, num_nodes = is_new[has_new].sum(1), (paths >= 0).sum(1)
    bounds = (np.append(0, lengths.cumsum()).astype(np.int32) for lengths in (num_new, num_nodes))
    return paths[paths >= 0], {
        **dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), bounds, strict=True)),
        "max_length_q": int(num_new.max()),
        "max_length_k": int(num_nodes.max()),
    }


def _calls(
    nodes: NDArray[np.int64], is_new: NDArray[np.bool_]
) -> tuple[list[tuple[int, NDArray[np.int64]]], NDArray[np.int64]]:
    """The calls of attention for rows as [`_number`] numbers them: `paths` and `nodes` of a [`Trie`]."""
    num_new = is_new.sum(1)
    rows = num_new.nonzero()[0]
    begins, lengths = (nodes >= 0).argmax(1)[rows], (nodes >= 0).sum(1)[rows]
    starts = lengths - num_new[rows]
    by_start = starts.argsort(kind="stable")
    paths, places = [], np.empty(num_new.sum(), dtype=np.int64)
    num_before = 0
    for first, end in pairwise(_split(starts[by_start], lengths[by_start])):
        group = by_start[first:end]
        start, length = starts[group].min(), lengths[group].max()
        columns = begins[group, None] + np.arange(length)
        of_rows = nodes[rows[group, None], columns.clip(max=nodes.shape[1] - 1)].clip(0)
        numbers = num_before + np.arange(len(group) * (length - start)).reshape(len(group), -1)
        is_row = (np.arange(length) >= starts[group, None]) & (np.arange(length) < lengths[group, None])
        places[of_rows[is_row]] = numbers[is_row[:, start:]]
        num_before += numbers.size
        paths.append((int(start), of_rows))
    return paths, places


def _split(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[int]:
    """
    Split rows, in order of where they start, into calls of attention that together cost the least.

    Rows of a call begin where the first of them does and are padded to the longest, so that each wants rows of its own
    kind, and every call has a price of its own.

    Returns:
        `list[int]`: The first row of each call, and the number of rows.
    """
    cheapest, first_of_last = np.zeros(len(starts) + 1, dtype=np.int64), [0]
    for end in range(1, len(starts) + 1):
        first = np.arange(end)[::-1]
        longest = np.maximum.accumulate(lengths[first])
        # A token looks at those before it: from the first new one's number on to that of all
        pairs = (end - first) * (longest - starts[first]) * (longest + starts[first]) // 2
        costs = cheapest[first] + pairs + PAIRS_PER_CALL
        first_of_last.append(int(first[costs.argmin()]))
        cheapest[end] = costs.min()
    bounds = [len(starts)]
    while bounds[-1] > 0:
        bounds.append(first_of_last[bounds[-1]])
    return bounds[::-1]
