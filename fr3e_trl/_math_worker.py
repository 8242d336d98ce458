"""
Scores maths answers for `math_reward` in a pool of processes. A script: `_math_worker.py FD NUM_WORKERS TIME_LIMIT`.

It is a separate program because the processes of a pool either start as copies of their parent, which must not be a
trainer on a GPU, or import the main module, which may be a training script.

It receives lists of (completion, solution) through the connection with the descriptor `FD`, and sends back a reply and
a failure for each, in order. The reply is the reward or, if the solution is `None`, the answer in the completion.
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
    # It ends when the trainer is gone, or when an idle process was killed, which makes the pool unusable
    with suppress(EOFError, ConnectionError, BrokenProcessPool):
        while True:
            args = [(completion, solution, time_limit) for completion, solution in connection.recv()]
            for future in [pool.schedule(reply_to, answer, timeout=time_limit) for answer in args]:
                connection.send(outcome_of(future))


def set_limits(connection: Connection) -> None:
    """Limit the memory of a worker process, and let it end at once when the pool kills it."""
    connection.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits until a computation ends
    if sys.platform == "linux":  # other systems do not enforce the limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def reply_to(completion: str, solution: str | None, time_limit: float) -> float | str | None:
    """The reward of a completion, or the answer in it if there is no solution."""
    # If the pool is gone, the signal of this CPU timer ends the process even during an endless computation
    signal.setitimer(signal.ITIMER_PROF, 2 * time_limit)
    if solution is None:
        return read_answer(completion)
    (reward,) = accuracy_reward([[{"role": "assistant", "content": completion}]], [solution])
    return reward


def read_answer(completion: str) -> str | None:
    """The answer that `accuracy_reward` extracts from a completion."""
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
