"""Errors of those who use the commands: told in one line, without a traceback."""

import contextlib
from collections.abc import Iterator
from typing import Any


class UsageError(ValueError):
    """What was asked for cannot be done. A command ends with its message alone, and exit code 2."""


@contextlib.contextmanager
def usage_errors(argument: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a `UsageError` of one line: the argument, the reason, and the remedy."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        reason = " ".join(str(error.__cause__ or error).split()) or "it is empty"
        raise UsageError(f"{argument}: {reason.rstrip('.!')}. {remedy}") from error


def require_argument(arguments: Any, name: str, recipe: str) -> None:
    """Raise a `UsageError` unless an argument is set. It names a recipe that has one."""
    if getattr(arguments, name) is None:
        raise UsageError(f"{name} is not set. Use a recipe, for example --config {recipe}, or --{name}.")
