"""How far a comparison is, and how long it will still take."""

import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from .outcomes import told_apart

CONSOLE = Console(stderr=True)

# A log has a line as often, and one for each finished run
SECONDS_BETWEEN_LINES = 60


@dataclass(frozen=True)
class Place:
    """
    Where a run is.

    Args:
        spent (`float`):
            What it has spent of its budget.
        spent_before (`float`):
            What of that an earlier call has, if the run was cut and goes on.
        step (`int`):
            Optimizer steps so far.
        pass_at_1 (`float`, *optional*):
            Held-out pass@1 when it was last evaluated, if it was.
    """

    spent: float
    spent_before: float
    step: int
    pass_at_1: float | None = None


class RunProgress:
    """
    Shows the progress of runs on stderr: a bar and where a run is on a terminal, a line a minute in a log, also while a
    step takes longer, and a line for each finished run.

    Args:
        stage (`str`):
            What the runs are for: the time left is that of this stage.
        amounts (`dict[str, float]`):
            What each run is to spend, by its name.
        cost (`str`):
            What that is of, to be read.
        first (`str`):
            What is done until the first run tells where it is.
        starts (`Iterable[float]`):
            Held-out pass@1 that earlier runs of the comparison began at. The first that begins elsewhere is told of.
    """

    def __init__(
        self,
        stage: str,
        amounts: dict[str, float],
        cost: str,
        first: str = "first evaluation",
        starts: Iterable[float] = (),
    ):
        self.stage = stage
        self.amounts = amounts
        self.cost = cost
        self.done = dict.fromkeys(amounts, 0.0)
        self.done_before = dict.fromkeys(amounts, 0.0)  # by an earlier call
        self.num_finished = 0
        self.told = f"{first},"
        self.starts = set(starts)
        self.is_told_apart = False
        self.start = time.monotonic()
        self._is_over = threading.Event()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=CONSOLE,
            disable=not sys.stderr.isatty(),
        )
        self.task = self.bar.add_task(self.line(), total=sum(amounts.values()))

    def __enter__(self) -> Self:
        self.bar.start()
        threading.Thread(target=self._keep_telling, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self.bar.stop()

    def update(self, name: str, place: Place) -> None:
        """A run is there."""
        self.done_before[name] = place.spent_before
        self._spend(name, place.spent)
        amount = self.amounts[name]
        self.told = f"{name}: step {place.step}, {place.spent:,.0f} of {amount:,.0f} {self.cost},"
        if place.pass_at_1 is not None:
            self.told += f" pass@1 {place.pass_at_1:.3f},"
            if place.step == 0 and not self.is_told_apart:
                self._tell_apart(place.pass_at_1)

    def finish(self, name: str) -> None:
        """A run is done."""
        self._spend(name, self.amounts[name])
        self.num_finished += 1
        self.told = name
        self._tell()

    def _tell_apart(self, start: float) -> None:
        """Hours of runs that cannot be compared would otherwise be told of in the report alone."""
        self.starts.add(start)
        if apart := told_apart(self.starts):
            self.is_told_apart = True
            CONSOLE.print(f"Warning: {apart}", markup=False, highlight=False, soft_wrap=True)

    def _spend(self, name: str, spent: float) -> None:
        self.done[name] = min(spent, self.amounts[name])
        self.bar.update(self.task, completed=sum(self.done.values()))

    def line(self) -> str:
        """Where the runs are."""
        return f"{self.stage} [{self.num_finished}/{len(self.amounts)}] {self.told} {self._times()}"

    def _times(self) -> str:
        """How long this call has taken, and how long it still will at its speed so far."""
        elapsed, done = time.monotonic() - self.start, sum(self.done.values())
        done_now = done - sum(self.done_before.values())
        if done_now <= 0:
            return f"after {minutes(elapsed)}"
        left = elapsed * (sum(self.amounts.values()) - done) / done_now
        return f"after {minutes(elapsed)}, about {minutes(left)} left"

    def _keep_telling(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_LINES if self.bar.disable else 1):
            if self.bar.disable:
                self._tell()
            else:
                self.bar.update(self.task, description=self.line())

    def _tell(self) -> None:
        CONSOLE.print(self.line(), markup=False, highlight=False, soft_wrap=True)


def minutes(seconds: float) -> str:
    """A duration, such as `2:05` for 125 seconds."""
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"
