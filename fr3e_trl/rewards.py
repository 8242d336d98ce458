"""A reward for maths that cannot hang or crash a run."""

import contextlib
import importlib.util
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("_math_worker.py")
START_LIMIT = 120.0  # seconds for a worker to start, on a machine that is busy


def get_math_reward(time_limit: float = 5.0, num_workers: int | None = None) -> Callable[..., list[float | None]]:
    r"""
    Make a reward function that checks maths answers as [`~trl.rewards.accuracy_reward`] does, in worker processes.

    math-verify limits its own time by a signal. A signal works in the main thread alone, and does not interrupt
    computations such as `9^{9^{9^9}}`. math-verify does not limit its memory. Here a worker is killed if it takes too
    long, or more than 4 GiB. Its answer scores 0, other answers are not affected, and the next one gets a new worker.

    Args:
        time_limit (`float`, *optional*, defaults to `5.0`):
            Seconds that a worker may take for an answer.
        num_workers (`int`, *optional*):
            Worker processes, of about 60 MB each. They start when first needed. If `None`, one for each CPU, up to 4.

    Returns:
        `Callable`: Reward function `math_reward(completions, solution, **kwargs)` for standard or conversational
        completions. It gives 1.0 if the answer equals the solution, 0.0 if not, and `None` if the solution cannot be
        parsed. Any thread may call it, and several at once. It logs the shares of completions that timed out or
        crashed: `math_reward/timeouts` and `math_reward/crashes`.

    Raises:
        ValueError: A limit is not positive.

    Needs math-verify (`pip install "fr3e-trl[math]"`) and a POSIX system.

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
                raise TypeError(f"The solution {text!r} is no text. The 'solution' column must hold strings like '42'.")
        scores, failures = workers.ask(completions, solution)
        if log_metric is not None:
            for failure in ("timeouts", "crashes"):
                log_metric(f"math_reward/{failure}", failures.count(failure) / len(failures))
        return [score if failure is None else 0.0 for score, failure in zip(scores, failures, strict=True)]

    return math_reward


class _Workers:
    """
    Worker processes. They start when first needed.

    Args:
        num_workers (`int`):
            How many.
        time_limit (`float`):
            Seconds for an answer.
    """

    def __init__(self, num_workers: int, time_limit: float):
        self.num_workers = num_workers
        self.time_limit = time_limit
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(_Worker())

    def ask(self, completions: list[Any], solutions: Sequence[str | None]) -> tuple[list[Any], list[str | None]]:
        """The workers' reply to each completion, and its failure: `"timeouts"`, `"crashes"` or `None`."""
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError('math_reward needs math-verify: pip install "fr3e-trl[math]".')
        with ThreadPoolExecutor(self.num_workers) as pool:
            replies = list(pool.map(self._ask_one, zip(completions, solutions, strict=True)))
        return [reply for reply, _ in replies], [failure for _, failure in replies]

    def _ask_one(self, answer: tuple[str | list[dict[str, Any]], str | None]) -> tuple[Any, str | None]:
        completion, solution = answer
        content = completion if isinstance(completion, str) else text_of(completion[-1])  # with tools, the last turn
        worker = self._idle.get()
        try:
            return worker.ask(content, solution, self.time_limit)
        finally:
            self._idle.put(worker)


def text_of(message: dict[str, Any]) -> str:
    """What a message says: its content, or the text parts of it."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


class _Worker:
    """A process that takes one answer at a time. It is replaced when it dies."""

    def __init__(self) -> None:
        self._process: Any = None  # a subprocess.Popen

    def ask(self, completion: str, solution: str | None, time_limit: float) -> tuple[Any, str | None]:
        """A completion's reward, or its answer if there is no solution. Its failure is as in [`_Workers.ask`]."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        try:
            process.stdin.write(json.dumps([completion, solution, time_limit]).encode() + b"\n")
            process.stdin.flush()
            reply = _read(process, time_limit)
        except BrokenPipeError:
            reply = b""
        if reply:
            return json.loads(reply), None
        self._stop()
        return None, "timeouts" if reply is None else "crashes"

    def _start(self) -> Any:
        # multiprocessing would import the user's script again, or fork a process that uses a GPU. With -P the modules
        # beside the worker's file are not found as top-level ones.
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            self._stop = weakref.finalize(self, _stop, process)  # at the latest when the interpreter exits
            if not _read(process, START_LIMIT):
                self._stop()
                errors.seek(0)
                reason = errors.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"A worker process of math_reward did not start. It wrote:\n{reason}")
        return process


def _read(process: Any, time_limit: float) -> bytes | None:
    """A line that the worker wrote. It is empty if the worker died, and `None` if time ran out."""
    ends, line = time.monotonic() + time_limit, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(ends - time.monotonic()):
                return None
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                return b""
            line += piece
    return line


def _stop(process: Any) -> None:
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


math_reward = get_math_reward()


def math_answers(completions: list[str]) -> list[str | None]:
    r"""
    The answers that `math_reward` reads in completions, as text. In `So \boxed{0.5}.` it reads `0.5`.

    Args:
        completions (`list[str]`):
            Texts.

    Returns:
        `list[str | None]`: The answer of each completion, cut at 500 characters. `None` if it has none.
    """
    answers, _ = _extraction.ask(completions, [None] * len(completions))
    return answers


_extraction = _Workers(min(4, os.cpu_count() or 1), time_limit=5.0)
