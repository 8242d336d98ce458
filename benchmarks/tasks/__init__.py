"""Tasks of the bench: generated problems, checked answers, and a demonstrator who is not always right."""

from .chain import ModularChain
from .countdown import Countdown
from .distractors import Distractors
from .graded import GradedMachine
from .lengths import Lengths
from .machine import StateMachine
from .search import Search
from .task import HELDOUT_SEED, Task

# Each family is a file of this folder and a line of this table
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        ModularChain(),
        Countdown(),
        Countdown(name="countdown_taught", policy_steps=6000),  # hardly slips in its arithmetic
        StateMachine(),
        StateMachine(
            name="hard", max_completion_length=113, policy_steps=700, num_steps=16, num_careful=4, loop_length=3
        ),
        Distractors(),
        GradedMachine(),
        Search(),
        Lengths(),
    )
}

__all__ = ["HELDOUT_SEED", "TASKS", "Search", "Task"]
