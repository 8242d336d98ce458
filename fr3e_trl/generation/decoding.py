"""TRL's generation mode, and the steps of transformers' `generate`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessorList
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from ..compat import TypedTrainer

# Name of transformers' hooks that make embeddings require gradients
HOOK = "make_inputs_require_grads"


class GenerateSteps:
    """
    The steps of transformers' `generate`, for custom decoding loops.

    Args:
        synced_gpus (`bool`):
            Whether all processes make the same number of forward passes, which `generate` itself ensures only without a
            custom loop. Needed where a forward pass is a collective call.
    """

    def __init__(self, synced_gpus: bool = False):
        self.synced_gpus = synced_gpus

    def run(self, model: Any, loop: Callable[..., torch.Tensor], inputs: dict[str, Any]) -> torch.Tensor:
        return model.generate(**inputs, custom_generate=loop)

    def sample(
        self, model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, arguments: dict[str, Any]
    ) -> torch.Tensor:
        return model._sample(input_ids, logits_processor, synced_gpus=self.synced_gpus, **arguments)

    def restored_state(self, model: Any, device: torch.device) -> AbstractContextManager[None]:
        return restored_state(model, device)

    def first_inputs(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)

    def next_inputs(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **model_kwargs)

    def updated(self, model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return model._update_model_kwargs_for_generation(outputs, model_kwargs)


@contextmanager
def generation_model(trainer: TypedTrainer) -> Iterator[Any]:
    """Enter generation mode as TRL does, and yield the model to generate with."""
    assert not isinstance(trainer.args.gradient_checkpointing_kwargs, str)  # any JSON has been parsed
    with (
        profiling_context(trainer, "transformers.generate"),
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        if trainer.use_transformers_continuous_batching and (trainer.args.bf16 or trainer.args.fp16):
            # Permanently, as TRL does, because the engine's attention kernels do not support float32
            model.to(torch.bfloat16 if trainer.args.bf16 else torch.float16)
            if trainer.args.cast_lm_head_to_fp32:
                model.lm_head.to(torch.float32)
        with restored_mode(trainer), contiguous_at_head(model):
            yield model


def contiguous_at_head(model: Any) -> AbstractContextManager[Any]:
    """
    Make the hidden states that the head receives contiguous, within the returned context.

    For prompts, `generate` passes a slice of the last positions. PyTorch 2.13 then expands a frozen head (LoRA) for
    each row, and on a CPU in bfloat16 it copies the head for each row: 2.7 GB for 48 rows of SmolLM2-135M.
    """
    head = model.get_output_embeddings()
    if head is None:
        return nullcontext()
    return head.register_forward_pre_hook(lambda _, inputs: tuple(hidden.contiguous() for hidden in inputs))


@contextmanager
def restored_mode(trainer: TypedTrainer) -> Iterator[None]:
    """Restore training or evaluation mode afterwards, because continuous batching changes it."""
    training = trainer.model.training
    try:
        yield
    finally:
        if trainer.model.training != training:
            trainer.model.train(training)


def drop_surplus_hooks(model: nn.Module) -> None:
    """
    Keep only one of the identical hooks that make a module's output require gradients.

    transformers adds a hook each time that gradient checkpointing is enabled, which TRL does after each generation and
    each scoring of log-probs, and never removes one. After many steps every forward pass would call thousands.
    """
    for module in model.modules():
        keys = [key for key, hook in module._forward_hooks.items() if getattr(hook, "__name__", "") == HOOK]
        for key in keys[:-1]:
            del module._forward_hooks[key]


@contextmanager
def restored_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Seed random generators for this context, and restore them and the modules' attributes and buffers afterwards."""
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in model.modules()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        try:
            torch.manual_seed(0)
            yield
        finally:
            for part, attributes, buffers in before:
                vars(part).clear()
                vars(part).update(attributes)
                part._buffers.clear()
                part._buffers.update(buffers)
