"""How far a comparison is, and how long it will still take."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

CONSOLE = Console(stderr=True)


class RunProgress:
    """
    Shows the progress of runs on stderr: a bar if it is a terminal, and a line for each finished run.

    Args:
        amounts (`dict[str, float]`):
            What each run is to spend, by its name.
    """

    def __init__(self, amounts: dict[str, float]):
        self.amounts = amounts
        self.done = dict.fromkeys(amounts, 0.0)
        self.num_finished = 0
        self.start = time.monotonic()
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

    def update(self, name: str, spent: float) -> None:
        """A run has spent so much."""
        self.done[name] = min(spent, self.amounts[name])
        self.bar.update(self.task, completed=sum(self.done.values()))

    def finish(self, name: str) -> None:
        """A run is done."""
        self.update(name, self.amounts[name])
        self.num_finished += 1
        elapsed = time.monotonic() - self.start
        left = elapsed * (sum(self.amounts.values()) / sum(self.done.values()) - 1)
        CONSOLE.print(
            f"[{self.num_finished}/{len(self.amounts)}] {name} after {minutes(elapsed)}, about {minutes(left)} left",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def minutes(seconds: float) -> str:
    """A duration, such as `2:05` for 125 seconds."""
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"
