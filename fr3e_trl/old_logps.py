"""
Old log-probs: the denominator of the importance ratio.

They belong to the distribution that a row was sampled from. That is the policy at the start of the step, except for
rows that vLLM sampled from a truncated distribution, or that were sampled by the policy of an earlier step.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .compat import TypedTrainer, in_float32, is_sharded, own_rows
from .generation.context import depends_on_padding
from .images import images_in, multimodal_of, select_rows
from .logps import Truncation
from .method.rows import Row
from .policy_logps import token_statistics

# Maximum divergence of vLLM's samples from the policy, in nats per token, that rounding and quantization may cause
MAX_DIVERGENCE = 1.0


def score_leftovers(trainer: TypedTrainer, leftovers: list[Row], has_own_sampler: bool) -> None:
    """Store the log-probs of rows that are left for the next step, under the current policy."""
    for row in leftovers:
        row.is_left_over = True
    if (trainer.use_vllm and trainer.vllm_importance_sampling_correction) or not leftovers:
        return  # vLLM's log-probs are those of the current policy
    held = [row for row in leftovers if row.holder == trainer.accelerator.process_index]
    for row, logprobs in zip(held, _known(trainer, held, has_own_sampler), strict=True):
        row.old_logprobs = logprobs
    unknown = [row for row in held if row.old_logprobs is None]
    statistics = token_statistics(
        trainer,
        [row.prompt_ids for row in unknown],
        [row.completion_ids for row in unknown],
        [multimodal_of(trainer, row.example) for row in unknown],
    )
    for row, (logprobs, _) in zip(unknown, statistics, strict=True):
        row.old_logprobs = logprobs.clone()


def old_logps_of(trainer: TypedTrainer, rows: list[Row], has_own_sampler: bool) -> "OldLogprobs | VLLMCorrection":
    """The old log-probs of a batch of these rows, for the trainer's settings."""
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        return VLLMCorrection(trainer, rows)
    return OldLogprobs(trainer, rows, has_own_sampler)


class OldLogprobs:
    """
    Old log-probs of a batch under the policy at the start of the step in which each row was sampled.

    Args:
        trainer (`GRPOTrainer`):
            Trains on the batch.
        rows (`list[Row]`):
            The rows of all processes.
        has_own_sampler (`bool`):
            Whether the sampler is the user's, whose log-probs are used as they are.

    Attributes:
        score_in_place_of_trl (`Callable`, *optional*):
            Replaces `_get_per_token_logps_and_entropies` when the old policy is scored. If `None`, TRL scores it.
    """

    def __init__(self, trainer: TypedTrainer, rows: list[Row], has_own_sampler: bool):
        self.trainer = trainer
        self.rows = own_rows(trainer, rows)
        self.has_own_sampler = has_own_sampler
        self.known = _known(trainer, self.rows, has_own_sampler)
        self.has_leftovers = any(row.is_left_over for row in rows)
        args = trainer.args
        assert args.steps_per_generation is not None
        # TRL's condition for scoring the old policy: a batch is used after other updates
        is_scored = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0
        is_known = all(logprobs is not None for logprobs in self.known)
        if is_scored and is_sharded(trainer):  # all processes must make a forward pass, or none
            is_known = all(gather_object([is_known]))
        self.score_in_place_of_trl = self._known_logprobs if is_scored and is_known else None

    def finish(self, batch: dict[str, torch.Tensor]) -> None:
        """Set the old log-probs that TRL did not compute, or computed under the wrong policy."""
        has_known = self.has_own_sampler and any(gather_object([logprobs is not None for logprobs in self.known]))
        if not (self.has_leftovers or has_known):
            return
        if "old_per_token_logps" not in batch:
            batch["old_per_token_logps"] = torch.zeros_like(batch["completion_ids"], dtype=torch.float32)
            fill_in(
                self.trainer,
                batch["old_per_token_logps"],
                *_tokens(batch),
                [row.in_loss and logprobs is None for row, logprobs in zip(self.rows, self.known, strict=True)],
                **images_in(batch),
            )
        _write(self.known, batch["old_per_token_logps"])

    def _known_logprobs(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[torch.Tensor, None, None]:
        logprobs = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        _write(self.known, logprobs)
        return logprobs, None, None


class VLLMCorrection:
    """
    Old log-probs of a batch with which TRL's importance sampling correction corrects only the mismatch of the engines.

    vLLM's log-probs belong to the distribution after top_k, top_p and min_p. TRL compares them with the old policy's
    over the whole vocabulary, so that the truncation looks like a mismatch. Here the old policy is scored with the same
    truncation, and the ratio is 1 where the engines agree.

    Args, attributes: those of [`OldLogprobs`].
    """

    def __init__(self, trainer: TypedTrainer, rows: list[Row]):
        self.trainer = trainer
        self.rows = own_rows(trainer, rows)
        self.is_truncated = trainer.top_p < 1 or trainer.top_k > 0 or bool(trainer.min_p)
        self.score_in_place_of_trl = self._truncated_logprobs if self.is_truncated else None

    def finish(self, batch: dict[str, torch.Tensor]) -> None:
        """Set the old log-probs to those without truncation, which the loss needs, and shift vLLM's by as much."""
        _check_same_policy(self.trainer, batch)
        if not self.is_truncated:
            return
        # If the correction may still mask rows, others may enter the loss in their place
        may_mask = self.trainer.vllm_importance_sampling_mode == "sequence_mask"
        truncated = batch["old_per_token_logps"]
        batch["old_per_token_logps"] = truncated.clone()
        fill_in(
            self.trainer,
            batch["old_per_token_logps"],
            *_tokens(batch),
            [row.in_loss or (may_mask and row.rollout.copy_of is None) for row in self.rows],
            **images_in(batch),
        )
        batch["sampling_per_token_logps"] += batch["old_per_token_logps"] - truncated

    def _truncated_logprobs(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[torch.Tensor, None, None]:
        logprobs = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        wanted = [True] * len(input_ids)
        images = images_in(kwargs)
        fill_in(self.trainer, logprobs, input_ids, attention_mask, wanted, _truncation(self.trainer), **images)
        return logprobs, None, None


def _known(trainer: TypedTrainer, rows: Sequence[Row], has_own_sampler: bool) -> list[torch.Tensor | None]:
    """
    Log-probs of each row's tokens, of shape (L,), under the policy that it was sampled from, if they are known.

    They come from the previous step for a row that it left, from a user's sampler, or from generation if that computes
    exactly as training does, because otherwise the ratio would not be 1 for an unchanged policy. In half precision it
    rounds differently. With learned positions it counts from a row's first token, whereas TRL's training counts from
    the first column of the padded batch. Tokens of a prefix, which is not in the loss, get 0.
    """
    is_exact = in_float32(trainer) and not trainer.use_vllm and not depends_on_padding(trainer.model.config)
    return [
        row.old_logprobs
        if row.old_logprobs is not None or row.rollout.logprobs is None or not (has_own_sampler or is_exact)
        else torch.cat([torch.zeros(len(row.prefix_ids)), torch.from_numpy(row.rollout.logprobs)])
        for row in rows
    ]


@torch.no_grad()
def fill_in(
    trainer: TypedTrainer,
    logprobs: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    wanted: Sequence[bool],
    truncation: Truncation | None = None,
    **images: Any,
) -> None:
    """
    Write the log-probs of rows under the current policy into a tensor.

    Args:
        trainer (`GRPOTrainer`):
            Has the policy.
        logprobs (`torch.Tensor` of shape (R, C)):
            Receives those of the last C tokens of each row.
        input_ids, attention_mask (`torch.Tensor` of shape (R, T)):
            The rows.
        wanted (`Sequence[bool]`):
            Which rows to score. The others are not forwarded, and `logprobs` is unchanged for them.
        truncation (`Callable`, *optional*):
            Truncates the distributions, see [`~logps.truncated_logps`].
        images:
            The batch's entries for images, see [`images_in`].
    """
    scored = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    passed = scored
    if is_sharded(trainer):  # all processes must make the same number of forward passes
        passed = scored + [0] * (max(gather_object([len(scored)])) - len(scored))
    if not passed:
        return
    row_logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        input_ids[passed],
        attention_mask[passed],
        logits_to_keep=logprobs.size(1),
        batch_size=trainer.args.per_device_train_batch_size,
        truncation=truncation,
        **select_rows(images, passed),
    )
    logprobs[scored] = row_logprobs[: len(scored)]


def _write(known: list[torch.Tensor | None], logprobs: torch.Tensor) -> None:
    """Write the known log-probs of completions into a batch (B, C)."""
    for row, row_known in zip(logprobs, known, strict=True):
        if row_known is not None:
            row[: len(row_known)] = row_known.to(row)


def _tokens(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of prompts and completions together."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return input_ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def _truncation(trainer: TypedTrainer) -> Truncation:
    """The truncation of vLLM's samples, in vLLM's order."""
    warpers = LogitsProcessorList()
    if trainer.min_p:
        warpers.append(MinPLogitsWarper(trainer.min_p))
    if trainer.top_k > 0:
        warpers.append(TopKLogitsWarper(trainer.top_k))
    if trainer.top_p < 1:
        warpers.append(TopPLogitsWarper(trainer.top_p))
    return cast(Truncation, warpers)


def _check_same_policy(trainer: TypedTrainer, batch: dict[str, torch.Tensor]) -> None:
    """Refuse samples of another model, for example from a server that was started with the wrong one."""
    difference = batch["sampling_per_token_logps"] - batch["old_per_token_logps"]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool() & difference.isfinite()
    divergence = trainer.accelerator.gather(difference[mask].mean()).nanmean().item()  # one verdict for all processes
    if divergence > MAX_DIVERGENCE:
        raise RuntimeError(
            f"vLLM does not sample from the policy {trainer.model.name_or_path!r}, but from a distribution "
            f"{divergence:.2f} nats per token away from it (at most {MAX_DIVERGENCE} is allowed). Does it serve the "
            "same model? With max_staleness, rollouts may also be too old: lower that, or the learning rate."
        )
