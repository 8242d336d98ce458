"""
Scores maths answers for `math_reward` in a pool of processes. A script: `_math_worker.py FD NUM_WORKERS TIME_LIMIT`.

It is a program of its own because the processes of a pool begin either as copies of the one that starts them, which
must not be a trainer on a GPU, or by importing the main module, which may be a script that trains.

Lists of (completion, solution) come through the connection with the descriptor `FD`. A reply and a failure are sent
back for each, in order. The reply is the reward or, where the solution is `None`, the answer read in the completion.
"""

import multiprocessing
import resource
import signal
import sys
from concurrent.futures import Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from pebble import ProcessPool
from trl.rewards import accuracy_reward

MEMORY_LIMIT = 4 * 2**30  # bytes
MAX_ANSWER = 500  # characters


def main(descriptor: int, num_workers: int, time_limit: float) -> None:
    connection = Connection(descriptor)
    context = multiprocessing.get_context("fork")
    pool = ProcessPool(num_workers, initializer=partial(set_limits, connection), context=context)
    connection.send("ready")
    # It ends when the trainer is gone, or when an idle process was killed, after which the pool is of no more use
    with suppress(EOFError, ConnectionError, BrokenProcessPool):
        while True:
            args = [(completion, solution, time_limit) for completion, solution in connection.recv()]
            for future in [pool.schedule(reply_to, answer, timeout=time_limit) for answer in args]:
                connection.send(outcome_of(future))


def set_limits(connection: Connection) -> None:
    """Have a process of the pool end when the pool kills it or is gone, and take no more than its memory."""
    connection.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for the end of a computation
    if sys.platform == "linux":  # others do not enforce it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def reply_to(completion: str, solution: str | None, time_limit: float) -> float | str | None:
    """The reward of a completion, or the answer read in it if there is no solution."""
    # If the pool is gone, the signal of this timer of CPU time kills, even in a computation without an end
    signal.setitimer(signal.ITIMER_PROF, 2 * time_limit)
    if solution is None:
        return read_answer(completion)
    (reward,) = accuracy_reward([[{"role": "assistant", "content": completion}]], [solution])
    return reward


def read_answer(completion: str) -> str | None:
    """The answer that `accuracy_reward` reads in a completion."""
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    parsed = parse(completion, extraction_config=[config], extraction_mode="first_match", parsing_timeout=10)
    return str(parsed[-1])[:MAX_ANSWER] if parsed else None


def outcome_of(future: Future[float | str | None]) -> tuple[float | str | None, str | None]:
    """The reply to an answer, and its failure: `"timeouts"`, `"crashes"` or `None`."""
    try:
        return future.result(), None
    except BrokenProcessPool:
        raise
    except TimeoutError:
        return None, "timeouts"
    except Exception:  # it ran out of memory, or its process died
        return None, "crashes"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
