"""Log-probs of completions that are not in a batch yet."""

from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from trl.trainer.utils import pad

from . import logps
from .compat import TypedTrainer, is_sharded
from .images import image_kwargs, select_rows
from .logps import Softmax, Truncation
from .method.tree import TokenIds


@torch.no_grad()
def token_statistics(
    trainer: TypedTrainer,
    prompt_ids: list[TokenIds],
    completion_ids: list[TokenIds],
    multimodal: list[Any] | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Log-probabilities and entropies of completions under the policy, at the temperature of the current batch.

    As in TRL's own generation and scoring, dropout is on unless `disable_dropout` turns it off. If the weights are
    sharded, all processes must call this together, including those without completions.

    Args:
        trainer (`GRPOTrainer`):
            Has the policy.
        prompt_ids, completion_ids (`list[TokenIds]`):
            Prompts, and one completion for each.
        multimodal (`list`, *optional*):
            Messages of the prompts that contain images, `None` for others.

    Returns:
        `list[tuple[torch.Tensor, torch.Tensor]]`: For each completion of L tokens, the log-probability of each token
        and the entropy of the distribution that it was drawn from, both of shape (L,), on the CPU, in nats.
    """
    num_own = len(completion_ids)
    if is_sharded(trainer):  # all processes must make the same number of forward passes
        num_idle = max(gather_object([num_own])) - num_own
        prompt_ids = [*prompt_ids, *[np.zeros(1, np.int32)] * num_idle]
        completion_ids = [*completion_ids, *[np.zeros(1, np.int32)] * num_idle]
    statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = trainer.args.per_device_train_batch_size
    for start in range(0, len(completion_ids), size):
        completions = completion_ids[start : start + size]
        batch = padded(trainer, prompt_ids[start : start + size], completions)
        images = image_kwargs(trainer, (multimodal or [])[start : start + size], batch[0], completions)
        logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, *batch, logits_to_keep=max(map(len, completions)), compute_entropy=True, **images
        )
        statistics += [
            (row_logps[: len(ids)], row_entropies[: len(ids)])
            for row_logps, row_entropies, ids in zip(
                logprobs.float().cpu(), entropies.float().cpu(), completions, strict=True
            )
        ]
    return statistics[:num_own]


def score(
    trainer: TypedTrainer,
    model: nn.Module,
    inputs: dict[str, Any],
    targets: torch.Tensor,
    truncation: Truncation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities and entropies as a trainer defines them, see [`~logps.score`], at the temperature of its batch.

    Args:
        trainer (`GRPOTrainer`):
            Has the settings of the head.
        model (`nn.Module`):
            The policy or the reference model, wrapped or not.

        All others, and what is returned, are those of [`~logps.score`].
    """
    unwrapped = trainer.accelerator.unwrap_model(model)
    softmax = Softmax.of(unwrapped.config, trainer.scoring_temperature)
    in_float32 = trainer.args.cast_lm_head_to_fp32
    with trainer.accelerator.autocast():
        head = unwrapped.get_output_embeddings()
        return logps.score(model, head, inputs, targets, softmax, truncation, in_float32)


def logps_and_entropies(
    trainer: TypedTrainer,
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    *,
    truncation: Truncation | None = None,
    **images: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """
    As `GRPOTrainer._get_per_token_logps_and_entropies`, but at `scoring_temperature` instead of the initial one.

    Args:
        truncation (`Callable`, *optional*):
            Truncates the distributions, see [`~logps.truncated_logps`]: without gradients or entropies.

        All others are those of TRL's method.

    Raises:
        NotImplementedError: The auxiliary loss of the routers is requested.
    """
    if compute_aux_loss:
        raise NotImplementedError(
            f"trainer.temperature was changed to {trainer.scoring_temperature}, but TRL computes the auxiliary loss of "
            "the routers (router_aux_loss_coef) at the initial temperature. Set temperature in the trainer's "
            "configuration, or router_aux_loss_coef=0."
        )
    images = {name: value for name, value in images.items() if value is not None}
    targets = input_ids.roll(-1, 1).masked_fill(attention_mask.roll(-1, 1) == 0, -100)
    targets[:, -1] = targets[:, : -logits_to_keep - 1] = -100
    size = batch_size or len(input_ids)
    scored = []
    for start in range(0, len(input_ids), size):
        rows = slice(start, start + size)
        row_images = select_rows(images, list(range(len(input_ids)))[rows])
        inputs = {name: value for name, value in row_images.items() if name not in ("num_images", "num_tiles")}
        inputs |= {"input_ids": input_ids[rows], "attention_mask": attention_mask[rows]}
        scored.append(score(trainer, model, inputs, targets[rows], truncation))
    logps, entropies = (torch.cat(values)[:, -logits_to_keep - 1 : -1] for values in zip(*scored, strict=True))
    return logps, entropies if compute_entropy else None, None


def padded(
    trainer: TypedTrainer, prompt_ids: list[TokenIds], completion_ids: list[TokenIds]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, (B, T), with prompts padded on the left and completions on the right, as in TRL."""
    sides = [(prompt_ids, "left"), (completion_ids, "right")]
    pad_id = trainer._tokenizer.pad_token_id
    input_ids = [pad([torch.as_tensor(ids, dtype=torch.long) for ids in rows], pad_id, side) for rows, side in sides]
    mask = [pad([torch.ones(len(ids), dtype=torch.long) for ids in rows], 0, side) for rows, side in sides]
    return torch.cat(input_ids, 1).to(trainer.accelerator.device), torch.cat(mask, 1).to(trainer.accelerator.device)
