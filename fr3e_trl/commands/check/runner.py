"""
Lines of a check, one after the other in a process of their own.

A line may hang, or take its process down, and a kernel that fails on a GPU leaves it of no use. So what follows a
failure has a new process. This module imports nothing that takes seconds.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..usage import one_line

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

END_SECONDS = 5  # for a process to end by itself
LAUNCHER_SECONDS = 2  # for a launcher to end its processes
LOG_CHARACTERS = 3000  # of what was printed before a failure


class NotRun(Exception):
    """A line cannot be run here. The message says why."""


class Wrong(Exception):
    """What a line found is not as it should be. The message says how."""


@dataclass(frozen=True)
class Line:
    """
    A line of the check.

    Args:
        name (`str`):
            What it checks.
        function (`str`):
            `module:name` of a function, which takes the setup, and returns what it found. It raises [`NotRun`],
            [`Wrong`], or whatever else goes wrong.
        remedy (`str`):
            What to do if it fails.
        seconds (`float`):
            How long it may take.
    """

    name: str
    function: str
    remedy: str
    seconds: float = 90


@dataclass(frozen=True)
class Result:
    """What came of a line: what was found, or why it was not run; and of a failure the traceback and the output."""

    name: str
    outcome: str
    told: str
    seconds: float = 0.0
    log: str = ""


def run_line(line: Line, setup: Any) -> Result:
    """Run a line here. Whatever it raises is its result."""
    began = time.monotonic()
    module, _, name = line.function.partition(":")
    try:
        told = getattr(importlib.import_module(module, __package__), name)(setup)
    except NotRun as reason:
        return Result(line.name, NOT_RUN, str(reason), time.monotonic() - began)
    except Exception as error:
        kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
        return failure(line, f"{kind}{one_line(error).rstrip('.')}", began, traceback.format_exc())
    return Result(line.name, PASSED, told, time.monotonic() - began)


def failure(line: Line, told: str, began: float, log: str = "") -> Result:
    return Result(line.name, FAILED, f"{told}. {line.remedy}.", time.monotonic() - began, log)


class Worker:
    """A process that runs lines, with what they print in a file."""

    def __init__(self, log: Path):
        context = multiprocessing.get_context("spawn")
        self.log = log
        self.log.touch()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(log)))
        self.process.start()
        theirs.close()

    def run(self, line: Line, setup: Any, seconds: float) -> Result:
        """Run a line there, for so long at most."""
        began, printed = time.monotonic(), self.log.stat().st_size
        try:
            self.connection.send((line, setup))
            if self.connection.poll(seconds):
                result: Result = self.connection.recv()
            else:
                self.kill()
                result = failure(line, f"It still ran after {seconds:.0f} s", began)
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            result = failure(line, f"It ended its process by {end}", began)
        if result.outcome != FAILED:
            return result
        text = self.log.read_bytes()[printed:].decode(errors="replace")
        return replace(result, log=f"{result.log}\n{text[-LOG_CHARACTERS:]}")

    def kill(self) -> None:
        """End the process and those that it started, whatever they do. A launcher that is told to end ends its own."""
        for end, seconds in ((signal.SIGTERM, LAUNCHER_SECONDS), (signal.SIGKILL, 0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid or 0, end)
                time.sleep(seconds)
        self.process.kill()

    def end(self) -> None:
        """Have the process end by itself, or else kill it."""
        self.connection.close()
        self.process.join(END_SECONDS)
        self.kill()
        self.process.join()


def _serve(connection: Connection, log: str) -> None:
    """Run the lines that are sent."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    with contextlib.suppress(EOFError):  # without its parent it has nothing to do
        while True:
            line, setup = connection.recv()
            connection.send(run_line(line, setup))


def run_lines(lines: Sequence[Line], setup: Any, seconds: float, directory: Path) -> Iterator[Line | Result]:
    """
    Run lines, and yield each before it begins, then its result.

    Args:
        lines (`Sequence[Line]`):
            What to run.
        setup (`Any`):
            What their functions take.
        seconds (`float`):
            How long all of them may take. Those that have not ended by then are not run.
        directory (`Path`):
            Where what they print goes.
    """
    ends = time.monotonic() + seconds
    over = f"the {seconds:.0f} s of --time_limit were over"
    worker: Worker | None = None
    try:
        for line in lines:
            left = ends - time.monotonic()
            if left <= 0:
                yield Result(line.name, NOT_RUN, over)
                continue
            yield line
            worker = worker or Worker(directory / "log")
            result = worker.run(line, setup, min(left, line.seconds))
            if result.outcome == FAILED:
                worker.end()
                worker = None
                if left < line.seconds and time.monotonic() >= ends:
                    result = Result(line.name, NOT_RUN, over, result.seconds)
            yield result
    finally:
        if worker is not None:
            worker.end()
