"""
Rows that share prefixes, forwarded once.

Completions of a prompt have it in common, and a branch has all that comes before its anchor in common with its base
trajectory. Rows are folded into a trie, whose nodes are laid end to end without padding: what a model does with a token
alone, which is nearly all, is done once a node. Attention is between tokens of a row, so there, and only there, the
rows are put together again: the new nodes of each row look back along its whole path, with no mask but the causal one.
It costs no more than in the rows apart, and nothing grows with the square of the trie.

A node is a token together with the one that follows it, as in TRL's asynchronous trainer: it has a single label, at the
price of one more node a branch. The last token of a row predicts nothing, and has no node.

Notation used for tensor shapes:
    - R: rows
    - T: columns, prompts and completions, padded
    - C: the last columns, completions
    - U: nodes
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AttentionInterface

from ..generation.context import context_length
from ..generation.growing_probe import special_tokens, tolerance, without_dropout
from .decoding import unchanged

# What one more call of attention costs, in pairs of a token and one that it looks at: see `_split`
PAIRS_PER_CALL = 2**14

# Implementations of attention that can be called with the paths of a trie
IMPLEMENTATIONS = ("sdpa", "eager")

# Settings of models whose attention looks back no further
WINDOWS = ("sliding_window", "attention_chunk_size")

# Columns of a trial's rows, and what follows them in another batch
COLUMNS, MORE_COLUMNS = 48, 13


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
        of_rows, scored (`torch.Tensor` of shape (R, C)):
            The node before each token of a completion, and whether the token is scored.
        windows (`set`, *optional*):
            Collects the windows that attention is called with.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    paths: list[tuple[int, torch.Tensor]]
    nodes: torch.Tensor
    of_rows: torch.Tensor
    scored: torch.Tensor
    windows: set[int | None] | None = None

    @property
    def model_inputs(self) -> dict[str, Any]:
        """What a model is called with, once [`share`] has seen it. The mask is given for it to make none itself."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device),
            "shared_prefixes": {"paths": self.paths, "nodes": self.nodes, "windows": self.windows},
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
    for first, end in pairwise(_split(starts[by_start].tolist(), lengths[by_start].tolist())):
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


def _split(starts: list[int], lengths: list[int]) -> list[int]:
    """
    Split rows, in order of where they start, into calls of attention that together cost the least.

    Rows of a call begin where the first of them does and are padded to the longest, so that each wants rows of its own
    kind, and every call has a price of its own.

    Returns:
        `list[int]`: The first row of each call, and the number of rows.
    """
    cheapest, first_of_last = [0], [0]
    for end in range(1, len(starts) + 1):
        costs, longest = {}, 0
        for first in reversed(range(end)):
            longest = max(longest, lengths[first])
            pairs = (end - first) * (longest - starts[first]) * longest
            if starts[first] == 0:
                pairs //= 2  # causal attention without a mask skips half of them
            costs[first] = cheapest[first] + pairs + PAIRS_PER_CALL
        first_of_last.append(min(costs, key=lambda first: costs[first]))
        cheapest.append(costs[first_of_last[-1]])
    bounds = [len(starts)]
    while bounds[-1] > 0:
        bounds.append(first_of_last[bounds[-1]])
    return bounds[::-1]


def obstacle_to_sharing(
    model: Any,
    dtype: torch.dtype,
    device: torch.device,
    score_apart: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    score_shared: Callable[[Trie], torch.Tensor],
) -> str | None:
    """
    What keeps a model from forwarding shared prefixes once, if anything does.

    Rows that branch are scored shared and apart. In some models, layers beside attention depend on the tokens before.
    Others have windows that their attention is not told of.

    Args:
        model (`~transformers.PreTrainedModel`):
            The model. It stays as it was, but that its attention takes paths.
        dtype (`torch.dtype`):
            What it computes in.
        device (`torch.device`):
            Where it computes.
        score_apart (`Callable`):
            Log-probs of the last C columns of rows, (R, C), from ids and mask of shape (R, T), and C.
        score_shared (`Callable`):
            The same from the rows' trie.

    Returns:
        `str` or `None`: A clause that says what is wrong.
    """
    name = type(getattr(model, "get_base_model", lambda: model)()).__name__
    config = model.config.get_text_config()
    if config._attn_implementation not in IMPLEMENTATIONS:
        taking = " and ".join(IMPLEMENTATIONS)
        return f"attn_implementation={config._attn_implementation!r} takes no paths, as {taking} do"
    if getattr(model, "_is_stateful", False):
        return f"layers of {name} are recurrent: what they make of a token depends on the row"
    share(model, config._attn_implementation)
    windows = [window for window in (getattr(config, name, None) for name in WINDOWS) if window]
    if set(getattr(config, "layer_types", None) or ["any"]) == {"full_attention"}:
        windows = []
    input_ids, mask = _branching_rows(model)
    input_ids, mask = input_ids.to(device), mask.to(device)
    num_columns = input_ids.size(1) // 2
    trie = replace(fold(input_ids, mask, mask[:, -num_columns:].bool()), windows=set())
    try:
        with torch.no_grad(), unchanged(model, device), without_dropout(model):
            apart = score_apart(input_ids, mask, num_columns)
            difference = (apart - score_shared(trie)).abs().mean().item()
            # The same in batches of other shapes, as a measure of what rounding does
            longer = [torch.cat([rows, rows[:, :MORE_COLUMNS]], 1) for rows in (input_ids, mask)]
            alone = [score_apart(*(rows[[i]] for rows in longer), num_columns + MORE_COLUMNS) for i in range(len(mask))]
            noise = (apart - torch.cat(alone)[:, :num_columns]).abs().mean().item()
    except Exception as error:
        return f"{name} raises {type(error).__name__}: {error}"
    assert trie.windows is not None
    for window in windows:
        if window not in trie.windows:  # it may be longer than what is tried out
            return f"the window of {name}, {window} tokens, is in its mask alone"
    if not difference <= tolerance(dtype, noise):
        return f"it changes log-probs of {name} by {difference:.2g} nats a token"
    return None


def _branching_rows(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, (4, T), of a row, two that branch off it, and itself with another beginning."""
    config = model.config
    length = min(COLUMNS, context_length(config) or COLUMNS)
    usual = np.setdiff1d(np.arange(config.get_text_config().vocab_size), special_tokens(config, []))
    rng = np.random.default_rng(0)
    input_ids = np.tile(rng.choice(usual, length), (4, 1))
    for row, start in ((1, length // 2 + 1), (2, length - length // 4)):
        input_ids[row, start:] = rng.choice(usual, length - start)
    mask = np.ones_like(input_ids)
    input_ids[3, 0] = mask[3, 0] = 0
    return torch.from_numpy(input_ids), torch.from_numpy(mask)


def share(model: nn.Module, implementation: str) -> None:
    """
    Have a model's attention take the paths of a trie.

    transformers looks attention up by name, in its register or in the model's own module, and passes on the keywords
    that a model is called with. The function of that name gets one more keyword, without which it is as before.
    """
    if implementation == "sdpa":
        AttentionInterface.register("sdpa", _with_paths(AttentionInterface()["sdpa"], needs_mask=False))
        return
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        functions = vars(module)
        if "eager_attention_forward" in functions:
            functions["eager_attention_forward"] = _with_paths(functions["eager_attention_forward"], needs_mask=True)


def _with_paths(attention: Callable[..., Any], needs_mask: bool) -> Callable[..., Any]:
    """Attention that takes `shared_prefixes`; `needs_mask` where it is causal by its mask alone."""
    if hasattr(attention, "takes_paths"):
        return attention

    @functools.wraps(attention)
    def with_paths(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        shared_prefixes: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        if shared_prefixes is None:
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        window = kwargs.get("sliding_window")
        if shared_prefixes["windows"] is not None:
            shared_prefixes["windows"].add(window)
        outputs = []
        for start, path in shared_prefixes["paths"]:
            mask = None
            if needs_mask or start > 0 or (window is not None and window < path.size(1)):
                mask = _causal_mask(start, path.size(1), window, path.device)
                if needs_mask:
                    mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
            states = _along(query, path[:, start:]), _along(key, path), _along(value, path)
            outputs.append(attention(module, *states, mask, *args, **kwargs)[0].flatten(0, 1))
        return torch.cat(outputs).index_select(0, shared_prefixes["nodes"]).unsqueeze(0), None

    with_paths.takes_paths = True  # type: ignore[attr-defined]
    return with_paths


def _along(states: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Of states of shape (1, H, U, D), those along the paths of r rows: (r, H, t, D)."""
    return states[0].index_select(1, path.flatten()).unflatten(1, path.shape).transpose(0, 1)


def _causal_mask(start: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """What tokens from `start` on see, by a mask of shape (1, 1, length - start, length)."""
    columns = torch.arange(length, device=device)
    mask = columns[start:, None] >= columns
    if window is not None:
        mask &= columns[start:, None] - window < columns
    return mask[None, None]
