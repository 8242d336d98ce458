"""
What each way to generate does to a step on a large engine, by a model of one: no model, no GPU.

    fr3e cost engine --output engine.png

An engine decodes up to so many sequences at once, and takes a + b x running for a step, in which each of them gets a
token; what has no place waits its turn. Prefill costs nothing: prompts are short beside completions, and prefixes are
in the cache. Completions have lognormal lengths, cut at the longest. One that branches off at a position is as long as
a completion that is longer than that. The ways:

- GRPO: all rows from their prompts;
- two rounds: branches when all base trajectories are finished;
- by prompt: those of a prompt when its base trajectories are;
- by rule: each as soon as its base trajectory is at its anchor;
- mixed: the branches of a batch with the base trajectories of the next.

Printed are times by way, as ratios to GRPO's of as many rows, for several numbers of rows for each place of the engine.

    fr3e cost engine --url http://127.0.0.1:8000 --max_running 16 --mean_length 60 --longest 200

holds the model against a vLLM server that decodes so many sequences at once (`--max-num-seqs`): a and b are measured on
it, and each way is timed beside what the model says of the same lengths.
"""

import argparse
import random
import statistics
from pathlib import Path

from rich.console import Console

from .common import make_parser, make_table
from .engine_check import check
from .engine_model import WAYS, Engine, Lengths, drawn_steps, seconds_of


def compare(options: argparse.Namespace, loads: list[float]) -> dict[str, list[tuple[float, float]]]:
    """Time and tokens of each way, as ratios to GRPO's, for numbers of rows for each place of the engine."""
    lengths = Lengths(options.mean_length, options.spread, options.longest, random.Random(options.seed))
    ratios: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for load in loads:
        sums = {way: [0.0, 0] for way in WAYS}
        for rows, prompts in drawn_steps(options, lengths, load):
            for way in WAYS:
                engine = seconds_of(way, prompts[way], rows, lambda: Engine(options.max_running))
                sums[way][0] += engine.seconds
                sums[way][1] += engine.num_tokens
        for way in WAYS:
            ratios[way].append((sums[way][0] / sums["GRPO"][0], sums[way][1] / sums["GRPO"][1]))
    return ratios


def plot(ratios: dict[str, list[tuple[float, float]]], loads: list[float], path: Path) -> None:
    """Draw the times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for way in WAYS:
        axes.plot(loads, [time for time, _ in ratios[way]], marker=".", label=way)
    axes.set(xscale="log", xlabel="rows of a step / sequences that run at once", ylabel="time of generation / GRPO's")
    axes.set_xticks(loads, [f"{load:g}" for load in loads], minor=False)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: list[str]) -> None:
    """Compare, and print the ratios."""
    parser = make_parser(
        __doc__,
        num_rows=(8, "rows of a prompt, a quarter of which are base trajectories"),
        max_running=(256, "sequences that the engine decodes at once"),
        mean_length=(2000, "mean length of completions, in tokens"),
        longest=(8192, "longest completion, in tokens"),
        gap=(50, "tokens between two positions that are uncertain enough, on average"),
        num_steps=(10, "steps to take the mean of"),
        seed=(1, "decides the lengths"),
    )
    parser.add_argument("--spread", type=float, default=0.8, help="of lengths: of their logarithm (default: 0.8)")
    parser.add_argument("--output", type=Path, help="where to draw the times")
    parser.add_argument("--url", help="address of a vLLM server to hold the model against")
    options = parser.parse_args(argv)
    if options.url is not None:
        check(options)
        return
    loads = [0.125, 0.25, 0.5, 1, 2, 4, 8, 16]
    ratios = compare(options, loads)
    table = make_table(
        "Time of generation / GRPO's, by rows for each place", *(f"{load:g}" for load in loads), "tokens"
    )
    for way in WAYS:
        tokens = statistics.mean(tokens for _, tokens in ratios[way])
        table.add_row(way, *(f"{time:.2f}" for time, _ in ratios[way]), f"{tokens:.2f}")
    Console().print(table)
    if options.output is not None:
        plot(ratios, loads, options.output)
