"""Time limits for tools."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any


def limited(name: str, tool: Callable[..., Any], seconds: float, abandon: Callable[[Callable[..., Any]], None]) -> Any:
    """
    Wrap a tool so that it raises a `TimeoutError` after `seconds`.

    Args:
        name (`str`):
            The tool's name for the policy.
        tool (`Callable`):
            A coroutine function, which is then cancelled, or a function. A function cannot be stopped, so it continues
            in a daemon thread.
        seconds (`float`):
            The limit.
        abandon (`Callable`):
            Called with a function that continues.
    """
    message = f"{name} took longer than {seconds:g} seconds."
    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def limited_coroutine(*args: Any, **kwargs: Any) -> Any:
            try:
                return await asyncio.wait_for(tool(*args, **kwargs), seconds)
            except TimeoutError:
                raise TimeoutError(message) from None

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
            raise TimeoutError(message)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return limited_function
