"""Sampling with transformers' continuous batching."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from transformers import GenerationConfig

from ..method.sampling import Sample, SamplingRequest
from .generate import GenerationModel


class ContinuousBatchingSampler:
    """
    Samples with transformers' continuous batching: a continuation enters the batch as soon as there is room.

    Args:
        generation_model (`GenerationModel`):
            Context manager that yields the model.
        generation_config (`Callable`):
            Returns a `GenerationConfig` with the sampling settings, except for the requests' temperatures and budgets.
        continuous_batching_config (`~transformers.generation.ContinuousBatchingConfig`):
            Settings of the engine.
    """

    def __init__(
        self,
        generation_model: GenerationModel,
        generation_config: Callable[[], GenerationConfig],
        continuous_batching_config: Any,
    ):
        self.generation_model = generation_model
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in requests]
        for temperature in dict.fromkeys(request.temperature for request in requests):
            config = copy.copy(self.generation_config())
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
                                f"transformers' continuous batching stopped with {len(pending)} unfinished "
                                "completions. Its error is in the log above. Set "
                                "use_transformers_continuous_batching=False to generate without it."
                            )
                    elif result.error is not None:
                        raise RuntimeError(f"transformers' continuous batching failed on a request: {result.error}")
                    elif result.is_finished():
                        samples[pending.pop(result.request_id)].append(Sample(result.generated_tokens))
        return samples
