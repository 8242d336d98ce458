"""Where a trainer's steps spend their time, and how much memory they take."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationMixin
from trl import GRPOTrainer

from fr3e_trl import policy_logps, rollout
from fr3e_trl.callbacks import Stopwatch
from fr3e_trl.fr3e_trainer import FR3ETrainer
from fr3e_trl.generation import decoding
from fr3e_trl.generation.generate import GenerateSampler

# Of a step's time: see `step.py`
PARTS = ["generation", "log-probs", "rewards", "loss", "backward", "FR3E", "TRL"]

# Methods and functions by the part of a step's time that they are
TIMED: list[tuple[type | ModuleType, str, str]] = [
    (GenerationMixin, "generate", "generation"),
    (GRPOTrainer, "_get_per_token_logps_and_entropies", "log-probs"),
    (GRPOTrainer, "_calculate_rewards", "rewards"),
    (GRPOTrainer, "_compute_loss", "loss"),
    (GRPOTrainer, "_generate_and_score_completions", "TRL"),
    (GRPOTrainer, "training_step", "backward"),
    (AcceleratedOptimizer, "step", "backward"),
    (decoding, "unwrap_model_for_generation", "TRL"),
    (rollout, "tokenized", "TRL"),
    (rollout, "decoded", "TRL"),
    (FR3ETrainer, "_generate_and_score_completions", "FR3E"),
    (FR3ETrainer, "_compute_loss", "FR3E"),
    (FR3ETrainer, "_get_per_token_logps_and_entropies", "log-probs"),
    (GenerateSampler, "sample", "FR3E"),
    (policy_logps, "token_statistics", "FR3E"),
]


class MethodStopwatch(Stopwatch):
    """A stopwatch of methods, by [`PARTS`]. What a part has asked of a GPU is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def begin(self, part: str) -> None:
        # Inside the loss, the forward pass is the loss's
        super().begin("loss" if part == "log-probs" and "loss" in self._running else part)

    def _add_elapsed(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        super()._add_elapsed()

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
) -> tuple[dict[str, dict[str, float]], dict[str, float], dict[str, float], dict[str, float]]:
    """
    Seconds of each trainer by part, the tokens that it generated, and those that its loss forwarded, over all turns but
    that of number 0; on a GPU, the most bytes of its last turn.
    """
    stopwatch = MethodStopwatch()
    seconds = {name: dict.fromkeys(PARTS, 0.0) for name in trainers}
    generated, updated = dict.fromkeys(trainers, 0.0), dict.fromkeys(trainers, 0.0)
    peaks: dict[str, float] = {}
    with stopwatch.times(TIMED):
        for turn in turns:
            for name, trainer in trainers.items():
                stopwatch.seconds = dict.fromkeys(PARTS, 0.0)
                before = replace(trainer.costs)
                if torch.cuda.is_available():
                    peaks[name] = peak_memory(trainer)
                else:
                    trainer.train()
                if turn > 0:
                    generated[name] += trainer.costs.generated_tokens - before.generated_tokens
                    updated[name] += trainer.costs.forward_backward_tokens - before.forward_backward_tokens
                    for part in PARTS:
                        seconds[name][part] += stopwatch.seconds[part]
    return seconds, generated, updated, peaks


def peak_memory(trainer: GRPOTrainer) -> int:
    """Most bytes of tensors of a step beside those before it: on the GPU, or as PyTorch's profiler records them."""
    gc.collect()  # what is freed below was made below
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.train()
    events: Any = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(num_bytes for _, num_bytes in changes))
