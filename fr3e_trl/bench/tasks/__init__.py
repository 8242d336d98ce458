"""Tasks of the bench: generated problems, checked answers, and a demonstrator who is not always right."""

from .addition import LongAddition
from .chain import ModularChain
from .countdown import Countdown
from .task import Task

TASKS: dict[str, Task] = {task.name: task for task in (ModularChain(), Countdown(), LongAddition())}

__all__ = ["TASKS", "Countdown", "LongAddition", "ModularChain", "Task"]
