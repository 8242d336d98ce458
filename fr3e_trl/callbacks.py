"""What a run prints: one line per log, warnings about what the user can fix, and a summary at the end."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import ProgressCallback, TrainerState, TrainingArguments

from .compat import TypedTrainer
from .fr3e_config import FR3EConfig
from .tree_log.record import FOLDER, METRICS, PAGE, evaluated, is_number

VALUE = "fr3e/value/S0"

# The columns of a line: label, metric and format. TRL's `reward` and `entropy` include branches
COLUMNS = [("length", "completions/mean_length", ".0f"), ("tokens", "fr3e/tokens/generated", ",.0f")]
KL = ("kl", "kl", ".3g")
GRPO_COLUMNS = [("reward", "reward", ".3f"), *COLUMNS, ("entropy", "entropy", ".3f"), KL]
FR3E_COLUMNS = [("reward", VALUE, ".3f"), *COLUMNS, ("entropy", "fr3e/entropy", ".3f"), KL]

# Metrics with a problematic range, and what to do. Each warning is printed once per run
WARNINGS: dict[str, tuple[Callable[[float], bool], str]] = {
    "grad_norm": (
        lambda norm: not math.isfinite(norm),
        "the gradient is not finite. Lower learning_rate, or train in bfloat16 instead of float16.",
    ),
    "completions/clipped_ratio": (
        lambda share: share > 0.5,
        "more than half of the completions are cut off. If that was so from the start, raise max_completion_length. "
        "If not, read some: a policy that repeats itself has collapsed and needs a lower learning_rate.",
    ),
    "fr3e/anchor/count": (
        lambda number: number == 0,
        "there were no branches. Either completions are too short, or no entropy reaches anchor_threshold. Lower it, "
        "or use 'auto'.",
    ),
    "fr3e/rows/informative": (
        lambda share: share == 0,
        "no row teaches anything, because all completions of a prompt have the same reward, or none (None or NaN). "
        "Check the reward function, or use prompts that are neither too easy nor too hard.",
    ),
}


class Stopwatch:
    """Measures `seconds` by part. Time counts for the innermost running part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    def begin(self, part: str) -> None:
        self._add_elapsed()
        self._running.append(part)

    def end(self) -> None:
        self._add_elapsed()
        self._running.pop()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def _add_elapsed(self) -> None:
        now = time.perf_counter()
        for part in self._running[-1:]:
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


class Console(ProgressCallback):
    """
    Prints one line per log instead of the dict of all metrics, which `log_history` and the reporters still get.

    It replaces transformers' `ProgressCallback`, so `remove_callback(ProgressCallback)` removes it. With
    `disable_tqdm=True`, transformers prints the dict instead, as for [`~trl.GRPOTrainer`].
    """

    def __init__(self, config: FR3EConfig, stopwatch: Stopwatch):
        super().__init__()
        self.config, self.stopwatch = config, stopwatch
        self.began, self.first_step, self.warned = 0.0, 0, set[str]()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self.began, self.first_step, self.warned = time.monotonic(), state.global_step, set()
        self.stopwatch.seconds, self.stopwatch._running = {}, []
        if sys.stderr.isatty():  # a log file would get every state of the bar
            super().on_train_begin(args, state, *_, **kwargs)
        if state.is_world_process_zero:
            if state.global_step >= state.max_steps:
                self.print(f"All {state.max_steps} steps are done. Raise max_steps or num_train_epochs to continue.")
            meaning = f"reward: mean over completions sampled from the prompt ({VALUE}). "
            hint = "For TRL's dict of all metrics, set disable_tqdm=True."
            self.print(hint if self.config.is_plain_grpo else meaning + hint)

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self.stopwatch.begin("update")  # everything except generation and rewards

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.stopwatch.end()
        if self.training_bar is not None:
            super().on_step_end(*args, **kwargs)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if sys.stderr.isatty():
            super().on_prediction_step(*args, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "train_runtime" not in logs:
            parts = [f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"]
            parts += line_parts(logs, FR3E_COLUMNS if not self.config.is_plain_grpo else GRPO_COLUMNS)
            steps, left = state.global_step - self.first_step, state.max_steps - state.global_step
            if "loss" in logs and steps > 0:
                parts.append(f"{duration((time.monotonic() - self.began) / steps * left)} left")
            self.print("  ".join(parts))
        for name, (is_problem, remedy) in WARNINGS.items():
            value, is_expected = logs.get(name), name == "fr3e/anchor/count" and self.config.num_anchors == 0
            if isinstance(value, float | int) and is_problem(value) and name not in self.warned and not is_expected:
                self.warned.add(name)
                self.print(highlighted(f"warning: {name} = {value:.3g}: {remedy}"))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            super().on_train_end(args, state, *_, **kwargs)
        if not state.is_world_process_zero:
            return
        say(f"\n{state.global_step - self.first_step} step(s) in {duration(time.monotonic() - self.began)}")
        rows, total = changes(state.log_history), sum(self.stopwatch.seconds.values())
        if not self.config.is_plain_grpo and total:
            times = sorted(self.stopwatch.seconds.items())
            rows.append(("time", ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in times)))
        if self.config.log_trees is not None:
            output = Path(str(args.output_dir))
            rows += [("trees", str(output / PAGE)), ("all metrics", str(output / FOLDER / METRICS))]
        show(rows)

    def print(self, line: str) -> None:
        say(line, print if self.training_bar is None else self.training_bar.write)


def replace_progress_callback(trainer: TypedTrainer, console: Console, user_callbacks: list[Any] | None) -> None:
    """Replace the `ProgressCallback` that transformers adds with the console. Those of the user stay."""
    callbacks = trainer.callback_handler.callbacks
    indices = [i for i, callback in enumerate(callbacks) if type(callback) is ProgressCallback]
    if len(indices) > sum(ProgressCallback in (callback, type(callback)) for callback in user_callbacks or []):
        callbacks[indices[-1]] = console  # transformers adds its own after the user's


def line_parts(logs: dict[str, Any], columns: list[tuple[str, str, str]]) -> list[str]:
    """The parts of a line for a log of a training step, of an evaluation, or of the user."""
    title = []
    if "eval_loss" in logs or "eval_reward" in logs:
        title, columns = [" of ".join(filter(None, ["evaluation", evaluated(logs)]))], GRPO_COLUMNS
        logs = {name.removeprefix("eval_"): value for name, value in logs.items() if name != "loss"}
    elif "loss" not in logs:
        columns = [(name, name, ".4g") for name in logs if name not in ("epoch", "total_flos")]
    elif "fr3e/tokens/generated" not in logs and columns == FR3E_COLUMNS:
        title, columns = ["same batch"], [KL]
    values = [(label, logs.get(name), form) for label, name, form in columns if logs.get(name) is not None]
    return title + [f"{label} {x if isinstance(x, str) else format(x, form)}" for label, x, form in values]


def changes(log_history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """
    How rewards changed during a run: from the first evaluation to the last, and during training.

    The training reward is the mean over the first and the last quarter of the logs, at most ten each. The 95% interval
    of the difference is estimated from differences of neighbouring logs, which a slow trend hardly affects. It requires
    16 logs, so that a normal distribution is close enough.
    """
    evaluations: dict[str, list[float]] = {}
    for entry in log_history:
        if is_number(entry.get("eval_reward")):
            name = " of ".join(filter(None, ["eval_reward", evaluated(entry)]))
            evaluations.setdefault(name, []).append(entry["eval_reward"])
    rows = [(name, f"{values[0]:.3f} → {values[-1]:.3f}") for name, values in evaluations.items()]
    metric = VALUE if any(VALUE in entry for entry in log_history) else "reward"
    values = [entry[metric] for entry in log_history if is_number(entry.get(metric))]
    if len(values) > 1:
        n = min(max(len(values) // 4, 1), 10)
        first, last = fmean(values[:n]), fmean(values[-n:])
        noise = 1.96 * math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(values)) / n)
        change = f"{last - first:+.3f}" + (f" ± {noise:.3f}" if len(values) >= 16 else "")
        rows.append(
            ("reward", f"{first:.3f} → {last:.3f}: {change} (first and last {'log' if n == 1 else f'{n} logs'})")
        )
    return rows


def say(line: str, write: Callable[[str], None] = print) -> None:
    """Print a line, replacing characters that the encoding lacks, or nothing once a pipe is closed."""
    try:
        try:
            write(line)
        except UnicodeEncodeError as error:
            write(line.encode(error.encoding, "replace").decode(error.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(rows: list[tuple[str, str]]) -> None:
    for name, text in rows:
        say(f"  {name:<13}{text}")


def highlighted(text: str) -> str:
    return f"\033[33m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def duration(seconds: float) -> str:
    """Such as `40 s`, `12 min` or `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
