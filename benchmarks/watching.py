"""Watching a trainer train: its batches, its forward passes, and where its time goes."""

from types import ModuleType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from trl import GRPOTrainer

from fr3e_trl.trl_adapter import decoding, prompts, rewards

# The three methods of GRPOTrainer that FR3ETrainer overrides, and the part of a step's time that is its own in each
OVERRIDES = {
    "_generate_and_score_completions": "FR3E",
    "_compute_loss": "FR3E",
    "_get_per_token_logps_and_entropies": "log-probs",
}

# Methods and functions by the part of a step's time that they are
PARTS: list[tuple[type | ModuleType, str, str]] = [
    (GRPOTrainer, "_get_per_token_logps_and_entropies", "log-probs"),
    (GRPOTrainer, "_calculate_rewards", "rewards"),
    (GRPOTrainer, "_compute_loss", "loss"),
    (GRPOTrainer, "_generate_and_score_completions", "TRL"),
    (GRPOTrainer, "training_step", "TRL"),
    (AcceleratedOptimizer, "step", "TRL"),
    (decoding, "unwrap_model_for_generation", "TRL"),
    (prompts, "tokenize", "TRL"),
    (rewards, "decode", "TRL"),
]


class WatchedMixin:
    """A `GRPOTrainer`, or a subclass, that tells of its batches and forward passes, and changes nothing."""

    def on_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """Called with each batch of a training step."""

    def on_forward(self, num_tokens: int) -> None:
        """Called when a batch is scored, with how many tokens go through the model: without padding."""

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The only change is that `on_batch` is called."""
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self.model.training:
            self.on_batch(batch)
        return batch

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The only change is that `on_forward` is called."""

        def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            is_shared = "shared_prefixes" in kwargs  # without padding
            self.on_forward(kwargs["input_ids"].numel() if is_shared else int(kwargs["attention_mask"].sum()))

        handle = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]
        finally:
            handle.remove()
