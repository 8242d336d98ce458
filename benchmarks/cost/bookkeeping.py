"""
What the bookkeeping of a large step costs, without a model: time, memory, and what the processes exchange.

    python -m benchmarks cost bookkeeping

Requests, anchors, rows, values, advantages and rejection for 512 prompts with 16 rows of 3,000 tokens in 8 processes,
by the functions that training calls, with a sampler that draws at once. The processes talk by gloo. Printed is the most
of any process. Its time, which includes waiting for the others, is a ratio to what TRL's own padding of its rows takes.
"""

import argparse
import os
import pickle
import resource
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console
from torch.multiprocessing import get_context, spawn

from fr3e_trl.fr3e_config import FR3EConfig
from fr3e_trl.method.credit import credit_rows
from fr3e_trl.method.credit.prior import ValueTracker, track_values
from fr3e_trl.method.explore import explore
from fr3e_trl.method.rows import Row, RowSharding, rows_of
from fr3e_trl.method.sampling import Sample, SamplingRequest
from fr3e_trl.method.tree import Score, TokenIds, Tree
from fr3e_trl.policy_logps import pad
from fr3e_trl.processes import in_every_process

from .common import make_parser, make_table

VOCABULARY = 150_000


class InstantSampler:
    """Draws tokens that do not depend on the prefix, and counts the time that it takes."""

    seconds = 0.0

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        began = time.perf_counter()
        samples = [
            [
                Sample(ids)
                for ids in np.random.randint(VOCABULARY, size=(r.num_samples, r.max_new_tokens), dtype=np.int32)
            ]
            for r in requests
        ]
        self.seconds += time.perf_counter() - began
        return samples


def score(owners: list[int], completion_ids: list[TokenIds], dialogues: list[Any]) -> list[Score]:
    return [Score([float(ids[-1] % 3 == 0)], float(ids[-1] % 3 == 0)) for ids in completion_ids]


def entropies(
    prompt_ids: list[TokenIds], completion_ids: list[TokenIds], multimodal: list[Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs and entropies as a forward pass leaves them: a micro-batch of rows in one tensor."""
    statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(completion_ids), 8):
        lengths = [len(ids) for ids in completion_ids[start : start + 8]]
        values = torch.rand(len(lengths), max(lengths))
        statistics += [(-row[:length], row[:length]) for row, length in zip(values, lengths, strict=True)]
    return statistics


def measure(process: int, options: argparse.Namespace, port: int, results: Any) -> None:
    """One process's part of the step."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(process),
        "LOCAL_RANK": str(process),
        "WORLD_SIZE": str(options.num_processes),
    }
    torch.set_num_threads(1)
    PartialState(cpu=True)
    args = FR3EConfig(
        "unused",
        num_generations=options.num_rows,
        per_device_train_batch_size=options.num_rows,
        max_completion_length=options.num_tokens,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    sharding = RowSharding(options.num_prompts * options.num_rows, options.num_processes, process)
    own = {row // options.num_rows for row in sharding.own}
    num_bytes = 0

    def counting(function: Callable[[], Any]) -> list[Any]:
        nonlocal num_bytes
        items = in_every_process(function)
        num_bytes += sum(len(pickle.dumps(item)) for item in items)
        return items

    trees = [
        Tree(np.arange(i, i + 200, dtype=np.int32) if i in own else np.empty(0, np.int32), options.num_tokens, key=i)
        for i in range(options.num_prompts)
    ]
    sampler = InstantSampler()
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    explore(trees, args.plan, sampler, score, entropies, (0, 0), sharding, counting)
    rows = rows_of(trees, sharding, {i: {} for i in own}, [None] * len(trees))
    tracker = ValueTracker()
    credit_rows(rows, trees, args.plan, tracker)
    track_values(trees, args.plan, tracker)
    seconds = time.perf_counter() - began - sampler.seconds
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    padding = _padding([row for row in rows if row.holder == process])
    results.put((seconds / padding, memory / 1024, num_bytes / 2**20))


def _padding(rows: list[Row]) -> float:
    """Seconds that TRL's padding of the rows takes, 8 at a time for the memory's sake."""
    began = time.perf_counter()
    for start in range(0, len(rows), 8):
        pad([torch.tensor(row.completion_ids.tolist()) for row in rows[start : start + 8]])
        pad([torch.tensor(row.loss_mask) for row in rows[start : start + 8]])
    return time.perf_counter() - began


def main(argv: list[str]) -> None:
    """Measure, and print the most of any process."""
    parser = make_parser(
        __doc__,
        num_prompts=(512, "prompts"),
        num_rows=(16, "rows of a prompt"),
        num_tokens=(3000, "tokens of a row"),
        num_processes=(8, "processes"),
    )
    options = parser.parse_args(argv)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = get_context("spawn").SimpleQueue()
    spawn(measure, (options, port, results), nprocs=options.num_processes)
    ratio, memory, num_bytes = map(max, zip(*(results.get() for _ in range(options.num_processes)), strict=True))
    sizes = f"{options.num_prompts} prompts x {options.num_rows} rows x {options.num_tokens} tokens"
    table = make_table(sizes, f"{options.num_processes} processes")
    table.add_row("time / TRL's padding of its rows", f"{ratio:.2f}")
    table.add_row("memory, MiB", f"{memory:.0f}")
    table.add_row("gathered from all, MiB", f"{num_bytes:.2f}")
    Console().print(table)
