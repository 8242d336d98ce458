"""
Check that training works on this machine: a small model is trained for a few steps in every way, line by line.

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
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from .usage import Parser, UsageError, one_line

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

LINE_SECONDS = 120  # that a line may take
LAUNCHER_SECONDS = 2  # for a launcher to end its processes
LOG_CHARACTERS = 3000  # of what was printed before a failure

Setup = argparse.Namespace  # see `read_setup`


class Line(NamedTuple):
    """A line of the check: `module:name` of a function that takes the [`Setup`], and what to do if it fails."""

    name: str
    function: str
    remedy: str


REPORT = "Attach this file to an issue of fr3e_trl"
SHARING = f"The docs on models say which families cannot. Of others: train with share_prefixes=False. {REPORT}"
LINES = [
    Line(
        "versions and devices", ".check_lines:machine", "Install a torch for this GPU and its driver, or use --use_cpu"
    ),
    Line("model", ".check_lines:make_policy", "Name a model that transformers knows by --model_name_or_path, or none"),
    Line("losses without exploration equal GRPO's", ".check_lines:losses", REPORT),
    Line("shared prefixes equal rows apart", ".check_lines:sharing", SHARING),
    Line("trees by generate", ".check_lines:grow", REPORT),
    Line("LoRA", ".check_lines:lora", f"Update peft. {REPORT}"),
    Line("QLoRA", ".check_lines:qlora", f"Update bitsandbytes, or train without load_in_4bit. {REPORT}"),
    Line("save and resume", ".check_lines:resume", f"Look at the room on the disk of TMPDIR. {REPORT}"),
    Line("several processes", ".check_lines:processes", f"Set NCCL_DEBUG=INFO to see more. {REPORT}"),
    Line("vLLM server", ".check_lines:vllm_server", "Start the server as the docs on vLLM say, and look at its log"),
    Line("vLLM colocate", ".check_lines:vllm_colocate", f"Use a vLLM server. {REPORT}"),
]


class NotRun(Exception):
    """A line cannot be run here. The message says why."""


class Wrong(Exception):
    """What a line found is not as it should be. The message says how."""


class Result(NamedTuple):
    """What came of a line: what was found, or why it was not run; and of a failure the traceback and the output."""

    name: str
    outcome: str
    told: str
    seconds: float = 0.0
    log: str = ""


def main(argv: list[str]) -> None:
    """Run the lines, and write the file after each."""
    setup = read_setup(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" if setup.devices is None else setup.devices.split(",")[0]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with which matrices are multiplied alike each time
    results: list[Result] = []
    write(setup.output, argv, results)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        for found in run_lines(LINES, in_directory(setup, directory)):
            if isinstance(found, Line):
                print(f"[{len(results) + 1:>2}/{len(LINES)}] {found.name} ...", file=sys.stderr, flush=True)
                continue
            print(row(found), flush=True)
            results.append(found)
            write(setup.output, argv, results)
    print(f"\n{summary(results)}. Attach {setup.output} to an issue.")
    if any(result.outcome == FAILED for result in results):
        sys.exit(1)


def read_setup(argv: list[str]) -> Setup:
    """
    The options, with `CUDA_VISIBLE_DEVICES` as it was given as `devices`. All lines but that of several processes have
    the first device alone, because transformers would spread each batch.
    """
    parser = Parser(prog="fr3e check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", help="directory or hub id of a model with the architecture (default: a small Qwen3)")
    add("--with_weights", action="store_true", help="take that model as it is, and not a small one like it")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights (default: float32)")
    add("--attn_implementation", help="kernel of attention, such as flash_attention_2 (default: the model's)")
    add("--trust_remote_code", action="store_true", help="whether code of the model's repository may be run")
    add("--vllm_server_base_url", help="address of a vLLM server to ask, such as http://localhost:8000")
    add("--num_processes", type=int, help="processes that train together (default: 2 if there are two GPUs)")
    add("--use_cpu", action="store_true", help="leave the GPUs alone")
    add("--time_limit", type=float, default=180, help="seconds for all lines (default: 180)")
    add("--output", type=Path, default=Path("fr3e_check.md"), help="file to write (default: fr3e_check.md)")
    setup = parser.parse_args(argv)
    if setup.with_weights and setup.model_name_or_path is None:
        raise UsageError("--with_weights needs the model: --model_name_or_path MODEL.")
    if setup.num_processes is not None and setup.num_processes < 1:
        raise UsageError(f"--num_processes {setup.num_processes} must be at least 1.")
    if not setup.time_limit > 0:
        raise UsageError(f"--time_limit {setup.time_limit:g} must be above 0, for example 180.")
    setup.devices = "" if setup.use_cpu else os.environ.get("CUDA_VISIBLE_DEVICES")
    if (setup.devices or "").startswith("-"):  # CUDA takes -1 for none
        setup.devices = ""
    return setup


def in_directory(setup: Setup, directory: str) -> Setup:
    """With the directory of what the runs write, and the directory or hub id of the model, the `policy`."""
    policy = setup.model_name_or_path if setup.with_weights else str(Path(directory) / "policy")
    return argparse.Namespace(**vars(setup) | {"directory": directory, "policy": policy})


def row(result: Result) -> str:
    """A result as rows of a terminal."""
    head = f"{result.outcome:<{len(NOT_RUN)}}  {result.name:<{max(len(line.name) for line in LINES)}}  "
    width = max(shutil.get_terminal_size((120, 24)).columns, len(head) + 40)
    told = f"{result.told} ({result.seconds:.1f} s)"
    return textwrap.fill(told, width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)


def summary(results: list[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, FAILED, NOT_RUN))


def write(path: Path, argv: list[str], results: list[Result]) -> None:
    """Write what is known so far, with the logs of what failed."""
    text = [f"# {shlex.join(['fr3e', 'check', *argv])}", f"{time.strftime('%Y-%m-%d %H:%M')}. {summary(results)}."]
    text += ["\n".join(["```text", *map(row, results), "```"])]
    for result in results:
        if result.log:
            log = result.log.replace("```", "'''").strip()
            text += [f"## {result.name}", f"```text\n{log}\n```"]
    path.write_text("\n\n".join(text) + "\n")


def run_line(line: Line, setup: Setup) -> Result:
    """Run a line here. Whatever it raises is its result."""
    module, _, name = line.function.rpartition(":")
    began, log = time.monotonic(), ""
    try:
        outcome, told = PASSED, getattr(importlib.import_module(module, __package__), name)(setup)
    except NotRun as reason:
        outcome, told = NOT_RUN, str(reason)
    except Exception as error:
        kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
        outcome, told, log = FAILED, f"{kind}{one_line(error).rstrip('.')}. {line.remedy}.", traceback.format_exc()
    return Result(line.name, outcome, told, time.monotonic() - began, log)


def run_lines(lines: Iterable[Line], setup: Setup) -> Iterator[Line | Result]:
    """
    Run lines until the time is over, and yield each before it begins, then its result.

    They run in a process of their own. A line may hang or take it down, and a kernel that fails on a GPU leaves it of
    no use, so what follows a failure has a new one.
    """
    ends, over = time.monotonic() + setup.time_limit, f"the {setup.time_limit:.0f} s of --time_limit were over"
    log, pool = Path(setup.directory, "log"), None
    log.touch()
    try:
        for line in lines:
            left = ends - time.monotonic()
            if left <= 0:
                yield Result(line.name, NOT_RUN, over)
                continue
            yield line
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), print_to, (str(log),))
            try:
                result = pool.submit(run_line, line, setup).result(min(left, LINE_SECONDS))
            except TimeoutError:
                is_slow = left >= LINE_SECONDS
                told = f"It still ran after {LINE_SECONDS:.0f} s. {line.remedy}." if is_slow else over
                result = Result(line.name, FAILED if is_slow else NOT_RUN, told, min(left, LINE_SECONDS))
            except BrokenProcessPool:
                result = Result(line.name, FAILED, f"It took its process down, see the log. {line.remedy}.")
            if result.outcome == FAILED:
                end(pool)
                pool = None
                result = result._replace(log=f"{result.log}\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}")
            yield result
    finally:
        if pool is not None:
            end(pool)


def print_to(log: str) -> None:
    """Have what this process and those that it starts print in a file, even if a signal ends it."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()


def end(pool: ProcessPoolExecutor) -> None:
    """End the process of the lines and those that it started. A launcher that is told to end ends its own."""
    for process in multiprocessing.active_children():
        for number, seconds in ((signal.SIGTERM, LAUNCHER_SECONDS), (signal.SIGKILL, 0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, number)
                time.sleep(seconds)
        process.kill()
    pool.shutdown()
