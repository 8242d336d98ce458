"""
Runs of a comparison, executed here or in worker processes.

A library takes the GPUs of CUDA_VISIBLE_DEVICES when it first looks for them. So this module imports none that may
look before the worker has its own GPU.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fr3e_trl.commands.usage import ExplainedError, UsageError, explain

from .outcomes import accuracies
from .progress import RunProgress

if TYPE_CHECKING:
    from .runs import Run

POLL_SECONDS = 0.5

_reports: Any = None  # where to tell how far its run is


def execute_all(stage: str, runs: "list[Run]", num_workers: int | None) -> None:
    """Execute the runs of a stage whose result is not there yet, in workers of a GPU each where there are several."""
    done = [run for run in runs if Path(run.path).exists()]
    for run in done:
        shutil.rmtree(run.under_way, ignore_errors=True)  # it was killed just after its result was written
    runs = [run for run in runs if not Path(run.path).exists()]
    if not runs:
        return
    from .runs import execute, read_result

    starts = [accuracies(read_result(run))[0] for run in done]
    devices = visible_devices()
    num_workers = num_workers or max(1, len(devices))
    amounts = {Path(run.path).stem: run.amount for run in runs}
    with RunProgress(stage, amounts, runs[0].cost.replace("_", " "), starts=starts) as progress:
        if num_workers > 1 or len(devices) > 1:
            _execute_in_workers(runs, num_workers, devices, progress)
            return
        for run in runs:
            name = Path(run.path).stem
            execute(run, lambda place, name=name: progress.update(name, place))  # type: ignore[misc]
            progress.finish(name)


def _execute_in_workers(runs: "list[Run]", num_workers: int, devices: list[str], progress: RunProgress) -> None:
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
    """
    Begin as a worker.

    Args:
        reports (`multiprocessing.Queue`):
            Takes the name of a run and where it is.
        devices (`multiprocessing.Queue`):
            Has a GPU for each worker, or `None`.
    """
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
