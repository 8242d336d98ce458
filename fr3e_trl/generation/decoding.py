"""How the policy generates: TRL's generation mode, and the steps of transformers' `generate`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessorList
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from ..compat import TypedTrainer

# What transformers calls the hooks that have embeddings require gradients
HOOK = "make_inputs_require_grads"


class GenerateSteps:
    """
    The steps of transformers' `generate`, for a decoding loop of one's own.

    Args:
        in_step (`bool`):
            Whether a forward pass is a collective call. A process then makes as many as the others do. `generate` sees
            to it only with its own loop.
    """

    def __init__(self, in_step: bool = False):
        self.in_step = in_step

    def run(self, model: Any, loop: Callable[..., torch.Tensor], inputs: dict[str, Any]) -> torch.Tensor:
        return model.generate(**inputs, custom_generate=loop)

    def sample(
        self, model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, arguments: dict[str, Any]
    ) -> torch.Tensor:
        return model._sample(input_ids, logits_processor, synced_gpus=self.in_step, **arguments)

    def unchanged(self, model: Any, device: torch.device) -> AbstractContextManager[None]:
        return unchanged(model, device)

    def first_inputs(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)

    def next_inputs(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **model_kwargs)

    def updated(self, model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return model._update_model_kwargs_for_generation(outputs, model_kwargs)


@contextmanager
def generation_model(trainer: TypedTrainer) -> Iterator[Any]:
    """Enter generation mode as TRL does, and yield the model to generate with."""
    assert not isinstance(trainer.args.gradient_checkpointing_kwargs, str)  # which is read as JSON
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
            # As TRL does, for good: the engine's attention kernels take no float32
            model.to(torch.bfloat16 if trainer.args.bf16 else torch.float16)
            if trainer.args.cast_lm_head_to_fp32:
                model.lm_head.to(torch.float32)
        with in_its_mode(trainer), contiguous_at_head(model):
            yield model


def contiguous_at_head(model: Any) -> AbstractContextManager[Any]:
    """
    Give the head contiguous hidden states, until the end of the context that is returned.

    Of prompts, `generate` gives it a slice: their last positions. A frozen head, LoRA's, is then repeated for each row
    (PyTorch 2.13), and on a CPU in bfloat16 it is copied as often: 2.7 GB for 48 rows of SmolLM2-135M.
    """
    head = model.get_output_embeddings()
    if head is None:
        return nullcontext()
    return head.register_forward_pre_hook(lambda _, inputs: tuple(hidden.contiguous() for hidden in inputs))


@contextmanager
def in_its_mode(trainer: TypedTrainer) -> Iterator[None]:
    """Put the model back into training or evaluation mode: continuous batching leaves it in one of its own."""
    training = trainer.model.training
    try:
        yield
    finally:
        if trainer.model.training != training:
            trainer.model.train(training)


def drop_surplus_hooks(model: nn.Module) -> None:
    """
    Leave one of the hooks that have a module's output require gradients, which are all alike.

    transformers adds one each time that gradient checkpointing is enabled again, which TRL does after each round of
    generation and of log-probs, and removes none: every forward pass would call thousands of them after as many steps.
    """
    for module in model.modules():
        hooks = [k for k, hook in module._forward_hooks.items() if getattr(hook, "__name__", "") == HOOK]
        for k in hooks[:-1]:
            del module._forward_hooks[k]


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back what modules keep to themselves, and the generators of random numbers, which begin at a seed."""
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
