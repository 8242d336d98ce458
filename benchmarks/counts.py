"""Checks of the commands' arguments: each raises a `ValueError` with the value and what is allowed."""

import math
from dataclasses import fields
from typing import Any


def check_counts(arguments: Any, **least: int) -> None:
    """
    Check arguments that are whole numbers, or `None` where that is their default.

    Args:
        arguments:
            A command's dataclass.
        **least (`int`):
            Names of arguments, each with the least that it may be.
    """
    optional = [field.name for field in fields(arguments) if field.default is None]
    for name, minimum in least.items():
        value = getattr(arguments, name)
        if value is not None or name not in optional:
            check_count(name, value, minimum)


def check_lists(arguments: Any, **least: int) -> None:
    """The same for arguments that are lists of whole numbers: at least one, and none of them twice."""
    for name, minimum in least.items():
        check_distinct(name, getattr(arguments, name))
        for value in getattr(arguments, name):
            check_count(name, value, minimum)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check a whole number."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")


def check_rate(name: str, value: Any) -> None:
    """Check a learning rate."""
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be a number of at least 0, for example 1e-3.")


def check_distinct(name: str, values: Any) -> None:
    """Check a list of at least one value, and none of them twice."""
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name}={values!r} must be a list of at least one value.")
    if len(set(values)) < len(values):
        raise ValueError(f"{name}={values!r} contains a value twice. Each value must be listed once.")
