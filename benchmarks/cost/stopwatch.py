"""Where a trainer's steps spend their time, and how much memory they take."""

import contextlib
import functools
import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationMixin

from fr3e_trl.generation.generate import GenerateSampler
from fr3e_trl.trainer import FR3ETrainer
from fr3e_trl.trl_adapter import logprobs
from fr3e_trl.trl_adapter.stopwatch import Stopwatch

from .. import watching

# Of a step's time: see `step.py`
PARTS = ["generation", "log-probs", "rewards", "loss", "FR3E", "TRL"]

TIMED: list[tuple[type | ModuleType, str, str]] = [
    (GenerationMixin, "generate", "generation"),
    *watching.PARTS,
    *((FR3ETrainer, name, part) for name, part in watching.OVERRIDES.items()),
    (GenerateSampler, "sample", "FR3E"),
    (logprobs, "token_statistics", "FR3E"),
]


FORWARDS_PROFILED = 16  # calls of the model after which what the profiler has recorded is read


class MethodStopwatch(Stopwatch):
    """A stopwatch of methods, by [`PARTS`]. What a part has asked of a GPU is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def begin(self, part: str) -> None:
        # Inside the loss, the forward pass is the loss's
        super().begin("loss" if part == "log-probs" and "loss" in self._running else part)

    def _turn(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        super()._turn()

    @contextlib.contextmanager
    def times(self, methods: list[tuple[type | ModuleType, str, str]]) -> Iterator[None]:
        """Have every call of these methods and functions, each with its class or module, counted for their parts."""
        originals = [(owner, name, vars(owner)[name]) for owner, name, _ in methods]
        for owner, name, part in methods:
            setattr(owner, name, self._timed(vars(owner)[name], part))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                result = function(*args, **kwargs)
            return self._entered(result, part) if isinstance(result, AbstractContextManager) else result

        return timed

    @contextlib.contextmanager
    def _entered(self, context: AbstractContextManager, part: str) -> Iterator[Any]:
        """A context whose beginning and end count for a part, and not what is done in it."""
        with contextlib.ExitStack() as stack:
            with self.part(part):
                entered = stack.enter_context(context)
            yield entered
            with self.part(part):
                stack.close()


def measure(
    trainers: dict[str, Any], turns: Iterable[int]
) -> tuple[dict[str, dict[str, float]], dict[str, float], dict[str, float]]:
    """
    Seconds of each trainer by part, the tokens that it generated, and those that its loss forwarded, over all turns but
    that of number 0.
    """
    stopwatch = MethodStopwatch()
    seconds = {name: dict.fromkeys(PARTS, 0.0) for name in trainers}
    generated, updated = dict.fromkeys(trainers, 0.0), dict.fromkeys(trainers, 0.0)
    with stopwatch.times(TIMED):
        for turn in turns:
            for name, trainer in trainers.items():
                stopwatch.seconds = dict.fromkeys(PARTS, 0.0)
                before = replace(trainer.costs)
                trainer.train()
                if turn > 0:
                    generated[name] += trainer.costs.generated_tokens - before.generated_tokens
                    updated[name] += trainer.costs.forward_backward_tokens - before.forward_backward_tokens
                    for part in PARTS:
                        seconds[name][part] += stopwatch.seconds[part]
    return seconds, generated, updated


def peak_memory(trainer: Any) -> int:
    """Most bytes of tensors of a step, beside those that there were before it: on the GPU if there is one."""
    trainer.args.max_steps = 1
    gc.collect()  # what is freed below was made below
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        return torch.cuda.max_memory_allocated() - before
    allocations = _Allocations()
    calls = itertools.count(1)
    hook = trainer.model.get_input_embeddings().register_forward_pre_hook(  # an adapter generates by the model in it
        lambda *args: allocations.read() if next(calls) % FORWARDS_PROFILED == 0 else None
    )
    trainer.train()
    hook.remove()
    allocations.end()
    return allocations.peak


class _Allocations:
    """
    Bytes that are allocated from now on and not freed again, as PyTorch's profiler records them.

    It is to be read now and then: the record of a step of 1,024 tokens takes more memory than the step.

    Attributes:
        held, peak (`int`):
            Those at the last reading, and the most that there were until then.
    """

    def __init__(self) -> None:
        self.held = self.peak = 0
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints two lines at each reading
        self._begin()

    def _begin(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def read(self) -> None:
        """Read what was recorded, and go on."""
        self.end()
        self._begin()
        gc.collect()  # the record before is in a cycle, and its size is not known to Python

    def end(self) -> None:
        """Read what was recorded, for the last time."""
        self._profiler.stop()
        events: Any = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        held = list(itertools.accumulate((num_bytes for _, num_bytes in changes), initial=self.held))
        self.held, self.peak = held[-1], max(self.peak, max(held))
