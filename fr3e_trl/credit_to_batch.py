"""
Credit into the batch that TRL's loss takes: advantages, masks and counts.

TRL's loss takes an advantage for each token, and stays as it is. What it divides the policy term of a loss type by is
made up for here, once, by a factor on the advantages.
"""

import math
from dataclasses import replace

import torch
from accelerate.utils import gather_object

from .compat import PER_TOKEN, TypedTrainer, own_rows
from .method.rows import Row, token_credit

# Metrics that are means over the tokens of a micro-batch that are in the loss, beside clip_ratio/...
OVER_TOKENS = {"entropy", "kl", "cispo_clip_ratio", "vespo/phi_seq_mean"}

# Losses that are means over the tokens of a row before they are means over rows
PER_ROW_MEAN = ("grpo", "sapo")


def set_credit(trainer: TypedTrainer, batch: dict[str, torch.Tensor], rows: list[Row], by_token: bool) -> None:
    """
    Replace TRL's advantages of a batch by the credit of its rows, and mask what is not learned from.

    A row that is not in the loss stays in the batch, with a mask of 0. It leaves what TRL divides by, too.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trains on the batch.
        batch (`dict[str, torch.Tensor]`):
            This process's part of what TRL's step returned, of B rows with completions of T tokens; changed in place.
            `advantages` becomes (B, T) if each token has its own, else it stays (B,). `tool_mask` (B, T) is 1 for the
            tokens in the loss, and `num_items_in_batch` their number in all processes. `in_loss` (B,) says which rows
            are in the loss.
        rows (`list[Row]`):
            The rows of all processes, with their credit.
        by_token (`bool`):
            Whether each token of a row has a weight and an advantage of its own. If not, it has the row's.
    """
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64).to(batch["advantages"])
    in_loss = torch.tensor([row.in_loss for row in rows], device=advantages.device)
    # The tables hold one batch: TRL's own values drop out. Copies had no rewards, since means leave them out
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
        # Of a masked row those tokens are left that other rows pass through
        is_masked = torch.tensor([row.rollout.score.is_masked for row in own], device=weights.device)
        batch["tool_mask"] = batch["tool_mask"] * ((weights > 0) | ~is_masked.unsqueeze(1))
    else:
        batch["advantages"] = own_rows(trainer, advantages)
    mask = batch["completion_mask"] * batch["tool_mask"]
    num_in_loss = trainer.accelerator.gather(mask.sum()).sum()
    batch["num_items_in_batch"] = num_in_loss  # TRL counted the tokens of all rows
    if trainer.loss_type in PER_TOKEN and weights is not None:
        # A token counts for all rows that pass through it
        num_counted = trainer.accelerator.gather((weights * mask).sum()).sum()
        batch["advantages"] *= num_in_loss / num_counted.clamp(min=1)
    elif trainer.loss_type in PER_ROW_MEAN and weights is not None:
        # Weights have the length of each whole row in them, and TRL divides by the row's own tokens in the loss
        batch["advantages"] *= mask.sum(1, keepdim=True)
    _count_rows(trainer, batch, len(rows) / in_loss.sum().clamp(min=1))


def _count_rows(trainer: TypedTrainer, batch: dict[str, torch.Tensor], rows_per_row_in_loss: torch.Tensor) -> None:
    """Have means over rows be over those in the loss, and old log-probs be of the tokens in it."""
    if trainer.loss_type not in PER_TOKEN and batch["advantages"].dim() == 1:
        batch["advantages"] = batch["advantages"] * rows_per_row_in_loss
    if trainer.loss_type == "bnpo":
        # Its means are over the tokens of a micro-batch, which have as many rows in the loss as the shuffle gives them
        batch["row_shares"] = batch["in_loss"] * rows_per_row_in_loss
    if "old_per_token_logps" in batch:
        # Where only tokens in the loss are scored, the others have a log-prob of 0, which may be far from their old one
        mask = batch["completion_mask"] * batch["tool_mask"]
        batch["old_per_token_logps"] = batch["old_per_token_logps"].masked_fill(mask == 0, 0)


def upgrade_batch(trainer: TypedTrainer, batch: dict[str, torch.Tensor]) -> None:
    """Bring a micro-batch of a checkpoint of version 0.1, whose loss did what the batch does now, to today's form."""
    if "num_rows_in_loss" not in batch:
        return
    num_rows_in_loss = batch.pop("num_rows_in_loss")
    tokens_per_counted = batch.pop("tokens_per_counted", None)
    batch.pop("rows_per_counted", None)
    if trainer.loss_type in PER_TOKEN and tokens_per_counted is not None:
        batch["advantages"] = batch["advantages"] * tokens_per_counted
    assert trainer.args.generation_batch_size is not None
    _count_rows(trainer, batch, trainer.args.generation_batch_size / num_rows_in_loss.clamp(min=1))


def mask_dropped(trainer: TypedTrainer, batch: dict[str, torch.Tensor], rows: list[Row]) -> bool:
    """
    Mask the rollouts of rows that TRL's correction for vLLM drops as a whole, with `"sequence_mask"`. Those that an
    earlier step left over leave the loss.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trains on the batch.
        batch (`dict[str, torch.Tensor]`):
            What TRL's step returned.
        rows (`list[Row]`):
            The rows of all processes.

    Returns:
        `bool`: Whether there are any, so that credit must be given anew: rows that pass through their tokens still
        credit these.
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


def weigh_dropped(trainer: TypedTrainer, batch: dict[str, torch.Tensor]) -> None:
    """Weigh the tokens that stay of rows that were dropped by the ratio of these tokens alone, within TRL's bounds."""
    ratio = batch["importance_sampling_ratio"]
    mask = batch["completion_mask"] * batch["tool_mask"]
    difference = ((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask).nan_to_num(0)
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    rest = difference.sum(1, keepdim=True).exp()
    if low is not None or high is not None:
        rest = rest.clamp(low, high)
    batch["importance_sampling_ratio"] = torch.where((ratio == 0) & (mask.sum(1, keepdim=True) > 0), rest, ratio)


def mark_empty(metrics: dict[str, list[float]], is_end_of_update: bool) -> None:
    """
    Have a micro-batch without a token in the loss, in any process, count for no mean over tokens.

    TRL logs 0 for it, which would count as much as the means of other micro-batches. It leaves NaN out. An update of
    which no micro-batch has a token keeps the 0.
    """
    if metrics["entropy"][-1] != 0:  # another process has tokens
        return
    for name, values in metrics.items():
        if name in OVER_TOKENS or name.startswith("clip_ratio/"):
            values[-1] = math.nan
            if is_end_of_update and all(map(math.isnan, values)):
                values[-1] = 0.0
