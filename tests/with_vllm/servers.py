"""A real vLLM server on this machine's CPU, as `examples/serve_demo.py` starts it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import requests

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from serve_demo import BLOCK_SIZE, ENVIRONMENT, MAX_LORA_RANK, POLICY, server_command

__all__ = ["BLOCK_SIZE", "ENVIRONMENT", "MAX_LORA_RANK", "POLICY", "Server"]


class Server:
    """A server that can be killed and started again at the same address."""

    def __init__(self, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                server_command(self.port), stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
            )

    def kill(self) -> None:
        """kill -9 of the server and of its engine."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> None:
        give_up = time.monotonic() + 300
        while not self.is_up():
            assert self.process.poll() is None and time.monotonic() < give_up, self.log.read_text()[-5000:]
            time.sleep(0.5)

    def is_up(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False
