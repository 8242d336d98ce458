"""The sampler that a trainer's settings ask for."""

from functools import partial

from trl.extras.profiling import profiling_context

from .compat import TypedTrainer, computed_in, is_sharded
from .fr3e_config import FR3EConfig
from .generation.continuous_batching import ContinuousBatchingSampler
from .generation.decoding import GenerateSteps, generation_model
from .generation.generate import GenerateSampler
from .generation.sampler import InStepSampler
from .generation.vllm import VLLMColocateSampler, VLLMServerSampler
from .images import image_inputs
from .method.sampling import Sampler


def make_sampler(trainer: TypedTrainer) -> Sampler:
    """What draws a trainer's rollouts: vLLM, transformers' continuous batching, or its `generate`."""
    profiler = partial(profiling_context, trainer, "vLLM.generate")
    model = partial(generation_model, trainer)
    sampler: Sampler
    if trainer.use_vllm and trainer.vllm_mode == "server":
        return VLLMServerSampler(trainer.vllm_generation, trainer.eos_token_ids, profiler)
    if trainer.use_vllm:
        return VLLMColocateSampler(trainer.vllm_generation, trainer.eos_token_ids, profiler)
    assert isinstance(trainer.args, FR3EConfig)
    is_early = bool(trainer.args.num_anchors) and trainer.args.anchor_threshold is not None
    is_alone = not (trainer.use_transformers_continuous_batching or is_sharded(trainer) or trainer.tools)
    steps = GenerateSteps(in_step=is_sharded(trainer) and trainer.accelerator.num_processes > 1)
    sampler = GenerateSampler(
        *(model, trainer.generation_config, trainer.accelerator.device, steps),
        image_inputs=partial(image_inputs, trainer),
        may_grow=is_early and is_alone,
        dtype=computed_in(trainer),
    )
    if trainer.use_transformers_continuous_batching:
        sampler = ContinuousBatchingSampler(model, trainer.generation_config, trainer.continuous_batching_config)
    return InStepSampler(sampler) if is_sharded(trainer) else sampler
