"""Scripts in one process or several, forked from one that has imported what all need, which takes seven seconds."""

import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from swift import read_metadata_once

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = ["accelerate.commands.launch", "datasets", "peft", "transformers.models.qwen3.modeling_qwen3"]
CONTEXT.set_forkserver_preload([*IMPORTED, "fr3e_trl.fr3e_trainer"])

SCRIPT = Path(__file__).with_name("processes_train.py")
RECIPES = Path(__file__).parents[1] / "recipes" / "accelerate"
TIMEOUT = 200  # seconds: nothing of this may hang


def launch(
    output: Path,
    num_processes: int,
    settings: dict,
    *options: str,
    recipe: str = "ddp",
    check: bool = True,
    script: Path = SCRIPT,
):
    """Train by a configuration in the recipes; returns what each process wrote, or, not `check`ed, success and log."""
    output.mkdir()
    arguments = ["--num_processes", num_processes, "--main_process_port", 0, script, output, json.dumps(settings)]
    log = output / "log"
    process = start(recipe, [*arguments, *options], output, log)
    finish(process, log)
    if not check:
        return process.exitcode == 0, log.read_text()
    assert process.exitcode == 0, log.read_text()[-3000:]
    return [json.loads((output / f"{i}.json").read_text()) for i in range(num_processes)]


def launch_nodes(output: Path, num_nodes: int, num_processes: int, settings: dict, *options: str, recipe: str = "ddp"):
    """Train in one launch for each node, all on this machine; returns what each of all processes wrote."""
    output.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = ["--num_machines", num_nodes, "--num_processes", num_processes, "--main_process_ip", "127.0.0.1"]
    script = [SCRIPT, output, json.dumps(settings), *options]
    logs = [output / f"log-{rank}" for rank in range(num_nodes)]
    nodes = [
        start(recipe, [*shared, "--main_process_port", port, "--machine_rank", rank, *script], output, log)
        for rank, log in enumerate(logs)
    ]
    for node, log in zip(nodes, logs, strict=True):
        finish(node, log)
        assert node.exitcode == 0, log.read_text()[-3000:]
    return [json.loads((output / f"{i}.json").read_text()) for i in range(num_processes)]


def start(recipe: str, arguments: list, output: Path, log: Path):
    arguments = ["--config_file", RECIPES / f"{recipe}.yaml", "--mixed_precision", "no", *arguments]
    process = CONTEXT.Process(target=run, args=([str(argument) for argument in arguments], output, log))
    process.start()
    return process


def finish(process, log: Path) -> None:
    process.join(TIMEOUT)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        raise subprocess.TimeoutExpired("accelerate launch", TIMEOUT, log.read_text())


def run(arguments: list[str], directory: Path, log: Path) -> None:
    """`accelerate launch`, whose processes are forked."""
    from accelerate.commands import launch as accelerate_launch
    from torch.distributed import run as torchrun

    os.setsid()
    with log.open("w") as file:
        begin(directory, file.fileno(), file.fileno())
    get_parser = torchrun.get_args_parser

    def forking_parser():
        parser = get_parser()
        parser.set_defaults(run_path=True, start_method="fork")
        return parser

    torchrun.get_args_parser = forking_parser
    sys.path.insert(0, str(Path(__file__).parent))  # as a script has it
    sys.argv = ["accelerate launch", *arguments]
    accelerate_launch.main()


def wait_until(holds, seconds=60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_script(script: Path, *arguments: str):
    """A process that runs a script here, with what it prints as `stdout`, and its errors in a file `stderr`."""
    reader, writer = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=run_script, args=(script, arguments, Path.cwd(), writer))
    process.start()
    writer.close()
    process.stdout = os.fdopen(os.dup(reader.fileno()))
    return process


def run_script(script: Path, arguments: tuple[str, ...], directory: Path, output: Connection) -> None:
    with open(directory / "stderr", "w") as errors:
        begin(directory, output.fileno(), errors.fileno())
    output.close()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def begin(directory: Path, stdout: int, stderr: int) -> None:
    """Of a forked process: as one that was started there, whose output goes to these files."""
    gc.freeze()  # or each `train()` looks for garbage in what was imported
    read_metadata_once()
    os.chdir(directory)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
