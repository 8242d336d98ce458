"""Creates a trainer's sampler, and applies sampling settings that are changed during training."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from trl.extras.profiling import profiling_context

from . import checks
from .compat import TypedTrainer, computed_in, is_sharded
from .fr3e_config import FR3EConfig
from .generation.ahead import AheadSampler
from .generation.continuous_batching import ContinuousBatchingSampler
from .generation.decoding import GenerateSteps, generation_model
from .generation.generate import GenerateSampler
from .generation.sampler import InStepSampler
from .generation.vllm import VLLMColocateSampler, VLLMServerSampler
from .images import image_inputs
from .method.sampling import Sampler

# Sampling settings by their names in the trainer, and the different names of some in `generation_config`
SETTINGS = ("max_completion_length", "eos_token_ids", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
IN_GENERATION_CONFIG = {"max_completion_length": "max_new_tokens", "eos_token_ids": "eos_token_id"}

# Attributes that TRL reads at each step, but that FR3E's credit, trees and data depend on from the start
FIXED = (
    *("num_generations", "num_iterations", "scale_rewards", "multi_objective_aggregation"),
    *("loss_type", "importance_sampling_level"),
)


def make_sampler(trainer: TypedTrainer) -> Sampler:
    """The sampler for a trainer's settings: vLLM, transformers' continuous batching, or `generate`."""
    profiler = partial(profiling_context, trainer, "vLLM.generate")
    model = partial(generation_model, trainer)
    sampler: Sampler
    assert isinstance(trainer.args, FR3EConfig)
    if trainer.use_vllm and trainer.vllm_mode == "server":
        server_sampler = AheadSampler if trainer.args.max_staleness else VLLMServerSampler
        return server_sampler(trainer.vllm_generation, trainer.eos_token_ids, profiler)
    if trainer.use_vllm:
        return VLLMColocateSampler(trainer.vllm_generation, trainer.eos_token_ids, profiler)
    has_rule = bool(trainer.args.num_anchors) and trainer.args.anchor_threshold is not None
    is_plain = not (trainer.use_transformers_continuous_batching or is_sharded(trainer) or trainer.tools)
    steps = GenerateSteps(synced_gpus=is_sharded(trainer) and trainer.accelerator.num_processes > 1)
    sampler = GenerateSampler(
        *(model, lambda: trainer.generation_config, trainer.accelerator.device, steps),
        image_inputs=partial(image_inputs, trainer),
        may_grow=has_rule and is_plain,
        dtype=computed_in(trainer),
    )
    if trainer.use_transformers_continuous_batching:
        sampler = ContinuousBatchingSampler(
            model, lambda: trainer.generation_config, trainer.continuous_batching_config
        )
    return InStepSampler(sampler) if is_sharded(trainer) else sampler


class LiveSettings:
    """
    Sampling settings that a script or a callback may change after the trainer was created.

    TRL stores each setting in two places: the trainer, and its `generation_config` (`vllm_generation` with vLLM). At
    each step, a value that was changed in one place since the previous step is copied to the other.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            A trainer that TRL has set up.
    """

    def __init__(self, trainer: TypedTrainer):
        self.trainer = trainer
        self._has_engine = trainer.use_vllm
        self._eos_token_ids = trainer.eos_token_ids  # the list that samplers hold
        self._fixed = {name: getattr(trainer, name) for name in FIXED}
        self._previous = {
            place: value for setting in SETTINGS for place, (_, _, value) in dict(self._places(setting)).items()
        }
        self._checked = None if self._has_engine else trainer.generation_config.to_dict()

    def update(self) -> None:
        """
        Apply changed settings.

        Raises:
            ValueError: A value is not allowed or cannot be honoured, or two places were set to different values.
        """
        for name, value in self._fixed.items():
            if getattr(self.trainer, name) != value:
                raise ValueError(
                    f"trainer.{name} was changed from {value!r} to {getattr(self.trainer, name)!r}, but cannot be "
                    f"changed after the trainer was created. Set {name} in its FR3EConfig."
                )
        if not self._has_engine:
            config = self.trainer.generation_config
            for name, value in self.trainer.generation_kwargs.items():  # a new object may not have them
                if name not in IN_GENERATION_CONFIG.values() and getattr(config, name, None) is None:
                    setattr(config, name, value)
        for setting in SETTINGS:
            places = dict(self._places(setting))
            changed = {place: value for place, (_, _, value) in places.items() if value != self._previous[place]}
            if len(set(changed.values())) > 1:
                conflict = " and ".join(f"{place}={_shown(value)}" for place, value in changed.items())
                raise ValueError(f"{conflict} differ. Set one of them, or both to the same value.")
            if not changed:
                continue
            ((place, value), *_) = changed.items()
            _check(setting, place, value)
            for owner, name, _ in places.values():
                if setting == "eos_token_ids":
                    self._eos_token_ids[:] = value
                    setattr(owner, name, self._eos_token_ids)
                else:
                    setattr(owner, name, value)
            self._previous |= dict.fromkeys(places, value)
        if not self._has_engine and self.trainer.generation_config.to_dict() != self._checked:
            checks.check_generation_config(self.trainer)
            self._checked = self.trainer.generation_config.to_dict()

    def _places(self, setting: str) -> Iterator[tuple[str, tuple[Any, str, Any]]]:
        """The places of a setting, each with the object that has it, its name there and its value."""
        trainer = self.trainer
        yield f"trainer.{setting}", (trainer, setting, _comparable(getattr(trainer, setting)))
        if not self._has_engine:
            name, config = IN_GENERATION_CONFIG.get(setting, setting), trainer.generation_config
            place = f"trainer.generation_config.{name}"
            if getattr(config, name, None) is None and hasattr(self, "_previous"):  # a new object may not have it
                value = self._previous[place]
                setattr(config, name, list(value) if isinstance(value, tuple) else value)
            found = getattr(config, name, None)
            if setting == "eos_token_ids" and isinstance(found, int):
                found = [found]
            yield place, (config, name, _comparable(found))
        elif setting != "eos_token_ids":
            engine = trainer.vllm_generation
            yield f"trainer.vllm_generation.{setting}", (engine, setting, _comparable(getattr(engine, setting)))


def _comparable(value: Any) -> Any:
    """A setting with lists as tuples."""
    return tuple(value) if isinstance(value, list) else value


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check(setting: str, place: str, value: Any) -> None:
    """Raise a `ValueError` if a value is not allowed."""
    allowed = None
    if setting == "max_completion_length" and not (isinstance(value, int) and value > 0):
        allowed = "a whole number above 0"
    elif setting == "temperature" and not (isinstance(value, int | float) and 0 < value < math.inf):
        allowed = "a number above 0"
    elif setting == "eos_token_ids" and not (
        isinstance(value, tuple) and value and all(isinstance(token, int) for token in value)
    ):
        allowed = "a non-empty list of token ids"
    if allowed is not None:
        raise ValueError(f"{place}={_shown(value)!r} is not allowed: it must be {allowed}.")
