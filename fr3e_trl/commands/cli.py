"""
The `fr3e` command.

An error that the user can fix ends a command with one line that says what was wrong, and exit code 2. `--debug`, or
`FR3E_DEBUG=1`, adds the traceback. An error in the user's own code, such as a reward function, is shown with its
traceback from there on. Ctrl-C ends a command with one line, and exit code 130.
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
from .outputs import versions
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

# Commands of `python -m benchmarks`, in a clone of the repository
BENCHMARKS = ("compare", "pooled", "cost", "make-policy")

# Seconds until a process other than the first reports an error. Most errors occur in all processes: the first reports
# them, and the launcher then ends the others
SECONDS_OF_FIRST = 15

# Values of TrainingArguments' own setting `debug`
DEBUG_OPTIONS = ("underflow_overflow", "tpu_metrics_debug")


def main(
    argv: list[str] | None = None,
    prog: str = "fr3e",
    description: str = "FR3E for TRL: training and evaluation.",
    commands: Commands = COMMANDS,
) -> None:
    """Run the command that the arguments name. It ends if its output is closed, as by `| head`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that its encoding lacks become question marks
    try:
        try:
            run(argv, prog, description, commands)
        except SystemExit:  # as after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # the exit code that shells give for SIGPIPE


def run(argv: list[str] | None, prog: str, description: str, commands: Commands) -> None:
    """Run the command that the arguments name, with those that follow."""
    if logging.lastResort is not None:  # it prints our warnings
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
        message = explain(error)
        if message is None:
            raise
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            time.sleep(SECONDS_OF_FIRST)
        if debug:
            traceback.print_exc()
        *trace, line = message.splitlines()
        print(*trace, f"{prog}: error: {line}", sep="\n", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"\n{prog}: interrupted.", *getattr(interrupt, "__notes__", []), file=sys.stderr)
        sys.exit(130)


def run_command(prog: str, implementation: str, arguments: list[str]) -> None:
    """Show help and check options without importing PyTorch and TRL, then run the command."""
    if prog in PAGES:
        if {"--help", "-h"} & {*arguments}:
            return print_help(prog)
        if "--help-all" in arguments:
            arguments = ["--help"]
        elif "RANK" not in os.environ:  # else the launcher has checked them
            recipe = check_options(prog, arguments)
            number = str(num_processes_of(arguments) or recipe.get("num_processes"))
            if prog == "fr3e train" and number.isdecimal() and int(number) > 0:
                return launch(int(number), arguments)
    if os.environ.get("RANK", "0") == "0":
        print(f"{prog}: loading ...", file=sys.stderr, flush=True)
    importlib.import_module(implementation).main(arguments)


def num_processes_of(arguments: list[str]) -> str | None:
    """The value of `--num_processes` on the command line, unchecked."""
    parser = Parser(add_help=False)
    parser.add_argument("--num_processes", "--num-processes", nargs="?")
    return parser.parse_known_args(arguments)[0].num_processes


def launch(num_processes: int, arguments: list[str]) -> None:
    """
    Start `fr3e train` in this many processes, and exit with the code of the first that fails.

    A process that fails reports why itself, unless a signal ended it, so the launcher's own report is hidden.
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
        reason = "which usually means that memory ran out" if name == "SIGKILL" else "and its last messages are above"
        raise UsageError(f"Process {rank} was ended by {name}, {reason}.") from None
    except SignalException as error:
        sys.exit(128 + error.sigval)


def read_command(prog: str, description: str, commands: Commands, arguments: list[str]) -> str:
    """The command that the first argument names. Without arguments, print the help."""
    if commands is COMMANDS and arguments and arguments[0] in BENCHMARKS:
        name = arguments[0]
        raise UsageError(f"{name!r} needs a clone of the repository: run `python -m benchmarks {name}` in it.")
    parser = Parser(prog=prog, description=description)
    if commands is COMMANDS:
        version = ", ".join(f"{name} {number}" for name, number in versions().items())
        parser.add_argument("--version", action="version", version=version, help="print the versions and exit")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, _) in commands.items():
        subparsers.add_parser(
            name, help=summary, add_help=False
        )  # its module has the help, and takes seconds to import
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
