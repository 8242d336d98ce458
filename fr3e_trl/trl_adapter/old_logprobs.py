"""
The importance ratio: against which distribution the tokens of each row are weighed.

A row is weighed by the distribution that it was sampled from. That is the policy at the start of the step, but for rows
sampled at another temperature, by vLLM from a truncated distribution, or by the policy of an earlier step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import linear
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..method.rows import Row
from .rows_trainer import RowsGRPOTrainer, images_in, select_rows

# Divergence of vLLM's samples from the policy, in nats a token, that rounding and quantization may amount to
MAX_DIVERGENCE = 1.0

# How many logits of truncated distributions exist at a time: 64 MiB of them, and several times that to sort them
MAX_LOGITS = 2**24


class RatioGRPOTrainer(RowsGRPOTrainer):
    """[`RowsGRPOTrainer`] whose importance ratio is against what each row was sampled from."""

    # Whether a sampler was passed, whose log-probs are those of what it draws from
    has_own_sampler = False

    # How to score the old policy in TRL's place, set until TRL asks for it
    _score_old: Callable[..., None] | None = None

    def assemble(self, batch_rows: list[Row], tool_counts: tuple[int, int] = (0, 0)) -> dict[str, torch.Tensor]:
        if self.use_vllm and self.vllm_importance_sampling_correction:
            return self._assemble_corrected(batch_rows, tool_counts)
        # Where updates are of batches sampled before other updates, as TRL decides it
        wants_old = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0
        # And where TRL would take another policy for the one that rows were sampled from
        sets_old = any(row.is_left_over for row in batch_rows)
        if not (wants_old or sets_old or self.has_own_sampler):
            return super().assemble(batch_rows, tool_counts)
        own = self.own_rows(batch_rows)
        known = self._known_logprobs(own)
        if wants_old and all(logprobs is not None for logprobs in known):
            self._score_old = partial(_write, known)
        batch = super().assemble(batch_rows, tool_counts)
        is_told = self.has_own_sampler and any(gather_object([logprobs is not None for logprobs in known]))
        if sets_old or is_told:
            self._set_old_logprobs(batch, own, known)
        return batch

    def score_leftovers(self, leftovers: list[Row]) -> None:
        """Have rows for the next step know how likely they are under the policy as it is now."""
        for row in leftovers:
            row.is_left_over = True
        if self.use_vllm and self.vllm_importance_sampling_correction:
            return  # against vLLM's log-probs, which are of the policy as it is now
        held = [row for row in leftovers if row.holder == self.accelerator.process_index]
        for row, logprobs in zip(held, self._known_logprobs(held), strict=True):
            row.old_logprobs = logprobs
        own = [row for row in held if row.old_logprobs is None]
        if not leftovers:
            return
        with self.scoring_temperature(self.temperature):
            statistics = self.token_statistics(
                [row.prompt_ids for row in own],
                [row.completion_ids for row in own],
                [self.multimodal_of(row.example) for row in own],
            )
        for row, (logprobs, _) in zip(own, statistics, strict=True):
            row.old_logprobs = logprobs.clone()

    def _known_logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor | None]:
        """
        Log-probs of each row's tokens, of shape (L,), under the policy that it was sampled from, if they were told: by
        generation in float32, by a sampler of one's own, or for a row left over by the step before. 0 for a prefix, not
        in the loss. In half precision decoding rounds otherwise than training does, and the ratio would not be 1 where
        nothing has changed.
        """
        is_told = self.has_own_sampler or (self.in_float32 and not self.use_vllm)
        return [
            row.old_logprobs
            if row.old_logprobs is not None or row.rollout.logprobs is None or not is_told
            else torch.cat([torch.zeros(len(row.prefix_ids)), torch.from_numpy(row.rollout.logprobs)])
            for row in rows
        ]

    def _set_old_logprobs(
        self, batch: dict[str, torch.Tensor], rows: list[Row], known: list[torch.Tensor | None]
    ) -> None:
        """Take the importance ratio against the policy at each row's temperature, and as it was for a row left over."""
        scored = {self.temperature} if "old_per_token_logps" in batch else set()
        old = batch.setdefault("old_per_token_logps", torch.zeros_like(batch["completion_ids"], dtype=torch.float32))
        self._fill_in(
            old,
            *_tokens(batch),
            [
                self.temperature if row.in_loss and logprobs is None and self.temperature not in scored else None
                for row, logprobs in zip(rows, known, strict=True)
            ],
            **images_in(batch),
        )
        _write(known, old)

    @torch.no_grad()
    def _fill_in(
        self,
        logprobs: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        temperatures: Sequence[float | None],
        truncated: bool = False,
        **images: Any,
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
            images:
                What a batch has of images, see [`images_in`].
        """
        for temperature in sorted(set(gather_object([t for t in temperatures if t is not None]))):
            at_it = [i for i, t in enumerate(temperatures) if t == temperature]
            passed = at_it
            if self.is_sharded:  # processes must make as many forward passes
                passed = at_it + [0] * (max(gather_object([len(at_it)])) - len(at_it))
            if not passed:
                continue
            kernel = partial(truncated_logprobs, self._warpers()) if truncated else None
            with self.scoring_temperature(temperature, kernel):
                scored, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    input_ids[passed],
                    attention_mask[passed],
                    logits_to_keep=logprobs.size(1),
                    batch_size=self.args.per_device_train_batch_size,
                    **select_rows(images, passed),
                )
            logprobs[at_it] = scored[: len(at_it)]

    # vLLM's log-probs

    def _assemble_corrected(self, batch_rows: list[Row], tool_counts: tuple[int, int]) -> dict[str, torch.Tensor]:
        """
        Have TRL correct for the difference between the two engines, and for that alone.

        vLLM samples at a row's own temperature, from the tokens that top_k, top_p and min_p leave, and its log-probs
        are of that distribution. TRL compares them with the old policy's over the whole vocabulary at the temperature
        of the training, and takes all of the difference for one between the engines. So the old policy is scored as
        vLLM samples: the ratio of the engines is then 1 where they agree.
        """
        own = self.own_rows(batch_rows)
        truncated = self.top_p < 1 or self.top_k > 0 or bool(self.min_p)
        if truncated:
            temperatures = [self.temperature] * len(own)
            self._score_old = partial(self._fill_in, temperatures=temperatures, truncated=truncated)
        batch = super().assemble(batch_rows, tool_counts)
        self._check_same_policy(batch)
        if truncated:
            # What the loss scores is not truncated
            as_sampled = batch["old_per_token_logps"]
            batch["old_per_token_logps"] = as_sampled.clone()
            self._fill_in(
                batch["old_per_token_logps"],
                *_tokens(batch),
                [self.temperature if row.in_loss else None for row in own],
                **images_in(batch),
            )
            batch["sampling_per_token_logps"] += batch["old_per_token_logps"] - as_sampled
        return batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        score_old, self._score_old = self._score_old, None  # the old policy is the first that TRL scores
        if score_old is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **kwargs
            )
        logprobs = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        score_old(logprobs, input_ids, attention_mask, **images_in(kwargs))
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


def _write(known: list[torch.Tensor | None], logprobs: torch.Tensor, *tokens: torch.Tensor, **images: Any) -> None:
    """Write the log-probs of completions that are known into those of a batch (B, C)."""
    for of_row, of_known in zip(logprobs, known, strict=True):
        if of_known is not None:
            of_row[: len(of_known)] = of_known.to(of_row)


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
