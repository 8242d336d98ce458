"""The `fr3e` command."""

import argparse
import importlib
import logging
import sys

# It warns while it is imported, of what does not matter here
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

COMMANDS = {
    "compare": ("fr3e_trl.bench.compare", "Train arms at equal generated tokens, and report which is best."),
    "gradient-check": (
        "fr3e_trl.bench.gradient_check",
        "Compare arms in a minute, by how well their updates point along the true gradient.",
    ),
    "make-policy": ("fr3e_trl.bench.policies", "Make the starting policy of a task."),
}


def main(argv: list[str] | None = None) -> None:
    """Run the subcommand that the arguments name, with those that follow."""
    parser = argparse.ArgumentParser(prog="fr3e", description="The bench of fr3e_trl.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, description) in COMMANDS.items():
        # Its own parser has the help: importing it takes seconds
        subparsers.add_parser(name, help=description, add_help=False)
    arguments = sys.argv[1:] if argv is None else argv
    command = parser.parse_args(arguments[:1]).command
    module, _ = COMMANDS[command]
    try:
        implementation = importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("matplotlib", "reasoning_gym", "rich"):
            raise
        sys.exit(f"fr3e {command} needs {package}. Install it with: pip install 'fr3e-trl[bench]'")
    sys.argv[0] = f"fr3e {command}"
    implementation.main(arguments[1:])


if __name__ == "__main__":
    main()
