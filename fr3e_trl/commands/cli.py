"""The `fr3e` command."""

import argparse
import importlib
import logging
import sys
from typing import Any

from .usage import UsageError

# It warns while it is imported, of what does not matter here
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# What each command of a name does, and the module with its `main`, or the commands below it
COSTS = {
    "step": ("A step of FR3E beside one of GRPO: tokens, time, and where it goes.", "fr3e_trl.bench.cost.step"),
    "update": ("The update, with shared prefixes forwarded once or with every row.", "fr3e_trl.bench.cost.update"),
    "bookkeeping": ("FR3E's own part of a large step.", "fr3e_trl.bench.cost.bookkeeping"),
    "processes": ("Two processes beside one.", "fr3e_trl.bench.cost.processes"),
    "vllm": ("A vLLM server: requests in flight, and the sync of the adapter.", "fr3e_trl.bench.cost.vllm"),
    "entropies": ("Entropies by a server's log-probs, or by a forward pass.", "fr3e_trl.bench.cost.entropies"),
    "engine": ("Ways to generate, by a model of a large engine.", "fr3e_trl.bench.cost.engine"),
}
COMMANDS: dict[str, tuple[str, Any]] = {
    "train": ("Train a model, as a recipe says; with --dry_run, say what a run will do.", "fr3e_trl.commands.train"),
    "eval": ("Evaluate a model: pass@1, pass@k and maj@k on any dataset with answers.", "fr3e_trl.commands.eval"),
    "compare": ("Train arms at equal generated tokens, and report which is best.", "fr3e_trl.bench.compare"),
    "pooled": ("Pool the differences between arms over several comparisons.", "fr3e_trl.bench.pooled"),
    "tree": ("Make a page that shows the trees which a run logged.", "fr3e_trl.page.page"),
    "cost": ("Measure what FR3E costs.", COSTS),
    "make-policy": ("Make the starting policy of a task.", "fr3e_trl.bench.policies"),
}

# The extra that brings a package
EXTRAS = {"matplotlib": "bench", "peft": "peft", "reasoning_gym": "bench", "rich": "bench"}


def main(argv: list[str] | None = None) -> None:
    """Run the command that the arguments name, with those that follow."""
    run("fr3e", "FR3E for TRL: training, evaluation, and a bench.", COMMANDS, sys.argv[1:] if argv is None else argv)


def run(prog: str, description: str, commands: dict[str, tuple[str, Any]], arguments: list[str]) -> None:
    """Run one of `commands`, which may have others below it."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (what_it_does, _) in commands.items():
        # Its own parser has the help: importing it takes seconds
        subparsers.add_parser(name, help=what_it_does, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    what_it_does, implementation = commands[command]
    if isinstance(implementation, dict):
        run(f"{prog} {command}", what_it_does, implementation, arguments[1:])
        return
    try:
        module = importlib.import_module(implementation)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        sys.exit(f"{prog} {command} needs {package}. Install it with: pip install 'fr3e-trl[{EXTRAS[package]}]'")
    sys.argv[0] = f"{prog} {command}"
    try:
        module.main(arguments[1:])
    except UsageError as error:
        print(f"{prog} {command}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
