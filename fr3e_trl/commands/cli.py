"""
The `fr3e` command.

What a user can mend ends a command with one line that says what was wrong, and exit code 2. With `--debug`, or
`FR3E_DEBUG=1`, its traceback comes too. Of an error in the user's own code, such as a reward function, the traceback
begins there. Ctrl-C ends a command with one line, and exit code 130.
"""

import importlib
import io
import logging
import os
import sys
import time
import traceback
from typing import Any

from .revision import versions
from .usage import Parser, UsageError, explain

# What each command does, and the module with its `main`, or the commands below it
Commands = dict[str, tuple[str, Any]]
COMMANDS: Commands = {
    "check": ("Say whether training works on this machine, line by line.", "fr3e_trl.commands.check.command"),
    "train": ("Train a model, as a recipe says; with --dry_run, say what a run will do.", "fr3e_trl.commands.train"),
    "eval": ("Evaluate a model: pass@1, pass@k and maj@k on any dataset with answers.", "fr3e_trl.commands.eval"),
    "init": ("Write a recipe, a reward and ten lines of data to begin with.", "fr3e_trl.commands.init"),
    "tree": ("Make a page that shows the trees which a run logged.", "fr3e_trl.commands.tree"),
}

# Commands that `python -m benchmarks` has instead, in a clone of the repository
OF_BENCHMARKS = ("compare", "pooled", "cost", "make-policy")

# Most errors are those of all processes. The first process tells them, and a launcher then ends the others. One that is
# left after so long tells its own
SECONDS_OF_FIRST = 15

TRAIN_HELP = "fr3e_trl.commands.train_help"

# Values of TrainingArguments' own setting `debug`
DEBUG_OPTIONS = ("underflow_overflow", "tpu_metrics_debug")


def main(
    argv: list[str] | None = None,
    prog: str = "fr3e",
    description: str = "FR3E for TRL: training and evaluation.",
    commands: Commands = COMMANDS,
) -> None:
    """Run the command that the arguments name. A pipe that nobody reads on, as after `| head`, ends it quietly."""
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
        while True:
            command = read_command(prog, description, commands, arguments)
            (description, implementation), arguments = commands[command], arguments[1:]
            prog = f"{prog} {command}"
            if isinstance(implementation, str):
                break
            commands = implementation
        sys.argv = [prog, *arguments]  # as the model card tells it
        if prog == "fr3e train" and "--help-all" in arguments:
            arguments = ["--help"]
        elif prog == "fr3e train" and {"--help", "-h"} & {*arguments}:
            implementation = TRAIN_HELP
        if implementation != TRAIN_HELP and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
            print(f"{prog}: loading ...", file=sys.stderr)
        importlib.import_module(implementation).main(arguments)
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
            print(f"\n{prog}: cut.", *getattr(interrupt, "__notes__", []), file=sys.stderr)
        sys.exit(130)


def read_command(prog: str, description: str, commands: Commands, arguments: list[str]) -> str:
    """Which of `commands` the first argument names."""
    if commands is COMMANDS and arguments and arguments[0] in OF_BENCHMARKS:
        name = arguments[0]
        raise UsageError(f"{name!r} needs a clone of the repository: run `python -m benchmarks {name}` in it.")
    parser = Parser(prog=prog, description=description)
    if commands is COMMANDS:
        told = ", ".join(f"{name} {version}" for name, version in versions().items())
        parser.add_argument("--version", action="version", version=told, help="tell the versions, and end")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (what_it_does, _) in commands.items():
        # Its own parser has the help: importing it takes seconds
        subparsers.add_parser(name, help=what_it_does, add_help=False)
    return parser.parse_args(arguments[:1]).command


def without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without our `--debug`, and whether it was there. With a value, it is a setting of the trainer."""
    following = [*arguments, ""][1:]
    is_ours = [
        argument == "--debug" and value not in DEBUG_OPTIONS
        for argument, value in zip(arguments, following, strict=True)
    ]
    others = [argument for argument, ours in zip(arguments, is_ours, strict=True) if not ours]
    return others, any(is_ours) or os.environ.get("FR3E_DEBUG", "0") not in ("", "0")


if __name__ == "__main__":
    main()
