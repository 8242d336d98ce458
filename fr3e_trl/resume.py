"""Exact resume: a run that was interrupted at any moment continues as if it had not been."""

import copy
import json
import logging
import math
import pickle
import random
from collections.abc import Sized
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig

from .compat import TypedTrainer

logger = logging.getLogger(__name__)

TRAINER_STATE_FILE = "trainer_state.json"

# Attributes that the next step needs and transformers does not save
STATE = ("_step", "_tr_loss", "_globalstep_last_logged")

# Settings that determine the rows of a step and their place in the data. An unfinished batch is only valid for these
SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "world_size",
)

# Settings of TRL that change the course of a run, and settings of FR3E that do not
DECISIVE = (
    *("seed", "beta", "loss_type", "epsilon", "epsilon_high", "scale_rewards", "temperature", "learning_rate"),
    *("use_vllm", "top_p", "top_k", "min_p"),
)
NOT_DECISIVE = ("log_trees", "share_prefixes", "tool_timeout", "max_staleness")


class ExactResume(TypedTrainer):
    """
    A trainer whose checkpoints hold the complete state, so that a resumed run equals the run without interruption.

    The difference from [`~trl.GRPOTrainer`]: checkpoints also hold the batch that is still being trained on
    (`num_iterations`, `steps_per_generation`), the position in it, metrics that were not logged yet, the order of the
    data in later epochs, and the result of `state_to_resume`.

    If the batch sizes or the number of processes have changed, the rest of the batch is dropped, with a warning. There
    are also warnings of changed settings, and of checkpoints without this state.

    A checkpoint saved within an update, for example before an error, resumes from the beginning of the update. A new
    run keeps nothing of an earlier one in the same process except the weights and transformers' optimizer.
    """

    # The last update: its step, and the results of [`ExactResume._step_state`] and [`_random_state`] at its beginning
    _update_start: tuple[int, dict[str, Any], dict[str, Any]] | None = None
    _epoch_start: dict[str, Any] | None = None  # [`_random_state`] before an epoch draws data, until its first update
    _train_sampler: Any = None
    _has_other_names = False  # whether weights were saved under names that the model does not have

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, UpdateTracker(self))  # before a user's, which may change this state

    # For subclasses

    def begin(self) -> None:
        """Called before the first step of a run, once the order of the data is known."""

    def state_to_resume(self) -> dict[str, Any]:
        """Further state that the next step needs, in plain values and tensors."""
        return {}

    def resume_from_state(self, state: dict[str, Any], has_changed: bool) -> None:
        """Restore what [`state_to_resume`] returned. `has_changed` tells whether settings have changed."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        Train, as [`~transformers.Trainer.train`].

        `resume_from_checkpoint=True` resumes from the last complete checkpoint and skips one that was being written
        when the run was killed. A resumed run equals the run without interruption.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(str(self.args.output_dir))
        self._update_start = self._epoch_start = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # The order of the data. TRL's sampler shuffles with a single random generator, which each epoch advances.

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The only change is that the sampler is stored, for the order of later epochs."""
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """The only change is that state of an earlier run is reset, and the order of the data continues."""
        epochs_trained, steps_trained_in_epoch = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs
        )
        _reset(self)
        self.begin()
        if not isinstance(self.train_dataset, Sized) and (self.state.epoch or 0) > 1:
            _warn(
                self,
                "The checkpoint was saved after the first pass over train_dataset, a stream, whose position in later "
                "passes is not known. The run continues at the beginning of the second pass, so that some prompts are "
                "used again.",
            )
        if self.state.global_step >= max_steps:
            return num_train_epochs, 0  # transformers would train one more step
        for _ in range(epochs_trained):
            next(iter(self._train_sampler), None)
        return epochs_trained, steps_trained_in_epoch

    # Each process saves and loads its state where transformers does so with random states: after the position in the
    # data is restored, and before the next step.

    def begin_epoch(self) -> None:
        """Store the random state at the beginning of an epoch."""
        self._epoch_start = _random_state(self)

    def begin_update(self) -> None:
        """Store the state at the beginning of an update: for an epoch's first one, before its data are drawn."""
        random_state, self._epoch_start = self._epoch_start or _random_state(self), None
        self._update_start = self.state.global_step, self._step_state(), random_state

    def _current_update(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """The start of the unfinished update, if there is one."""
        start = self._update_start
        return start if start is not None and start[0] == self.state.global_step else None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The only change is that a checkpoint saved within an update has the state at its beginning."""
        now = _random_state(self)
        if (start := self._current_update()) is not None:
            _restore_random_state(self, start[2])
        try:
            super()._save_checkpoint(model, trial)
        finally:
            _restore_random_state(self, now)

    def _save_rng_state(self, output_dir: str) -> None:
        """The only change is that the state for the next step is saved too."""
        super()._save_rng_state(output_dir)
        start = self._current_update()
        state = self._step_state() if start is None else start[1]
        tables = json.dumps(state["tables"], default=str)  # reward functions may log any object
        torch.save(state | {"tables": tables}, _state_file(output_dir, self.args.process_index))

    def _step_state(self) -> dict[str, Any]:
        assert self.args.steps_per_generation is not None
        is_batch_used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        has_tables = self.log_completions and self.is_world_process_zero() and not is_batch_used_up
        return {name: copy.deepcopy(getattr(self, name)) for name in STATE} | {
            "sizes": _sizes(self),
            "settings": _settings(self),
            "buffered_inputs": None if is_batch_used_up else self._buffered_inputs,
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
            "tables": _tables(self) if has_tables else {},
            "of_method": self.state_to_resume(),
        }

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The only change is that the state for the next step is loaded too."""
        super()._load_rng_state(checkpoint)
        self._epoch_start = _random_state(self)
        if checkpoint is None:
            return
        own = _state_file(checkpoint, self.args.process_index)
        # If its own is missing, there were fewer processes. A node may only have the files of its processes
        file = own if own.exists() else _state_file(checkpoint, 0)
        exist = gather_object([file.exists()])
        if any(exist) and not all(exist):
            raise ValueError(
                f"Some of {checkpoint}/grpo_state_*.pt are missing. Resume from the checkpoint before it. Or remove "
                "the others too to continue with a new batch, as from a checkpoint of GRPOTrainer."
            )
        if not file.exists():
            self.resume_from_state({}, False)
            has_optimizer = self.is_deepspeed_enabled or (Path(checkpoint) / SCHEDULER_NAME).exists()
            _warn(
                self,
                "%s has no %s, like a checkpoint %s. Its weights%s and its place in the data are kept. %s unfinished "
                "batch, the value tracker, rows left over and the anchors' threshold are reset, so that losses will "
                "differ from those of a run without interruption.",
                checkpoint,
                file.name,
                "of GRPOTrainer" if has_optimizer else "saved with save_only_model=True",
                ", its optimizer" if has_optimizer else "",
                "The" if has_optimizer else "The optimizer, the learning rate schedule, the",
            )
            return
        state = _read_state(file)
        if file != own and state["sizes"] == _sizes(self):
            raise ValueError(
                f"{own} is missing, so the checkpoint is probably incomplete. Resume from the checkpoint before it."
            )
        for name in STATE:
            setattr(self, name, send_to_device(state[name], self.args.device))
        self._buffered_inputs = send_to_device(state["buffered_inputs"], self.args.device)
        self._metrics["train"].update(state["metrics"])
        _extend_tables(self._logs, json.loads(state["tables"]))
        if state["sizes"] != _sizes(self):
            _drop_batch(self, state["sizes"])
        has_changed = _warn_about_settings(self, state["settings"])
        if has_changed:
            self._buffered_inputs = None  # for example, its old log-probs may have another temperature
        self.resume_from_state(state["of_method"], has_changed)
        if self.args.sync_ref_model:
            _warn(
                self,
                "Checkpoints do not hold the reference model, so sync_ref_model=True continues with the initial one. "
                "Losses will differ from those of a run without interruption.",
            )

    # The weights. transformers saves those of some models, including most vision models, under names that it does not
    # find when it resumes, and would continue with the initial weights.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The only change is that weights saved under other names are found."""
        self._has_other_names = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_other_names(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """The only change is that weights saved under other names are found."""
        self._has_other_names = False
        super()._load_best_model()
        self._load_other_names(self.state.best_model_checkpoint)
        if self.use_vllm:
            self._last_loaded_step = -1  # vLLM still has the last weights

    def _load_other_names(self, checkpoint: str | None) -> None:
        if self._has_other_names:
            saved = type(self.model).from_pretrained(checkpoint, dtype=self.model.dtype)
            self.model.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The only change is that tied weights and weights saved under other names do not count as missing."""
        tied = getattr(self.model, "all_tied_weights_keys", {})  # saved once, under the other name
        load_result = load_result._replace(missing_keys=[key for key in load_result.missing_keys if key not in tied])
        self._has_other_names = bool(load_result.missing_keys and load_result.unexpected_keys)
        if not self._has_other_names:
            super()._issue_warnings_after_load(load_result)


class UpdateTracker(TrainerCallback):
    """Lets a trainer store its state at the beginning of each epoch and update."""

    def __init__(self, trainer: ExactResume):
        self.trainer = trainer

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.begin_epoch()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.begin_update()


def _random_state(trainer: TypedTrainer) -> dict[str, Any]:
    """The state in a checkpoint of transformers and TRL that changes within an update, mostly random states."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),  # none without a GPU
        "num_tokens": trainer.state.num_input_tokens_seen,
        "entropy_control": (trainer.entropy_coef, trainer._last_world_entropy),
    }


def _restore_random_state(trainer: TypedTrainer, state: dict[str, Any]) -> None:
    """Restore what [`_random_state`] returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])
    trainer.state.num_input_tokens_seen = state["num_tokens"]
    trainer.entropy_coef, trainer._last_world_entropy = state["entropy_control"]


def _reset(trainer: TypedTrainer) -> None:
    """Reset the state of an earlier run in this process, which may have ended at any point."""
    trainer._step, trainer._buffered_inputs = 0, None
    trainer._entropy_window_stats, trainer._current_train_step_time = None, 0.0
    if trainer.use_adaptive_entropy:  # otherwise the coefficient is a setting
        trainer.entropy_coef, trainer._last_world_entropy = trainer.args.entropy_coef, math.inf
    for values in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
        values.clear()
    if trainer.use_vllm:
        trainer._last_loaded_step = -1  # this run reuses step numbers


def _tables(trainer: TypedTrainer) -> dict[str, Any]:
    """The tables of `log_completions` for the batch, without images."""
    return {
        name: {key: list(values) for key, values in part.items()} if isinstance(part, dict) else list(part)
        for name, part in trainer._logs.items()
        if name != "images"
    }


def _extend_tables(tables: Any, saved: dict[str, Any]) -> None:
    for name, values in saved.items():
        if isinstance(values, dict):
            _extend_tables(tables[name], values)
        else:
            tables[name].extend(values)


def _plain(value: Any) -> Any:
    """Convert NumPy scalars to Python values, because `torch.load(weights_only=True)` refuses them."""
    return value.item() if isinstance(value, np.generic) else value


def _sizes(trainer: TypedTrainer) -> dict[str, int]:
    return {name: _plain(getattr(trainer.args, name)) for name in SIZES}


def _settings(trainer: TypedTrainer) -> dict[str, Any]:
    """Settings that determine the course of a run, except sizes, in plain values."""
    args = trainer.args
    names = [field.name for field in fields(args) if field.name not in GRPOConfig.__dataclass_fields__]
    names = [name for name in names if name not in NOT_DECISIVE and not name.startswith("vllm_")]
    settings = {name: _plain(getattr(args, name, None)) for name in (*names, *DECISIVE)}
    plain = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str | None)}
    has_length = isinstance(trainer.train_dataset, Sized)
    return plain | ({"examples of train_dataset": len(trainer.train_dataset)} if has_length else {})


def _read_state(file: Path) -> dict[str, Any]:
    """The state that a process saved. A `ValueError` names a damaged file."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        names = (*STATE, "sizes", "settings", "buffered_inputs", "metrics", "tables", "of_method")
        _ = {name: state[name] for name in names}
        _ = {name: state["sizes"][name] for name in SIZES}
    except (EOFError, KeyError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {error}). Resume from the checkpoint before it. Or remove all "
            "its grpo_state_*.pt to continue with a new batch, as from a checkpoint of GRPOTrainer."
        ) from error
    return state


def _warn_about_settings(trainer: TypedTrainer, saved: dict[str, Any]) -> bool:
    """
    Warn of settings that differ from the checkpoint's.

    Returns:
        `bool`: Whether they change the course of the run.
    """
    current = _settings(trainer)
    changed = [name for name in saved.keys() & current.keys() if saved[name] != current[name]]
    if "learning_rate" in changed:
        changed.remove("learning_rate")
        _warn(
            trainer,
            "The run continues with learning_rate=%s from the checkpoint's optimizer and scheduler. The current value, "
            "%s, has no effect. To change it, begin a new run with model_name_or_path=CHECKPOINT.",
            saved["learning_rate"],
            current["learning_rate"],
        )
    if not changed:
        return False
    kept = ["its weights, its optimizer and its place in the data"]
    if saved.get("value_tracker") and current["value_tracker"]:
        kept.append("the tracked values")
    if saved.get("max_refills") and current["max_refills"]:
        kept.append("the place in the order of prompts that refill draws from")
    _warn(
        trainer,
        "The checkpoint was saved with other settings: %s. The run continues with the current ones, and keeps %s.",
        ", ".join(f"{name}={saved[name]!r} (now {current[name]!r})" for name in sorted(changed)),
        " and ".join(kept),
    )
    return True


def _warn(trainer: TypedTrainer, message: str, *arguments: Any) -> None:
    if trainer.accelerator.is_main_process:
        logger.warning(message, *arguments)


def _drop_batch(trainer: TypedTrainer, saved_sizes: dict[str, int]) -> None:
    """Drop the unfinished batch, with a warning, so that the next step generates a new one."""
    trainer._step = 0  # counts within a batch, and the new one may have another length
    trainer._buffered_inputs = None
    if trainer.accelerator.is_main_process:
        changes = ", ".join(
            f"{name}={saved_sizes[name]} (now {size})"
            for name, size in _sizes(trainer).items()
            if size != saved_sizes[name]
        )
        logger.warning(
            "The checkpoint was saved with other sizes: %s. The rest of its generation batch is dropped, and the next "
            "step generates a new one, from the place in the data that the same number of steps of the current sizes "
            "would have reached.",
            changes,
        )


def _state_file(checkpoint: str, process_index: int) -> Path:
    return Path(checkpoint) / f"grpo_state_{process_index}.pt"


def save_before(trainer: TypedTrainer, error: Exception) -> None:
    """Save a checkpoint of the last step before `error` ends the run."""
    step = trainer.state.global_step
    if step > 0:
        if not is_complete(Path(str(trainer.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"):
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        error.add_note(
            f"Step {step}, the last that was trained, is saved in {trainer.args.output_dir}. Once "
            "this is fixed, continue with trainer.train(resume_from_checkpoint=True)."
        )


def last_complete_checkpoint(output_dir: str) -> str:
    """
    The last complete checkpoint.

    Raises:
        ValueError: There is none.
    """
    for _, checkpoint in sorted(checkpoints(output_dir).items(), reverse=True):
        if is_complete(checkpoint):
            return str(checkpoint)
    raise ValueError(
        f"There is no complete checkpoint in {output_dir!r} to resume from. Train without resume_from_checkpoint."
    )


def is_complete(checkpoint: str | Path) -> bool:
    """Whether a checkpoint is complete. The trainer's state is written last."""
    try:
        state = json.loads((Path(checkpoint) / TRAINER_STATE_FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and {"global_step", "log_history", "max_steps"} <= state.keys()


def checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Checkpoints in a directory by their step, including incomplete ones."""
    numbers = {path: path.name.rpartition("-")[2] for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    # There may be others, such as `checkpoint-best`
    return {int(number): path for path, number in numbers.items() if number.isdecimal()}
