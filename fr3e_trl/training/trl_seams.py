"""
The one place that depends on TRL's inside.

[`RowsGRPOTrainer`] is a [`~trl.GRPOTrainer`] that can be handed rows which are already generated and scored, and of
which some leave the loss. `tests/test_trl_contract.py` names everything that it relies on, so that a new version of TRL
that moves any of it fails there first.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import RolloutFunc
from trl.trainer.utils import pad

from ..config import FR3EConfig
from ..generation.vllm_sync import FR3EVLLMGeneration
from .resume import ResumableGRPOTrainer

# Keys of TRL's batch that hold its tokens
BATCH_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")

# Losses that TRL averages over rows rather than over tokens
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")

# Losses that TRL sums over the tokens of a micro-batch, and divides by those of all micro-batches
TOKEN_SUM_LOSSES = ("dapo", "cispo", "vespo")


@dataclass
class Rows:
    """
    This process's part of a batch of finished completions.

    Notation used for tensor shapes:
        - R: rows of the batch, in this process
        - A: rows of all processes
        - F: reward functions

    Args:
        inputs (`list[dict]`):
            The dataset's example that each row belongs to.
        prompt_ids, completion_ids (`list[list[int]]`):
            Token ids of each row.
        loss_mask (`list[list[int]]`):
            For each token of each completion, 1 if it counts in the loss and 0 if it is only context.
        logprobs (`list[list[float | None]]`, *optional*):
            Log-probability of each token of each completion under the distribution that it was sampled from, `None`
            for a token that is only context.
        temperatures (`list[float]`):
            Temperature that the tokens in the loss were sampled at, for each row.
        rewards_per_func (`torch.Tensor` of shape (A, F)):
            Rewards of the rows of all processes, NaN where a function gave none.
        old_logprobs (`list[torch.Tensor | None]`, *optional*):
            Log-probabilities of each completion, of shape (L,), under an earlier policy that it was sampled from;
            `None` for a completion that is the present policy's. If no completion of any process is an earlier one's,
            `None` for all.
        extra_logs (`dict[str, list]`):
            Columns of R values that the reward functions logged.
    """

    inputs: list[dict[str, Any]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    loss_mask: list[list[int]]
    logprobs: list[list[float | None]] | None
    temperatures: list[float]
    rewards_per_func: torch.Tensor
    old_logprobs: list[torch.Tensor | None] | None = None
    extra_logs: dict[str, list[Any]] = field(default_factory=dict)


@contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    """Have another `value` in the place of what TRL's module knows by a name, where there is no other way in."""
    original = getattr(grpo_trainer, name)
    setattr(grpo_trainer, name, value)
    try:
        yield
    finally:
        setattr(grpo_trainer, name, original)


class RowsGRPOTrainer(ResumableGRPOTrainer):
    """[`~trl.GRPOTrainer`] that can train on rows generated and scored before it assembles a batch."""

    beta: float
    rollout_func: RolloutFunc | None
    _last_loaded_step: int

    def __init__(self, *, args: FR3EConfig, **kwargs: Any):
        with _replaced("VLLMGeneration", functools.partial(FR3EVLLMGeneration, fr3e_args=args)):
            super().__init__(args=args, **kwargs)
        self._rows: Rows | None = None  # set while a batch is assembled from finished rows

    # Before the batch: what is needed to generate and score

    @contextmanager
    def generation_model(self) -> Iterator[Any]:
        """Enter generation mode as TRL does, and yield the model to generate with."""
        training = self.model.training
        with (
            profiling_context(self, "transformers.generate"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            if self.use_transformers_continuous_batching and (self.args.bf16 or self.args.fp16):
                # As TRL does, for good: the engine's attention kernels take no float32
                model.to(torch.bfloat16 if self.args.bf16 else torch.float16)
                if self.args.cast_lm_head_to_fp32:
                    model.lm_head.to(torch.float32)
            try:
                yield model
            finally:
                self.model.train(training)  # continuous batching leaves it in evaluation mode

    @contextmanager
    def vllm_engine(self) -> Iterator[None]:
        """Have vLLM ready with the policy's weights; one that may sleep wakes up for as long. Without vLLM, nothing."""
        if not self.use_vllm:
            yield
            return
        generation = self.vllm_generation
        may_sleep = self.vllm_mode == "colocate" and generation.enable_sleep_mode
        if self.state.global_step != self._last_loaded_step or (may_sleep and generation._llm_weights_sleeping):
            with profiling_context(self, "sync_weights"):
                generation.sync_weights()  # wakes up the memory of the weights
            self._last_loaded_step = self.state.global_step
        if may_sleep:
            generation.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            if may_sleep:
                generation.llm.sleep(level=2)
                generation._llm_weights_sleeping = True

    def tokenize_prompts(self, prompts: list[Any]) -> list[list[int]]:
        """Token ids of prompts, standard or conversational."""
        prompt_ids, images, _ = self._tokenize_prompts(prompts)
        if images is not None:
            raise NotImplementedError(
                "FR3ETrainer does not support images yet, and a prompt has some. Remove them, or set num_anchors=0 to "
                "train with plain GRPO."
            )
        return prompt_ids

    def score(
        self, inputs: list[dict[str, Any]], prompt_ids: list[list[int]], completion_ids: list[list[int]]
    ) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """
        Score N completions with the trainer's F reward functions, in this process alone.

        Returns:
            `tuple[torch.Tensor, dict[str, list]]`: Rewards of shape (N, F), NaN where a function gave none, and the
            columns that the functions logged, N values each.
        """
        prompts = [example["prompt"] for example in inputs]
        completions = self._decode(prompts, prompt_ids, completion_ids)
        with _replaced("gather", lambda tensor: tensor):  # TRL's last step, which wants as many rows of each process
            rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        logs = {column: v for column, v in self._pending_extra_logs.items() if len(v) == len(inputs)}
        self._pending_extra_logs.clear()
        return rewards_per_func, logs

    def _decode(self, prompts: list[Any], prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[Any]:
        """Completions as reward functions receive them, the same as those that TRL decodes."""
        if not is_conversational({"prompt": prompts[0]}):
            return self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        if any(getattr(self._tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            return [
                [parse_response(self._tokenizer, ids, prefix=prefix, tools=self.tools)]
                for prefix, ids in zip(prompt_ids, completion_ids, strict=True)
            ]
        contents = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": content}] for content in contents]

    @torch.no_grad()
    def token_statistics(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """
        Log-probabilities and entropies of completions under the policy, at the sampling temperature.

        Dropout is as it is for TRL's own generation and log-probs: on, unless `disable_dropout` turns it off.

        Returns:
            `list[tuple[torch.Tensor, torch.Tensor]]`: For each completion of L tokens, the log-probability of each
            token and the entropy of the distribution that it was drawn from, both of shape (L,), on the CPU, in nats.
        """
        prompt_mask, completion_mask = ([torch.ones(len(ids)) for ids in rows] for rows in (prompt_ids, completion_ids))
        pad_id = self._tokenizer.pad_token_id
        input_ids = torch.cat(
            [
                pad([torch.tensor(ids) for ids in prompt_ids], padding_value=pad_id, padding_side="left"),
                pad([torch.tensor(ids) for ids in completion_ids], padding_value=pad_id),
            ],
            dim=1,
        )
        attention_mask = torch.cat([pad(prompt_mask, padding_side="left"), pad(completion_mask)], dim=1).long()
        logprobs, entropies, _ = self._get_per_token_logps_and_entropies(
            self.model,
            input_ids.to(self.accelerator.device),
            attention_mask.to(self.accelerator.device),
            logits_to_keep=max(map(len, completion_ids)),
            batch_size=self.args.per_device_train_batch_size,
            compute_entropy=True,
        )
        lengths = [len(ids) for ids in completion_ids]
        return [
            (row_logprobs[:length], row_entropies[:length])
            for row_logprobs, row_entropies, length in zip(
                logprobs.float().cpu(), entropies.float().cpu(), lengths, strict=True
            )
        ]

    # The batch

    def assemble(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Have TRL make its batch of `rows`: padding, log-probs of the old and the reference policy, logs."""
        self._rows = rows
        self.rollout_func = lambda prompts, trainer: {
            "prompt_ids": rows.prompt_ids,
            "completion_ids": rows.completion_ids,
            "logprobs": rows.logprobs,
        }
        self._pending_extra_logs.update(rows.extra_logs)
        try:
            return super()._generate_and_score_completions(rows.inputs)
        finally:
            self._rows = None
            self.rollout_func = None

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        output = super()._generate(prompts)
        if self._rows is None:
            return output
        # The mask goes in here, and not by `rollout_func`, for TRL to log the lengths of whole completions
        prompt_ids, completion_ids, _, *rest = output
        return prompt_ids, completion_ids, self._rows.loss_mask, *rest

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        if self._rows is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rows.rewards_per_func

    def set_advantages(self, batch: dict[str, torch.Tensor], advantages: torch.Tensor, in_loss: torch.Tensor) -> None:
        """
        Replace the advantages of an assembled batch, and take rows out of its loss.

        Args:
            batch (`dict[str, torch.Tensor]`):
                What [`assemble`] returned, changed in place.
            advantages (`torch.Tensor` of shape (A,)):
                Advantages of the rows of all processes.
            in_loss (`torch.Tensor` of shape (A,)):
                Boolean mask. Rows outside leave the loss, numerator and denominator both.
        """
        advantages, in_loss = advantages.to(batch["advantages"]), in_loss.to(batch["advantages"].device)
        self._logs["advantages"].extend(advantages.tolist())  # it holds one batch: TRL's own drop out
        batch["num_rows_in_loss"] = in_loss.sum()
        batch["advantages"], batch["in_loss"] = self.own_rows(advantages), self.own_rows(in_loss)
        batch["tool_mask"] = batch["tool_mask"] * batch["in_loss"].unsqueeze(1)
        # TRL counted the tokens of all rows
        num_tokens = (batch["completion_mask"] * batch["tool_mask"]).sum()
        batch["num_items_in_batch"] = self.accelerator.gather(num_tokens).sum()

    def own_rows(self, rows: Any) -> Any:
        """This process's part of the rows of all: TRL deals them out in order, wherever that cuts a group."""
        num_own = len(rows) // self.accelerator.num_processes
        return rows[self.accelerator.process_index * num_own :][:num_own]

    # The loss

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Leave rows that are not in the loss out of the forward pass, and out of what TRL divides by."""
        if "in_loss" not in inputs:
            return super()._compute_loss(model, inputs)
        # As many as the process with most of them has, since TRL gathers by row; at least one, for a backward pass
        num_rows = int(self.accelerator.gather(inputs["in_loss"].sum()).max().clamp(min=1))
        keep = inputs["in_loss"].int().argsort(descending=True, stable=True)[:num_rows]
        inputs = {key: value[keep] if value.dim() > 0 else value for key, value in inputs.items()}
        # Micro-batches, of which each process has its own, now differ in how many rows r they have. Each counts by
        # them: the mean of their losses L that TRL takes becomes sum(r * L) / sum(r), where one without rows has no
        # share, and which is TRL's mean where all have as many. This defines bnpo, whose L is a mean over tokens, and
        # the entropy bonus, which is such a mean with any loss type.
        own_rows = inputs["in_loss"].sum()
        num_micro_batches = self.args.steps_per_generation * self.accelerator.num_processes
        weight = own_rows * num_micro_batches / inputs["num_rows_in_loss"].clamp(min=1)
        beta = self.beta
        if self.loss_type in ROW_MEAN_LOSSES:
            # TRL divides by `num_rows`, of which this process may have fewer. The policy term is linear in the
            # advantages, and the KL term in beta; that may not become 0 in one process alone, for what TRL gathers.
            share = own_rows.clamp(min=1) / num_rows
            inputs["advantages"] = inputs["advantages"] / share
            self.beta = beta / share.item()
        elif self.loss_type in TOKEN_SUM_LOSSES:
            # TRL divides by the tokens of all micro-batches: no weight is wanted
            inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * weight
        try:
            return super()._compute_loss(model, inputs) * weight
        finally:
            self.beta = beta
