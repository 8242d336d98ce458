"""A model of a large engine: how long it decodes, and in which order."""

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

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
        if self.spread == 0:
            return max(min(round(math.exp(self.location)), self.longest), longer_than + 1)
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


def drawn_steps(
    options: argparse.Namespace, lengths: Lengths, load: float
) -> Iterator[tuple[list[int], dict[str, list[list[Base]]]]]:
    """Of each step, with so many rows for each place of the engine: lengths of GRPO's rows, and the prompts by way."""
    num_prompts = max(1, round(load * options.max_running / options.num_rows))
    num_bases = max(1, options.num_rows // 4)
    for _ in range(options.num_steps):
        rows = [lengths.draw() for _ in range(num_prompts * options.num_rows)]
        anywhere, first = (
            [draw_prompt(lengths, num_bases, options.num_rows - num_bases, gap) for _ in range(num_prompts)]
            for gap in (None, options.gap)
        )
        yield rows, {way: first if way == "by rule" else anywhere for way in WAYS}


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
