"""Whether a model can forward shared prefixes once: tried on the model itself."""

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

# Settings of models whose attention looks back no further
WINDOWS = ("sliding_window", "attention_chunk_size")

# Columns of a trial's rows, and what follows them in another batch
COLUMNS, MORE_COLUMNS = 48, 13


def obstacle_to_sharing(
    model: PreTrainedModel,
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
            # The same in batches of other shapes, and with embeddings rounded otherwise: what rounding does
            ids, masks = (torch.cat([rows, rows[:, :MORE_COLUMNS]], 1) for rows in (input_ids, mask))
            alone = [score_apart(ids[[i]], masks[[i]], num_columns + MORE_COLUMNS) for i in range(len(mask))]
            with rounded_otherwise(model):
                rounded = score_apart(input_ids, mask, num_columns)
            others = (torch.cat(alone)[:, :num_columns], rounded)
            noise = max((apart - other).abs().mean().item() for other in others)
    except Exception as error:
        return f"{name} raises {type(error).__name__}: {error}"
    for window in windows:
        if window not in trie.windows:  # it may be longer than what is tried out
            return f"the window of {name}, {window} tokens, is in its mask alone"
    if not difference <= tolerance(dtype, noise):
        return f"it changes log-probs of {name} by {difference:.2g} nats a token"
    return None


@contextlib.contextmanager
def rounded_otherwise(model: PreTrainedModel) -> Iterator[None]:
    """Every embedding one unit in its last place away, up and down in turn."""

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
    """What needs no trial to be known. Otherwise the model's attention takes paths from now on."""
    if getattr(model, "_is_stateful", False):
        return f"layers of {name_of(model)} are recurrent: what they make of a token depends on the row"
    config = model.config.get_text_config()
    if "conv" in (getattr(config, "layer_types", None) or []):  # so little that rounding may hide it
        return f"layers of {name_of(model)} are convolutions: what they make of a token depends on the row"
    implementation = attention_of(model)
    if not share(model, implementation):
        return f"attn_implementation={implementation!r} is none of sdpa, eager, flex and FlashAttention"
    return None


def attention_of(model: PreTrainedModel) -> str:
    """The name of what computes a model's attention."""
    return model.config.get_text_config()._attn_implementation


def _branching_rows(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, (4, T), of a row, two that branch off it, and itself with another beginning."""
    length = min(COLUMNS, context_length(model.config) or COLUMNS)
    usual = usual_tokens(model.config)
    rng = np.random.default_rng(0)
    input_ids = np.tile(rng.choice(usual, length), (4, 1))
    for row, start in ((1, length // 2 + 1), (2, length - length // 4)):
        input_ids[row, start:] = rng.choice(usual, length - start)
    mask = np.ones_like(input_ids)
    input_ids[3, 0] = mask[3, 0] = 0
    return torch.from_numpy(input_ids), torch.from_numpy(mask)
