"""
Runs of a comparison, executed here or in worker processes, and where they are.

A library takes the GPUs of CUDA_VISIBLE_DEVICES when it first looks for them. So this module imports none that may
look before the worker has its own GPU.
"""

import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fr3e_trl.commands.usage import ExplainedError, UsageError, explain

if TYPE_CHECKING:
    from .runs import Run


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def execute_all(stage: str, runs: "list[Run]", num_workers: int | None) -> None:
    """Execute the runs of a stage whose result is not there yet, in workers of a GPU each where there are several."""
    done = [run for run in runs if Path(run.path).exists()]
    for run in done:
        shutil.rmtree(run.under_way, ignore_errors=True)  # it was killed just after its result was written
    runs = [run for run in runs if not Path(run.path).exists()]
    if not runs:
        return
    from .runs import execute

    devices = visible_devices()
    num_workers = num_workers or max(1, len(devices))
    began, numbers = time.monotonic(), itertools.count(1)

    def finished(name: str) -> None:
        number, took = next(numbers), time.monotonic() - began
        passed, left = (f"{s // 60}:{s % 60:02}" for s in map(round, (took, took / number * (len(runs) - number))))
        log(f"{stage} [{number}/{len(runs)}] {name} after {passed}, about {left} left")

    if num_workers > 1 or len(devices) > 1:
        _execute_in_workers(runs, num_workers, devices, finished)
        return
    for run in runs:
        execute(run)
        finished(Path(run.path).stem)


def _execute_in_workers(
    runs: "list[Run]", num_workers: int, devices: list[str], finished: Callable[[str], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    own_devices = context.Queue()
    for i in range(num_workers):
        own_devices.put(devices[i % len(devices)] if devices else None)
    pool = ProcessPoolExecutor(num_workers, context, start, (own_devices,))
    left = iter(runs)
    names: dict[Future[None], str] = {}  # of what is under way: the pool would not take back what it was given

    def begin(number: int) -> None:
        for run in itertools.islice(left, number):
            names[pool.submit(execute_run, run)] = Path(run.path).stem

    try:
        begin(num_workers)
        pool.submit(int)  # the pool looks whose end to wait for before it starts the last worker (Python 3.11)
        while names:
            done, _ = wait(names, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                finished(names.pop(future))
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


def start(devices: Any) -> None:
    """Begin as a worker: `devices` has a GPU for each, or `None`."""
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
    """Execute a run. Its error is one that can be sent to the parent."""
    from .runs import execute

    try:
        execute(run)
    except Exception as error:
        message = explain(error)
        if message is None or isinstance(error, UsageError):
            raise
        raise ExplainedError(message) from error
