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
it, and each way is timed beside what the model says of the same lengths. (By rule there is nothing to time: a client
does not see the tokens as they come.)
"""

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from .common import make_parser, make_table

# Of Llama-3.1-8B on one H100, a line through the inter-token latencies of NVIDIA NIM 1.8.0: 4.6 ms with 1 request, 5.9
# with 50, 7.6 with 100, 9.8 with 150, 12.7 with 200 and 16.1 with 250.
# https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance
STEP_SECONDS = 3.3e-3
SEQUENCE_SECONDS = 0.047e-3

WAYS = ["GRPO", "two rounds", "by prompt", "by rule", "mixed"]


class Engine:
    """
    Decodes sequences in the order in which they come, and counts the time.

    Args:
        max_running (`int`):
            How many at once.
        step_seconds, sequence_seconds (`float`):
            a and b of a step's time.
    """

    def __init__(
        self, max_running: int, step_seconds: float = STEP_SECONDS, sequence_seconds: float = SEQUENCE_SECONDS
    ):
        self.max_running = max_running
        self.step_seconds = step_seconds
        self.sequence_seconds = sequence_seconds
        self.seconds = 0.0
        self.num_tokens = 0
        self._step = 0
        self._num_running = 0
        self._num_added = 0
        self._waiting: deque[tuple[int, dict[int, Callable[[], None]]]] = deque()  # in order
        self._events: list[tuple[int, int, Callable[[], None]]] = []  # a step, a number for order, what happens after

    def add(self, length: int, then: dict[int, Callable[[], None]] | None = None) -> None:
        """Have a sequence of so many tokens decoded, and functions called when it has so many of them."""
        self._waiting.append((length, then or {}))

    def run(self) -> None:
        """Decode until nothing is left."""
        while True:
            while self._waiting and self._num_running < self.max_running:
                self._start(*self._waiting.popleft())
            if not self._events:
                return
            # From one event to the next as many sequences run
            step = self._events[0][0]
            steps, self._step = step - self._step, step
            self.seconds += steps * (self.step_seconds + self.sequence_seconds * self._num_running)
            self.num_tokens += steps * self._num_running
            while self._events and self._events[0][0] == step:
                heapq.heappop(self._events)[2]()

    def _start(self, length: int, then: dict[int, Callable[[], None]]) -> None:
        self._num_running += 1
        for num_tokens, action in [*then.items(), (length, self._end)]:
            heapq.heappush(self._events, (self._step + num_tokens, self._num_added, action))
            self._num_added += 1

    def _end(self) -> None:
        self._num_running -= 1


class Lengths:
    """
    Lengths of completions.

    Args:
        mean (`float`):
            Of the lognormal distribution, in tokens.
        spread (`float`):
            Standard deviation of its logarithm.
        longest (`int`):
            Where completions are cut, in tokens.
        rng (`random.Random`):
            Draws them.
    """

    def __init__(self, mean: float, spread: float, longest: int, rng: random.Random):
        self.location = math.log(mean) - spread**2 / 2
        self.spread = spread
        self.longest = longest
        self.rng = rng

    def draw(self, longer_than: int = 0) -> int:
        """Of a completion that is known to be longer than so many tokens."""
        if longer_than == 0:
            quantile = self.rng.random()
        else:
            normal = statistics.NormalDist(self.location, self.spread)
            below = normal.cdf(math.log(longer_than))
            quantile = below + (1 - below) * self.rng.random()
        quantile = min(max(quantile, 1e-12), 1 - 1e-12)
        length = math.exp(statistics.NormalDist(self.location, self.spread).inv_cdf(quantile))
        return max(min(round(length), self.longest), longer_than + 1, 1)


# A base trajectory: its length, and what branches off it: from where, and for how many tokens
Base = tuple[int, list[tuple[int, int]]]


def draw_prompt(lengths: Lengths, num_bases: int, num_anchors: int, gap: float | None) -> list[Base]:
    """
    A prompt's base trajectories.

    Anchors are anywhere along a trajectory or, if `gap` is given, so many tokens apart on average, from its beginning:
    the first that a threshold finds. What it ends too soon for begins with the prompt, when it has ended.
    """
    bases = []
    for b in range(num_bases):
        length = lengths.draw()
        num_branches = num_anchors // num_bases + (b < num_anchors % num_bases)
        positions: list[int] = []
        while len(positions) < num_branches:
            if gap is None:
                positions.append(lengths.rng.randrange(length))
            else:
                positions.append((positions[-1] if positions else 0) + math.ceil(lengths.rng.expovariate(1 / gap)))
        branches = [(p, lengths.draw(p) - p) if p < length else (length, lengths.draw()) for p in positions]
        bases.append((length, branches))
    return bases


def seconds_of(way: str, prompts: list[list[Base]], rows: list[int], make_engine: Callable[[], Engine]) -> Engine:
    """An engine that has generated the rows of a step in one of `WAYS`; `rows` are the lengths of GRPO's."""
    engine = make_engine()
    if way == "GRPO":
        for length in rows:
            engine.add(length)
    elif way == "two rounds":
        for base in (base for bases in prompts for base in bases):
            engine.add(base[0])
        engine.run()
        add_branches(engine, [base for bases in prompts for base in bases])
    elif way == "mixed":
        # Of the batch before, which is like this one
        for bases in prompts:
            add_branches(engine, bases)
            for length, _ in bases:
                engine.add(length)
    elif way == "by rule":
        for length, branches in (base for bases in prompts for base in bases):
            then: dict[int, list[int]] = {}
            for position, remaining in branches:
                then.setdefault(position, []).append(remaining)
            engine.add(length, {position: partial(add_all, engine, lengths) for position, lengths in then.items()})
    else:
        for bases in prompts:
            growing = {id(base) for base in bases}

            def end(base: Base, bases: list[Base] = bases, growing: set[int] = growing) -> None:
                growing.discard(id(base))
                if not growing:
                    add_branches(engine, bases)

            for base in bases:
                engine.add(base[0], {base[0]: partial(end, base)})
    engine.run()
    return engine


def add_branches(engine: Engine, bases: list[Base]) -> None:
    for _, branches in bases:
        add_all(engine, [remaining for _, remaining in branches])


def add_all(engine: Engine, lengths: list[int]) -> None:
    for length in lengths:
        engine.add(length)


def compare(options: argparse.Namespace, loads: list[float]) -> dict[str, list[tuple[float, float]]]:
    """Time and tokens of each way, as ratios to GRPO's, for numbers of rows for each place of the engine."""
    rng = random.Random(options.seed)
    lengths = Lengths(options.mean_length, options.spread, options.longest, rng)
    num_bases = max(1, options.num_rows // 4)
    ratios: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for load in loads:
        num_prompts = max(1, round(load * options.max_running / options.num_rows))
        sums = {way: [0.0, 0] for way in WAYS}
        for _ in range(options.num_steps):
            rows = [lengths.draw() for _ in range(num_prompts * options.num_rows)]
            anywhere, first = (
                [draw_prompt(lengths, num_bases, options.num_rows - num_bases, gap) for _ in range(num_prompts)]
                for gap in (None, options.gap)
            )
            for way in WAYS:
                prompts = first if way == "by rule" else anywhere
                engine = seconds_of(way, prompts, rows, lambda: Engine(options.max_running))
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
        from .engine_check import check

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
