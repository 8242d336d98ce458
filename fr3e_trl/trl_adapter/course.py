"""From where to where a run has come, by what it logged, and how much of that may be noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import Any

from transformers import TrainerState

from ..page.record import evaluated, is_number

VALUE = "fr3e/value/S0"
MOST_LOGS = 10  # at either end
FEWEST_FOR_NOISE = 5


@dataclass(frozen=True)
class Change:
    """
    A mean reward at the beginning of a run and at its end, each with half of its 95% interval.

    Args:
        name (`str`):
            The metric.
        when (`str`):
            Which logs the two are of.
        first (`float`, *optional*), last (`float`):
            The means. Of a single log there is no first.
        noise (`float`, *optional*):
            Half of the interval of either mean. `None` where too little was logged to tell.
    """

    name: str
    when: str
    first: float | None
    last: float
    noise: float | None

    @property
    def difference(self) -> float | None:
        """By how much the last mean is above the first."""
        return None if self.first is None else self.last - self.first

    @property
    def noise_of_difference(self) -> float | None:
        """Half of the interval of that."""
        return None if self.noise is None else math.sqrt(2) * self.noise


def changes(trainer: Any) -> list[Change]:
    """From where to where the run has come: in evaluation, if there was one, and while training."""
    datasets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {None: trainer.eval_dataset}
    logged = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    # A run that was resumed has logs of evaluations that were before
    batches = {
        id(entry): of_one for entry, of_one in zip(reversed(logged), reversed(trainer.evaluations), strict=False)
    }
    found = [
        change_in_evaluation(trainer.state, len(dataset) if hasattr(dataset, "__len__") else None, batches, name)
        for name, dataset in datasets.items()
    ]
    return [change for change in [*found, change_of_value(trainer.state)] if change is not None]


def change_of_value(state: TrainerState) -> Change | None:
    """
    The change of the value at the prompt, which is the reward in a run without exploration.

    The mean over a quarter of the logs, at most ten, at either end. Their noise is that of neighbouring logs.
    """
    is_exploring = any(VALUE in entry for entry in state.log_history)
    name = VALUE if is_exploring else "reward"
    values = [entry[name] for entry in state.log_history if is_number(entry.get(name))]
    if not values:
        return None
    number = min(max(len(values) // 4, 1), MOST_LOGS)
    when = f"first and last {number} of {len(values)} logs" if number > 1 else f"first and last of {len(values)} logs"
    if len(values) == 1:
        return Change(name, "one log", None, values[0], None)
    noise = noise_of_logs(values)
    return Change(
        name,
        when,
        sum(values[:number]) / number,
        sum(values[-number:]) / number,
        None if noise is None else noise / math.sqrt(number),
    )


def change_in_evaluation(
    state: TrainerState,
    num_prompts: int | None,
    batches: dict[int, list[tuple[float, float]]],
    name: str | None = None,
) -> Change | None:
    """
    The change of the mean reward in evaluation, from the first to the last. `name` is that of one of several sets, and
    `batches` has the means and deviations in those of evaluations, by the id of the log.

    Its noise is that of drawing the prompts, as if all completions of a prompt had the same reward: at most too wide.
    `None` where all rewards are the same, which does not tell how they spread.
    """
    entries = [entry for entry in state.log_history if is_number(entry.get("eval_reward")) and evaluated(entry) == name]
    if not entries:
        return None
    first, last = entries[0], entries[-1]
    deviation = max((deviation_of(batches[id(entry)]) for entry in (first, last) if id(entry) in batches), default=0)
    degrees = (num_prompts or 1) - 1
    return Change(
        "eval_reward" if name is None else f"eval_reward of {name}",
        f"steps {first['step']} and {last['step']}" if len(entries) > 1 else f"step {last['step']}",
        first["eval_reward"] if len(entries) > 1 else None,
        last["eval_reward"],
        quantile(degrees) * deviation / math.sqrt(degrees) if deviation and degrees else None,
    )


def deviation_of(batches: Sequence[tuple[float, float]]) -> float:
    """The standard deviation of all rewards, of batches of one size with such means and deviations."""
    known = [(mean, 0.0 if math.isnan(deviation) else deviation) for mean, deviation in batches if not math.isnan(mean)]
    square = fmean(mean**2 + deviation**2 for mean, deviation in known)
    return math.sqrt(max(square - fmean(mean for mean, _ in known) ** 2, 0.0))


def noise_of_logs(values: Sequence[float]) -> float | None:
    """
    Half of the 95% interval of a single log, by how much neighbouring logs differ, which a slow trend hardly changes.

    Their mean squared difference is twice the variance (von Neumann), with 2(n - 1)² / (3n - 4) degrees of freedom.
    `None` with fewer than five logs.
    """
    n = len(values)
    if n < FEWEST_FOR_NOISE:
        return None
    variance = sum((b - a) ** 2 for a, b in pairwise(values)) / (2 * (n - 1))
    return quantile(2 * (n - 1) ** 2 / (3 * n - 4)) * math.sqrt(variance)


def quantile(degrees: float) -> float:
    """Student's, of a 95% interval, as by Abramowitz and Stegun, 26.7.5: 4% too small with 3 degrees of freedom."""
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
