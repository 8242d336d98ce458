"""Lines for the runner of `fr3e check`. This module imports nothing that takes seconds."""

import os
import signal
import subprocess
import sys


def passes(setup):
    return f"process {os.getpid()}"


def fails(setup):
    print("what was printed before")
    raise ValueError("too bad")


def dies(setup):
    print("its last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(setup):
    """With a launcher that ends its process, in a session of its own, when it is told to end itself."""
    code = (
        "import signal, subprocess, sys; child = subprocess.Popen(['sleep', '1000'], start_new_session=True); "
        "print(child.pid, flush=True); signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit())); "
        "child.wait()"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
