"""
Work that is shared out between processes.

Every process knows of all the work, and gets all of the results. Each makes the same collective calls in the same
order, whatever its share, also when that is empty; and an error in one is raised in all of them.
"""

import heapq
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

T = TypeVar("T")
R = TypeVar("R")


def on_main_process(accelerator: Accelerator, function: Callable[[], R]) -> R:
    """Call `function` in the main process, and return its result, or raise its error, in every process."""
    result, error = _attempt(function) if accelerator.is_main_process else (None, None)
    outcome: list[Any] = [result, _portable(error)]
    broadcast_object_list(outcome, from_process=0)
    if error or outcome[1]:
        raise error or outcome[1]
    return outcome[0]


def in_every_process(function: Callable[[], R]) -> list[R]:
    """
    Call `function` in every process, and return the results of all.

    Where it raises, each process raises: its own error, or the first of the others'.
    """
    result, error = _attempt(function)
    results, errors = zip(*gather_object([(result, _portable(error))]), strict=True)
    if any(errors):
        raise error or next(filter(None, errors))
    return list(results)


def in_shares(
    accelerator: Accelerator,
    function: Callable[[list[T]], list[R]],
    items: Sequence[T],
    costs: Sequence[float],
    in_step: bool = False,
) -> list[R]:
    """
    Share `items` out between the processes, and return the results for all of them, in order.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Knows the processes.
        function (`Callable`):
            Gives one result for each item that it gets. It is not called for an empty share.
        items, costs (`Sequence`):
            The same in every process.
        in_step (`bool`):
            Whether the processes must call `function` with equally many items, because it makes collective calls of
            its own for them, as a model does whose weights are sharded. The first item then fills up shorter shares.
    """
    shares = share_out(costs, accelerator.num_processes)
    mine = [items[i] for i in shares[accelerator.process_index]]
    num_own = len(mine)
    if in_step:
        mine += [items[0]] * (max(map(len, shares)) - num_own)
    results: dict[int, R] = {}
    for share, of_share in zip(shares, in_every_process(lambda: function(mine)[:num_own] if mine else []), strict=True):
        results |= dict(zip(share, of_share, strict=True))
    return [results[i] for i in range(len(items))]


def share_out(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """
    Share indices out so that the shares cost about the same: each, from the costliest, to who has least.

    The costliest share exceeds the mean by less than the cost of one item.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [(0.0, i) for i in range(num_shares)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, i = heapq.heappop(loads)
        shares[i].append(index)
        heapq.heappush(loads, (load + costs[index], i))
    return [sorted(share) for share in shares]


def _attempt(function: Callable[[], R]) -> tuple[R | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None) -> Exception | None:
    """An error that can be sent to other processes."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__} in another process: {error}")
