"""Tools that take no longer than they may."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any


def limited(name: str, tool: Callable[..., Any], seconds: float, abandon: Callable[[Callable[..., Any]], None]) -> Any:
    """
    A tool that raises a `TimeoutError` where `tool` takes too long.

    Args:
        name (`str`):
            What the policy calls it.
        tool (`Callable`):
            A function, or a coroutine function, which is cancelled then. A function cannot be stopped: it goes on in a
            thread that does not keep the process alive.
        seconds (`float`):
            How long it may take.
        abandon (`Callable`):
            Is told of a tool that goes on.
    """
    too_long = f"{name} took longer than {seconds:g} seconds."
    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def limited_coroutine(*args: Any, **kwargs: Any) -> Any:
            try:
                return await asyncio.wait_for(tool(*args, **kwargs), seconds)
            except TimeoutError:
                raise TimeoutError(too_long) from None

        return limited_coroutine

    @functools.wraps(tool)
    def limited_function(*args: Any, **kwargs: Any) -> Any:
        outcome: list[Any] = []

        def call() -> None:
            try:
                outcome.append((tool(*args, **kwargs), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(seconds)
        if not outcome:
            abandon(tool)
            raise TimeoutError(too_long)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return limited_function
