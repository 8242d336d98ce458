"""Log-probs of completions that are not in a batch yet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from trl.trainer import utils as trl_utils

from ..method.tree import TokenIds
from .images import image_kwargs
from .overriding import overridden
from .prompts import padded
from .setup import is_sharded

# How much of the vocabulary TRL's LM head takes at a time
HEAD_TILE = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE


@torch.no_grad()
def token_statistics(
    trainer: Any, prompt_ids: list[TokenIds], completion_ids: list[TokenIds], multimodal: list[Any] | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Log-probabilities and entropies of completions under the policy, at the sampling temperature.

    Dropout is as it is for TRL's own generation and log-probs: on, unless `disable_dropout` turns it off. Where the
    weights are sharded, all processes must call this together, each with its own completions, also with none.

    Args:
        trainer (`GRPOTrainer`):
            Has the policy.
        prompt_ids, completion_ids (`list[TokenIds]`):
            Prompts, and a completion of each.
        multimodal (`list`, *optional*):
            Messages of the prompts that have images, `None` for others.

    Returns:
        `list[tuple[torch.Tensor, torch.Tensor]]`: For each completion of L tokens, the log-probability of each token
        and the entropy of the distribution that it was drawn from, both of shape (L,), on the CPU, in nats.
    """
    num_own = len(completion_ids)
    if is_sharded(trainer):  # as many forward passes as the process with most completions
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
            (row_logprobs[: len(ids)], row_entropies[: len(ids)])
            for row_logprobs, row_entropies, ids in zip(
                logprobs.float().cpu(), entropies.float().cpu(), completions, strict=True
            )
        ]
    return statistics[:num_own]


@contextmanager
def head_kernel(kernel: Callable[..., Any]) -> Iterator[None]:
    """
    Have another kernel compute log-probs in TRL's LM head.

    The head finds the hidden states, the weights however they are sharded, and the scale and the softcap of the logits.
    """
    with overridden(trl_utils, _ChunkedLogProbFunction=SimpleNamespace(apply=kernel)):
        yield


def scored_by_head(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities and entropies by TRL's LM head, without a model.

    Args:
        hidden (`torch.Tensor` of shape (N, H)):
            What the head projects.
        weight (`torch.Tensor` of shape (V, H)):
            The head.
        tokens (`torch.Tensor` of shape (N,)):
            Ids.

    Returns:
        `tuple`: Both of shape (N,), in nats.
    """
    arguments = hidden, weight, None, tokens, 1.0, HEAD_TILE, None, 1.0, ("log_probs", "entropy")
    logprobs, entropies, *_ = trl_utils._ChunkedLogProbFunction.apply(*arguments)
    return logprobs, entropies
