"""Sampling with transformers: `generate`, and continuous batching."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .sampler import Sample, SamplingRequest

# Enters generation mode, as TRL does, and yields the model to generate with.
GenerationModel = Callable[[], AbstractContextManager[Any]]

# How many logits are kept until log-probs and entropies are made of them, beside those of one step: 64 MiB
MAX_LOGITS = 2**24


class GenerateSampler:
    """
    Draws with transformers' `generate`: all requests as one left-padded batch.

    The batch is as wide as the longest row, prefix and budget together, and takes as many steps as the largest budget:
    no more of either than if all were drawn from their prompts. All rows begin at one width, with what fits there of
    their prefixes, and the rest of a longer prefix is forced token by token while the others sample.

    Args:
        generation_model (`GenerationModel`):
            Context manager that yields the model.
        generation_config (`~transformers.GenerationConfig`):
            Sampling settings; temperature and budget are taken from the requests. Its `eos_token_id` must be a list.
            Its `min_new_tokens` counts from the prompt, like that of a completion drawn at once.
        device (`torch.device`):
            Where the model computes: not always where its weights are.
    """

    def __init__(self, generation_model: GenerationModel, generation_config: GenerationConfig, device: torch.device):
        self.generation_model = generation_model
        self.generation_config = generation_config
        self.device = device

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        rows = [request for request in requests for _ in range(request.num_samples)]
        drawn = iter(self._generate(rows) if rows else [])
        return [[next(drawn) for _ in range(request.num_samples)] for request in requests]

    def _generate(self, rows: list[SamplingRequest]) -> list[Sample]:
        """One continuation for each row."""
        config = copy.deepcopy(self.generation_config)
        width = _initial_width(rows, config.eos_token_id)
        begins = [max(width, len(row.prefix_ids)) for row in rows]  # the columns at which sampling begins
        ends = [begin + row.max_new_tokens for begin, row in zip(begins, rows, strict=True)]
        known_ids = torch.full((len(rows), max(begins)), -1)
        for of_row, begin, row in zip(known_ids, begins, rows, strict=True):
            of_row[begin - len(row.prefix_ids) : begin] = torch.tensor(row.prefix_ids)
        min_new_tokens = config.min_new_tokens or 0
        min_lengths = [
            begin - row.num_sampled_before + min_new_tokens if min_new_tokens else 0
            for begin, row in zip(begins, rows, strict=True)
        ]
        config.max_new_tokens = max(ends) - width
        config.min_new_tokens, config.temperature = 0, 1.0  # each row has its own
        temperatures = torch.tensor([row.temperature for row in rows], device=self.device)
        processor = _RowSampling(
            known_ids.to(self.device),
            temperatures,
            torch.tensor(min_lengths, device=self.device),
            torch.tensor(config.eos_token_id, device=self.device),
        )
        is_known = known_ids[:, :width] >= 0
        record = _PolicyRecord(temperatures)
        with self.generation_model() as model, record.of(model):
            output_ids = model.generate(
                input_ids=known_ids[:, :width].where(is_known, config.pad_token_id).to(self.device),
                attention_mask=is_known.long().to(self.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList([_RowEnds(torch.tensor(ends, device=self.device), record)]),
            )
        logprobs, entropies = record.statistics()
        samples = []
        for i, (of_row, begin, end) in enumerate(zip(output_ids.cpu().numpy(), begins, ends, strict=True)):
            token_ids = _until_eos(of_row[begin:end], config.eos_token_id)
            columns = slice(begin - width, begin - width + len(token_ids))
            samples.append(Sample(token_ids, logprobs[i, columns].copy(), entropies[i, columns].copy()))
        return samples


def _initial_width(rows: list[SamplingRequest], eos_token_ids: list[int]) -> int:
    """
    The width that a batch begins with: the smallest from which it takes no more steps than the largest budget.

    It becomes as wide as its longest row then. But whatever has an EOS in it is there at the beginning, as `generate`
    takes a row for finished where it is forced: a prompt may have one, of a chat's earlier turns.
    """
    width = max(len(row.prefix_ids) + row.max_new_tokens for row in rows) - max(row.max_new_tokens for row in rows)
    eos_positions = [np.flatnonzero(np.isin(row.prefix_ids, eos_token_ids)) for row in rows]
    return max([width, *(int(positions[-1]) + 1 for positions in eos_positions if positions.size)])


def _until_eos(token_ids: np.ndarray, eos_token_ids: list[int]) -> np.ndarray:
    """A copy that ends with the first EOS: what follows is padding."""
    is_eos = np.isin(token_ids, eos_token_ids)
    return token_ids[: is_eos.argmax() + 1 if is_eos.any() else None].astype(np.int32)


class _RowSampling(LogitsProcessor):
    """
    Scores of rows that are sampled each in its own way, or not yet, as long as their next token is known.

    `generate` calls it in the place where it would scale by the temperature: after penalties, before top-k and others.

    Args:
        known_ids (`torch.Tensor`):
            Tokens of the first columns, of shape (B, L), -1 where a row has none or is sampled.
        temperatures (`torch.Tensor`):
            Of shape (B,).
        min_lengths (`torch.Tensor`):
            Columns that a row must have before an EOS, of shape (B,).
        eos_token_ids (`torch.Tensor`):
            Of shape (E,).
    """

    def __init__(
        self,
        known_ids: torch.Tensor,
        temperatures: torch.Tensor,
        min_lengths: torch.Tensor,
        eos_token_ids: torch.Tensor,
    ):
        self.known_ids = known_ids
        self.temperatures = temperatures
        self.min_lengths = min_lengths
        self.longest_minimum = int(min_lengths.max())
        self.eos_token_ids = eos_token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        column = input_ids.shape[1]
        scores = scores / self.temperatures[:, None]
        if column < self.longest_minimum:
            too_short = (column < self.min_lengths)[:, None]
            scores[:, self.eos_token_ids] = scores[:, self.eos_token_ids].masked_fill(too_short, -torch.inf)
        if column >= self.known_ids.shape[1]:
            return scores
        token_ids = self.known_ids[:, column, None]
        is_known = token_ids >= 0
        index = token_ids.clamp(min=0)
        score = scores.gather(1, index).masked_fill(is_known, 0.0)
        return scores.masked_fill_(is_known, -torch.inf).scatter_(1, index, score)


class _RowEnds(StoppingCriteria):
    """Stops each row of a batch at its own number of columns, `ends` (B,), and tells the record of each step."""

    def __init__(self, ends: torch.Tensor, record: "_PolicyRecord"):
        self.ends = ends
        self.record = record

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.record.note(input_ids)
        return input_ids.shape[1] >= self.ends


class _PolicyRecord:
    """
    Keeps how likely each token was that a row went on with, and the entropy there: two numbers a token.

    They are the policy's, at the row's temperature: of logits that no penalty has changed and nothing has cut off. So
    they are taken from the model, and not where logits are processed.

    Args:
        temperatures (`torch.Tensor`):
            Of shape (B,).
    """

    def __init__(self, temperatures: torch.Tensor):
        self.temperatures = temperatures
        self.logits: list[torch.Tensor] = []  # of the last steps, of shape (B, V)
        self.columns: list[torch.Tensor] = []  # of the steps before, of shape (2, B, n)

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Keep them while `model` generates."""
        model = model.get_base_model() if is_peft_model(model) else model
        hook = model.register_forward_hook(
            lambda module, args, output: self.logits.append(output.logits[:, -1].clone())
        )
        try:
            yield
        finally:
            hook.remove()

    def note(self, input_ids: torch.Tensor) -> None:
        """Take note of the tokens that were sampled last; `input_ids` (B, L) ends with them."""
        self.input_ids = input_ids
        if len(self.logits) * self.logits[0].numel() >= MAX_LOGITS:
            self._reduce()

    def _reduce(self) -> None:
        """Two numbers in the place of each vocabulary. Many at a time: where they are small, it is calls that cost."""
        logits = torch.stack(self.logits, 1).to(self.input_ids.device).float() / self.temperatures[:, None, None]
        token_ids = self.input_ids[:, -len(self.logits) :, None]
        self.logits = []
        logprobs = logits.log_softmax(2)
        entropies = torch.special.entr(logprobs.exp()).sum(2)
        self.columns.append(torch.stack([logprobs.gather(2, token_ids).squeeze(2), entropies]))

    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies in nats, of shape (B, L), of all columns that were generated."""
        if self.logits:
            self._reduce()
        logprobs, entropies = torch.cat(self.columns, dim=2).cpu().numpy()
        return logprobs, entropies


class ContinuousBatchingSampler:
    """
    Draws with transformers' continuous batching: every continuation enters the batch as soon as there is room.

    Args:
        generation_model (`GenerationModel`):
            Context manager that yields the model.
        generation_config (`~transformers.GenerationConfig`):
            Sampling settings; temperature and budget are taken from the requests.
        continuous_batching_config (`~transformers.generation.ContinuousBatchingConfig`):
            Settings of the engine.
    """

    def __init__(
        self, generation_model: GenerationModel, generation_config: GenerationConfig, continuous_batching_config: Any
    ):
        self.generation_model = generation_model
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        for temperature in dict.fromkeys(request.temperature for request in requests):
            config = copy.deepcopy(self.generation_config)
            config.temperature = temperature
            with (
                self.generation_model() as model,
                model.continuous_batching_context_manager(
                    generation_config=config, continuous_batching_config=self.continuous_batching_config, timeout=5
                ) as manager,
            ):
                pending = {
                    manager.add_request(request.prefix_ids.tolist(), max_new_tokens=request.max_new_tokens): i
                    for i, request in enumerate(requests)
                    for _ in range(request.num_samples)
                    if request.temperature == temperature
                }
                while pending:
                    result = manager.get_result(timeout=1)
                    if result is None:
                        if not manager.is_running():
                            raise RuntimeError(
                                f"transformers' continuous batching stopped with {len(pending)} completions open. "
                                "Its error is in the log above; set use_transformers_continuous_batching=False to "
                                "generate without it."
                            )
                    elif result.error is not None:
                        raise RuntimeError(f"transformers' continuous batching failed on a request: {result.error}")
                    elif result.is_finished():
                        samples[pending.pop(result.request_id)].append(Sample(result.generated_tokens))
        return samples
