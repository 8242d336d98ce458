"""
Old log-probs: the distribution that the importance ratio weighs each row against.

It is the one that the row was sampled from. That is the policy at the start of the step, but for rows sampled by vLLM
from a truncated distribution, or by the policy of an earlier step.
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

# Divergence of vLLM's samples from the policy, in nats a token, that rounding and quantization may amount to
MAX_DIVERGENCE = 1.0


def score_leftovers(trainer: TypedTrainer, leftovers: list[Row], has_own_sampler: bool) -> None:
    """Have rows for the next step know how likely they are under the policy as it is now."""
    for row in leftovers:
        row.is_left_over = True
    if (trainer.use_vllm and trainer.vllm_importance_sampling_correction) or not leftovers:
        return  # vLLM's log-probs are of the policy as it is now
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
    """The old log-probs of a batch of these rows, as the trainer is set up."""
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        return VLLMCorrection(trainer, rows)
    return OldLogprobs(trainer, rows, has_own_sampler)


class OldLogprobs:
    """
    Old log-probs of a batch as the policy's, at the start of the step or of the one that a row was sampled in.

    Args:
        trainer (`GRPOTrainer`):
            Trains on the batch.
        rows (`list[Row]`):
            The rows of all processes.
        has_own_sampler (`bool`):
            Whether the sampler is the user's, whose log-probs hold.

    Attributes:
        score_in_place_of_trl (`Callable`, *optional*):
            Scores the old policy in the place of `_get_per_token_logps_and_entropies`. If `None`, TRL does.
    """

    def __init__(self, trainer: TypedTrainer, rows: list[Row], has_own_sampler: bool):
        self.trainer = trainer
        self.rows = own_rows(trainer, rows)
        self.has_own_sampler = has_own_sampler
        self.known = _known(trainer, self.rows, has_own_sampler)
        self.has_leftovers = any(row.is_left_over for row in rows)
        args = trainer.args
        assert args.steps_per_generation is not None
        # Where updates are of batches sampled before other updates, as TRL decides it
        is_scored = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0
        is_known = all(logprobs is not None for logprobs in self.known)
        if is_scored and is_sharded(trainer):  # whose forward passes all processes make together, or none
            is_known = all(gather_object([is_known]))
        self.score_in_place_of_trl = self._known_logprobs if is_scored and is_known else None

    def finish(self, batch: dict[str, torch.Tensor]) -> None:
        """Set the old log-probs that TRL has not, or not of the right policy."""
        is_told = self.has_own_sampler and any(gather_object([logprobs is not None for logprobs in self.known]))
        if not (self.has_leftovers or is_told):
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
    Old log-probs of a batch by which TRL corrects for the difference between the two engines, and for that alone.

    vLLM samples from the tokens that top_k, top_p and min_p leave, and its log-probs are of that distribution. TRL
    compares them with the old policy's over the whole vocabulary, and takes all of the difference for one between the
    engines. So the old policy is scored as vLLM samples: the ratio of the engines is then 1 where they agree.

    Args, attributes: those of [`OldLogprobs`].
    """

    def __init__(self, trainer: TypedTrainer, rows: list[Row]):
        self.trainer = trainer
        self.rows = own_rows(trainer, rows)
        self.is_truncated = trainer.top_p < 1 or trainer.top_k > 0 or bool(trainer.min_p)
        self.score_in_place_of_trl = self._truncated_logprobs if self.is_truncated else None

    def finish(self, batch: dict[str, torch.Tensor]) -> None:
        """Set the old log-probs to those of whole distributions, as the loss has them, and move vLLM's by as much."""
        _check_same_policy(self.trainer, batch)
        if not self.is_truncated:
            return
        # Where a row may yet be dropped, others may be learned from for that
        may_drop = self.trainer.vllm_importance_sampling_mode == "sequence_mask"
        as_sampled = batch["old_per_token_logps"]
        batch["old_per_token_logps"] = as_sampled.clone()
        fill_in(
            self.trainer,
            batch["old_per_token_logps"],
            *_tokens(batch),
            [row.in_loss or (may_drop and row.rollout.copy_of is None) for row in self.rows],
            **images_in(batch),
        )
        batch["sampling_per_token_logps"] += batch["old_per_token_logps"] - as_sampled

    def _truncated_logprobs(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[torch.Tensor, None, None]:
        logprobs = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        in_batch = [True] * len(input_ids)
        images = images_in(kwargs)
        fill_in(self.trainer, logprobs, input_ids, attention_mask, in_batch, _warpers(self.trainer), **images)
        return logprobs, None, None


def _known(trainer: TypedTrainer, rows: Sequence[Row], has_own_sampler: bool) -> list[torch.Tensor | None]:
    """
    Log-probs of each row's tokens, of shape (L,), under the policy that it was sampled from, if they were told: by
    generation in float32, by a sampler of one's own, or for a row left over by the step before. 0 for a prefix, not in
    the loss. The ratio would not be 1 where nothing has changed if generation computed otherwise than training does. In
    half precision it rounds otherwise. With learned positions it counts from a row's first token, and training, as TRL
    has it, from the first column of the padded batch.
    """
    is_alike = in_float32(trainer) and not trainer.use_vllm and not depends_on_padding(trainer.model.config)
    is_told = has_own_sampler or is_alike
    return [
        row.old_logprobs
        if row.old_logprobs is not None or row.rollout.logprobs is None or not is_told
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
    Write the log-probs of rows under the policy as it is into a tensor.

    Args:
        trainer (`GRPOTrainer`):
            Has the policy.
        logprobs (`torch.Tensor` of shape (R, C)):
            Where to write those of the last C tokens of each row.
        input_ids, attention_mask (`torch.Tensor` of shape (R, T)):
            The rows.
        wanted (`Sequence[bool]`):
            R flags. Other rows are left out of the forward pass, and keep what is in `logprobs`.
        truncation (`Callable`, *optional*):
            Truncates the distributions, see [`~logps.truncated_logps`].
        images:
            What a batch has of images, see [`images_in`].
    """
    scored = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    passed = scored
    if is_sharded(trainer):  # processes must make as many forward passes
        passed = scored + [0] * (max(gather_object([len(scored)])) - len(scored))
    if not passed:
        return
    of_rows, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        input_ids[passed],
        attention_mask[passed],
        logits_to_keep=logprobs.size(1),
        batch_size=trainer.args.per_device_train_batch_size,
        truncation=truncation,
        **select_rows(images, passed),
    )
    logprobs[scored] = of_rows[: len(scored)]


def _write(known: list[torch.Tensor | None], logprobs: torch.Tensor) -> None:
    """Write the log-probs of completions that are known into those of a batch (B, C)."""
    for of_row, of_known in zip(logprobs, known, strict=True):
        if of_known is not None:
            of_row[: len(of_known)] = of_known.to(of_row)


def _tokens(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a batch, prompts and completions together."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return input_ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def _warpers(trainer: TypedTrainer) -> Truncation:
    """What vLLM truncates by, in its order."""
    warpers = LogitsProcessorList()
    if trainer.min_p:
        warpers.append(MinPLogitsWarper(trainer.min_p))
    if trainer.top_k > 0:
        warpers.append(TopKLogitsWarper(trainer.top_k))
    if trainer.top_p < 1:
        warpers.append(TopPLogitsWarper(trainer.top_p))
    return cast(Truncation, warpers)


def _check_same_policy(trainer: TypedTrainer, batch: dict[str, torch.Tensor]) -> None:
    """Refuse samples of another model: of a server that was started with the wrong one, say."""
    difference = batch["sampling_per_token_logps"] - batch["old_per_token_logps"]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool() & difference.isfinite()
    divergence = trainer.accelerator.gather(difference[mask].mean()).nanmean().item()  # one verdict for all processes
    if divergence > MAX_DIVERGENCE:
        raise RuntimeError(
            f"vLLM does not sample from the policy {trainer.model.name_or_path!r}, but from a distribution "
            f"{divergence:.2f} nats a token away from it ({MAX_DIVERGENCE} are allowed). Does it serve the same "
            "model? With max_staleness, rollouts may also be too old: lower that, or the learning rate."
        )
