"""
Writes credit into the batch for TRL's loss: advantages, masks and counts.

TRL's loss accepts an advantage per token and is not changed. If its denominator for a loss type does not fit weighted
tokens or rejected rows, a factor on the advantages corrects that here.
"""

import math
from dataclasses import replace

import torch
from accelerate.utils import gather_object

from .compat import PER_TOKEN, TypedTrainer, own_rows
from .method.rows import Row, token_credit

# Metrics that are means over the tokens of a micro-batch in the loss, in addition to clip_ratio/...
TOKEN_MEAN_METRICS = {"entropy", "kl", "cispo_clip_ratio", "vespo/phi_seq_mean"}

# Losses that average over the tokens of each row, then over rows
ROW_MEAN_LOSSES = ("grpo", "sapo")


def set_credit(trainer: TypedTrainer, batch: dict[str, torch.Tensor], rows: list[Row], by_token: bool) -> None:
    """
    Replace TRL's advantages of a batch with the credit of its rows, and mask everything outside the loss.

    A row outside the loss stays in the batch with a mask of 0, and does not count in TRL's denominators.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trains on the batch.
        batch (`dict[str, torch.Tensor]`):
            This process's part of the batch of TRL's step, with B rows of T completion tokens; changed in place.
            `advantages` becomes (B, T) if each token has its own, otherwise it stays (B,). `tool_mask` (B, T) is 1 for
            tokens in the loss, and `num_items_in_batch` their number in all processes. `in_loss` (B,) marks the rows in
            the loss.
        rows (`list[Row]`):
            The rows of all processes, with their credit.
        by_token (`bool`):
            Whether each token has its own weight and advantage, or those of its row.
    """
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64).to(batch["advantages"])
    in_loss = torch.tensor([row.in_loss for row in rows], device=advantages.device)
    # The tables hold one batch, so these values push TRL's out. TRL had no rewards of copies
    trainer._logs["advantages"].extend(advantages.tolist())
    for i, name in enumerate(trainer.reward_func_names):
        trainer._logs["rewards"][name].extend(row.rollout.score.rewards[i] for row in rows)
    batch["in_loss"] = own_rows(trainer, in_loss)
    batch["tool_mask"] = batch["tool_mask"] * batch["in_loss"].unsqueeze(1)
    weights = None
    if by_token:
        own = own_rows(trainer, rows)
        credit = torch.from_numpy(token_credit(own, batch["completion_mask"].size(1)))
        weights, batch["advantages"] = credit.to(advantages)
        # A masked row keeps the tokens that other rows pass through
        is_masked = torch.tensor([row.rollout.score.is_masked for row in own], device=weights.device)
        batch["tool_mask"] = batch["tool_mask"] * ((weights > 0) | ~is_masked.unsqueeze(1))
    else:
        batch["advantages"] = own_rows(trainer, advantages)
    mask = batch["completion_mask"] * batch["tool_mask"]
    num_in_loss = trainer.accelerator.gather(mask.sum()).sum()
    batch["num_items_in_batch"] = num_in_loss  # TRL counted the tokens of all rows
    if trainer.loss_type in PER_TOKEN and weights is not None:
        # A token counts for each row that passes through it
        num_weighted = trainer.accelerator.gather((weights * mask).sum()).sum()
        batch["advantages"] *= num_in_loss / num_weighted.clamp(min=1)
    elif trainer.loss_type in ROW_MEAN_LOSSES and weights is not None:
        # Weights include 1 / length of the whole row, and TRL divides by the row's own tokens in the loss as well
        batch["advantages"] *= mask.sum(1, keepdim=True)
    _average_rows_in_loss(trainer, batch, len(rows) / in_loss.sum().clamp(min=1))


def _average_rows_in_loss(
    trainer: TypedTrainer, batch: dict[str, torch.Tensor], rows_per_counted_row: torch.Tensor
) -> None:
    """Turn means over rows into means over those in the loss, and mask old log-probs outside the loss."""
    if trainer.loss_type not in PER_TOKEN and batch["advantages"].dim() == 1:
        batch["advantages"] = batch["advantages"] * rows_per_counted_row
    if trainer.loss_type == "bnpo":
        # Its means are over the tokens of a micro-batch, whose number of rows in the loss depends on the shuffle
        batch["row_shares"] = batch["in_loss"] * rows_per_counted_row
    if "old_per_token_logps" in batch:
        # If only tokens in the loss are scored, the others have a log-prob of 0, which may be far from their old one
        mask = batch["completion_mask"] * batch["tool_mask"]
        batch["old_per_token_logps"] = batch["old_per_token_logps"].masked_fill(mask == 0, 0)


def upgrade_batch(trainer: TypedTrainer, batch: dict[str, torch.Tensor]) -> None:
    """Convert a micro-batch of a checkpoint of version 0.1, whose loss applied factors that are now in the batch."""
    if "num_rows_in_loss" not in batch:
        return
    num_rows_in_loss = batch.pop("num_rows_in_loss")
    tokens_per_counted = batch.pop("tokens_per_counted", None)
    batch.pop("rows_per_counted", None)
    if trainer.loss_type in PER_TOKEN and tokens_per_counted is not None:
        batch["advantages"] = batch["advantages"] * tokens_per_counted
    assert trainer.args.generation_batch_size is not None
    _average_rows_in_loss(trainer, batch, trainer.args.generation_batch_size / num_rows_in_loss.clamp(min=1))


def mask_dropped(trainer: TypedTrainer, batch: dict[str, torch.Tensor], rows: list[Row]) -> bool:
    """
    Mask the rollouts of rows that TRL's correction for vLLM drops completely (`"sequence_mask"`). Those left over from
    an earlier step are removed from the loss.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trains on the batch.
        batch (`dict[str, torch.Tensor]`):
            The batch of TRL's step.
        rows (`list[Row]`):
            The rows of all processes.

    Returns:
        `bool`: Whether there are any, so that credit must be recomputed: other rows that pass through their tokens
        still credit these.
    """
    if "importance_sampling_ratio" not in batch or trainer.vllm_importance_sampling_mode != "sequence_mask":
        return False
    own = (batch["importance_sampling_ratio"] == 0).all(1).tolist()
    dropped = [row for row, is_dropped in zip(rows, gather_object(own), strict=True) if is_dropped]
    for row in dropped:
        if row.is_left_over:  # credited with its own step, whose tree is gone
            row.in_loss = False
        else:
            row.rollout.score = replace(row.rollout.score, is_masked=True)
    return bool(dropped)


def reweight_dropped(trainer: TypedTrainer, batch: dict[str, torch.Tensor]) -> None:
    """Give the remaining tokens of dropped rows the importance ratio of these tokens alone, within TRL's bounds."""
    ratio = batch["importance_sampling_ratio"]
    mask = batch["completion_mask"] * batch["tool_mask"]
    difference = ((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask).nan_to_num(0)
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    remaining_ratio = difference.sum(1, keepdim=True).exp()
    if low is not None or high is not None:
        remaining_ratio = remaining_ratio.clamp(low, high)
    is_dropped = (ratio == 0) & (mask.sum(1, keepdim=True) > 0)
    batch["importance_sampling_ratio"] = torch.where(is_dropped, remaining_ratio, ratio)


def ignore_empty_micro_batch(metrics: dict[str, list[float]], is_end_of_update: bool) -> None:
    """
    Exclude a micro-batch without tokens in the loss, in any process, from metrics that are means over tokens.

    TRL logs 0 for it, which would count like the means of other micro-batches. NaN is ignored. If no micro-batch of an
    update has tokens, the 0 is kept.
    """
    if metrics["entropy"][-1] != 0:  # another process has tokens
        return
    for name, values in metrics.items():
        if name in TOKEN_MEAN_METRICS or name.startswith("clip_ratio/"):
            values[-1] = math.nan
            if is_end_of_update and all(map(math.isnan, values)):
                values[-1] = 0.0
