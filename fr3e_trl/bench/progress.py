"""How far a comparison is, and how long it will still take."""

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

CONSOLE = Console(stderr=True)

# A log has a line at most as often, and one for each finished run
SECONDS_BETWEEN_LINES = 60


@dataclass(frozen=True)
class Place:
    """
    Where a run is.

    Args:
        spent (`float`):
            What it has spent of its budget.
        step (`int`):
            Optimizer steps so far.
        pass_at_1 (`float`):
            Held-out pass@1 when it was last evaluated.
    """

    spent: float
    step: int
    pass_at_1: float


class RunProgress:
    """
    Shows the progress of runs on stderr: a bar and where the last run is on a terminal, a line a minute in a log, and a
    line for each finished run.

    Args:
        amounts (`dict[str, float]`):
            What each run is to spend, by its name.
        cost (`str`):
            What that is of, to be read.
    """

    def __init__(self, amounts: dict[str, float], cost: str):
        self.amounts = amounts
        self.cost = cost
        self.done = dict.fromkeys(amounts, 0.0)
        self.num_finished = 0
        self.start = self.last_line = time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=CONSOLE,
            disable=not sys.stderr.isatty(),
            speed_estimate_period=600,
        )
        self.task = self.bar.add_task(f"{len(amounts)} runs", total=sum(amounts.values()))

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()

    def update(self, name: str, place: Place) -> None:
        """A run is there."""
        self._spend(name, place.spent)
        told = (
            f"{name}: step {place.step}, {place.spent:,.0f} of {self.amounts[name]:,.0f} {self.cost}, "
            f"pass@1 {place.pass_at_1:.3f}"
        )
        self.bar.update(self.task, description=f"{self.num_finished} of {len(self.amounts)} runs; {told}")
        if not sys.stderr.isatty() and time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self._print(f"{told}, {self._times()}")

    def finish(self, name: str) -> None:
        """A run is done."""
        self._spend(name, self.amounts[name])
        self.num_finished += 1
        self._print(f"[{self.num_finished}/{len(self.amounts)}] {name} {self._times()}")

    def _spend(self, name: str, spent: float) -> None:
        self.done[name] = min(spent, self.amounts[name])
        self.bar.update(self.task, completed=sum(self.done.values()))

    def _times(self) -> str:
        elapsed, done = time.monotonic() - self.start, sum(self.done.values())
        if done == 0:
            return f"after {minutes(elapsed)}"
        left = elapsed * (sum(self.amounts.values()) / done - 1)
        return f"after {minutes(elapsed)}, about {minutes(left)} left"

    def _print(self, line: str) -> None:
        self.last_line = time.monotonic()
        CONSOLE.print(line, markup=False, highlight=False, soft_wrap=True)


def minutes(seconds: float) -> str:
    """A duration, such as `2:05` for 125 seconds."""
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"
