"""Lines for the runner of `fr3e check`. This module imports nothing that takes seconds."""

import os
import signal
import time


def passes(setup):
    return f"process {os.getpid()}"


def fails(setup):
    print("what was printed before")
    raise ValueError("too bad")


def dies(setup):
    print("its last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(setup):
    time.sleep(1000)
