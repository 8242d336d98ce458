"""Where the time of steps goes."""

import contextlib
import time
from collections.abc import Iterator
from operator import itemgetter


class Stopwatch:
    """
    Time by part, each moment counted for the innermost part that is running.

    A GPU computes while the program goes on. What it computes counts for the part that waits for it.

    Attributes:
        seconds (`dict[str, float]`):
            Of each part so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    def begin(self, part: str) -> None:
        """Count from now on for this part, until `end`."""
        self._turn()
        self._running.append(part)

    def end(self) -> None:
        """Go on with the part that was running before."""
        self._turn()
        self._running.pop()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context that counts for a part."""
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._running:
            part = self._running[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        """Each part's share, the largest first."""
        total = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=itemgetter(1), reverse=True)
        return ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts)
