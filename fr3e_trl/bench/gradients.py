"""
Gradients of real trainers at a fixed policy, and how they agree.

Notation used for tensor shapes:
    - P: parameters of the policy
    - B: batches
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from .arms import make_trainer
from .own_task import OwnTask
from .tasks import Task

# Settings that would make several updates of a batch, or several batches an update
PER_BATCH = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "num_iterations")


class _KeepGradients(TrainerCallback):
    def __init__(self, receive: Callable[[torch.Tensor], None]):
        self.receive = receive

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        self.receive(flat_gradient(model))


def batch_gradients(
    settings: dict[str, Any],
    policy: Path,
    task: Task | OwnTask,
    num_batches: int,
    seed: int,
    receive: Callable[[torch.Tensor], None],
) -> Any:
    """
    Have an arm's trainer compute the gradients of independent batches at the starting policy.

    The trainer trains as it always does, at a learning rate of 0.

    Args:
        settings (`dict[str, Any]`):
            Settings of the arm, see [`make_trainer`].
        policy (`Path`):
            Directory of the policy.
        task ([`Task`]):
            The task.
        num_batches (`int`):
            How many batches, each of other prompts.
        seed (`int`):
            Decides prompts and sampling.
        receive (`Callable`):
            Is given each batch's gradient, of shape (P,).

    Returns:
        `GRPOTrainer`: The trainer, with its measurements.
    """
    settings = {name: value for name, value in settings.items() if name not in PER_BATCH}
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(
            settings,
            policy,
            task,
            Path(output_dir),
            seed,
            max_steps=num_batches,
            num_train_examples=num_batches * settings["num_prompts"],
            learning_rate=0.0,
            weight_decay=0.0,
            max_grad_norm=0.0,  # no clipping
        )
        trainer.add_callback(_KeepGradients(receive))
        trainer.train()
    return trainer


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """Gradient of all trained parameters, (P,) in double precision. It points uphill: the reverse of the loss's."""
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return -torch.cat([gradient.flatten() for gradient in gradients]).double().cpu()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of the angle between two gradients of shape (P,); 0 if one is 0, which points nowhere."""
    norms = a.norm() * b.norm()
    return (a @ b / norms).item() if norms > 0 else 0.0


def reference_quality(agreement: float) -> float:
    """
    Cosine of the reference with the true gradient, from that of its two halves.

    Halves that are the true gradient and independent noise agree to ρ = S / (S + N), S and N being the squared norms of
    signal and noise; their mean has half the noise, and a squared cosine of S / (S + N / 2) = 2ρ / (1 + ρ) with the
    signal. 0 where the halves do not agree at all.
    """
    return math.sqrt(max(0.0, 2 * agreement / (1 + agreement)))


def progress(cos: float) -> float:
    """
    Expected progress of a step of the best size in a direction with this cosine, in units that grow with the batch.

    A gradient with signal S and noise N / n of n tokens has c² = S / (S + N / n), so that c² / (1 − c²) = n S / N:
    twice as much means that half the tokens would do.
    """
    return cos**2 / (1 - cos**2)


def progress_error(cos: float, error: float) -> float:
    """Standard error of [`progress`] from that of the cosine, to first order: the derivative is 2c / (1 − c²)²."""
    return 2 * abs(cos) / (1 - cos**2) ** 2 * error
