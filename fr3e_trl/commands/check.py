"""
Check that training works on this machine: train a small model for a few steps in every way, line by line.

    fr3e check
    fr3e check --model_name_or_path Qwen/Qwen3-0.6B

Nothing is downloaded, unless --model_name_or_path names a model of the hub: then its configuration, or with
--with_weights all of it. The exit code is 0 if no line failed, 1 if one did, and 2 for wrong arguments.
"""

import argparse
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from .usage import Parser, UsageError, one_line

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

LINE_SECONDS = 120  # time limit of a line
LOG_CHARACTERS = 3000  # of the output before a failure

Setup = argparse.Namespace  # see `read_setup`


class Line(NamedTuple):
    """A line of the check, run by a function that takes the [`Setup`]. The remedy says what to do if it fails."""

    name: str
    function: str
    remedy: str
    module: str = "fr3e_trl.commands.check_lines"


REPORT = "Attach this file to an issue of fr3e_trl"
SHARING = f"See the docs on models, or train with share_prefixes=False. {REPORT}"
LINES = [
    Line("versions and devices", "machine", "Install a torch for this GPU and its driver, or use --use_cpu"),
    Line("model", "make_policy", "Use --model_name_or_path with a model that transformers knows, or leave it out"),
    Line("losses without exploration equal GRPO's", "losses", REPORT),
    Line("shared prefixes equal rows apart", "sharing", SHARING),
    Line("trees by generate", "grow", REPORT),
    Line("LoRA", "lora", f"Update peft. {REPORT}"),
    Line("QLoRA", "qlora", f"Update bitsandbytes, or train without load_in_4bit. {REPORT}"),
    Line("save and resume", "resume", f"Check the free space on the disk of TMPDIR. {REPORT}"),
    Line("several processes", "processes", f"Set NCCL_DEBUG=INFO to see more. {REPORT}"),
    Line("vLLM server", "vllm_server", "Start the server as the docs on vLLM say, and check its log"),
    Line("vLLM colocate", "vllm_colocate", f"Use a vLLM server. {REPORT}"),
]


class NotRun(Exception):
    """A line cannot be run here. The message says why."""


class CheckFailed(Exception):
    """A line ran, and its result is wrong. The message says how."""


class Result(NamedTuple):
    """The outcome of a line, with what it found or why it was not run. `log`: traceback and output of a failure."""

    name: str
    outcome: str
    message: str
    seconds: float = 0.0
    log: str = ""


def main(argv: list[str]) -> None:
    """Run the lines, and write the report after each, so that a crash does not lose it."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        setup = read_setup(argv, directory)
        write_report(setup.output, argv, results)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(setup.gpus[:1])  # else transformers splits each batch
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
        for result in run_lines(LINES, setup):
            print(as_text(result), flush=True)
            results.append(result)
            write_report(setup.output, argv, results)
    print(f"\n{summary(results)}. Attach {setup.output} to an issue.")
    if any(result.outcome == FAILED for result in results):
        sys.exit(1)


def read_setup(argv: list[str], directory: str = "") -> Setup:
    """
    The options, the `directory` for files of the lines, the `policy` to train (a directory or hub id), and `gpus`, the
    devices for `CUDA_VISIBLE_DEVICES`. Only the line of several processes uses more than the first.
    """
    parser = Parser(prog="fr3e check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", help="directory or hub id of a model with the architecture (default: a small Qwen3)")
    add("--with_weights", action="store_true", help="train that model itself, not a small one like it")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights (default: float32)")
    add("--attn_implementation", help="kernel of attention, such as flash_attention_2 (default: the model's)")
    add("--trust_remote_code", action="store_true", help="allow code of the model's repository to run")
    add("--vllm_server_base_url", help="address of a vLLM server to ask, such as http://localhost:8000")
    add("--num_processes", type=int, help="processes that train together (default: 2 if there are two GPUs)")
    add("--use_cpu", action="store_true", help="do not use GPUs")
    add("--time_limit", type=float, default=180, help="seconds for all lines (default: 180)")
    add("--output", type=Path, default=Path("fr3e_check.md"), help="file to write (default: fr3e_check.md)")
    setup = parser.parse_args(argv)
    if setup.with_weights and setup.model_name_or_path is None:
        raise UsageError("--with_weights needs the model: --model_name_or_path MODEL.")
    if setup.num_processes is not None and setup.num_processes < 1:
        raise UsageError(f"--num_processes {setup.num_processes} must be at least 1.")
    if not setup.time_limit > 0:
        raise UsageError(f"--time_limit {setup.time_limit:g} must be above 0, for example 180.")
    found = range(len([*Path("/dev").glob("nvidia[0-9]*")]) or 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, found)))
    is_hidden = setup.use_cpu or visible.startswith("-")
    setup.gpus = [] if is_hidden else [name for name in visible.split(",") if name]
    setup.directory = directory
    setup.policy = setup.model_name_or_path if setup.with_weights else str(Path(directory, "policy"))
    return setup


def as_text(result: Result) -> str:
    return f"{result.outcome:<7}  {result.name:<39}  {result.message} ({result.seconds:.1f} s)"


def summary(results: list[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, FAILED, NOT_RUN))


def write_report(path: Path, argv: list[str], results: list[Result]) -> None:
    """Write the results so far, with the logs of failures."""
    text = [f"# {shlex.join(['fr3e', 'check', *argv])}", f"{time.strftime('%Y-%m-%d %H:%M')}. {summary(results)}."]
    text += ["\n".join(["```text", *map(as_text, results), "```"])]
    for result in results:
        if result.log:
            log = result.log.replace("```", "'''").strip()
            text += [f"## {result.name}", f"```text\n{log}\n```"]
    path.write_text("\n\n".join(text) + "\n")


def run_line(line: Line, setup: Setup) -> Result:
    """Run a line in this process. Whatever it raises becomes its result."""
    start, log = time.monotonic(), ""
    try:
        outcome, message = PASSED, getattr(importlib.import_module(line.module), line.function)(setup)
    except NotRun as reason:
        outcome, message = NOT_RUN, str(reason)
    except Exception as error:
        kind = "" if isinstance(error, CheckFailed) else f"{type(error).__name__}: "
        outcome, message, log = FAILED, f"{kind}{one_line(error).rstrip('.')}. {line.remedy}.", traceback.format_exc()
    return Result(line.name, outcome, message, time.monotonic() - start, log)


def run_lines(lines: list[Line], setup: Setup) -> Iterator[Result]:
    """
    Run lines until the time limit, and yield their results.

    They run in a process of their own, because a line may hang or crash. After a failure the next line gets a new
    process, because a failed GPU kernel makes the old one unusable.
    """
    end, over = time.monotonic() + setup.time_limit, f"--time_limit {setup.time_limit:g} (seconds) was reached"
    log, pool = Path(setup.directory, "log"), None
    log.touch()
    try:
        for number, line in enumerate(lines, 1):
            seconds = min(end - time.monotonic(), LINE_SECONDS)
            if seconds <= 0:
                yield Result(line.name, NOT_RUN, over)
                continue
            print(f"[{number:>2}/{len(lines)}] {line.name} ...", file=sys.stderr, flush=True)
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), print_to, (str(log),))
            try:
                result = pool.submit(run_line, line, setup).result(seconds)
            except TimeoutError:
                hangs = FAILED, f"It still ran after {seconds:g} s. {line.remedy}."
                result = Result(line.name, *(hangs if seconds == LINE_SECONDS else (NOT_RUN, over)), seconds)
            except BrokenProcessPool:
                result = Result(line.name, FAILED, f"It crashed its process, see the log. {line.remedy}.")
            if result.outcome == FAILED or result.message == over:
                kill(pool)
                pool = None
            if result.outcome == FAILED:
                result = result._replace(log=f"{result.log}\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}")
            yield result
        if pool is not None:
            pool.shutdown()
            pool = None
    finally:
        if pool is not None:
            kill(pool)


def print_to(log: str) -> None:
    """Send all output of this process to a file, also that of a crash and of the processes that it starts."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()


def kill(pool: ProcessPoolExecutor) -> None:
    """Kill the process of the lines and those that it started."""
    for process in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()  # if it was still starting, and had no group of its own
    pool.shutdown()
