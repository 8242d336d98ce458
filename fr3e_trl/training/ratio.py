"""
The importance ratio: against which distribution the tokens of each row are weighed.

A row is weighed by the distribution that it was sampled from. That is the policy at the start of the step, but for rows
sampled at another temperature, by vLLM from a truncated distribution, or by the policy of an earlier step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from accelerate.utils import is_peft_model
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from trl.trainer.utils import add_fused_lm_head

from ..method.batch import Row
from .trl_seams import RowsGRPOTrainer

# Divergence of vLLM's samples from the policy, in nats a token, that rounding and quantization may amount to
MAX_DIVERGENCE = 1.0


class RatioGRPOTrainer(RowsGRPOTrainer):
    """[`RowsGRPOTrainer`] whose importance ratio is against what each row was sampled from."""

    def assemble(self, batch_rows: list[Row]) -> dict[str, torch.Tensor]:
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        off_temperatures = sorted({row.temperature for row in batch_rows} - {self.temperature})
        own = self.own_rows(batch_rows)
        if corrects and (self._truncates or off_temperatures):
            self._as_if_scored(own)
        batch = super().assemble(batch_rows)
        if corrects:
            self._check_same_policy(batch)
        if off_temperatures:
            self._set_behaviour_logprobs(batch, own, off_temperatures)
        if any(row.is_left_over for row in batch_rows) and not corrects:
            self._set_old_logprobs(batch, own)
        return batch

    def keep(self, leftovers: list[Row]) -> None:
        """Have rows for the next step know how likely they are under the policy as it is now."""
        for row in leftovers:
            row.is_left_over = True
        if self.use_vllm and self.vllm_importance_sampling_correction:
            return  # against vLLM's log-probs, which are of the policy as it is now
        held = [row for row in leftovers if row.holder == self.accelerator.process_index]
        for temperature in dict.fromkeys(row.temperature for row in leftovers):
            own = [row for row in held if row.temperature == temperature]
            with self.scoring_temperature(temperature):
                statistics = self.token_statistics([row.prompt_ids for row in own], [row.completion_ids for row in own])
            for row, (logprobs, _) in zip(own, statistics, strict=True):
                row.old_logprobs = logprobs.clone()

    @torch.no_grad()
    def _set_behaviour_logprobs(
        self, batch: dict[str, torch.Tensor], rows: list[Row], off_temperatures: list[float]
    ) -> None:
        """Take the importance ratio of rows sampled at other temperatures against the policy at these."""
        if "old_per_token_logps" not in batch:
            batch["old_per_token_logps"] = self._logprobs(batch)
        temperatures = torch.tensor([row.temperature for row in rows], device=self.accelerator.device).unsqueeze(1)
        for temperature in off_temperatures:
            with self.scoring_temperature(temperature):
                # Of all rows: where the weights are sharded, every process has to make as many forward passes
                behaviour = self._logprobs(batch)
            batch["old_per_token_logps"] = torch.where(
                temperatures == temperature, behaviour, batch["old_per_token_logps"]
            )

    @torch.no_grad()
    def _set_old_logprobs(self, batch: dict[str, torch.Tensor], rows: list[Row]) -> None:
        """Take the importance ratio of rows sampled in an earlier step against the policy as it was then."""
        if "old_per_token_logps" not in batch:
            batch["old_per_token_logps"] = self._logprobs(batch)
        for old, row in zip(batch["old_per_token_logps"], rows, strict=True):
            if row.old_logprobs is not None:
                old[: len(row.old_logprobs)] = row.old_logprobs.to(old)

    def _logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            logits_to_keep=batch["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
        )[0]

    @contextmanager
    def scoring_temperature(self, temperature: float) -> Iterator[None]:
        """Score log-probs at another temperature: TRL's LM head has its own built in, so it gets another head."""
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        forward = model.forward
        add_fused_lm_head(model, temperature, self.args.cast_lm_head_to_fp32, outputs=("log_probs", "entropy"))
        try:
            yield
        finally:
            model.forward = forward

    # vLLM's log-probs

    @property
    def _truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)

    @torch.no_grad()
    def _as_if_scored(self, rows: list[Row]) -> None:
        """
        vLLM's log-probs, brought from the distribution that it samples from to the one that the loss scores.

        vLLM samples at a row's own temperature, from the tokens that top_k, top_p and min_p leave, and its log-probs
        are of that distribution; TRL compares them with the policy's over the whole vocabulary at the temperature of
        the training, and takes the difference for one between the two engines. What it is by the policy's own weights
        is added to them here, so that the ratio is 1 where the engines agree.
        """
        warpers = LogitsProcessorList()
        # In vLLM's order
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        if self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        for row in rows:
            ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.completion_ids])).long()
            ids = ids.unsqueeze(0).to(self.accelerator.device)
            tokens = ids[0, -row.rollout.length :, None]
            with self.accelerator.autocast():
                logits = self.model(input_ids=ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
            scored = (logits / self.temperature).log_softmax(-1).gather(1, tokens)
            logits /= row.temperature
            # A token at the edge may be cut off by these weights, and not by vLLM's rounding of them
            sampled_from = warpers(ids, logits).scatter(1, tokens, logits.gather(1, tokens)).log_softmax(-1)
            shift = (scored - sampled_from.gather(1, tokens)).squeeze(1)
            row.rollout.logprobs = row.rollout.logprobs + shift.cpu().numpy()

    def _check_same_policy(self, batch: dict[str, torch.Tensor]) -> None:
        """Refuse samples of another model: of a server that was started with the wrong one, say."""
        difference = batch["sampling_per_token_logps"] - batch["old_per_token_logps"]
        mask = (batch["completion_mask"] * batch["tool_mask"]).bool() & difference.isfinite()
        divergence = self.accelerator.gather(difference[mask].mean()).nanmean().item()  # one verdict for all processes
        if divergence > MAX_DIVERGENCE:
            raise RuntimeError(
                f"vLLM does not sample from the policy {self.model.name_or_path!r}, but from a distribution "
                f"{divergence:.2f} nats a token away from it ({MAX_DIVERGENCE} are allowed). Does it serve the same "
                "model?"
            )
