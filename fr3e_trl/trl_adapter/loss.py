"""
The loss: credit of tokens into TRL's batch, and rows that leave the loss.

TRL divides the policy term of each loss type by something else. Where rows leave the loss, all of it is divided by what
is in the loss: see [`DIVIDED_BY`].
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object

from ..method.rows import Row, token_credit
from .images import select_rows
from .logs import without_tokens, without_window
from .overriding import overridden
from .setup import own_rows


class Divisor(Enum):
    """What TRL divides the policy term of a micro-batch by."""

    ROWS = "its rows"
    TOKENS = "its tokens in the loss"
    ALL_TOKENS = "the tokens in the loss of all micro-batches (num_items_in_batch)"


DIVIDED_BY = {
    "grpo": Divisor.ROWS,
    "sapo": Divisor.ROWS,
    "dr_grpo": Divisor.ROWS,
    "luspo": Divisor.ROWS,
    "bnpo": Divisor.TOKENS,
    "dapo": Divisor.ALL_TOKENS,
    "cispo": Divisor.ALL_TOKENS,
    "vespo": Divisor.ALL_TOKENS,
}


def set_credit(trainer: Any, batch: dict[str, torch.Tensor], rows: list[Row], of_tokens: bool) -> None:
    """
    Replace the advantages of an assembled batch by the credit of its rows, and take rows out of its loss.

    Args:
        trainer (`GRPOTrainer`):
            Trains on the batch.
        batch (`dict[str, torch.Tensor]`):
            What [`assemble`] returned, changed in place.
        rows (`list[Row]`):
            The rows of all processes, with their advantages. Those not in the loss leave it, numerator and denominator
            both.
        of_tokens (`bool`):
            Whether each token of a row has a weight and an advantage of its own. If not, it has the row's.
    """
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64).to(batch["advantages"])
    in_loss = torch.tensor([row.in_loss for row in rows], device=advantages.device)
    # The tables hold one batch: TRL's own values drop out. Copies had no rewards, since means leave them out
    trainer._logs["advantages"].extend(advantages.tolist())
    for i, name in enumerate(trainer.reward_func_names):
        trainer._logs["rewards"][name].extend(row.rollout.score.rewards[i] for row in rows)
    batch["num_rows_in_loss"] = in_loss.sum()
    batch["advantages"], batch["in_loss"] = own_rows(trainer, advantages), own_rows(trainer, in_loss)
    batch["tool_mask"] = batch["tool_mask"] * batch["in_loss"].unsqueeze(1)
    if of_tokens:
        own = own_rows(trainer, rows)
        credit = torch.from_numpy(token_credit(own, batch["completion_mask"].size(1)))
        weights, batch["advantages"] = credit.to(batch["advantages"])
        # Of a masked row those tokens are left that other rows pass through
        is_masked = torch.tensor([row.rollout.score.is_masked for row in own], device=weights.device)
        batch["tool_mask"] = batch["tool_mask"] * ((weights > 0) | ~is_masked.unsqueeze(1))
    mask = batch["completion_mask"] * batch["tool_mask"]
    batch["num_items_in_batch"] = trainer.accelerator.gather(mask.sum()).sum()  # TRL counted the tokens of all rows
    if of_tokens:
        # A token counts for all rows that pass through it
        num_counted = trainer.accelerator.gather((weights * mask).sum()).sum()
        batch["tokens_per_counted"] = batch["num_items_in_batch"] / num_counted.clamp(min=1)
        batch["rows_per_counted"] = batch["num_rows_in_loss"] / len(rows)


def mask_dropped(trainer: Any, batch: dict[str, torch.Tensor], rows: list[Row]) -> bool:
    """
    Mask the rollouts of rows that TRL's correction for vLLM drops as a whole, with `"sequence_mask"`. Those that an
    earlier step left over leave the loss.

    Args:
        trainer (`GRPOTrainer`):
            Trains on the batch.
        batch (`dict[str, torch.Tensor]`):
            What [`assemble`] returned.
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


def weigh_dropped(trainer: Any, batch: dict[str, torch.Tensor]) -> None:
    """Weigh the tokens that stay of rows that were dropped by the ratio of these tokens alone, within TRL's bounds."""
    ratio = batch["importance_sampling_ratio"]
    mask = batch["completion_mask"] * batch["tool_mask"]
    difference = ((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask).nan_to_num(0)
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    of_rest = difference.sum(1, keepdim=True).exp()
    if low is not None or high is not None:
        of_rest = of_rest.clamp(low, high)
    batch["importance_sampling_ratio"] = torch.where((ratio == 0) & (mask.sum(1, keepdim=True) > 0), of_rest, ratio)


def compute_loss(
    trainer: Any, trl_loss: Callable[..., torch.Tensor], model: Any, inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """
    TRL's loss of a micro-batch, without the rows that are not in the loss.

    Micro-batches, of which each process has its own, differ in how many rows r they have in the loss. Each counts by
    them: the mean of their losses L that TRL takes becomes sum(r * L) / sum(r), where one without rows has no share,
    and which is TRL's mean where all have as many. This defines bnpo, whose L is a mean over tokens, and the entropy
    bonus, which is such a mean with any loss type.

    Args:
        trainer (`GRPOTrainer`):
            Knows the loss type.
        trl_loss (`Callable`):
            TRL's loss: a model and the inputs to a scalar.
        model (`nn.Module`):
            The policy, as it is trained.
        inputs (`dict[str, torch.Tensor]`):
            A micro-batch, of a batch that [`set_credit`] has seen.
    """
    # As many rows as the process with most of them has, since TRL gathers by row; at least one, for a backward pass
    most = int(trainer.accelerator.gather(inputs["in_loss"].sum()).max())
    num_rows = max(most, 1)
    keep = inputs["in_loss"].int().argsort(descending=True, stable=True)[:num_rows]
    inputs = select_rows(inputs, keep.tolist())
    num_own = inputs["in_loss"].sum()
    num_micro_batches = trainer.args.steps_per_generation * trainer.accelerator.num_processes
    weight = num_own * num_micro_batches / inputs["num_rows_in_loss"].clamp(min=1)
    beta = trainer.beta
    divisor = DIVIDED_BY[trainer.loss_type]
    if divisor is not Divisor.ROWS and "tokens_per_counted" in inputs:
        # The policy term is divided by the tokens that were counted for it, other terms by the tokens in the loss
        inputs["advantages"] = inputs["advantages"] * inputs["tokens_per_counted"]
    if divisor is Divisor.ROWS and "rows_per_counted" in inputs:
        # And by the rows of the batch, whichever teach something: copies too, which the tokens of their original count
        inputs["advantages"] = inputs["advantages"] * inputs["rows_per_counted"]
    if divisor is Divisor.ROWS:
        # TRL divides by `num_rows`, of which this process may have fewer. The policy term is linear in the advantages,
        # and the KL term in beta; that may not become 0 in one process alone, for what TRL gathers.
        share = num_own.clamp(min=1) / num_rows
        inputs["advantages"] = inputs["advantages"] / share
        beta = beta / share.item()
    if divisor is Divisor.ALL_TOKENS:
        inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * weight  # no weight is wanted
    loss_mask = inputs["completion_mask"] * inputs["tool_mask"]
    if trainer.shares_prefixes and "old_per_token_logps" in inputs:
        # Where only tokens in the loss are scored, the others have a log-prob of 0, which may be far from their old one
        inputs["old_per_token_logps"] = inputs["old_per_token_logps"].masked_fill(loss_mask == 0, 0)
    score = partial(trainer._get_per_token_logps_and_entropies, loss_mask=loss_mask)
    with (
        overridden(trainer, beta=beta, _get_per_token_logps_and_entropies=score),
        nullcontext() if most else without_tokens(trainer),
        without_window(trainer),
    ):
        return trl_loss(model, inputs) * weight
