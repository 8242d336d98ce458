"""A trainer's forward passes with the prefixes that rows share forwarded once."""

import logging
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from ..compat import TypedTrainer, computed_in
from ..logps import Truncation
from ..policy_logps import score
from ..processes import in_every_process
from . import probe
from .trie import fold

logger = logging.getLogger(__name__)


def can_share(trainer: TypedTrainer) -> bool:
    """
    Whether what rows have in common can be forwarded once; where not, a warning says why. All processes decide alike,
    and must ask together.
    """
    obstacle = next(filter(None, in_every_process(lambda: obstacle_to_sharing(trainer))), None)
    if obstacle is not None:
        logger.warning("share_prefixes is off, and every row forwarded with all of its tokens: %s.", obstacle)
    return obstacle is None


def obstacle_by_design(trainer: TypedTrainer) -> str | None:
    """What keeps prefixes from being shared, as far as it needs no trial to be known."""
    if trainer._is_vlm:
        return "the images of a prompt are forwarded with each of its rows"
    if trainer.aux_loss_enabled:
        return "the loss of the routers (router_aux_loss_coef) is a mean over the tokens of all rows"
    return probe.obstacle_by_design(trainer.model)


def obstacle_to_sharing(trainer: TypedTrainer) -> str | None:
    """What keeps prefixes from being shared, by a trial on the model."""
    obstacle = obstacle_by_design(trainer)
    if obstacle is not None:
        return obstacle
    model = trainer.model
    return probe.obstacle_to_sharing(
        *(model, computed_in(trainer), trainer.accelerator.device),
        score_apart=lambda *rows: GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, *rows)[0],
        score_shared=lambda trie: trie.to_rows(score(trainer, model, trie.model_inputs, trie.labels)[0]),
    )


def logps_and_entropies(
    trainer: TypedTrainer,
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    loss_mask: torch.Tensor | None,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    *args: Any,
    truncation: Truncation | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """
    As `GRPOTrainer._get_per_token_logps_and_entropies`, with what rows share forwarded once.

    Args:
        loss_mask (`torch.Tensor` of shape (R, C), *optional*):
            The tokens of completions to score. Others have the log-probability and the entropy 0.
        truncation (`Callable`, *optional*):
            Truncates the distributions, see [`~logps.truncated_logps`].

        All others are those of TRL's method. What rows cannot share (the loss of routers, images) is scored by it.
    """
    if any(value is not None and value is not False for value in (*args, *kwargs.values())):
        rows = model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy
        return GRPOTrainer._get_per_token_logps_and_entropies(trainer, *rows, *args, **kwargs)
    scored = attention_mask[:, -logits_to_keep:].bool()
    if loss_mask is not None:
        scored &= loss_mask.bool()
    size = batch_size or len(input_ids)
    parts = [
        _score_rows(trainer, model, *of_rows, truncation)
        for of_rows in zip(input_ids.split(size), attention_mask.split(size), scored.split(size), strict=True)
    ]
    logps, entropies = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    return logps, entropies if compute_entropy else None, None


def _score_rows(
    trainer: TypedTrainer,
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    scored: torch.Tensor,
    truncation: Truncation | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probs and entropies of rows (R, T), both of shape (R, C), 0 where nothing is scored.

    Rows without a token to score are not forwarded. If no row has one, the first is, for the gradient of 0 that other
    processes wait for.
    """
    kept = scored.any(1)
    kept[0] |= ~kept.any()
    trie = fold(input_ids[kept], attention_mask[kept], scored[kept])
    of_nodes = score(trainer, model, trie.model_inputs, trie.labels, truncation)
    if not trie.windows:  # loading a kernel of the hub anew does that
        raise RuntimeError(
            f"attn_implementation={probe.attention_of(trainer.model)!r} was registered anew after training had begun, "
            "and does not know shared prefixes any more. Set share_prefixes=False."
        )
    logps, entropies = (values.new_zeros(scored.shape) for values in of_nodes)
    logps[kept], entropies[kept] = (trie.to_rows(values) for values in of_nodes)
    return logps, entropies
