"""What TRL logs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

# Means over the tokens of a micro-batch that are in the loss, beside clip_ratio/...
OVER_TOKENS = {"entropy", "kl", "cispo_clip_ratio", "vespo/phi_seq_mean"}


@contextmanager
def without_tokens(trainer: Any) -> Iterator[None]:
    """
    Have TRL log no mean over tokens, in a loss that has none. It logs 0 for it, which would count as much as the means
    of other micro-batches.
    """
    metrics = trainer._metrics["train"]
    before = {name: list(values) for name, values in metrics.items()}
    yield
    for name in [name for name in metrics if name in OVER_TOKENS or name.startswith("clip_ratio/")]:
        if name in before:
            metrics[name] = before[name]
        else:
            del metrics[name]


@contextmanager
def without_window(trainer: Any) -> Iterator[None]:
    """
    Have TRL's adaptive entropy bonus stay as it is where no micro-batch of an update has a token in its loss. TRL takes
    their entropy for 0, and raises its coefficient.
    """
    before = trainer.entropy_coef, trainer._last_world_entropy
    yield
    if trainer.use_adaptive_entropy and trainer.accelerator.sync_gradients and trainer._last_world_entropy == 0:
        trainer.entropy_coef, trainer._last_world_entropy = before
        trainer._metrics["train"]["entropy_coef"][-1:] = before[:1]


def log_spread(trainer: Any) -> None:
    """
    Have an evaluation log the standard deviation of all its rewards. TRL's `reward_std` is that of each batch, on
    average: next to 0 where a batch is one prompt, whose completions do alike.
    """
    metrics = trainer._metrics["eval"]
    batches = [
        (mean, 0.0 if math.isnan(deviation) else deviation)
        for mean, deviation in zip(metrics.get("reward", []), metrics.get("reward_std", []), strict=True)
        if not math.isnan(mean)
    ]
    if batches:
        square = fmean(mean**2 + deviation**2 for mean, deviation in batches)
        metrics["fr3e/reward_std"] = [math.sqrt(max(square - fmean(mean for mean, _ in batches) ** 2, 0.0))]


def log_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Add a training step's metrics to those that TRL averages and logs."""
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(value)


def last_metric(trainer: Any, name: str) -> float:
    """A metric of the last training step, if it was not logged yet."""
    return trainer._metrics["train"][name][-1]


def last_rewards(trainer: Any) -> dict[str, list[float]]:
    """Rewards of the rows of the last batch, by the name of the reward function."""
    return {name: list(rewards) for name, rewards in trainer._logs["rewards"].items()}
