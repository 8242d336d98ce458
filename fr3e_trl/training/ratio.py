"""
The importance ratio: against which distribution the tokens of each row are weighed.

A row is weighed by the distribution that it was sampled from. That is the policy at the start of the step, but for rows
sampled at another temperature, by vLLM from a truncated distribution, or by the policy of an earlier step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from torch.nn.functional import linear
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

from .trl_seams import Rows, RowsGRPOTrainer

# Divergence of vLLM's samples from the policy, in nats a token, that rounding and quantization may amount to
MAX_DIVERGENCE = 1.0

# How many logits of truncated distributions exist at a time: 64 MiB of them, and several times that to sort them
MAX_LOGITS = 2**24


class RatioGRPOTrainer(RowsGRPOTrainer):
    """[`RowsGRPOTrainer`] whose importance ratio is against what each row was sampled from."""

    # How to score the old policy in TRL's place, set until TRL asks for it
    _score_old: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None

    def assemble(self, rows: Rows) -> dict[str, torch.Tensor]:
        in_loss = [True] * len(rows.temperatures)
        off_temperature = set(gather_object(rows.temperatures)) != {self.temperature}
        if self.use_vllm and self.vllm_importance_sampling_correction:
            return self._assemble_corrected(rows, rows.temperatures, in_loss, off_temperature)
        batch = super().assemble(rows)
        if off_temperature or rows.old_logprobs is not None:
            old_logprobs = rows.old_logprobs or [None] * len(rows.temperatures)
            self._set_old_logprobs(batch, rows.temperatures, in_loss, old_logprobs)
        return batch

    def _set_old_logprobs(
        self,
        batch: dict[str, torch.Tensor],
        temperatures: list[float],
        in_loss: list[bool],
        old_logprobs: list[torch.Tensor | None],
    ) -> None:
        """Take the importance ratio against the policy at each row's temperature, and as it was for a row left over."""
        known = {self.temperature} if "old_per_token_logps" in batch else set()
        old = batch.setdefault("old_per_token_logps", torch.zeros_like(batch["completion_ids"], dtype=torch.float32))
        self._fill_in(
            old,
            *_tokens(batch),
            [
                temperature if is_in_loss and of_row is None and temperature not in known else None
                for temperature, is_in_loss, of_row in zip(temperatures, in_loss, old_logprobs, strict=True)
            ],
        )
        for row, of_row in zip(old, old_logprobs, strict=True):
            if of_row is not None:
                row[: len(of_row)] = of_row.to(row)

    @torch.no_grad()
    def _fill_in(
        self,
        logprobs: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        temperatures: Sequence[float | None],
        truncated: bool = False,
    ) -> None:
        """
        Write the log-probs of rows under the policy as it is, each at its own temperature, into a tensor.

        Args:
            logprobs (`torch.Tensor` of shape (R, C)):
                Where to write those of the last C tokens of each row.
            input_ids, attention_mask (`torch.Tensor` of shape (R, T)):
                The rows.
            temperatures (`Sequence[float | None]`):
                R temperatures. Rows with `None` are left out of the forward pass, and keep what is in `logprobs`.
            truncated (`bool`):
                Whether of the distributions that top_k, top_p and min_p leave.
        """
        for temperature in sorted(set(gather_object([t for t in temperatures if t is not None]))):
            at_it = [i for i, t in enumerate(temperatures) if t == temperature]
            passed = at_it
            if self._dist.is_fsdp or self._dist.is_zero3:  # processes must make as many forward passes
                passed = at_it + [0] * (max(gather_object([len(at_it)])) - len(at_it))
            if not passed:
                continue
            with self.scoring_temperature(temperature, truncated):
                scored, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    input_ids[passed],
                    attention_mask[passed],
                    logits_to_keep=logprobs.size(1),
                    batch_size=self.args.per_device_train_batch_size,
                )
            logprobs[at_it] = scored[: len(at_it)]

    @contextmanager
    def scoring_temperature(self, temperature: float, truncated: bool = False) -> Iterator[None]:
        """
        Score log-probs at another temperature, and under the distributions that top_k, top_p and min_p leave if
        `truncated`: TRL's LM head has its own temperature built in, so it gets another head.
        """
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        forward, kernel = model.forward, trl_utils._ChunkedLogProbFunction
        add_fused_lm_head(model, temperature, self.args.cast_lm_head_to_fp32, outputs=("log_probs", "entropy"))
        if truncated:
            # The head finds the hidden states, the weights however they are sharded, and the scale and the softcap of
            # the logits
            trl_utils._ChunkedLogProbFunction = SimpleNamespace(apply=partial(truncated_logprobs, self._warpers()))
        try:
            yield
        finally:
            model.forward, trl_utils._ChunkedLogProbFunction = forward, kernel

    # vLLM's log-probs

    def _assemble_corrected(
        self, rows: Rows, temperatures: list[float], in_loss: list[bool], off_temperature: bool
    ) -> dict[str, torch.Tensor]:
        """
        Have TRL correct for the difference between the two engines, and for that alone.

        vLLM samples at a row's own temperature, from the tokens that top_k, top_p and min_p leave, and its log-probs
        are of that distribution. TRL compares them with the old policy's over the whole vocabulary at the temperature
        of the training, and takes all of the difference for one between the engines. So the old policy is scored as
        vLLM samples: the ratio of the engines is then 1 where they agree.
        """
        truncated = self.top_p < 1 or self.top_k > 0 or bool(self.min_p)
        if truncated or off_temperature:
            self._score_old = partial(self._fill_in, temperatures=temperatures, truncated=truncated)
        batch = super().assemble(rows)
        self._check_same_policy(batch)
        if truncated:
            # What the loss scores is not truncated
            as_sampled = batch["old_per_token_logps"]
            batch["old_per_token_logps"] = as_sampled.clone()
            self._fill_in(
                batch["old_per_token_logps"],
                *_tokens(batch),
                [
                    temperature if is_in_loss else None
                    for temperature, is_in_loss in zip(temperatures, in_loss, strict=True)
                ],
            )
            batch["sampling_per_token_logps"] += batch["old_per_token_logps"] - as_sampled
        return batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        score_old, self._score_old = self._score_old, None  # with vLLM, the old policy is the first that TRL scores
        if score_old is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **kwargs
            )
        logprobs = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        score_old(logprobs, input_ids, attention_mask)
        return logprobs, None, None

    def _warpers(self) -> LogitsProcessorList:
        """What vLLM truncates by, in its order."""
        warpers = LogitsProcessorList()
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        if self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers

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


def _tokens(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a batch, prompts and completions together."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return input_ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def truncated_logprobs(
    warpers: LogitsProcessorList,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    scale: float,
    outputs: tuple[str, ...],
) -> tuple[torch.Tensor, None, None, None, None]:
    """
    Log-probabilities of N tokens under distributions that are truncated, in the place of the kernel of TRL's LM head.

    Args:
        warpers (`LogitsProcessorList`):
            Truncate. A token that was sampled is never cut off: one at the edge may be by these weights, and not by
            vLLM's rounding of them.
        hidden (`torch.Tensor` of shape (N, H)):
            What the LM head projects.
        weight, bias (`torch.Tensor` of shape (V, H) and (V,)):
            The LM head.
        tokens (`torch.Tensor` of shape (N,)):
            Ids.
        temperature, softcap, scale (`float`):
            The logits are multiplied by `scale`, capped softly at `softcap` if that is not `None`, and divided by
            `temperature`.
        chunk_size, outputs:
            Not used: the kernel tiles the vocabulary, which cannot be truncated in parts, and has more outputs.

    Returns:
        `tuple`: The log-probabilities, of shape (N,) in float32, and `None` for the kernel's other outputs.
    """
    num_positions = max(MAX_LOGITS // len(weight), 1)
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    logprobs = []
    for states, ids in zip(hidden.split(num_positions), tokens.unsqueeze(1).split(num_positions), strict=True):
        logits = linear(states, weight, bias).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits /= temperature
        of_tokens = logits.gather(1, ids)
        kept = warpers(ids, logits).scatter(1, ids, of_tokens)
        logprobs.append((of_tokens - kept.logsumexp(1, keepdim=True)).squeeze(1))
    return torch.cat(logprobs), None, None, None, None
