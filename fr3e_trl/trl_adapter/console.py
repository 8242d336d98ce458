"""The console: one line a log, what needs the user's attention, and at the end what came of the run."""

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..page.record import FOLDER, METRICS, PAGE, evaluated
from .course import VALUE, Change, changes
from .resume import TRAINER_STATE_FILE

# A line: what is called how, in which format
COLUMNS = [
    ("length", "completions/mean_length", ".0f"),
    ("tokens", "fr3e/tokens/generated", ",.0f"),
    ("entropy", "entropy", ".3f"),
    ("kl", "kl", ".3g"),
]

BRANCHED = "fr3e/anchor/count"

# What the user can mend: a metric, when it tells, and what to do. Told once a run
ALARMS: list[tuple[str, Callable[[float], bool], str]] = [
    (
        "grad_norm",
        lambda norm: not math.isfinite(norm),
        "the gradient is not finite. Lower learning_rate, or train in bfloat16 rather than float16.",
    ),
    (
        "completions/clipped_ratio",
        lambda share: share > 0.5,
        "more than half of the completions are cut. If it was so from the start, raise max_completion_length. If it "
        "came later, look at some: a policy that repeats itself has collapsed, and needs a lower learning_rate.",
    ),
    (
        BRANCHED,
        lambda number: number == 0,
        "no branch was grown. Either completions are too short for one, or no token is as uncertain as "
        "anchor_threshold: lower it, or use 'auto'.",
    ),
    (
        "fr3e/rows/informative",
        lambda share: share == 0,
        "no row teaches anything: all completions of a prompt have the same reward, or none has one (None or NaN). "
        "Look at the reward function, or use prompts that are neither too easy nor too hard.",
    ),
]

Rows = list[tuple[str, str]]


class Console(ProgressCallback, PrinterCallback):
    """
    Prints one line a log in the place of a dict with all metrics. They are in `log_history` and the reporters.

    It takes the place of transformers' own callback, and is both of its kinds: `remove_callback(PrinterCallback)` and
    `remove_callback(ProgressCallback)` remove it. There is a progress bar on a terminal, unless `disable_tqdm`.

    Args:
        trainer ([`FR3ETrainer`]):
            The trainer.
    """

    def __init__(self, trainer: Any):
        super().__init__()
        self.trainer = trainer
        self.tells_next = True  # whether it says what to do next. `fr3e train` does when the model is saved
        self._began, self._first_step = 0.0, 0
        self._first_step_began = 0.0
        self._told: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step
        self._told.clear()
        self.trainer.stopwatch.seconds.clear()
        if _has_bars(args):
            super().on_train_begin(args, state, control, **kwargs)
        if state.is_world_process_zero and state.global_step >= state.max_steps:
            self._print(
                f"Step {state.global_step} is the last of {state.max_steps}: nothing is left to train. Raise max_steps "
                "or num_train_epochs to go on."
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._first_step:
            self._first_step_began = time.monotonic()
        self.trainer.stopwatch.begin("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.stopwatch.end()
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)
        elif state.is_world_process_zero and state.global_step == self._first_step + 1 and not control.should_log:
            self._print(f"{self._place(state)}  {self._time_left(args, state)}")  # the first log may be long in coming

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any):
        if _has_bars(args):
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "train_runtime" not in logs:  # the log at the end is no line, but may have metrics of the last steps
            parts = [self._place(state), *parts_of(logs, is_exploring=not args.is_plain_grpo)]
            if "loss" in logs and state.global_step > self._first_step:
                parts.append(self._time_left(args, state))
            self._print("  ".join(parts))
        for name, tells, remedy in ALARMS:
            value = logs.get(name)
            if name == BRANCHED and args.num_states == 1:  # no branch was asked for
                continue
            if name not in self._told and isinstance(value, float | int) and tells(value):
                self._told.add(name)
                self._print(highlighted(f"warning: {name} = {value:.3g}: {remedy}"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)
        if state.is_world_process_zero:
            steps = state.global_step - self._first_step
            say(f"\n{steps} step{'s' * (steps != 1)} in {duration(time.monotonic() - self._began)}")
            show(self._rows(args, state))

    def _rows(self, args: Any, state: Any) -> Rows:
        """What came of the run, and where it is."""
        rows = [
            ("value at the prompt" if change.name == VALUE else change.name, told(change))
            for change in changes(self.trainer)
        ]
        if not args.is_plain_grpo and self.trainer.stopwatch.seconds:
            rows.append(("time of the steps", str(self.trainer.stopwatch)))
        if args.load_best_model_at_end and state.best_global_step:
            rows.append(("weights", f"of step {state.best_global_step:,}, the best by {args.metric_for_best_model}"))
        output, checkpoint = Path(args.output_dir), checkpoint_of(args, state)
        if checkpoint is not None:
            rows.append(("checkpoint", str(checkpoint)))
        if args.log_trees is not None and (output / PAGE).exists():
            rows.append(("trees", str(output / PAGE)))
        if args.log_trees is not None:
            rows.append(("all metrics", str(output / FOLDER / METRICS)))
        elif checkpoint is not None:
            rows.append(("all metrics", str(checkpoint / TRAINER_STATE_FILE)))
        if self.tells_next and checkpoint is not None:
            what = f"--dataset_name DATASET --reward_funcs REWARD --max_completion_length {args.max_completion_length}"
            rows.append(("next", f"fr3e eval --model_name_or_path {shlex.quote(str(checkpoint))} {what}"))
        elif self.tells_next:
            rows.append(("next", f"trainer.save_model({args.output_dir!r}): nothing is saved yet"))
        return rows

    def _place(self, state: Any) -> str:
        return f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"

    def _time_left(self, args: Any, state: Any) -> str:
        """
        By what an update and a batch have taken so far: the first of a batch's steps has its generation.

        What came before the first step, such as an evaluation, does not come again.
        """
        steps_of_batch = args.num_iterations * args.steps_per_generation / args.gradient_accumulation_steps
        steps, whole = (step - self._first_step for step in (state.global_step, state.max_steps))
        batches, whole_batches = (math.ceil(number / steps_of_batch) for number in (steps, whole))
        updating = self.trainer.stopwatch.seconds.get("update", 0.0)
        generating = time.monotonic() - self._first_step_began - updating
        left = updating / steps * (whole - steps) + generating / batches * (whole_batches - batches)
        return f"{duration(left)} left"

    def _print(self, line: str) -> None:
        say(line, print if self.training_bar is None else self.training_bar.write)


def take_over(trainer: Any, given: list[Any] | None) -> None:
    """
    Have the console in the place of what transformers prints by, unless that is a notebook's.

    Args:
        trainer ([`FR3ETrainer`]):
            The trainer.
        given (`list`, *optional*):
            Callbacks of the user, classes or instances. They stay.
    """
    kind: type[TrainerCallback] = PrinterCallback if trainer.args.disable_tqdm else ProgressCallback
    callbacks = trainer.callback_handler.callbacks
    places = [i for i, callback in enumerate(callbacks) if type(callback) is kind]
    if len(places) > sum(callback is kind or type(callback) is kind for callback in given or []):
        callbacks[places[-1]] = Console(trainer)  # transformers adds its own after the user's


def console_of(trainer: Any) -> Console | None:
    """The console of a trainer, unless it was removed."""
    return next((callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Console)), None)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Without the progress bars of transformers and the hub, such as that of saving. The trainer's own stays."""
    if not logging.is_progress_bar_enabled() or are_progress_bars_disabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def parts_of(logs: dict[str, Any], is_exploring: bool) -> list[str]:
    """What a line says of a log: of a training step, of an evaluation, or whatever the user has logged."""
    if "eval_loss" in logs or "eval_reward" in logs:
        title = " of ".join(filter(None, ["evaluation", evaluated(logs)]))
        logs = {name.removeprefix("eval_"): value for name, value in logs.items() if name != "loss"}
        return [title, *_parts([("reward", "reward", ".3f"), *COLUMNS], logs)]
    if "loss" not in logs:
        return [
            f"{name} {_number(value, '.4g')}" for name, value in logs.items() if name not in ("epoch", "total_flos")
        ]
    if not is_exploring:
        return _parts([("reward", "reward", ".3f"), *COLUMNS], logs)
    if "fr3e/tokens/generated" not in logs:
        return ["same batch", *_parts(COLUMNS[-1:], logs)]
    # TRL's entropy is over the tokens in the loss, and also of steps that generate nothing
    logs = {**logs, "entropy": logs.get("fr3e/entropy")}
    return _parts([("value", VALUE, ".3f"), *COLUMNS], logs)


def _parts(columns: list[tuple[str, str, str]], logs: dict[str, Any]) -> list[str]:
    return [f"{label} {_number(logs[name], form)}" for label, name, form in columns if logs.get(name) is not None]


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else str(value)


def told(change: Change) -> str:
    """A change in words: `0.340 → 0.406: +0.066 ± 0.120 (first and last 2 of 8 logs)`."""
    if change.difference is None:
        return f"{change.last:.3f} ({change.when})"
    difference = f"{change.difference:+.3f}"
    if change.noise_of_difference is not None:
        within = "within" if abs(change.difference) <= change.noise_of_difference else "beyond"
        difference += f" ± {change.noise_of_difference:.3f}, {within} the noise"
    elif not change.name.startswith("eval_"):
        difference += ", too few logs to tell it from noise"
    return f"{change.first:.3f} → {change.last:.3f}: {difference} ({change.when})"


def checkpoint_of(args: Any, state: TrainerState) -> Path | None:
    """The checkpoint of the last step, if it was saved."""
    checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    return checkpoint if args.save_strategy != "no" and checkpoint.is_dir() else None


def say(line: str, write: Callable[[str], None] = print) -> None:
    """
    Print a line. It ends no run.

    A pipe may be read no more, as after `| head`: what follows goes nowhere. Letters that the terminal's encoding lacks
    become question marks.
    """
    try:
        try:
            write(line)
        except UnicodeEncodeError as error:
            write(line.encode(error.encoding, "replace").decode(error.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(rows: Rows) -> None:
    """Print what is called how, as a table."""
    for name, text in rows:
        say(f"  {name:<21}{text}")


def highlighted(text: str) -> str:
    """In yellow on a terminal."""
    return f"\033[33m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def duration(seconds: float) -> str:
    """Such as `40 s`, `12 min` or `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _has_bars(args: Any) -> bool:
    return not args.disable_tqdm and sys.stderr.isatty()
