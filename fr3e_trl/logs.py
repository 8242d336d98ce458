"""What TRL logs."""

import math
from typing import Any

# Means over the tokens of a micro-batch that are in the loss, beside clip_ratio/...
OVER_TOKENS = {"entropy", "kl", "cispo_clip_ratio", "vespo/phi_seq_mean"}


def mark_empty(metrics: dict[str, list[float]], is_end_of_update: bool) -> None:
    """
    Have a micro-batch without a token in the loss, in any process, count for no mean over tokens.

    TRL logs 0 for it, which would count as much as the means of other micro-batches. It leaves NaN out. An update of
    which no micro-batch has a token keeps the 0.
    """
    if metrics["entropy"][-1] != 0:  # another process has tokens
        return
    for name, values in metrics.items():
        if name in OVER_TOKENS or name.startswith("clip_ratio/"):
            values[-1] = math.nan
            if is_end_of_update and all(map(math.isnan, values)):
                values[-1] = 0.0


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
