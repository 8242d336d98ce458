"""The sampler that a trainer's settings ask for, and settings that change while it lives."""

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

# Sampling settings as the trainer's attributes are called, and what `generation_config` calls those named otherwise
SETTINGS = ("max_completion_length", "eos_token_ids", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
IN_GENERATION_CONFIG = {"max_completion_length": "max_new_tokens", "eos_token_ids": "eos_token_id"}

# What TRL reads of itself at each step, and what FR3E's credit, trees and data depend on since the trainer was made
FIXED = ("num_generations", "num_iterations", "scale_rewards", "multi_objective_aggregation", "loss_type")


def make_sampler(trainer: TypedTrainer) -> Sampler:
    """What draws a trainer's rollouts: vLLM, transformers' continuous batching, or its `generate`."""
    profiler = partial(profiling_context, trainer, "vLLM.generate")
    model = partial(generation_model, trainer)
    sampler: Sampler
    assert isinstance(trainer.args, FR3EConfig)
    if trainer.use_vllm and trainer.vllm_mode == "server":
        server_sampler = AheadSampler if trainer.args.max_staleness else VLLMServerSampler
        return server_sampler(trainer.vllm_generation, trainer.eos_token_ids, profiler)
    if trainer.use_vllm:
        return VLLMColocateSampler(trainer.vllm_generation, trainer.eos_token_ids, profiler)
    is_early = bool(trainer.args.num_anchors) and trainer.args.anchor_threshold is not None
    is_alone = not (trainer.use_transformers_continuous_batching or is_sharded(trainer) or trainer.tools)
    steps = GenerateSteps(synced_gpus=is_sharded(trainer) and trainer.accelerator.num_processes > 1)
    sampler = GenerateSampler(
        *(model, lambda: trainer.generation_config, trainer.accelerator.device, steps),
        image_inputs=partial(image_inputs, trainer),
        may_grow=is_early and is_alone,
        dtype=computed_in(trainer),
    )
    if trainer.use_transformers_continuous_batching:
        sampler = ContinuousBatchingSampler(
            model, lambda: trainer.generation_config, trainer.continuous_batching_config
        )
    return InStepSampler(sampler) if is_sharded(trainer) else sampler


class LiveSettings:
    """
    Sampling settings that may be changed after a trainer was made: by a script, or by a callback between two steps.

    TRL keeps each in two places, the trainer and its `generation_config` (`vllm_generation` with vLLM). At each step
    the place that was changed since the step before is what counts, and the other is set to it.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            A trainer that TRL has set up.
    """

    def __init__(self, trainer: TypedTrainer):
        self.trainer = trainer
        self._has_engine = trainer.use_vllm
        self._ends = trainer.eos_token_ids  # the list that samplers have
        self._fixed = {name: getattr(trainer, name) for name in FIXED}
        self._known = {place: value for places in self._found().values() for place, (_, _, value) in places.items()}
        self._checked = None if self._has_engine else trainer.generation_config.to_dict()

    def update(self) -> None:
        """
        Take up what was changed.

        Raises:
            ValueError: A value is impossible, or cannot be honoured, or two places were set to different values.
        """
        for name, value in self._fixed.items():
            if getattr(self.trainer, name) != value:
                raise ValueError(
                    f"trainer.{name} was changed from {value!r} to {getattr(self.trainer, name)!r}, which must stay as "
                    f"it was when the trainer was made. Set {name} in its FR3EConfig."
                )
        if not self._has_engine:
            config = self.trainer.generation_config
            for name, value in self.trainer.generation_kwargs.items():  # what a new object leaves open
                if name not in IN_GENERATION_CONFIG.values() and getattr(config, name, None) is None:
                    setattr(config, name, value)
        for setting, places in self._found().items():
            changed = {place: value for place, (_, _, value) in places.items() if value != self._known[place]}
            if len(set(changed.values())) > 1:
                told = " and ".join(f"{place}={_shown(value)}" for place, value in changed.items())
                raise ValueError(f"{told} differ. Set one of them, or both to the same value.")
            if not changed:
                continue
            ((place, value), *_) = changed.items()
            _check(setting, place, value)
            for owner, name, _ in places.values():
                setattr(owner, name, self._written(value) if setting == "eos_token_ids" else value)
            self._known |= dict.fromkeys(places, value)
        if not self._has_engine and self.trainer.generation_config.to_dict() != self._checked:
            checks.check_generation_config(self.trainer)
            self._checked = self.trainer.generation_config.to_dict()

    def _found(self) -> dict[str, dict[str, tuple[Any, str, Any]]]:
        """For each setting and each place that it is kept in, which object has it, by what name, and its value."""
        return {setting: dict(self._places(setting)) for setting in SETTINGS}

    def _places(self, setting: str) -> Iterator[tuple[str, tuple[Any, str, Any]]]:
        trainer = self.trainer
        yield f"trainer.{setting}", (trainer, setting, _plain(getattr(trainer, setting)))
        if not self._has_engine:
            name, config = IN_GENERATION_CONFIG.get(setting, setting), trainer.generation_config
            place = f"trainer.generation_config.{name}"
            if getattr(config, name, None) is None and hasattr(self, "_known"):  # a new object leaves it open
                value = self._known[place]
                setattr(config, name, list(value) if isinstance(value, tuple) else value)
            found, is_end = getattr(config, name, None), setting == "eos_token_ids"
            yield place, (config, name, _plain([found] if is_end and isinstance(found, int) else found))
        elif setting != "eos_token_ids":
            engine = trainer.vllm_generation
            yield f"trainer.vllm_generation.{setting}", (engine, setting, _plain(getattr(engine, setting)))

    def _written(self, ends: tuple[int, ...]) -> list[int]:
        """The tokens that end a completion, in the list that samplers have."""
        self._ends[:] = ends
        return self._ends


def _plain(value: Any) -> Any:
    """A setting in a form that can be compared: the tokens that end a completion as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check(setting: str, place: str, value: Any) -> None:
    """Refuse a value that is impossible."""
    problem = None
    if setting == "max_completion_length" and not (isinstance(value, int) and value > 0):
        problem = "a whole number above 0"
    elif setting == "temperature" and not (isinstance(value, int | float) and 0 < value < math.inf):
        problem = "a number above 0"
    elif setting == "eos_token_ids" and not (
        isinstance(value, tuple) and value and all(isinstance(token, int) for token in value)
    ):
        problem = "a list of token ids, and not empty"
    if problem is not None:
        raise ValueError(f"{place}={_shown(value)!r} is not allowed: it must be {problem}.")
