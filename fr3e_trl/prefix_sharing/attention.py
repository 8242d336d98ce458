"""
Attention for the nodes of a trie: the new nodes of each row attend to its whole path.

This is causal attention with fewer queries than keys, aligned at the last of both, which kernels support in different
ways:

- FlashAttention takes all rows in one call, with separate lengths of queries and keys. transformers calls it for
  `flash_attention_2`, `flash_attention_3` and kernels from the hub. torch has a copy of it, which replaces `sdpa` where
  that would use FlashAttention: on CUDA, in half precision.
- `flex_attention` gets the blocks of keys that each block of queries attends to.
- `sdpa` elsewhere and `eager` support this alignment only with a mask. They get queries in blocks, with a mask for the
  block and the keys that it attends to.

No tensor grows with the square of a row's length. `eager` keeps the scores of all blocks for the backward pass.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils.generic import is_flash_attention_requested

from .trie import Trie

# Queries per call with a mask: smaller blocks skip more keys, but need more calls
BLOCK = 256

# flex_attention's default block size
FLEX_BLOCK = 128

# Limit of its recompilations: 30 micro-batches of random shapes needed 13
FLEX_RECOMPILATIONS = 64

Attention = Callable[..., Any]


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """
    Make `sdpa` use torch's own kernels instead of cuDNN's.

    From torch 2.11 on, cuDNN's kernel returns NaN gradients on Hopper GPUs if rows are padded to 64 beyond a multiple
    of 128 (https://github.com/pytorch/pytorch/issues/196678). `fr3e check` found this on an H200, with GRPOTrainer too.
    """
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def share(model: nn.Module, implementation: str) -> bool:
    """
    Make a model's attention accept the keyword `shared_prefixes`, a [`Trie`].

    transformers looks up the attention function by name, in its registry or in the model's module, and passes on the
    keywords of the model's call. The function is wrapped, and behaves as before without this keyword.

    Returns:
        `bool`: Whether this implementation is supported.
    """
    if implementation == "eager":
        for module in {sys.modules[type(part).__module__] for part in model.modules()}:
            functions = vars(module)
            if "eager_attention_forward" in functions:
                functions["eager_attention_forward"] = _with_paths(functions["eager_attention_forward"], _eager)
        return True
    adapter = _flash if is_flash_attention_requested(requested_attention_implementation=implementation) else None
    adapter = {"sdpa": _sdpa, "flex_attention": _flex}.get(implementation, adapter)
    if adapter is not None:
        AttentionInterface.register(implementation, _with_paths(AttentionInterface()[implementation], adapter))
    return adapter is not None


def _with_paths(attention: Attention, adapter: Callable[..., torch.Tensor]) -> Attention:
    """Wrap an attention function so that it accepts `shared_prefixes`, using the adapter for its implementation."""
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
        shared_prefixes: Trie | None = None,
        **kwargs: Any,
    ) -> Any:
        if shared_prefixes is None:
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        shared_prefixes.windows.add(kwargs.get("sliding_window"))
        call = functools.partial(attention, module)
        return adapter(call, shared_prefixes, query, key, value, *args, **kwargs), None

    with_paths.takes_paths = True  # type: ignore[attr-defined]
    return with_paths


# Adapters take an attention function without its module, a trie, and queries, keys and values (1, H, U, D), and return
# outputs (1, U, H, D). All but flex's are excluded from a model's compilation, which would be repeated for each trie


@torch.compiler.disable
def _flash(attention: Attention, trie: Trie, *states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """
    All rows in one call. New nodes are numbered row by row, so queries are in order already.

    transformers' attention passes the lengths to its `_flash_attention_forward`.
    """
    query, *others = states
    key, value = (part[0].transpose(0, 1).index_select(0, trie.path).transpose(0, 1).unsqueeze(0) for part in others)
    return attention(query, key, value, None, **trie.lengths, **kwargs)[0]


@torch.compiler.disable
def _sdpa(attention: Attention, trie: Trie, *states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """FlashAttention where sdpa would use it. Otherwise a mask, except for groups without prefixes."""
    kind = states[0].device.type
    if torch.is_autocast_enabled(kind):  # as sdpa does
        states = tuple(part.to(torch.get_autocast_dtype(kind)) for part in states)
    if not kwargs.get("dropout") and runs_flash(*states):
        return _flash(_varlen, trie, *states, **kwargs)
    window = kwargs.get("sliding_window")

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
        if start == 0 and (window is None or window >= key.size(2)):
            return attention(query, key, value, None, **kwargs)[0]
        # Once per group, because each block would keep its own copy for the backward pass
        key, value = (part.repeat_interleave(query.size(1) // part.size(1), 1) for part in (key, value))
        return _in_blocks(functools.partial(_masked_sdpa, **kwargs), trie, query, key, value, start, window)

    return _by_groups(trie, attend, *states)


def _masked_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """torch's sdpa with the signature of transformers' attention functions."""
    output = scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
    return output.transpose(1, 2), None


@functools.cache
def has_varlen() -> bool:
    """Whether torch has FlashAttention for variable lengths, with windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def runs_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether sdpa would run FlashAttention, and torch has it for variable lengths."""
    if not (query.is_cuda and has_varlen() and query.size(-1) % 8 == 0):
        return False
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """torch's FlashAttention with the signature of transformers' attention functions."""
    from torch.nn.attention.varlen import varlen_attn

    output: Any = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=True,
    )
    return output.unsqueeze(0), None


def _flex(attention: Attention, trie: Trie, *states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """
    One call with a block mask for each group of rows.

    It is recompiled for one row and for several, with and without gradients, and so on. After eight recompilations,
    torch's default, it would run uncompiled, with all scores in memory.
    """
    window = kwargs.get("sliding_window")

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
        mask_key = (start, key.size(2), window)
        if mask_key not in trie.masks:
            trie.masks[mask_key] = block_mask(*mask_key, query.device)
        return attention(query, key, value, trie.masks[mask_key], **kwargs)[0]

    with torch._dynamo.config.patch(recompile_limit=FLEX_RECOMPILATIONS):
        return _by_groups(trie, attend, *states)


@torch.compiler.disable
def _eager(attention: Attention, trie: Trie, *states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Masked blocks, because eager attention is causal only through its mask."""
    call = functools.partial(_in_blocks, functools.partial(attention, **kwargs), trie)
    return _by_groups(trie, functools.partial(call, window=kwargs.get("sliding_window")), *states)


def _in_blocks(
    attention: Attention,
    trie: Trie,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    window: int | None,
) -> torch.Tensor:
    """Attention of a group of rows in blocks of queries, each with its mask."""
    outputs = []
    for first in range(start, key.size(2), BLOCK):
        end = min(first + BLOCK, key.size(2))
        begin = 0 if window is None else max(first + 1 - window, 0)
        mask = _mask(trie, end - first, end - begin, window, query)
        states = query[:, :, first - start : end - start], key[:, :, begin:end], value[:, :, begin:end]
        outputs.append(attention(*states, mask)[0])
    return torch.cat(outputs, 1)


def _by_groups(trie: Trie, attend: Callable[..., torch.Tensor], *states: torch.Tensor) -> torch.Tensor:
    """Call `attend` for groups of r rows with queries (r, H, t - start, D), keys, values (r, H, t, D) and `start`."""
    query, key, value = states
    outputs = [
        attend(_along(query, path[:, start:]), _along(key, path), _along(value, path), start).flatten(0, 1)
        for start, path in trie.paths
    ]
    return torch.cat(outputs).index_select(0, trie.nodes).unsqueeze(0)


def _along(states: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Select states (1, H, U, D) along the paths of r rows: (r, H, t, D)."""
    return states[0].index_select(1, path.flatten()).unflatten(1, path.shape).transpose(0, 1)


def _mask(trie: Trie, num_queries: int, num_keys: int, window: int | None, query: torch.Tensor) -> torch.Tensor:
    """
    Additive mask of a block, (1, 1, num_queries, num_keys), aligned at the last query and key.

    It is the lower right part of a larger mask, which is made once for all blocks and layers.
    """
    longest = trie.lengths["max_length_k"]
    width = longest if window is None else min(longest, window + BLOCK - 1)
    mask_key = (window, query.dtype)
    if mask_key not in trie.masks:
        columns = torch.arange(width, device=query.device)
        rows = torch.arange(width - BLOCK, width, device=query.device)[:, None]
        is_seen = columns <= rows
        if window is not None:
            is_seen &= rows - columns < window
        trie.masks[mask_key] = torch.zeros_like(is_seen, dtype=query.dtype).masked_fill_(
            ~is_seen, torch.finfo(query.dtype).min
        )
    mask: torch.Tensor = trie.masks[mask_key][BLOCK - num_queries :, width - num_keys :]
    # On other devices, kernels may require aligned memory, which a view does not have
    return (mask if query.device.type == "cpu" else mask.contiguous())[None, None]


def block_mask(start: int, length: int, window: int | None, device: torch.device) -> BlockMask:
    """
    Causal block mask for `flex_attention`, whose queries are the tokens from `start` on.

    It is computed from the bounds of blocks, whereas `create_block_mask` would compare all queries with all keys.

    Args:
        start, length (`int`):
            Of `length` tokens, those from `start` on are queries.
        window (`int`, *optional*):
            The number of tokens that a query attends to, including itself.
        device (`torch.device`):
            Device of the mask.
    """
    offset = torch.tensor(start, device=device)  # a Python number would be recompiled for each value

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_seen = query + offset >= key
        return is_seen if window is None else is_seen & (query + offset - key < window)

    queries = torch.arange(start, length, FLEX_BLOCK, device=device)[:, None]
    keys = torch.arange(0, length, FLEX_BLOCK, device=device)
    last_query, last_key = (first + FLEX_BLOCK - 1 for first in (queries, keys))
    some = keys <= last_query.clamp(max=length - 1)
    every = (last_key <= queries) & (last_query < length)
    if window is not None:
        some &= queries - last_key < window
        every &= last_query - keys < window

    def listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of key blocks for each query block, and their indices, followed by the others."""
        order = blocks.int().argsort(dim=1, descending=True, stable=True)
        return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), FLEX_BLOCK, sees, seq_lengths=(length - start, length)
    )
