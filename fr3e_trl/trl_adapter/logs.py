"""What TRL logs."""

from collections.abc import Iterator
from contextlib import contextmanager
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


def note_evaluation(trainer: Any) -> None:
    """
    Keep the mean reward of a batch of an evaluation, and the deviation in it, in a list for each evaluation. TRL logs
    their averages, which do not tell by how much prompts differ: a batch may be one prompt.
    """
    metrics = trainer._metrics["eval"]
    if len(metrics["reward"]) == 1:
        trainer.evaluations.append([])
    trainer.evaluations[-1].append((metrics["reward"][-1], metrics["reward_std"][-1]))


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
