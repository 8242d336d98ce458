"""What TRL logs."""

from typing import Any


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
