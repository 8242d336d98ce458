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
from .usage import Parser, explain

# What each command of a name does, and the module with its `main`, or the commands below it
COSTS = {
    "step": ("A step of FR3E beside one of GRPO: tokens, time, and where it goes.", "fr3e_trl.bench.cost.step"),
    "update": ("The update, with shared prefixes forwarded once or with every row.", "fr3e_trl.bench.cost.update"),
    "tensors": ("The largest tensors with long completions, counted.", "fr3e_trl.bench.cost.tensors"),
    "bookkeeping": ("FR3E's own part of a large step.", "fr3e_trl.bench.cost.bookkeeping"),
    "processes": ("Two processes beside one.", "fr3e_trl.bench.cost.processes"),
    "vllm": ("A vLLM server: requests in flight, and the sync of the adapter.", "fr3e_trl.bench.cost.vllm"),
    "entropies": ("Entropies by a server's log-probs, or by a forward pass.", "fr3e_trl.bench.cost.entropies"),
    "engine": ("Ways to generate, by a model of a large engine.", "fr3e_trl.bench.cost.engine"),
}
COMMANDS: dict[str, tuple[str, Any]] = {
    "check": ("Say whether training works on this machine, line by line.", "fr3e_trl.bench.check.command"),
    "train": ("Train a model, as a recipe says; with --dry_run, say what a run will do.", "fr3e_trl.commands.train"),
    "eval": ("Evaluate a model: pass@1, pass@k and maj@k on any dataset with answers.", "fr3e_trl.commands.eval"),
    "compare": ("Train arms at equal generated tokens, and report which is best.", "fr3e_trl.bench.compare"),
    "pooled": ("Pool the differences between arms over several comparisons.", "fr3e_trl.bench.pooled"),
    "init": ("Write a recipe, a reward and ten lines of data to begin with.", "fr3e_trl.commands.init"),
    "tree": ("Make a page that shows the trees which a run logged.", "fr3e_trl.commands.tree"),
    "cost": ("Measure what FR3E costs.", COSTS),
    "make-policy": ("Make the starting policy of a task.", "fr3e_trl.bench.make_policy"),
}

# Most errors are those of all processes. The first process tells them, and a launcher then ends the others. One that is
# left after so long tells its own
SECONDS_OF_FIRST = 15

TRAIN_HELP = "fr3e_trl.commands.train_help"

# Values of TrainingArguments' own setting `debug`
DEBUG_OPTIONS = ("underflow_overflow", "tpu_metrics_debug")


def main(argv: list[str] | None = None) -> None:
    """Run the command that the arguments name. A pipe that nobody reads on, as after `| head`, ends it quietly."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that its encoding lacks become question marks
    try:
        try:
            run(argv)
        except SystemExit:  # as after --help. What nobody foresaw has a traceback first
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as a shell has it of a process that SIGPIPE ended


def run(argv: list[str] | None) -> None:
    """Run the command that the arguments name, with those that follow."""
    if logging.lastResort is not None:  # by which our warnings are printed
        form, is_coloured = "WARNING: %(message)s", sys.stderr.isatty() and "NO_COLOR" not in os.environ
        logging.lastResort.setFormatter(logging.Formatter(f"\033[33m{form}\033[0m" if is_coloured else form))
    arguments, debug = without_debug(sys.argv[1:] if argv is None else argv)
    if debug:
        os.environ["FR3E_DEBUG"] = "1"  # of the processes that are started too
    prog, what_it_does, commands = "fr3e", "FR3E for TRL: training, evaluation, and a bench.", COMMANDS
    try:
        while True:
            command = read_command(prog, what_it_does, commands, arguments)
            (what_it_does, implementation), arguments = commands[command], arguments[1:]
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


def read_command(prog: str, description: str, commands: dict[str, tuple[str, Any]], arguments: list[str]) -> str:
    """Which of `commands` the first argument names."""
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
