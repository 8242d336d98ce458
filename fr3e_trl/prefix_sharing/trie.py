"""
A trie of rows, with which shared prefixes are forwarded once.

Completions share their prompt, and a branch shares everything before its anchor with its base trajectory. Rows are
folded into a trie whose nodes are concatenated without padding, so that all per-token computation, which is most of a
model, is done once per node. Only attention needs whole rows: the new nodes of each row attend to its whole path with
the usual causal mask. This costs no more than separate rows, and nothing grows with the square of the trie. Attention
kernels take rows either concatenated without padding, or padded in groups (`attention.py`).

As in TRL's asynchronous trainer, a node is a token together with the next one, so that it has a single label, at the
price of one more node per branch. The last token of a row predicts nothing and has no node.

Notation used for tensor shapes:
    - R: rows
    - T: columns of padded prompts and completions
    - C: the last columns, those of completions
    - U: nodes
    - P: nodes of all paths, concatenated
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Overhead of an attention call, in query-key pairs: see `_split`
PAIRS_PER_CALL = 2**14


@dataclass(frozen=True)
class Trie:
    """
    Rows folded into a trie.

    Args:
        input_ids, position_ids, labels (`torch.Tensor` of shape (1, U)):
            The token and column of each node, and the next token, -100 where no row scores it.
        paths (`list[tuple[int, torch.Tensor]]`):
            For each attention call with a group of r rows, the first position to compute and the nodes along the rows'
            paths, of shape (r, t). Positions after the end of a row contain arbitrary nodes.
        nodes (`torch.Tensor` of shape (U,)):
            The index of each node in the concatenated outputs of these calls.
        path (`torch.Tensor` of shape (P,)):
            The concatenated paths of rows with new nodes. New nodes are numbered in the same order.
        lengths (`dict`):
            Cumulative and maximum lengths of these rows' new nodes (queries) and paths (keys), as arguments of
            FlashAttention's functions for variable lengths, under transformers' names.
        predictors, scored (`torch.Tensor` of shape (R, C)):
            The node that predicts each token of a completion, and whether the token is scored.
        windows (`set`):
            The sliding windows that attention was called with, including `None`.
        masks (`dict`):
            Cache of masks that attention calls share.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    paths: list[tuple[int, torch.Tensor]]
    nodes: torch.Tensor
    path: torch.Tensor
    lengths: dict[str, Any]
    predictors: torch.Tensor
    scored: torch.Tensor
    windows: set[int | None] = field(default_factory=set)
    masks: dict[Any, Any] = field(default_factory=dict)

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Inputs of a model that was prepared with `share`. The dummy mask keeps it from creating one."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device),
            "shared_prefixes": self,
        }

    def to_rows(self, node_values: torch.Tensor) -> torch.Tensor:
        """Values of nodes, of shape (1, U), arranged in rows (R, C), 0 where no token is scored."""
        row_values = node_values[0].index_select(0, self.predictors.flatten()).view(self.predictors.shape)
        return row_values.masked_fill(~self.scored, 0)


def fold(input_ids: torch.Tensor, attention_mask: torch.Tensor, scored: torch.Tensor) -> Trie:
    """
    Fold rows into a trie.

    Args:
        input_ids, attention_mask (`torch.Tensor` of shape (R, T)):
            The rows. The tokens of each must be contiguous, and prefixes are shared only between rows that start in the
            same column.
        scored (`torch.Tensor` of shape (R, C)):
            Boolean mask of the tokens whose log-probabilities are wanted.
    """
    tokens = torch.where(attention_mask.bool(), input_ids, -1).cpu().numpy()
    scored_tokens = scored.cpu().numpy() & (tokens[:, -scored.size(1) :] >= 0)
    # In sorted order, each row has its longest common prefix with the row before it
    order = np.array(sorted(range(len(tokens)), key=lambda row: tokens[row].tobytes()))
    nodes, is_new = _number(tokens[order])
    paths, output_indices = _calls(nodes, is_new)
    path, lengths = _end_to_end(nodes, is_new)
    nodes, is_new = nodes[inverse := order.argsort()], is_new[inverse]
    predictors = nodes[:, -scored.size(1) - 1 : -1]
    by_node = nodes[is_new].argsort()
    labels = np.full(len(by_node), -100)
    labels[predictors[scored_tokens]] = tokens[:, -scored.size(1) :][scored_tokens]

    def on_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(input_ids.device)

    return Trie(
        input_ids=on_device(tokens[is_new][by_node][None]),
        position_ids=on_device(is_new.nonzero()[1][by_node][None]),
        labels=on_device(labels[None]),
        paths=[(start, on_device(path)) for start, path in paths],
        nodes=on_device(output_indices),
        path=on_device(path),
        lengths={key: on_device(value) if isinstance(value, np.ndarray) else value for key, value in lengths.items()},
        predictors=on_device(np.where(scored_tokens, predictors, 0)),
        scored=on_device(scored_tokens),
    )


def _number(tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """
    Number the nodes of rows in lexicographic order.

    Args:
        tokens (`np.ndarray` of shape (R, T)):
            Token ids, -1 for padding.

    Returns:
        `tuple`: The node of each token, or -1, and whether the row is the first one with this node, both of shape
        (R, T).
    """
    has_node = np.zeros_like(tokens, dtype=bool)
    has_node[:, :-1] = (tokens[:, :-1] >= 0) & (tokens[:, 1:] >= 0)
    num_columns = tokens.shape[1]
    differs = tokens[1:] != tokens[:-1]
    num_common = np.where(differs.any(1), differs.argmax(1), num_columns + 1)
    num_shared = np.concatenate([[0], (num_common - 1).clip(0)])  # a node includes the next token
    is_new = has_node & (np.arange(num_columns) >= num_shared[:, None])
    nodes = np.full(tokens.shape, -1)
    nodes[is_new] = np.arange(is_new.sum())
    for row in range(1, len(tokens)):
        nodes[row, : num_shared[row]] = nodes[row - 1, : num_shared[row]]
    return nodes, is_new


def _end_to_end(nodes: NDArray[np.int64], is_new: NDArray[np.bool_]) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """`path` and `lengths` of a [`Trie`], from the results of [`_number`]."""
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
    """`paths` and `nodes` of a [`Trie`], from the results of [`_number`]."""
    num_new = is_new.sum(1)
    rows = num_new.nonzero()[0]
    begins, lengths = (nodes >= 0).argmax(1)[rows], (nodes >= 0).sum(1)[rows]
    starts = lengths - num_new[rows]
    by_start = starts.argsort(kind="stable")
    paths, output_indices = [], np.empty(num_new.sum(), dtype=np.int64)
    num_before = 0
    for first, end in pairwise(_split(starts[by_start], lengths[by_start])):
        group = by_start[first:end]
        start, length = starts[group].min(), lengths[group].max()
        columns = begins[group, None] + np.arange(length)
        group_paths = nodes[rows[group, None], columns.clip(max=nodes.shape[1] - 1)].clip(0)
        numbers = num_before + np.arange(len(group) * (length - start)).reshape(len(group), -1)
        is_row = (np.arange(length) >= starts[group, None]) & (np.arange(length) < lengths[group, None])
        output_indices[group_paths[is_row]] = numbers[is_row[:, start:]]
        num_before += numbers.size
        paths.append((int(start), group_paths))
    return paths, output_indices


def _split(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[int]:
    """
    Split rows, sorted by the start of their new nodes, into attention calls with the lowest total cost.

    All rows of a call start at its first row's start and are padded to the longest, which favors small groups, whereas
    the overhead of each call favors large ones.

    Returns:
        `list[int]`: The first row of each call, and the total number of rows.
    """
    cheapest, first_of_last = np.zeros(len(starts) + 1, dtype=np.int64), [0]
    for end in range(1, len(starts) + 1):
        first = np.arange(end)[::-1]
        longest = np.maximum.accumulate(lengths[first])
        # The token at position i attends to i + 1 tokens
        pairs = (end - first) * (longest - starts[first]) * (longest + starts[first]) // 2
        costs = cheapest[first] + pairs + PAIRS_PER_CALL
        first_of_last.append(int(first[costs.argmin()]))
        cheapest[end] = costs.min()
    bounds = [len(starts)]
    while bounds[-1] > 0:
        bounds.append(first_of_last[bounds[-1]])
    return bounds[::-1]
