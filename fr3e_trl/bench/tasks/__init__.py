"""Tasks of the bench: generated problems, checked answers, and a demonstrator who is not always right."""

from .chain import ModularChain
from .countdown import Countdown
from .machine import StateMachine
from .task import Task

TASKS: dict[str, Task] = {task.name: task for task in (ModularChain(), Countdown(), StateMachine())}

__all__ = ["TASKS", "Countdown", "ModularChain", "StateMachine", "Task"]
