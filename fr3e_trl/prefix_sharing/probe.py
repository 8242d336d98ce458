"""Test whether a model can forward shared prefixes once."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..generation.context import context_length
from ..generation.decoding import restored_state
from ..generation.growing_probe import name_of, tolerance, usual_tokens, without_dropout
from .attention import share
from .trie import Trie, fold

# Config settings that limit how far attention looks back
WINDOWS = ("sliding_window", "attention_chunk_size")

# Columns of the test rows, and further columns in batches of another shape
COLUMNS, MORE_COLUMNS = 48, 13


def obstacle_to_sharing(
    model: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    score_apart: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    score_shared: Callable[[Trie], torch.Tensor],
) -> str | None:
    """
    Why a model cannot forward shared prefixes once, or `None` if it can.

    Compares log-probs of branching rows with and without sharing. In some models, other layers than attention depend on
    previous tokens. Others apply windows only in the mask, which is not used here.

    Args:
        model (`~transformers.PreTrainedModel`):
            The model. Its attention functions accept tries afterwards, and nothing else changes.
        dtype (`torch.dtype`):
            Its compute dtype.
        device (`torch.device`):
            Its device.
        score_apart (`Callable`):
            Returns log-probs of the last C columns of rows, (R, C), given ids and mask of shape (R, T), and C.
        score_shared (`Callable`):
            Returns the same given the rows' trie.

    Returns:
        `str` or `None`: The problem, as a clause.
    """
    name = name_of(model)
    config = model.config.get_text_config()
    windows = [window for window in (getattr(config, name, None) for name in WINDOWS) if window]
    if set(getattr(config, "layer_types", None) or ["any"]) == {"full_attention"}:
        windows = []
    input_ids, mask = _branching_rows(model)
    input_ids, mask = input_ids.to(device), mask.to(device)
    num_columns = input_ids.size(1) // 2
    trie = fold(input_ids, mask, mask[:, -num_columns:].bool())
    try:
        with torch.no_grad(), restored_state(model, device), without_dropout(model):
            apart = score_apart(input_ids, mask, num_columns)
            difference = (apart - score_shared(trie)).abs().mean().item()
            # The effect of rounding: the same rows in batches of other shapes, and with perturbed embeddings
            ids, masks = (torch.cat([rows, rows[:, :MORE_COLUMNS]], 1) for rows in (input_ids, mask))
            alone = [score_apart(ids[[i]], masks[[i]], num_columns + MORE_COLUMNS) for i in range(len(mask))]
            with rounded_otherwise(model):
                rounded = score_apart(input_ids, mask, num_columns)
            others = (torch.cat(alone)[:, :num_columns], rounded)
            noise = max((apart - other).abs().mean().item() for other in others)
    except Exception as error:
        return f"{name} raises {type(error).__name__}: {error}"
    for window in windows:
        if window not in trie.windows:  # checked separately because it may be longer than the test rows
            return f"the window of {name}, {window} tokens, is applied only in its mask"
    if not difference <= tolerance(dtype, noise):
        return f"it changes log-probs of {name} by {difference:.2g} nats per token"
    return None


@contextlib.contextmanager
def rounded_otherwise(model: PreTrainedModel) -> Iterator[None]:
    """Change every embedding by one unit in the last place, alternately up and down."""

    def move(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(output.dtype).eps
        signs = 1 - 2 * (torch.arange(output.size(-1), device=output.device) % 2)
        return output * (1 + eps * signs).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


def obstacle_by_design(model: PreTrainedModel) -> str | None:
    """Why sharing is impossible, as far as no test is needed. If `None`, its attention accepts tries from now on."""
    if getattr(model, "_is_stateful", False):
        return f"layers of {name_of(model)} are recurrent, so their outputs for a token depend on the row"
    config = model.config.get_text_config()
    if "conv" in (getattr(config, "layer_types", None) or []):  # a small effect that rounding may hide
        return f"layers of {name_of(model)} are convolutions, so their outputs for a token depend on the row"
    implementation = attention_of(model)
    if not share(model, implementation):
        return f"attn_implementation={implementation!r} is not supported: use sdpa, eager, flex or FlashAttention"
    return None


def attention_of(model: PreTrainedModel) -> str:
    """The name of a model's attention implementation."""
    return model.config.get_text_config()._attn_implementation


def _branching_rows(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, (4, T), of a row, two branches of it, and the same row without its first token."""
    length = min(COLUMNS, context_length(model.config) or COLUMNS)
    tokens = usual_tokens(model.config)
    rng = np.random.default_rng(0)
    input_ids = np.tile(rng.choice(tokens, length), (4, 1))
    for row, start in ((1, length // 2 + 1), (2, length - length // 4)):
        input_ids[row, start:] = rng.choice(tokens, length - start)
    mask = np.ones_like(input_ids)
    input_ids[3, 0] = mask[3, 0] = 0
    return torch.from_numpy(input_ids), torch.from_numpy(mask)
