"""
A process that executes runs of a comparison.

Nothing that may look for GPUs is imported before the process has its own: they are those of CUDA_VISIBLE_DEVICES when
they are first looked for.
"""

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runs import Run

_reports: Any = None  # where to tell how far its run is


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
            Takes the name of a run and what it has spent.
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
    execute(run, lambda spent: _reports.put((name, spent)))
