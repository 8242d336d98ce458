"""
The importance ratio: against which distribution the tokens of each row are weighed.

A row is weighed by the distribution that it was sampled from. That is the policy at the start of the step, but for rows
sampled at another temperature, by vLLM from a truncated distribution, or by the policy of an earlier step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate.utils import gather_object, is_peft_model
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from trl.trainer.utils import add_fused_lm_head

from .trl_seams import Rows, RowsGRPOTrainer

# Divergence of vLLM's samples from the policy, in nats a token, that rounding and quantization may amount to
MAX_DIVERGENCE = 1.0


class RatioGRPOTrainer(RowsGRPOTrainer):
    """[`RowsGRPOTrainer`] whose importance ratio is against what each row was sampled from."""

    def assemble(self, rows: Rows) -> dict[str, torch.Tensor]:
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        off_temperatures = sorted(set(gather_object(rows.temperatures)) - {self.temperature})
        if corrects and rows.logprobs is not None and (self._truncates or off_temperatures):
            rows = replace(rows, logprobs=self._as_if_scored(rows, rows.logprobs))
        batch = super().assemble(rows)
        if corrects:
            self._check_same_policy(batch)
        if off_temperatures:
            self._set_behaviour_logprobs(batch, rows, off_temperatures)
        if rows.old_logprobs is not None:
            self._set_old_logprobs(batch, rows.old_logprobs)
        return batch

    @torch.no_grad()
    def _set_behaviour_logprobs(
        self, batch: dict[str, torch.Tensor], rows: Rows, off_temperatures: list[float]
    ) -> None:
        """Take the importance ratio of rows sampled at other temperatures against the policy at these."""
        if "old_per_token_logps" not in batch:
            batch["old_per_token_logps"] = self._logprobs(batch)
        temperatures = torch.tensor(rows.temperatures, device=self.accelerator.device).unsqueeze(1)
        for temperature in off_temperatures:
            with self.scoring_temperature(temperature):
                # Of all rows: where the weights are sharded, every process has to make as many forward passes
                behaviour = self._logprobs(batch)
            batch["old_per_token_logps"] = torch.where(
                temperatures == temperature, behaviour, batch["old_per_token_logps"]
            )

    @torch.no_grad()
    def _set_old_logprobs(self, batch: dict[str, torch.Tensor], old_logprobs: list[torch.Tensor | None]) -> None:
        """Take the importance ratio of rows sampled in an earlier step against the policy as it was then."""
        if "old_per_token_logps" not in batch:
            batch["old_per_token_logps"] = self._logprobs(batch)
        for row, logprobs in zip(batch["old_per_token_logps"], old_logprobs, strict=True):
            if logprobs is not None:
                row[: len(logprobs)] = logprobs.to(row)

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
    def _as_if_scored(self, rows: Rows, logprobs: list[list[float | None]]) -> list[list[float | None]]:
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
        corrected = []
        for i, of_row in enumerate(logprobs):
            start = rows.loss_mask[i].index(1)
            ids = torch.tensor([rows.prompt_ids[i] + rows.completion_ids[i]], device=self.accelerator.device)
            tokens = ids[0, len(rows.prompt_ids[i]) + start :, None]
            with self.accelerator.autocast():
                logits = self.model(input_ids=ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
            scored = (logits / self.temperature).log_softmax(-1).gather(1, tokens)
            logits /= rows.temperatures[i]
            # A token at the edge may be cut off by these weights, and not by vLLM's rounding of them
            sampled_from = warpers(ids, logits).scatter(1, tokens, logits.gather(1, tokens)).log_softmax(-1)
            shift = (scored - sampled_from.gather(1, tokens)).squeeze(1).tolist()
            shifted = [None if x is None else x + y for x, y in zip(of_row[start:], shift, strict=True)]
            corrected.append([*of_row[:start], *shifted])
        return corrected

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
