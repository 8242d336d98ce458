"""
Several processes of `fr3e train`, in a program of its own: the one that has read the arguments may hold a GPU.

One that fails has told why, unless a signal has ended it. A launcher's own report is left out.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(num_processes: str, *arguments: str) -> None:
    """Start as many processes, and end with the exit code of the first that fails, or 128 and a signal's number."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launcher = ["--standalone", f"--nproc_per_node={num_processes}", "-m", "fr3e_trl.commands.cli", "train"]
    try:
        torchrun([*launcher, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        reason = "as it is where memory does not suffice" if name == "SIGKILL" else "and has told above what it could"
        told = f"Process {rank} was ended by {name}, {reason}."
        print(f"fr3e train: error: {told}", file=sys.stderr)
        sys.exit(2)
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main(*sys.argv[1:])
