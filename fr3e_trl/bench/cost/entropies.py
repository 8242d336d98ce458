"""
What the entropies of base trajectories cost with a vLLM server: log-probs in its answers, or a forward pass.

    fr3e cost entropies

An answer of a server is made up: tokens with the log-probs of the likeliest ones of a random distribution. Measured is
what the trainer does with it, in one thread: reading the JSON, and making entropies of it. A server's answers are read
while other completions are still generated. A forward pass begins when all are done. It is not measured: its time is
that of 2 FLOP for each parameter and token, at the speed that is given.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from ...generation.vllm import NUM_LOGPROBS, entropies_of
from .common import make_parser, make_table

VOCABULARY = 150_000
LENGTHS = (1024, 4096)


def answer(num_tokens: int, num_logprobs: int) -> bytes:
    """The JSON of a completion as vLLM's server sends it."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (num_tokens, 1000))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    likeliest = -np.sort(-logprobs, axis=1)[:, :num_logprobs]
    names = [[f"token_id:{i}" for i in of_token] for of_token in rng.integers(VOCABULARY, size=likeliest.shape)]
    top = [dict(zip(of_token, values, strict=True)) for of_token, values in zip(names, likeliest.tolist(), strict=True)]
    of_tokens = {
        "text_offset": list(range(num_tokens)),
        "token_logprobs": likeliest[:, 0].tolist(),
        "tokens": [of_token[0] for of_token in names],
        "top_logprobs": top,
    }
    token_ids = rng.integers(VOCABULARY, size=num_tokens).tolist()
    return json.dumps({"choices": [{"token_ids": token_ids, "logprobs": of_tokens}]}).encode()


def seconds_of(function: Callable[[], Any], num_turns: int) -> float:
    """The least of several turns, of CPU time."""
    seconds = []
    for _ in range(num_turns):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    return min(seconds)


def _entropies(top: list[dict[str, float]]) -> np.ndarray:
    return entropies_of(of_token.values() for of_token in top)


def main(argv: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = make_parser(__doc__, num_turns=(5, "turns, of which the least counts"))
    parser.add_argument("--billions", type=float, default=7.0, help="parameters of a policy, in 1e9 (default: 7)")
    parser.add_argument("--tflops", type=float, default=300.0, help="of a GPU in a forward pass (default: 300)")
    parser.add_argument("--num_gpus", type=int, default=8, help="that share it (default: 8)")
    options = parser.parse_args(argv)
    table = make_table("Tokens, and log-probs of each", "MB", "reading, ms", "entropies, ms", "forward, ms")
    for num_tokens in LENGTHS:
        forward = 2 * options.billions * 1e9 * num_tokens / (options.tflops * 1e12 * options.num_gpus)
        for num_logprobs in (NUM_LOGPROBS, 10, 5):
            body = answer(num_tokens, num_logprobs)
            top = json.loads(body)["choices"][0]["logprobs"]["top_logprobs"]
            reading = seconds_of(partial(json.loads, body), options.num_turns)
            making = seconds_of(partial(_entropies, top), options.num_turns)
            table.add_row(
                f"{num_tokens}, {num_logprobs}",
                *(f"{value:.1f}" for value in (len(body) / 1e6, 1e3 * reading, 1e3 * making, 1e3 * forward)),
            )
    Console().print(table)
