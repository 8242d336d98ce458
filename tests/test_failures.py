"""What cannot work ends with one line that names what was wrong, soon, with exit code 2, and nothing is lost."""

import contextlib
import functools
import hashlib
import io
import logging
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from failures import CATEGORIES
from failures.case import EVAL, TRAIN
from models import model_on_disk

from fr3e_trl.commands import cli
from fr3e_trl.commands.data import import_file
from fr3e_trl.commands.usage import explain

SECONDS = 30

REWARDS = """
def digit(completions, **kwargs):
    return [float(any(c in "01234" for c in text)) for text in texts_of(completions)]

def needs_level(completions, level, **kwargs): return [0.0] * len(completions)
def none(completions, **kwargs): return [None] * len(completions)
def nan(completions, **kwargs): return [float("nan")] * len(completions)
def text(completions, **kwargs): return ["good"] * len(completions)
def few(completions, **kwargs): return [1.0]
def number(completions, **kwargs): return 1.0

limit = 3

def texts_of(completions):
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]
"""
EXAMPLES = "".join(f'{{"prompt": "{i}+{i}=", "solution": "{2 * i}", "level": {i}}}\n' for i in range(16))


def furnish():
    """Fill the present directory with what the commands of the cases take."""
    Path("data.jsonl").write_text(EXAMPLES)
    Path("rewards.py").write_text(REWARDS)
    Path("model").symlink_to(model_on_disk())


@functools.cache
def results_of(command: str) -> Path:
    before = Path.cwd()
    directory = Path(tempfile.mkdtemp(prefix="fr3e-trl-test-"))
    os.chdir(directory)
    try:
        furnish()
        cli.main(shlex.split(command))
    finally:
        os.chdir(before)
    return directory / "out"


@contextmanager
def served(answers):
    """A server that has an answer for some paths; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answers.get(self.path.partition("?")[0], (404, "not here"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer

        def log_message(self, *args):
            pass

    if not answers:
        yield "http://127.0.0.1:9"
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def limited(largest_file):
    """No file may become larger, as where a disk is full."""
    if largest_file is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents():
    files = [path for path in Path().rglob("*") if path.is_file() and "model" not in path.parts]
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in files if path.resolve() != Path("/dev/full")}


def end_of(case, url, capsys):
    if callable(case.command):
        with pytest.raises(Exception) as raised:
            case.command()
        return 2, f"error: {raised.value}"
    with pytest.raises(SystemExit) as ending, limited(case.largest_file):
        cli.main(case.arguments(url))
    return ending.value.code, capsys.readouterr().err


def test_an_error_in_a_users_own_code_is_told_from_there_on(capsys):
    furnish()
    Path("rewards.py").write_text("def score(completions, **kwargs):\n    return [1 / 0 for text in completions]\n")
    for command in (TRAIN, EVAL):
        with pytest.raises(SystemExit) as ending:
            cli.main(shlex.split(f"{command} --reward_funcs=rewards.py:score"))
        assert ending.value.code == 2
        told = capsys.readouterr().err
        told = told[told.index("Traceback") :]
        frames = re.findall('File "(.*?)", line', told)
        assert frames and {Path(frame).name for frame in frames} == {"rewards.py"}
        assert "ZeroDivisionError: division by zero" in told
        assert re.search(r"error: .*rewards\.py, line 2, raised ZeroDivisionError", told.splitlines()[-1])
    # And a file that it does not find, with its place
    Path("mine.py").write_text("open('lost.txt')\n")
    with pytest.raises(FileNotFoundError) as raised:
        import_file("mine.py")
    told = explain(raised.value.with_traceback(raised.tb.tb_next))  # this file is a user's too
    assert "mine.py, line 1, raised FileNotFoundError" in told.splitlines()[-1]


@pytest.fixture
def fr3e():
    """Starts a command in a process of its own, which is killed in the end, with those that it has started."""
    processes = []

    def start(arguments: str) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in a background job
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
        command = [sys.executable, "-m", "fr3e_trl.commands.cli", *shlex.split(arguments)]
        process = subprocess.Popen(command, env=environment, **pipes)
        processes.append(process)
        return process

    furnish()
    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_of_several_processes_one_tells_what_is_wrong(fr3e):
    process = fr3e(f"{TRAIN} --num_processes=2 --per_device_train_batch_size=4 --reward_funcs=rewards.py:text")
    _, told = process.communicate(timeout=240)
    assert process.returncode == 2, told
    assert told.count("error: ") == told.count("fr3e train: error: ") == 1 and "Traceback" not in told
    assert "'good'" in told.splitlines()[-1]


def test_ctrl_c_says_how_to_go_on(fr3e):
    process = fr3e(f"{TRAIN} --max_steps=2000 --save_strategy=steps --save_steps=2 --logging_steps=1")
    while "step    3/2000" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait() == 130
    says = r"fr3e train: interrupted\. --resume_from_checkpoint true resumes from out/checkpoint-\d+\.$"
    assert re.search(says, told.strip()) and "Traceback" not in told


@pytest.mark.parametrize("name, reason", [("SIGKILL", "memory ran out"), ("SIGABRT", "are above")])
def test_a_process_that_a_signal_ends_is_told_of(name, reason, fr3e):
    score = f"def score(**kwargs):\n    os.kill(os.getpid(), signal.{name})\n"
    Path("rewards.py").write_text(f"import os, signal\n\n{score}")
    process = fr3e(f"{TRAIN} --num_processes=1 --reward_funcs=rewards.py:score")
    _, told = process.communicate(timeout=240)
    assert process.returncode == 2
    assert f"error: Process 0 was ended by {name}" in told.splitlines()[-1] and reason in told.splitlines()[-1]


def test_a_pipe_that_nobody_reads_ends_no_run(fr3e):
    process = fr3e(f"{TRAIN} --max_steps=4 --logging_steps=1")
    assert process.stdout.readline().startswith("reward: ")
    assert "step 1/4" in process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait() == 0, told
    assert Path("out/model.safetensors").exists()


@pytest.mark.parametrize("command", ["--help", "train --help"])  # small enough for a buffer, and line by line
def test_a_command_whose_output_nobody_reads_ends_quietly(command, fr3e, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1" if command == "train --help" else "")
    process = fr3e(command)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 141)


def test_output_in_ascii_and_warnings_without_colour(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setitem(sys.modules, "arrow", SimpleNamespace(main=lambda arguments: print("→")))
    monkeypatch.setitem(cli.COMMANDS, "arrow", ("", "arrow"))
    cli.main(["arrow"])
    assert output.getvalue() == b"?\n"
    assert logging.lastResort.formatter._fmt == "WARNING: %(message)s"


CASES = {f"{category}: {case.name}": case for category, cases in CATEGORIES.items() for case in cases}
assert len(CASES) == sum(map(len, CATEGORIES.values()))  # their names are unique


@pytest.mark.parametrize("name", CASES)
def test_failure(name, capsys, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(sys, "argv", ["fr3e"])
    furnish()
    if case.after is not None:
        shutil.copytree(results_of(case.after), "out", symlinks=True)
    for path, content in case.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    if case.setup is not None:
        case.setup()
    before = contents()
    capsys.readouterr()
    start = time.monotonic()
    with served(case.server) as url:
        code, told = end_of(case, url, capsys)
    seconds = time.monotonic() - start
    assert code == 2, told
    assert "Traceback" not in told
    lines = [line for line in told.splitlines() if "error: " in line]
    assert len(lines) == 1, told
    assert all(words in lines[0] for words in case.says) and len(lines[0]) < 1000, lines[0]
    assert seconds < SECONDS
    after = contents()
    assert {path: after.get(path) for path in before} == before  # nothing is lost
