"""A reward function for maths that cannot hang or crash a run."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("_math_worker.py")
MAX_STARTS = 2  # starts of the pool per answer: the pool also ends when it loses an idle process


def get_math_reward(time_limit: float = 5.0, num_workers: int | None = None) -> Callable[..., list[float | None]]:
    r"""
    Make a reward function that checks maths answers as [`~trl.rewards.accuracy_reward`] does, in worker processes.

    math-verify limits its time with a signal, which works only in the main thread and does not interrupt computations
    such as `9^{9^{9^9}}`, and it does not limit its memory. Here a worker is killed if it takes too long or needs more
    than 4 GiB. Its answer then scores 0, and other answers are unaffected.

    Args:
        time_limit (`float`, *optional*, defaults to `5.0`):
            Time limit for an answer, in seconds.
        num_workers (`int`, *optional*):
            Number of worker processes, which start when first needed. If `None`, one for each CPU, up to 4.

    Returns:
        `Callable`: Reward function `math_reward(completions, solution, **kwargs)` for standard or conversational
        completions. It returns 1.0 if the answer equals the solution, 0.0 if not, and `None` if the solution cannot be
        parsed. Several threads may call it at once. It logs the shares of completions that timed out or crashed:
        `math_reward/timeouts` and `math_reward/crashes`.

    Raises:
        ValueError: A limit is not positive.

    Needs math-verify and pebble (`pip install "fr3e-trl[math]"`) and a POSIX system.

    Example:

    ```python
    >>> from fr3e_trl.rewards import get_math_reward

    >>> math_reward = get_math_reward(time_limit=2.0)
    >>> math_reward([r"It is \boxed{0.5}.", r"It is \boxed{9^{9^{9^9}}}."], solution=[r"\frac{1}{2}", "4"])
    [1.0, 0.0]
    ```
    """
    if time_limit <= 0:
        raise ValueError(f"time_limit={time_limit} is not allowed: it must be above 0, for example 5.0.")
    if num_workers is None:
        num_workers = min(4, os.cpu_count() or 1)
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers} is not allowed: it must be at least 1, for example 4.")
    workers = _Workers(num_workers, time_limit)

    def math_reward(
        completions: list[Any],
        solution: list[str],
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        for text in solution:
            if not isinstance(text, str):
                raise TypeError(
                    f"The solution {text!r} is not a string. The 'solution' column must contain strings like '42'."
                )
        scores, failures = workers.ask(completions, solution)
        if log_metric is not None:
            for failure in ("timeouts", "crashes"):
                log_metric(f"math_reward/{failure}", failures.count(failure) / len(failures))
        return [score if failure is None else 0.0 for score, failure in zip(scores, failures, strict=True)]

    return math_reward


class _Workers:
    """
    A pool of worker processes, which start when first needed; see `_math_worker.py`.

    Args:
        num_workers (`int`):
            Number of processes.
        time_limit (`float`):
            Time limit for an answer, in seconds.
    """

    def __init__(self, num_workers: int, time_limit: float):
        self.num_workers = num_workers
        self.time_limit = time_limit
        self._lock = threading.Lock()
        self._connection: Connection | None = None  # the pool ends when this is closed

    def ask(self, completions: list[Any], solutions: list[Any]) -> tuple[list[Any], list[str | None]]:
        """The workers' replies to completions, and their failures: `"timeouts"`, `"crashes"` or `None` for each."""
        if importlib.util.find_spec("math_verify") is None or importlib.util.find_spec("pebble") is None:
            raise ImportError('math_reward needs math-verify and pebble: pip install "fr3e-trl[math]".')
        answers = [
            # The last turn if there are tools
            (completion if isinstance(completion, str) else text_of(completion[-1]), solution)
            for completion, solution in zip(completions, solutions, strict=True)
        ]
        outcomes: list[tuple[Any, str | None]] = []
        num_starts = 0
        with self._lock:
            while len(outcomes) < len(answers):
                # Kept only if all replies arrive: after an interrupt, late replies would be taken for later answers
                connection, self._connection = self._connection or self._start(), None
                try:
                    connection.send(answers[len(outcomes) :])
                    while len(outcomes) < len(answers):
                        outcomes.append(connection.recv())
                        num_starts = 0
                    self._connection = connection
                except (EOFError, OSError):
                    num_starts += 1
                    if num_starts > MAX_STARTS:
                        outcomes.append((None, "crashes"))
        return [reply for reply, _ in outcomes], [failure for _, failure in outcomes]

    def _start(self) -> Connection:
        """Start the pool in a separate program, and wait until it is ready."""
        connection, theirs = multiprocessing.Pipe()
        arguments = [WORKER, theirs.fileno(), self.num_workers, self.time_limit]
        with tempfile.TemporaryFile() as log:
            # -P keeps the script's directory out of sys.path, so that its modules do not shadow top-level ones
            self._process = subprocess.Popen(
                [sys.executable, "-P", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            try:
                connection.recv()
            except EOFError:
                log.seek(0)
                reason = log.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"The worker process of math_reward did not start. It wrote:\n{reason}") from None
        return connection


def text_of(message: dict[str, Any]) -> str:
    """The text of a message: its content, or the text parts of that."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


math_reward = get_math_reward()


def math_answers(completions: list[str]) -> list[str | None]:
    r"""
    The answers that `math_reward` extracts from completions, as text, such as `0.5` from `So \boxed{0.5}.`.

    Args:
        completions (`list[str]`):
            Completions as text.

    Returns:
        `list[str | None]`: The answer of each completion, truncated to 500 characters, or `None` if there is none.
    """
    answers, _ = _extraction.ask(completions, [None] * len(completions))
    return answers


_extraction = _Workers(min(4, os.cpu_count() or 1), time_limit=5.0)
