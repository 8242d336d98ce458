"""
Runs of a comparison, executed here or in worker processes, and where they are.

A library takes the GPUs of CUDA_VISIBLE_DEVICES when it first looks for them. So this module imports none that may
look before the worker has its own GPU.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fr3e_trl.commands.usage import ExplainedError, UsageError, explain

from .outcomes import Place, accuracies, told_apart

if TYPE_CHECKING:
    from .runs import Run

POLL_SECONDS = 0.5
SECONDS_BETWEEN_LINES = 60

_reports: Any = None  # where to tell how far its run is


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """
    Tells where the runs of a stage are: a line a minute, and one for each finished run, on stderr.

    Args:
        stage (`str`), cost (`str`):
            What the runs are for, and what they spend, to be read.
        amounts (`dict[str, float]`):
            What each run is to spend, by its name.
        starts (`set[float]`):
            Held-out pass@1 that earlier runs of the comparison began at. The first that begins elsewhere is told of.
    """

    def __init__(self, stage: str, amounts: dict[str, float], cost: str, starts: set[float]):
        self.stage, self.amounts, self.cost, self.starts = stage, amounts, cost, starts
        self.done = dict.fromkeys(amounts, 0.0)
        self.done_before = dict.fromkeys(amounts, 0.0)  # by an earlier call
        self.num_finished = 0
        self.start = self.last_line = time.monotonic()

    def update(self, name: str, place: Place) -> None:
        """A run is there."""
        self.done_before[name] = place.spent_before
        self.done[name] = min(place.spent, self.amounts[name])
        if place.step == 0 and not told_apart(self.starts or {place.pass_at_1}):
            self.starts.add(place.pass_at_1)
            if apart := told_apart(self.starts):
                tell(f"Warning: {apart}")
        if time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            spent = f"{place.spent:,.0f} of {self.amounts[name]:,.0f} {self.cost}"
            self.line(f"{name}: step {place.step}, {spent}, pass@1 {place.pass_at_1:.3f},")

    def finish(self, name: str) -> None:
        """A run is done."""
        self.done[name] = self.amounts[name]
        self.num_finished += 1
        self.line(name)

    def line(self, what: str) -> None:
        """With how long this call has taken, and how long it still will at its speed so far."""
        self.last_line = time.monotonic()
        elapsed, done = self.last_line - self.start, sum(self.done.values())
        done_now = done - sum(self.done_before.values())
        left = elapsed * (sum(self.amounts.values()) - done) / done_now if done_now > 0 else None
        times = f"after {minutes(elapsed)}" + ("" if left is None else f", about {minutes(left)} left")
        tell(f"{self.stage} [{self.num_finished}/{len(self.amounts)}] {what} {times}")


def minutes(seconds: float) -> str:
    """A duration, such as `2:05` for 125 seconds."""
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


def execute_all(stage: str, runs: "list[Run]", num_workers: int | None) -> None:
    """Execute the runs of a stage whose result is not there yet, in workers of a GPU each where there are several."""
    done = [run for run in runs if Path(run.path).exists()]
    for run in done:
        shutil.rmtree(run.under_way, ignore_errors=True)  # it was killed just after its result was written
    runs = [run for run in runs if not Path(run.path).exists()]
    if not runs:
        return
    from .runs import execute, read_result

    starts = {accuracies(read_result(run))[0] for run in done}
    devices = visible_devices()
    num_workers = num_workers or max(1, len(devices))
    amounts = {Path(run.path).stem: run.amount for run in runs}
    progress = Progress(stage, amounts, runs[0].cost.replace("_", " "), starts)
    if num_workers > 1 or len(devices) > 1:
        _execute_in_workers(runs, num_workers, devices, progress)
        return
    for run in runs:
        name = Path(run.path).stem
        execute(run, lambda place, name=name: progress.update(name, place))  # type: ignore[misc]
        progress.finish(name)


def _execute_in_workers(runs: "list[Run]", num_workers: int, devices: list[str], progress: Progress) -> None:
    context = multiprocessing.get_context("spawn")
    reports, own_devices = context.Queue(), context.Queue()
    for i in range(num_workers):
        own_devices.put(devices[i % len(devices)] if devices else None)
    pool = ProcessPoolExecutor(num_workers, context, start, (reports, own_devices))
    left = iter(runs)
    names: dict[Future[None], str] = {}  # of what is under way: the pool would not take back what it was given

    def begin(number: int) -> None:
        for run in islice(left, number):
            names[pool.submit(execute_run, run)] = Path(run.path).stem

    try:
        begin(num_workers)
        pool.submit(int)  # the pool looks whose end to wait for before it starts the last worker (Python 3.11)
        while names:
            done, _ = wait(names, POLL_SECONDS, FIRST_COMPLETED)
            while not reports.empty():
                progress.update(*reports.get())
            for future in done:
                future.result()
                progress.finish(names.pop(future))
                begin(1)
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.terminate()  # each goes on from its last evaluation
        if isinstance(error, BrokenProcessPool):
            raise ExplainedError(
                f"A worker was killed, as it is where memory does not suffice, while {num_workers} runs were under "
                "way. Try a smaller num_workers. The same command goes on from what is there."
            ) from error
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def visible_devices() -> list[str]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def start(reports: Any, devices: Any) -> None:
    """Begin as a worker: `reports` takes the name of a run and where it is, `devices` has a GPU for each, or `None`."""
    global _reports
    _reports = reports
    device = devices.get()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the parent hears too, and ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would finish its run, and then wait for the next for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def execute_run(run: "Run") -> None:
    """Execute a run, and tell how far it is."""
    from .runs import execute

    name = Path(run.path).stem
    try:
        execute(run, lambda place: _reports.put((name, place)))
    except Exception as error:
        told = explain(error)
        if told is None or isinstance(error, UsageError):
            raise
        raise ExplainedError(told) from error
