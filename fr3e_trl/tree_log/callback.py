"""Logs the trees of a run during training."""

import functools
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState, TrainingArguments

from ..fr3e_config import FR3EConfig
from ..method.rows import Row
from ..method.tree import Tree
from ..processes import in_every_process, on_main_process
from .page import make_page
from .record import FOLDER, METRICS, PAGE, append_log, merge_records, record_trees, set_aside, write_logs, write_step

logger = logging.getLogger(__name__)


def never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Let a run continue if a callback fails to write its logs (`what`). The first error is reported in a warning."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            if not self.has_failed and PartialState().is_main_process:
                logger.warning(
                    "%s could not be written (%s: %s). Training continues. Further such errors are not reported.",
                    self.what,
                    type(error).__name__,
                    error,
                )
            self.has_failed = True

    return guarded


class TreeLog(TrainerCallback):
    """
    Writes a run's trees and metrics, and the page that shows them. The trainer passes the trees.

    Errors, such as a full disk, do not end a run but are reported in one warning. Logs of an earlier run in the same
    directory are moved to `trees-1`, or the next number.

    Args:
        every (`int`):
            Number of steps between logs of trees.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the policy.
        reward_funcs (`list[str]`):
            Names of the reward functions.
        accelerator ([`~accelerate.Accelerator`]):
            The accelerator, whose main process writes.
    """

    def __init__(
        self, every: int, tokenizer: PreTrainedTokenizerBase, reward_funcs: list[str], accelerator: Accelerator
    ):
        self.every = every
        self.tokenizer = tokenizer
        self.reward_funcs = reward_funcs
        self.accelerator = accelerator
        self._last: int | None = None  # the last step that was logged
        self._has_begun = False
        self.what = f"log_trees={every}: trees or metrics"
        self.has_failed = False

    @never_raises
    def write(self, trees: list[Tree], rows: list[Row], args: FR3EConfig, step: int) -> None:
        """
        Log the trees of a batch if it is the first in `every` steps or of the run. All processes must call this.

        Args:
            trees (`list[Tree]`), rows (`list[Row]`):
                See [`record_trees`].
            args (`FR3EConfig`):
                Settings of the run.
            step (`int`):
                The first step that trains on them.
        """
        if self._last is not None and (step - 1) // self.every == (self._last - 1) // self.every:
            return
        self._last = step
        # Each process only has the tokens of its own rows
        records = in_every_process(lambda: record_trees(trees, rows, self.tokenizer, args.plan.credit))
        record = {
            "step": step,
            "num_trees": len(trees),
            "reward_funcs": self.reward_funcs,
            "credit": args.credit,
            "trees": merge_records(records),
        }
        on_main_process(self.accelerator, lambda: write_step(Path(args.output_dir), record))

    @never_raises
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self._last, self._has_begun = None, True
        if not state.is_world_process_zero:
            return
        run = Path(str(args.output_dir))
        # Steps after this run's checkpoint belong to an earlier run that got further
        folder = set_aside(run, state.global_step)
        if folder is not None:
            logger.warning(
                "The logs of an earlier run in %s after step %d were moved to %s.", run, state.global_step, folder
            )
        write_logs(run / FOLDER / METRICS, state.log_history)

    @never_raises
    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        # An evaluation before training does not belong to the run, whose directory may still have an earlier run's logs
        if state.is_world_process_zero and self._has_begun:
            append_log(Path(str(args.output_dir)) / FOLDER / METRICS, state.log_history[-1])

    @never_raises
    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            make_page(Path(str(args.output_dir)), Path(str(args.output_dir)) / PAGE)

    @never_raises
    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self.on_save(args, state)
        if state.is_world_process_zero:
            report(Path(str(args.output_dir)) / PAGE, args.report_to)


def report(page: Path, report_to: str | list[str] | None) -> None:
    """Upload the page to Weights & Biases or trackio, if `report_to` names them, as an artifact and as HTML."""
    for name in ("wandb", "trackio"):
        if name not in (report_to or []):
            continue
        try:
            service = importlib.import_module(name)
            service.log_artifact(str(page), name="trees", type="trees")
            service.log({"trees": service.Html(page.read_text(), inject=False)})
        except Exception as error:  # must not fail a finished training
            logger.warning("%s was not logged to %s: %s: %s", page, name, type(error).__name__, error)
