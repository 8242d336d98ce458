"""A trainer's forward passes in which shared prefixes are forwarded once."""

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
    Whether shared prefixes can be forwarded once, with a warning if not.

    All processes get the same answer, and must call this together.
    """
    obstacle = next(filter(None, in_every_process(lambda: obstacle_to_sharing(trainer))), None)
    if obstacle is not None:
        logger.warning("share_prefixes is off, and each row is forwarded with all of its tokens: %s.", obstacle)
    return obstacle is None


def obstacle_by_design(trainer: TypedTrainer) -> str | None:
    """Why prefixes cannot be shared, as far as the settings and the model's class show it."""
    if trainer._is_vlm:
        return "images are forwarded with each row of their prompt"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss of the routers (router_aux_loss_coef) is a mean over the tokens of all rows"
    return probe.obstacle_by_design(trainer.model)


def obstacle_to_sharing(trainer: TypedTrainer) -> str | None:
    """Why prefixes cannot be shared, including a test of the model."""
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
    As `GRPOTrainer._get_per_token_logps_and_entropies`, but shared prefixes are forwarded once.

    Args:
        loss_mask (`torch.Tensor` of shape (R, C), *optional*):
            The tokens of completions to score. Others get a log-prob and an entropy of 0.
        truncation (`Callable`, *optional*):
            Truncates the distributions, see [`~logps.truncated_logps`].

        All others are those of TRL's method, which is used if there are images or an auxiliary loss.
    """
    if any(value is not None and value is not False for value in (*args, *kwargs.values())):
        own_args = model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy
        return GRPOTrainer._get_per_token_logps_and_entropies(trainer, *own_args, *args, **kwargs)
    scored = attention_mask[:, -logits_to_keep:].bool()
    if loss_mask is not None:
        scored &= loss_mask.bool()
    size = batch_size or len(input_ids)
    parts = [
        _score_rows(trainer, model, *rows, truncation)
        for rows in zip(input_ids.split(size), attention_mask.split(size), scored.split(size), strict=True)
    ]
    logps, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
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

    Rows without scored tokens are not forwarded, except for the first if there are no others, because other processes
    wait for gradients.
    """
    kept = scored.any(1)
    kept[0] |= ~kept.any()
    trie = fold(input_ids[kept], attention_mask[kept], scored[kept])
    node_values = score(trainer, model, trie.model_inputs, trie.labels, truncation)
    if not trie.windows:  # happens when a kernel is loaded from the hub again
        raise RuntimeError(
            f"attn_implementation={probe.attention_of(trainer.model)!r} was registered again after training had "
            "started, and no longer supports shared prefixes. Set share_prefixes=False."
        )
    logps, entropies = (values.new_zeros(scored.shape) for values in node_values)
    logps[kept], entropies[kept] = (trie.to_rows(values) for values in node_values)
    return logps, entropies
