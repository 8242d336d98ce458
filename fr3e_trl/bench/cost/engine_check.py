"""The model of an engine, held against a vLLM server: `fr3e cost engine --url`."""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console

from ...generation.vllm import STREAM_INTERVAL
from ...generation.vllm_server import VLLMServer, VLLMServerError
from .common import followed, make_table, over_turns
from .engine_model import WAYS, Base, Engine, Lengths, drawn_steps, seconds_of

LOADS = [0.5, 1, 2, 4]  # rows of a step for each place of the engine

PROMPT = "7 + 5 ="


class Server:
    """
    A server that is asked for completions of given lengths.

    Args:
        url (`str`):
            Its address.
    """

    def __init__(self, url: str):
        self.server = VLLMServer(url, "python examples/serve_demo.py", up_timeout=240, request_timeout=1800)
        self.prompt_ids = self.server.tokenize(PROMPT)

    def request(self, length: int, prefix_ids: list[int] | None = None) -> dict[str, Any]:
        """For so many tokens, whatever they are, after the prompt and a prefix."""
        return {
            "prompt": self.prompt_ids + (prefix_ids or []),
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": 1.0,
        }

    def step_costs(self, max_running: int) -> tuple[float, float]:
        """
        a and b of a step's time in seconds, by a line through the times with three numbers of sequences. Neither is
        below 0, whatever else the machine did meanwhile.
        """
        length = 128
        numbers = sorted({1, max(2, max_running // 2), max_running})
        self.server.complete([self.request(length)] * max_running)  # to warm up
        seconds = [self._timed([self.request(length)] * number) / length for number in numbers]
        slope, intercept = statistics.linear_regression(numbers, seconds)
        return max(intercept, 0.0), max(slope, 0.0)

    def _timed(self, payloads: list[dict[str, Any]], follow: Any = None) -> float:
        start = time.perf_counter()
        self.server.complete(payloads, follow)
        return time.perf_counter() - start

    def seconds_of(self, way: str, prompts: list[list[Base]], rows: list[int]) -> float:
        """What the server takes for the rows of a step in one of `WAYS`, see [`~.engine_model.seconds_of`]."""
        bases = [base for of_prompt in prompts for base in of_prompt]
        of_bases = [self.request(length) for length, _ in bases]
        if way == "GRPO":
            return self._timed([self.request(length) for length in rows])
        if way == "mixed":  # the prefixes are of no matter: those of the prompt's own tokens
            before = (self.prompt_ids * max(length for length, _ in bases) for _ in bases)
            return self._timed([*self._branches(bases, list(before)), *of_bases])
        if way == "by rule":
            return self._timed(
                [payload | {"stream": True, "stream_interval": STREAM_INTERVAL} for payload in of_bases],
                self._leave(bases),
            )
        # Branches are asked for when all of these are finished
        groups = [bases] if way == "two rounds" else prompts
        group_of = [g for g, group in enumerate(groups) for _ in group]
        finished: list[dict[int, list[int]]] = [{} for _ in groups]

        def branch(i: int, response: dict[str, Any]) -> list[dict[str, Any]]:
            if i >= len(bases):  # a branch
                return []
            group, of_group = groups[group_of[i]], finished[group_of[i]]
            of_group[i] = response["choices"][0]["token_ids"]
            if len(of_group) < len(group):
                return []
            return self._branches(group, [of_group[i] for i in sorted(of_group)])

        return self._timed(of_bases, branch)

    def _leave(self, bases: list[Base]) -> Callable[[int, dict[str, Any]], list[dict[str, Any]]]:
        """Asks for each branch as soon as its base trajectory is there."""
        told: list[list[int]] = [[] for _ in bases]

        def follow(i: int, response: dict[str, Any]) -> list[dict[str, Any]]:
            if i >= len(bases):  # a branch
                return []
            num_before = len(told[i])
            told[i] += response["choices"][0]["token_ids"]
            return [
                self.request(remaining, told[i][:position])
                for position, remaining in bases[i][1]
                if num_before < position <= len(told[i])
            ]

        return follow

    def _branches(self, bases: list[Base], token_ids: list[list[int]]) -> list[dict[str, Any]]:
        return [
            self.request(remaining, of_base[:position])
            for (_, branches), of_base in zip(bases, token_ids, strict=True)
            for position, remaining in branches
        ]


def check(options: argparse.Namespace) -> None:
    """Time each way on the server, and by the model with the server's own a and b, on the same lengths."""
    try:
        server = Server(options.url)
        a, b = server.step_costs(options.max_running)
        print(f"A step takes {1e3 * a:.2f} ms + {1e3 * b:.3f} ms for each running sequence", flush=True)
        make_engine = partial(Engine, options.max_running, a, b)
        lengths = Lengths(options.mean_length, options.spread, options.longest, random.Random(options.seed))
        table = make_table("Time of generation / GRPO's, by rows for each place", "measured", "by the model")
        for load in followed(LOADS, "load"):
            measured: dict[str, list[float]] = {way: [] for way in WAYS}
            modelled: dict[str, list[float]] = {way: [] for way in WAYS}
            for rows, prompts in drawn_steps(options, lengths, load):
                for way in WAYS:
                    measured[way].append(server.seconds_of(way, prompts[way], rows))
                    modelled[way].append(seconds_of(way, prompts[way], rows, make_engine).seconds)
            for way in WAYS[1:]:
                of_server, of_model = (
                    [x / grpo for x, grpo in zip(seconds[way], seconds["GRPO"], strict=True)]
                    for seconds in (measured, modelled)
                )
                table.add_row(f"{way}, {load:g}", over_turns(of_server), f"{statistics.median(of_model):.2f}")
    except VLLMServerError as error:
        raise SystemExit(f"fr3e cost engine: error: {error}") from None
    Console().print(table)
