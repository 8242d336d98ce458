"""The page that shows the trees which a run logged: `fr3e tree`."""

from pathlib import Path

from ..page.page import MAX_TREES, make_page
from ..page.record import FOLDER, PAGE, logged_steps
from .usage import Parser, UsageError


def main(arguments: list[str]) -> None:
    """The command `fr3e tree`."""
    parser = Parser(
        prog="fr3e tree",
        description="Make one HTML file, which needs no network, of the trees and metrics that a run logged with "
        "log_trees: completions coloured by entropy or credit, with their branches unfolded where they leave.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="output directory of the run")
    parser.add_argument("--output", type=Path, help=f"where the page goes (default: {PAGE} in RUN_DIR)")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        help=f"steps whose trees to show (default: all, or evenly spread ones with about {MAX_TREES} trees together)",
    )
    options = parser.parse_args(arguments)
    if not (options.run / FOLDER).is_dir():
        raise UsageError(
            f"{options.run} has no folder '{FOLDER}'. Train with log_trees, for example log_trees=10, to have one."
        )
    steps = logged_steps(options.run)
    for step in options.steps or []:
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"--steps: trees of step {step} were not logged. Those of these were: {known}.")
    output = options.output or options.run / PAGE
    if output.is_dir():
        raise UsageError(f"'{output}' is a directory. Give a file by --output.")
    try:
        num_trees = make_page(options.run, output, options.steps)
    except OSError as error:
        raise UsageError(f"{error.strerror}: '{output}'. Give another file by --output.") from error
    print(f"{output}: {num_trees} trees, {output.stat().st_size / 1e3:,.0f} kB")
