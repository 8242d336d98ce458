"""Tasks of the bench: generated problems, checked answers, and a demonstrator who is not always right."""

from .chain import ModularChain
from .countdown import Countdown
from .distractors import Distractors
from .graded import GradedMachine
from .machine import StateMachine
from .search import Search
from .task import Task

_TASKS = (
    ModularChain(),
    Countdown(),
    StateMachine(),
    StateMachine(name="hard", max_completion_length=113, policy_steps=700, num_steps=16, num_careful=4, loop_length=3),
    Distractors(),
    GradedMachine(),
    Search(),
)
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}

__all__ = ["TASKS", "Countdown", "Distractors", "GradedMachine", "ModularChain", "Search", "StateMachine", "Task"]
