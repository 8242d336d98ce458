"""Sampling with transformers: `generate`, and continuous batching."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .sampler import Sample, SamplingRequest

# Enters generation mode, as TRL does, and yields the model to generate with.
GenerationModel = Callable[[], AbstractContextManager[Any]]


class GenerateSampler:
    """
    Draws with transformers' `generate`: all requests of a temperature as one left-padded batch.

    Args:
        generation_model (`GenerationModel`):
            Context manager that yields the model.
        generation_config (`~transformers.GenerationConfig`):
            Sampling settings; temperature and budget are taken from the requests. Its `eos_token_id` must be a list.
    """

    def __init__(self, generation_model: GenerationModel, generation_config: GenerationConfig):
        self.generation_model = generation_model
        self.generation_config = generation_config

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        for temperature in dict.fromkeys(request.temperature for request in requests):
            rows = [
                i
                for i, request in enumerate(requests)
                for _ in range(request.num_samples)
                if request.temperature == temperature
            ]
            for i, token_ids in zip(rows, self._generate([requests[i] for i in rows], temperature), strict=True):
                samples[i].append(Sample(token_ids))
        return samples

    def _generate(self, rows: list[SamplingRequest], temperature: float) -> list[list[int]]:
        """One continuation for each row."""
        config = copy.deepcopy(self.generation_config)
        config.temperature = temperature
        budgets = torch.tensor([row.max_new_tokens for row in rows])
        config.max_new_tokens = int(budgets.max())
        width = max(len(row.prefix_ids) for row in rows)
        with self.generation_model() as model:
            input_ids = torch.tensor(
                [[config.pad_token_id] * (width - len(row.prefix_ids)) + row.prefix_ids.tolist() for row in rows],
                device=model.device,
            )
            attention_mask = torch.tensor(
                [[0] * (width - len(row.prefix_ids)) + [1] * len(row.prefix_ids) for row in rows], device=model.device
            )
            output_ids = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([_RowBudgets(width + budgets.to(model.device))]),
            )
        new_ids = output_ids[:, width:].cpu()
        is_eos = torch.isin(new_ids, torch.tensor(config.eos_token_id))
        # A row ends with its first EOS, or where its budget does; what follows is padding.
        first_eos = torch.where(is_eos.any(1), is_eos.int().argmax(1), new_ids.shape[1])
        lengths = torch.minimum(first_eos + 1, budgets).tolist()
        return [ids[:length] for ids, length in zip(new_ids.tolist(), lengths, strict=True)]


class _RowBudgets(StoppingCriteria):
    """Stops each row of a batch at its own total length, `max_lengths` (B,)."""

    def __init__(self, max_lengths: torch.Tensor):
        self.max_lengths = max_lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.max_lengths


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
