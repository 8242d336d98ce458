"""Overrides that last for one call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def overridden(target: Any, **values: Any) -> Iterator[None]:
    """
    Have an object or a module know other values by these names.

    A method that is given here is found in the place of its class's, by all who call it on this one object. It is
    called without the object. What it replaces can be read from the object before.

    Args:
        target (`Any`):
            A trainer, or a module.
        values (`dict[str, Any]`):
            What it knows by each name. Afterwards it knows what it did before: an attribute that it had of its own is
            put back, and one that it had not is deleted, so that no method stays behind on it.

    Example:

    ```python
    >>> with overridden(trainer, _generate=lambda prompts: output):
    ...     batch = GRPOTrainer._generate_and_score_completions(trainer, inputs)
    ```
    """
    own = {name: vars(target)[name] for name in values if name in vars(target)}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(target, name, own[name])
            else:
                delattr(target, name)
