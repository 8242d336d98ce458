"""
Collective calls that raise an error in every process if one process fails.

All processes must make the same collective calls in the same order, including those that have no work.
"""

import pickle
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather, gather_object

T = TypeVar("T")
R = TypeVar("R")


def on_main_process(accelerator: Accelerator, function: Callable[[], R]) -> R:
    """Call `function` in the main process. Every process returns its result, or raises its error."""
    result, error = _attempt(function) if accelerator.is_main_process else (None, None)
    outcome: list[Any] = [result, error and portable(error)]
    broadcast_object_list(outcome, from_process=0)
    if error or outcome[1]:
        raise error or outcome[1]
    return outcome[0]


def through_main_process(
    accelerator: Accelerator, function: Callable[[list[T]], Sequence[R]], items: Sequence[T]
) -> list[R]:
    """
    Call `function` in the main process with the items of all processes.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            The accelerator of these processes.
        function (`Callable`):
            Returns one result for each item. If it raises, every process raises.
        items (`Sequence`):
            This process's items.

    Returns:
        `list`: The results for this process's items. No other process but the main one receives them.
    """
    if accelerator.num_processes == 1:
        return list(function(list(items)))
    gathered: list[Any] = [None] * accelerator.num_processes  # the items of each process
    dist.gather_object(list(items), gathered if accelerator.is_main_process else None)
    outcomes: list[Any] | None = None
    error: Exception | None = None
    if accelerator.is_main_process:
        results, error = _attempt(lambda: iter(function(list(chain.from_iterable(gathered)))))
        outcomes = [
            ([next(results) for _ in process_items] if results else None, error and portable(error))
            for process_items in gathered
        ]
    outcome: list[Any] = [None]
    dist.scatter_object_list(outcome, outcomes)
    own_results, main_error = outcome[0]
    if error or main_error:
        raise error or main_error
    return own_results


def through_group(group: Any, function: Callable[[list[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
    """
    Call `function` in every process of a group with the items of the whole group.

    Args:
        group (`torch.distributed.ProcessGroup`):
            The processes.
        function (`Callable`):
            Returns one result for each item, the same in every process.
        items (`Sequence`):
            This process's items.

    Returns:
        `list`: The results for this process's items.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)  # the items of each process
    dist.all_gather_object(gathered, list(items), group=group)
    results = function(list(chain.from_iterable(gathered)))
    start = sum(map(len, gathered[: dist.get_rank(group)]))
    return list(results[start : start + len(items)])


def in_every_process(function: Callable[[], R]) -> list[R]:
    """
    Call `function` in every process, and return the results of all.

    If it raises anywhere, every process raises its own error, or the first of the others' errors.
    """
    result, error = _attempt(function)
    results, errors = zip(*gather_object([(result, error and portable(error))]), strict=True)
    if any(errors):
        raise error or next(filter(None, errors))
    return list(results)


def agree(function: Callable[[], R]) -> R:
    """Call `function` in every process, and return its own result. If it raises anywhere, every process raises."""
    own: list[R] = []
    in_every_process(lambda: own.append(function()))
    return own[0]


def agree_on_gathered(
    function: Callable[[], torch.Tensor], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """
    Call a `function` that ends by gathering a tensor in every process. If it raises before that, every process raises.

    A process in which it raises gathers infinities instead, which make the others exchange errors.

    Args:
        function (`Callable`):
            Returns the gathered tensor. It makes no other collective call.
        shape (`tuple[int, ...]`):
            Shape of each process's part.
        device (`torch.device`):
            Device of the parts.
    """
    error: Exception | None = None
    try:
        gathered = function()
    except Exception as failure:
        error, gathered = failure, gather(torch.full(shape, torch.inf, device=device))
    if gathered.isinf().any():  # an error, or a computed infinity
        errors = gather_object([error and portable(error)])
        if any(errors):
            raise error or next(filter(None, errors))
    return gathered


def in_step(function: Callable[[], R]) -> list[R]:
    """
    Call a `function` that makes collective calls itself in every process, and return the results of all.

    If it raises in one, that process exits and the launcher stops the others, which no error could reach while they
    wait in a collective call.
    """
    return gather_object([function()])


def _attempt(function: Callable[[], R]) -> tuple[R | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def portable(error: Exception) -> Exception:
    """The error, or a replacement if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__} in another process: {error}")


class Lockstep:
    """
    Lets each process make a collective call as often as it needs, while the others join in.

    Within the context each process makes its calls with [`call`]. A process that leaves the context joins the calls of
    the others until all have left. An error in one process is raised in all.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            The accelerator of these processes.
        join (`Callable`):
            Makes the call when this process has nothing of its own to do.
    """

    def __init__(self, accelerator: Accelerator, join: Callable[[], Any]):
        self.is_alone = accelerator.num_processes == 1
        self.join = join
        self._has_failed = False

    def call(self, function: Callable[[], R]) -> R:
        """Make a call together with all processes."""
        self._exchange(True)
        return function()

    def __enter__(self) -> "Lockstep":
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, Exception) and not self._has_failed:
            self._exchange(error)
        elif error is None:
            while self._exchange(False):
                try:
                    self.join()
                except Exception as failure:
                    self._exchange(failure)
                    raise

    def _exchange(self, status: bool | Exception) -> bool:
        """
        Exchange whether each process makes a call, or its error. Returns whether any process makes one.

        Raises the first of the other processes' errors.
        """
        if self.is_alone:
            return False
        statuses = gather_object([portable(status) if isinstance(status, Exception) else status])
        errors = [other for other in statuses if isinstance(other, Exception)]
        if errors and not isinstance(status, Exception):
            self._has_failed = True
            raise errors[0]
        return any(statuses)
