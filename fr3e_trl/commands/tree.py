"""`fr3e tree`: a page with the trees that a run logged."""

from pathlib import Path

from ..tree_log.page import MAX_TREES, make_page
from ..tree_log.record import FOLDER, PAGE, logged_steps
from .usage import Parser, UsageError


def main(arguments: list[str]) -> None:
    """The command `fr3e tree`."""
    parser = Parser(
        prog="fr3e tree",
        description="Make one HTML file, which works offline, from what a run logged with log_trees. It shows "
        "metrics, and completions coloured by entropy or credit, and their branches where they start.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="output directory of the run")
    parser.add_argument("--output", type=Path, help=f"file of the page (default: {PAGE} in RUN_DIR)")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        help=f"steps to show (default: all, or evenly spread ones with about {MAX_TREES} trees)",
    )
    options = parser.parse_args(arguments)
    if not (options.run / FOLDER).is_dir():
        raise UsageError(
            f"{options.run} has no folder '{FOLDER}'. To log trees, train with log_trees, for example log_trees=10."
        )
    steps = logged_steps(options.run)
    for step in options.steps or []:
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"--steps: trees of step {step} were not logged. Logged steps: {known}.")
    output = options.output or options.run / PAGE
    if output.is_dir():
        raise UsageError(f"'{output}' is a directory. Use --output FILE.")
    try:
        num_trees = make_page(options.run, output, options.steps)
    except OSError as error:
        raise UsageError(f"{error.strerror}: '{output}'. Use another file as --output.") from error
    print(f"{output}: {num_trees} trees, {output.stat().st_size / 1e3:,.0f} kB")
