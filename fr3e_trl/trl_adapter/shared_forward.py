"""A trainer's forward passes with the prefixes that rows share forwarded once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils

from ..processes import in_every_process
from . import sharing_probe
from .decoding import drop_surplus_hooks
from .overriding import overridden
from .prefix_sharing import Trie, fold
from .setup import computed_in

logger = logging.getLogger(__name__)


def can_share(trainer: Any) -> bool:
    """
    Whether what rows have in common can be forwarded once; where not, a warning says why. All processes decide alike,
    and must ask together.
    """
    obstacle = next(filter(None, in_every_process(lambda: obstacle_to_sharing(trainer))), None)
    if obstacle is not None:
        logger.warning("share_prefixes is off, and every row forwarded with all of its tokens: %s.", obstacle)
    return obstacle is None


def obstacle_by_design(trainer: Any) -> str | None:
    """What keeps prefixes from being shared, as far as it needs no trial to be known."""
    if trainer._is_vlm:
        return "the images of a prompt are forwarded with each of its rows"
    if trainer.aux_loss_enabled:
        return "the loss of the routers (router_aux_loss_coef) is a mean over the tokens of all rows"
    return sharing_probe.obstacle_by_design(trainer.model)


def obstacle_to_sharing(trainer: Any) -> str | None:
    """What keeps prefixes from being shared, by a trial on the model."""
    obstacle = obstacle_by_design(trainer)
    if obstacle is not None:
        return obstacle
    model = trainer.model
    return sharing_probe.obstacle_to_sharing(
        *(model, computed_in(trainer), trainer.accelerator.device),
        score_apart=lambda *rows: GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, *rows)[0],
        score_shared=lambda trie: trie.to_rows(_forward(trainer, model, trie).log_probs),
    )


def logps_and_entropies(
    trainer: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    loss_mask: torch.Tensor | None,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
    """
    As `GRPOTrainer._get_per_token_logps_and_entropies`, with what rows share forwarded once.

    Args:
        loss_mask (`torch.Tensor` of shape (R, C), *optional*):
            The tokens of completions to score. Others have the log-probability and the entropy 0.

        All others are those of TRL's method. What rows cannot share (the loss of routers, images) is scored by it.
    """
    scored = attention_mask[:, -logits_to_keep:].bool()
    if loss_mask is not None:
        scored &= loss_mask.bool()
    if any(value is not None and value is not False for value in kwargs.values()):
        return GRPOTrainer._get_per_token_logps_and_entropies(
            trainer,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            **kwargs,
        )
    size = batch_size or len(input_ids)
    parts = [
        _score(trainer, model, *(rows[start : start + size] for rows in (input_ids, attention_mask, scored)))
        for start in range(0, len(input_ids), size)
    ]
    logprobs, entropies = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    return logprobs, entropies if compute_entropy else None, None


def _score(
    trainer: Any, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, scored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probs and entropies of rows, what they share forwarded once.

    Args:
        trainer (`GRPOTrainer`):
            Knows whether to cast.
        model (`nn.Module`):
            Policy or reference model.
        input_ids, attention_mask (`torch.Tensor` of shape (R, T)):
            The rows.
        scored (`torch.Tensor` of shape (R, C)):
            Boolean mask of the tokens to score. Rows without one are not forwarded. If no row has one, the first is,
            for the gradient of 0 that other processes wait for.

    Returns:
        `tuple`: Both of shape (R, C), 0 where nothing is scored, and entropies of a reference model, which TRL has
        give none.
    """
    kept = scored.any(1)
    kept[0] |= ~kept.any()
    trie = fold(input_ids[kept], attention_mask[kept], scored[kept])
    outputs = _forward(trainer, model, trie)
    if not trie.windows:  # loading a kernel of the hub anew does that
        implementation = sharing_probe.attention_of(trainer.model)
        raise RuntimeError(
            f"attn_implementation={implementation!r} was registered anew after training had begun, and does not know "
            "shared prefixes any more. Set share_prefixes=False."
        )
    logprobs, entropies = (outputs.log_probs.new_zeros(scored.shape) for _ in range(2))
    logprobs[kept] = trie.to_rows(outputs.log_probs)
    if outputs.entropy is not None:
        entropies[kept] = trie.to_rows(outputs.entropy)
    return logprobs, entropies


def _forward(trainer: Any, model: Any, trie: Trie) -> Any:
    """What TRL's LM head makes of a trie."""
    # Without Triton it takes all positions, with a label or without
    with trainer.accelerator.autocast(), overridden(trl_utils, _use_triton=lambda device: True):
        return model(**trie.model_inputs, shift_labels=trie.labels, fused_lm_head=True)


@contextmanager
def kept_together(trainer: Any) -> Iterator[None]:
    """Keep rows that share prefixes together, when TRL shuffles a batch and then splits it into micro-batches."""
    prepare_inputs = trainer._prepare_inputs

    def prepare_together(generation_batch: Any) -> Any:
        drop_surplus_hooks(trainer.model)
        if not trainer.shares_prefixes:
            return prepare_inputs(generation_batch)
        with overridden(grpo_trainer, shuffle_sequence_dict=shuffle_by_prompt):
            return prepare_inputs(generation_batch)

    with overridden(trainer, _prepare_inputs=prepare_together):
        yield


def shuffle_by_prompt(batch: dict[str, Any]) -> dict[str, Any]:
    """
    Shuffle the prompts of a batch, where TRL shuffles its rows.

    The rows of a prompt stay together, and are sorted by their tokens: of micro-batches smaller than that, each has
    those that share most. A gradient that is accumulated over all micro-batches stays the same, but for what is a mean
    over those of each; of several optimizer steps a batch, each has fewer prompts, with more rows of them.
    """
    prompts = [row.tobytes() for row in torch.where(batch["prompt_mask"].bool(), batch["prompt_ids"], -1).cpu().numpy()]
    completions = [row.tobytes() for row in batch["completion_ids"].cpu().numpy()]
    ranks: dict[bytes, int] = {}
    for prompt, rank in zip(prompts, torch.randperm(len(prompts)).tolist(), strict=True):
        ranks.setdefault(prompt, rank)
    order = sorted(range(len(prompts)), key=lambda row: (ranks[prompts[row]], completions[row]))

    def permuted(value: Any) -> Any:
        if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0):
            return value
        return value[order] if isinstance(value, torch.Tensor) else [value[row] for row in order]

    return {key: permuted(value) for key, value in batch.items()}
