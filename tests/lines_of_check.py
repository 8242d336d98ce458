"""Lines for the runner of `fr3e check`. This module imports nothing that takes seconds."""

import os
import signal
import subprocess


def passes(setup):
    return f"process {os.getpid()}"


def fails(setup):
    print("what was printed before")
    raise ValueError("too bad")


def dies(setup):
    print("its last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(setup):
    child = subprocess.Popen(["sleep", "1000"])
    print(child.pid, flush=True)
    child.wait()
