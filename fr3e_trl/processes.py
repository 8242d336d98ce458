"""
What processes do together.

All processes make the same collective calls in the same order, also those without work. An error in one process is
raised in all.
"""

import pickle
from collections.abc import Callable, Sequence
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
    Have the main process call `function` with the items of all processes.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Knows the processes.
        function (`Callable`):
            Gives one result for each item. If it raises, every process raises.
        items (`Sequence`):
            This process's items.

    Returns:
        `list`: The results for this process's items. Besides this process only the main one sees them.
    """
    if accelerator.num_processes == 1:
        return list(function(list(items)))
    of_processes: list[Any] = [None] * accelerator.num_processes
    dist.gather_object(list(items), of_processes if accelerator.is_main_process else None)
    outcomes: list[Any] = of_processes
    error: Exception | None = None
    if accelerator.is_main_process:
        results, error = _attempt(lambda: iter(function([item for of_process in of_processes for item in of_process])))
        outcomes = [
            ([next(results) for _ in of_process] if results else None, error and portable(error))
            for of_process in of_processes
        ]
    outcome: list[Any] = [None]
    dist.scatter_object_list(outcome, outcomes if accelerator.is_main_process else None)
    own_results, of_main = outcome[0]
    if error or of_main:
        raise error or of_main
    return own_results


def through_group(group: Any, function: Callable[[list[T]], Sequence[R]], items: Sequence[T]) -> list[R]:
    """
    Have every process of a group call `function` with the items of the whole group.

    Args:
        group (`torch.distributed.ProcessGroup`):
            The processes.
        function (`Callable`):
            Gives one result for each item, the same in every process.
        items (`Sequence`):
            This process's items.

    Returns:
        `list`: The results for this process's items.
    """
    of_processes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_processes, list(items), group=group)
    results = function([item for of_process in of_processes for item in of_process])
    start = sum(map(len, of_processes[: dist.get_rank(group)]))
    return list(results[start : start + len(items)])


def in_every_process(function: Callable[[], R]) -> list[R]:
    """
    Call `function` in every process, and return the results of all.

    If it raises anywhere, every process raises: its own error, or the first of the others' errors.
    """
    result, error = _attempt(function)
    results, errors = zip(*gather_object([(result, error and portable(error))]), strict=True)
    if any(errors):
        raise error or next(filter(None, errors))
    return list(results)


def agree(function: Callable[[], R]) -> R:
    """Call `function` in every process, for its own result. If it raises anywhere, every process raises."""
    own: list[R] = []
    in_every_process(lambda: own.append(function()))
    return own[0]


def agree_on_gathered(
    function: Callable[[], torch.Tensor], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """
    Call a `function` that ends by gathering a tensor, in every process. If it raises before, every process raises.

    A process in which it raises gathers infinity in the place of its part, which the others take for the sign to ask.

    Args:
        function (`Callable`):
            Returns what was gathered. It makes no other collective call.
        shape (`tuple[int, ...]`):
            That of each process's part.
        device (`torch.device`):
            Where the parts are.
    """
    error: Exception | None = None
    try:
        gathered = function()
    except Exception as failure:
        error, gathered = failure, gather(torch.full(shape, torch.inf, device=device))
    if gathered.isinf().any():  # or a process has computed that
        errors = gather_object([error and portable(error)])
        if any(errors):
            raise error or next(filter(None, errors))
    return gathered


def in_step(function: Callable[[], R]) -> list[R]:
    """
    Call a `function` that makes collective calls itself in every process, and return the results of all.

    If it raises in one, that process ends, and the launcher ends the others. They cannot be told: they wait in a call
    of `function`.
    """
    return gather_object([function()])


def _attempt(function: Callable[[], R]) -> tuple[R | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def portable(error: Exception) -> Exception:
    """The error, in a form that other processes can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__} in another process: {error}")


class Turns:
    """
    Has every process make a collective call equally often, although each needs it a different number of times.

    Within the context each process makes its calls by [`take`]. A process that leaves the context joins in the calls
    of the others until all have left. An error in one process is raised in all.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Knows the processes.
        join (`Callable`):
            Makes the call when this process has nothing of its own to do.
    """

    def __init__(self, accelerator: Accelerator, join: Callable[[], Any]):
        self.is_alone = accelerator.num_processes == 1
        self.join = join
        self._has_failed = False

    def take(self, call: Callable[[], R]) -> R:
        """Make a call together with all processes."""
        self._tell(True)
        return call()

    def __enter__(self) -> "Turns":
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, Exception) and not self._has_failed:
            self._tell(error)
        elif error is None:
            while self._tell(False):
                try:
                    self.join()
                except Exception as failure:
                    self._tell(failure)
                    raise

    def _tell(self, what: Any) -> bool:
        """Tell the others that this process makes a call (or not, or failed). Returns whether any process makes one."""
        if self.is_alone:
            return False
        told = gather_object([portable(what) if isinstance(what, Exception) else what])
        errors = [of_process for of_process in told if isinstance(of_process, Exception)]
        if errors and not isinstance(what, Exception):
            self._has_failed = True
            raise errors[0]
        return any(told)
