"""One server for all tests."""

import os
import sys

import pytest
from servers import Server

# uv leaves what it installs uncompiled, and a process that keeps nothing compiles for five seconds before it begins
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(scope="session")
def running_server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server") / "log")
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(running_server):
    """The server, up, whatever the test before did to it."""
    if running_server.process.poll() is not None:
        running_server.start()
    running_server.wait()
    return running_server
