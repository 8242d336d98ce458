"""
What the entropies of base trajectories cost with a vLLM server: log-probs in its answers, or a forward pass.

    fr3e cost entropies

An answer of a server is made up: tokens with the log-probs of the likeliest ones of a random distribution. Measured is
what the trainer does with it, in one thread: reading the JSON, and making entropies of it. A server's answers are read
while other completions are still generated. A forward pass begins when all are done. It is not measured: its time is
that of 2 FLOP for each parameter and token, with 7e9 parameters on 8 GPUs of 300 TFLOP/s.

    fr3e cost entropies --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct

With a language model, completions of a few questions are sampled with it. Printed is how far entropies made of so many
log-probs are below the exact ones: over all tokens, and over those that are anchors by the exact ones. Anchors are the
first 3 positions above the threshold that these entropies have at the first step (`anchor_threshold="auto"`). A moved
anchor is one of the exact entropies that those made of log-probs do not give.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from ...commands.completions import complete, sampling_config
from ...commands.data import load_tokenizer
from ...commands.usage import usage_errors
from ...generation.vllm import NUM_LOGPROBS, entropies_of
from ...method.anchors import AboveThreshold, eligible_positions, next_threshold, uncertainty
from .common import make_parser, make_table

VOCABULARY = 150_000
LENGTHS = (1024, 4096)
COUNTS = (NUM_LOGPROBS, 10, 5)
NUM_ANCHORS = 3

# Of the forward pass: parameters of the policy, the GPUs that share it, and what each of them computes in a second
NUM_PARAMETERS, NUM_GPUS, FLOPS = 7e9, 8, 300e12

QUESTIONS = (
    "A baker makes 12 trays of 8 rolls and sells 70 rolls. How many are left? Think step by step.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h? Explain each step.",
    "What is the sum of the first 20 odd numbers? Show your reasoning.",
    "Anna is 3 years older than Ben. Together they are 29. How old is each? Explain.",
    "Write a Python function that tells whether a number is prime, and explain it.",
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "List three reasons to learn music, and discuss each of them.",
)


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


def distributions(
    name: str, num_completions: int, max_completion_length: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """
    Of each completion that a model samples of [`QUESTIONS`], what its L tokens were sampled from.

    Returns:
        `list[tuple]`: Exact entropies, of shape (L,), in nats; log-probs of the most likely tokens, of shape
        (L, `NUM_LOGPROBS`), the likeliest first; and those of the tokens that were sampled, of shape (L,).
    """
    tokenizer = load_tokenizer(ModelConfig(model_name_or_path=name), trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with usage_errors(f"model_name_or_path={name!r}", "Use the directory or the id of a model.", OSError):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        if tokenizer.chat_template
        else text
        for text in QUESTIONS
        for _ in range(num_completions)
    ]
    prompt_ids = [tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids for text in texts]
    config = sampling_config(model, tokenizer, max_completion_length)
    completions = [
        row for rows in complete(model, tokenizer, prompt_ids, config, 16, range(len(texts))) for row in rows
    ]
    found = []
    for prompt, completion in zip(prompt_ids, completions, strict=True):
        ids = torch.tensor(prompt + completion.token_ids)
        length = len(completion.token_ids)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, -length - 1 : -1].double().log_softmax(1)
        entropies = -(logprobs.exp() * logprobs).sum(1)
        top = logprobs.topk(NUM_LOGPROBS, 1).values
        sampled = logprobs.gather(1, ids[-length:, None])[:, 0]
        found.append((entropies.numpy(), top.numpy(), sampled.numpy()))
    return found


def as_told(top: np.ndarray, sampled: np.ndarray, num_logprobs: int) -> list[list[float]]:
    """Log-probs as vLLM gives them: the most likely ones, and that of the token that was sampled, where it is not."""
    return [
        [*likeliest, *([logprob] if logprob < likeliest[-1] else [])]
        for likeliest, logprob in zip(top[:, :num_logprobs].tolist(), sampled.tolist(), strict=True)
    ]


def anchors_of(entropies: list[np.ndarray], budget: int) -> list[set[int]]:
    """The anchors of each completion, at the threshold of all of them."""
    eligible = [eligible_positions(of_completion, budget) for of_completion in entropies]
    rows = list(zip(entropies, eligible, strict=True))
    threshold = next_threshold(None, [uncertainty(*row, NUM_ANCHORS) for row in rows])
    return [set(AboveThreshold(threshold=threshold).choose(row, None, mask, NUM_ANCHORS)) for row, mask in rows]


def errors_table(name: str, num_completions: int, max_completion_length: int) -> Table:
    """How far entropies made of log-probs are off, and the anchors that they move."""
    found = distributions(name, num_completions, max_completion_length)
    exact = [entropies for entropies, _, _ in found]
    anchors = anchors_of(exact, max_completion_length)
    num_anchors = sum(map(len, anchors))
    table = make_table(
        f"{sum(map(len, exact))} tokens, {num_anchors} anchors, mean entropy {np.concatenate(exact).mean():.2f} nats",
        "missing, nats a token",
        "at anchors, nats",
        "anchors moved",
    )
    for num_logprobs in COUNTS:
        estimated = [entropies_of(as_told(top, sampled, num_logprobs), num_logprobs) for _, top, sampled in found]
        missing = [whole - part for whole, part in zip(exact, estimated, strict=True)]
        at_anchors = [row[sorted(positions)] for row, positions in zip(missing, anchors, strict=True)]
        chosen = anchors_of(estimated, max_completion_length)
        moved = sum(len(own - other) for own, other in zip(anchors, chosen, strict=True))
        table.add_row(
            f"{num_logprobs} log-probs",
            f"{np.concatenate(missing).mean():.3f}",
            f"{np.concatenate(at_anchors).mean():.3f}",
            f"{moved / max(num_anchors, 1):.0%}",
        )
    return table


def main(argv: list[str]) -> None:
    """Measure, and print tables."""
    parser = make_parser(
        __doc__,
        num_turns=(5, "turns, of which the least counts"),
        num_completions=(4, "completions of each question"),
        max_completion_length=(256, "tokens of a completion at most"),
    )
    parser.add_argument("--model_name_or_path", help="a language model, whose entropies are compared")
    options = parser.parse_args(argv)
    table = make_table("Tokens, and log-probs of each", "MB", "reading, ms", "entropies, ms", "forward, ms")
    for num_tokens in LENGTHS:
        forward = 2 * NUM_PARAMETERS * num_tokens / (NUM_GPUS * FLOPS)
        for num_logprobs in COUNTS:
            body = answer(num_tokens, num_logprobs)
            top = json.loads(body)["choices"][0]["logprobs"]["top_logprobs"]
            reading = seconds_of(partial(json.loads, body), options.num_turns)
            making = seconds_of(partial(_entropies, top), options.num_turns)
            table.add_row(
                f"{num_tokens}, {num_logprobs}",
                *(f"{value:.1f}" for value in (len(body) / 1e6, 1e3 * reading, 1e3 * making, 1e3 * forward)),
            )
    Console().print(table)
    if options.model_name_or_path is not None:
        sizes = (options.num_completions, options.max_completion_length)
        Console().print(errors_table(options.model_name_or_path, *sizes))
