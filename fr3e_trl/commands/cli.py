"""
The `fr3e` command.

What the user can fix ends a command with one line that says what was wrong, and exit code 2. `--debug`, or
`FR3E_DEBUG=1`, adds the traceback. For an error in the user's own code, such as a reward function, the traceback begins
there. Ctrl-C ends a command with one line, and exit code 130.
"""

import importlib
import io
import logging
import os
import signal
import sys
import time
import traceback
from typing import Any

from .options import PAGES, check_options, print_help
from .revision import versions
from .usage import Parser, UsageError, explain

# What each command does, and the module with its `main`, or the commands below it
Commands = dict[str, tuple[str, Any]]
COMMANDS: Commands = {
    "init": ("Write a recipe, a reward function and data to start from.", "fr3e_trl.commands.init"),
    "train": ("Train a model. --dry_run prints what a run will do.", "fr3e_trl.commands.train"),
    "eval": ("Evaluate a model on a dataset with answers.", "fr3e_trl.commands.eval"),
    "tree": ("Show the trees that a run logged, as a web page.", "fr3e_trl.commands.tree"),
    "check": ("Check that training works on this machine.", "fr3e_trl.commands.check"),
}

# Commands that `python -m benchmarks` has instead, in a clone of the repository
OF_BENCHMARKS = ("compare", "pooled", "cost", "make-policy")

# Seconds until a process other than the first reports an error. Most errors are those of all processes: the first one
# reports them, and the launcher then ends the others
SECONDS_OF_FIRST = 15

# Values of TrainingArguments' own setting `debug`
DEBUG_OPTIONS = ("underflow_overflow", "tpu_metrics_debug")


def main(
    argv: list[str] | None = None,
    prog: str = "fr3e",
    description: str = "FR3E for TRL: training and evaluation.",
    commands: Commands = COMMANDS,
) -> None:
    """Run the command that the arguments name. If nobody reads its output any more, as after `| head`, it ends."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that its encoding lacks become question marks
    try:
        try:
            run(argv, prog, description, commands)
        except SystemExit:  # as after --help. What nobody foresaw has a traceback first
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as a shell has it of a process that SIGPIPE ended


def run(argv: list[str] | None, prog: str, description: str, commands: Commands) -> None:
    """Run the command that the arguments name, with those that follow."""
    if logging.lastResort is not None:  # by which our warnings are printed
        form, is_coloured = "WARNING: %(message)s", sys.stderr.isatty() and "NO_COLOR" not in os.environ
        logging.lastResort.setFormatter(logging.Formatter(f"\033[33m{form}\033[0m" if is_coloured else form))
    arguments, debug = without_debug(sys.argv[1:] if argv is None else argv)
    if debug:
        os.environ["FR3E_DEBUG"] = "1"  # of the processes that are started too
    try:
        implementation: Any = commands
        while not isinstance(implementation, str):
            command = read_command(prog, description, implementation, arguments)
            description, implementation = implementation[command]
            prog, arguments = f"{prog} {command}", arguments[1:]
        sys.argv = [prog, *arguments]
        run_command(prog, implementation, arguments)
    except Exception as error:
        told = explain(error)
        if told is None:
            raise
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            time.sleep(SECONDS_OF_FIRST)
        if debug:
            traceback.print_exc()
        *trace, line = told.splitlines()
        print(*trace, f"{prog}: error: {line}", sep="\n", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"\n{prog}: interrupted.", *getattr(interrupt, "__notes__", []), file=sys.stderr)
        sys.exit(130)


def run_command(prog: str, implementation: str, arguments: list[str]) -> None:
    """Do at once what takes no import of PyTorch and TRL, and say so before the rest."""
    if prog in PAGES:
        if {"--help", "-h"} & {*arguments}:
            return print_help(prog)
        if "--help-all" in arguments:
            arguments = ["--help"]
        elif "RANK" not in os.environ:  # of what is launched, the launcher has checked it
            recipe = check_options(prog, arguments)
            number = str(num_processes_of(arguments) or recipe.get("num_processes"))
            if prog == "fr3e train" and number.isdecimal() and int(number) > 0:
                return launch(int(number), arguments)
    if os.environ.get("RANK", "0") == "0":
        print(f"{prog}: loading ...", file=sys.stderr, flush=True)
    importlib.import_module(implementation).main(arguments)


def num_processes_of(arguments: list[str]) -> str | None:
    """What the command line says of it, whatever it is."""
    parser = Parser(add_help=False)
    parser.add_argument("--num_processes", "--num-processes", nargs="?")
    return parser.parse_known_args(arguments)[0].num_processes


def launch(num_processes: int, arguments: list[str]) -> None:
    """
    Start `fr3e train` in as many processes, and end with the exit code of the first that fails.

    A process that fails has said why, unless a signal has ended it. The launcher's own report is left out.
    """
    print(f"fr3e train: starting {num_processes} process(es) ...", file=sys.stderr, flush=True)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launcher = ["--standalone", f"--nproc_per_node={num_processes}", "-m", "fr3e_trl.commands.cli", "train"]
    try:
        torchrun([*launcher, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        reason = "as it is when memory runs out" if name == "SIGKILL" else "and its last messages are above"
        raise UsageError(f"Process {rank} was ended by {name}, {reason}.") from None
    except SignalException as error:
        sys.exit(128 + error.sigval)


def read_command(prog: str, description: str, commands: Commands, arguments: list[str]) -> str:
    """Which of `commands` the first argument names. Without one, print the help."""
    if commands is COMMANDS and arguments and arguments[0] in OF_BENCHMARKS:
        name = arguments[0]
        raise UsageError(f"{name!r} needs a clone of the repository: run `python -m benchmarks {name}` in it.")
    parser = Parser(prog=prog, description=description)
    if commands is COMMANDS:
        told = ", ".join(f"{name} {version}" for name, version in versions().items())
        parser.add_argument("--version", action="version", version=told, help="print the versions and exit")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (what_it_does, _) in commands.items():
        # Its own parser has the help: importing it takes seconds
        subparsers.add_parser(name, help=what_it_does, add_help=False)
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(2)
    return parser.parse_args(arguments[:1]).command


def without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without our `--debug`, and whether it was there. With a value, it is a setting of the trainer."""
    values = [*arguments[1:], ""]
    others = [
        argument
        for argument, value in zip(arguments, values, strict=False)
        if argument != "--debug" or value in DEBUG_OPTIONS
    ]
    return others, len(others) < len(arguments) or os.environ.get("FR3E_DEBUG", "0") not in ("", "0")


if __name__ == "__main__":
    main()
