"""Exact resume: a run that was cut, at any moment, goes on as the run that was not."""

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

# What a step continues from, beside what transformers saves and what the weights of a batch decide
STATE = ("_step", "_tr_loss", "_globalstep_last_logged")

# Settings that decide which rows a step trains on, and from which of the data: what is left of a batch fits these alone
SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "world_size",
)

# Settings of TRL's by which a run that goes on is another, and those of FR3E's by which it is not
DECISIVE = (
    *("seed", "beta", "loss_type", "epsilon", "epsilon_high", "scale_rewards", "temperature", "learning_rate"),
    *("use_vllm", "top_p", "top_k", "min_p"),
)
NOT_DECISIVE = ("log_trees", "share_prefixes", "tool_timeout", "max_staleness")


class ExactResume(TypedTrainer):
    """
    A trainer whose checkpoints hold all that training goes on from, so that a resumed run is the run that was not cut.

    The difference from [`~trl.GRPOTrainer`]'s: the batch that is still being trained on (`num_iterations`,
    `steps_per_generation`), the place within it, metrics that were not yet logged, the order of the data in later
    epochs, and what `state_to_resume` returns.

    With other batch sizes, or another number of processes, what was left of the batch is dropped, with a warning. A
    warning also names settings that have changed, or a checkpoint that lacks all this.

    A checkpoint that is saved within an update, as before an error, goes on from where the update began. A run begins
    with nothing of what an earlier one in the same process left behind, but its weights and transformers' optimizer.
    """

    # The last update: its step, and what it began with, of [`ExactResume._state_of_step`] and of [`_moving`]
    _update_began: tuple[int, dict[str, Any], dict[str, Any]] | None = None
    _data_began: dict[str, Any] | None = None  # [`_moving`] before an epoch's data are drawn, until its first update
    _train_sampler: Any = None
    _has_other_names = False  # whether weights were saved under other names than those of the model

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, NoteUpdates(self))  # before a user's, which may change what it keeps

    # For subclasses

    def begin(self) -> None:
        """Called before the first step of a run, when the order of the data is decided."""

    def state_to_resume(self) -> dict[str, Any]:
        """What else the next step depends on, in plain values and tensors."""
        return {}

    def resume_from_state(self, state: dict[str, Any], has_changed: bool) -> None:
        """Take up what [`state_to_resume`] returned, given also whether settings have changed."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        Train, as [`~transformers.Trainer.train`].

        `resume_from_checkpoint=True` resumes from the last complete checkpoint and skips one that was being written
        when the run was killed. A resumed run equals the run without interruption.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(str(self.args.output_dir))
        self._update_began = self._data_began = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # The order of the data. TRL's sampler shuffles by one random generator, which each epoch moves on.

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The only change is that the sampler is kept, for later epochs to go on from."""
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """The only change is that a run begins with nothing of an earlier one, and goes on in the order of the data."""
        epochs_trained, steps_trained_in_epoch = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs
        )
        _forget(self)
        self.begin()
        if not isinstance(self.train_dataset, Sized) and (self.state.epoch or 0) > 1:
            _warn(
                self,
                "The checkpoint was saved after the first pass over train_dataset, a stream, whose place in later "
                "passes is not known. The run goes on at the beginning of the second pass: prompts that it has been "
                "trained on since come again.",
            )
        if self.state.global_step >= max_steps:
            return num_train_epochs, 0  # transformers would train one step more
        for _ in range(epochs_trained):
            next(iter(self._train_sampler), None)
        return epochs_trained, steps_trained_in_epoch

    # Each process saves and loads its own, where transformers does so with the states of the random generators: when
    # the data are where they were, and before the next step.

    def begin_epoch(self) -> None:
        """Keep what an epoch begins with."""
        self._data_began = _moving(self)

    def begin_update(self) -> None:
        """Keep what an update begins with: the first of an epoch before its data are drawn, which takes randomness."""
        moving, self._data_began = self._data_began or _moving(self), None
        self._update_began = self.state.global_step, self._state_of_step(), moving

    def _beginning(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """What the update began with that is not through yet, if there is one."""
        began = self._update_began
        return began if began is not None and began[0] == self.state.global_step else None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The only change is that a checkpoint that is saved within an update is of where it began."""
        now = _moving(self)
        if (beginning := self._beginning()) is not None:
            _move_to(self, beginning[2])
        try:
            super()._save_checkpoint(model, trial)
        finally:
            _move_to(self, now)

    def _save_rng_state(self, output_dir: str) -> None:
        """The only change is that what the next step goes on from is saved too."""
        super()._save_rng_state(output_dir)
        beginning = self._beginning()
        state = self._state_of_step() if beginning is None else beginning[1]
        tables = json.dumps(state["tables"], default=str)  # reward functions may log any object
        torch.save(state | {"tables": tables}, _state_file(output_dir, self.args.process_index))

    def _state_of_step(self) -> dict[str, Any]:
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
        """The only change is that what the next step goes on from is loaded too."""
        super()._load_rng_state(checkpoint)
        self._data_began = _moving(self)
        if checkpoint is None:
            return
        own = _state_file(checkpoint, self.args.process_index)
        # Without its own, there were fewer processes. A node may have the files of its own processes alone
        file = own if own.exists() else _state_file(checkpoint, 0)
        are_there = gather_object([file.exists()])
        if any(are_there) and not all(are_there):
            raise ValueError(
                f"Some of {checkpoint}/grpo_state_*.pt are missing. Resume from the checkpoint before it. Or remove "
                "the others too, and the run goes on with a new batch, as from a checkpoint of GRPOTrainer's."
            )
        if not file.exists():
            self.resume_from_state({}, False)
            has_optimizer = self.is_deepspeed_enabled or (Path(checkpoint) / SCHEDULER_NAME).exists()
            _warn(
                self,
                "%s has no %s, as a checkpoint %s. Its weights%s and its place in the data are kept. %s batch that was "
                "in use, the value tracker, rows left over and the anchors' threshold begin anew: losses will differ "
                "from those of the run that was not cut.",
                checkpoint,
                file.name,
                "of GRPOTrainer's" if has_optimizer else "that save_only_model=True leaves",
                ", its optimizer" if has_optimizer else "",
                "The" if has_optimizer else "The optimizer, the schedule of the learning rate, the",
            )
            return
        state = _read_state(file)
        if file != own and state["sizes"] == _sizes(self):
            raise ValueError(
                f"{own} is missing, as if the checkpoint had been cut while it was written. Resume from the checkpoint "
                "before it."
            )
        for name in STATE:
            setattr(self, name, send_to_device(state[name], self.args.device))
        self._buffered_inputs = send_to_device(state["buffered_inputs"], self.args.device)
        self._metrics["train"].update(state["metrics"])
        _fill(self._logs, json.loads(state["tables"]))
        if state["sizes"] != _sizes(self):
            _begin_new_batch(self, state["sizes"])
        has_changed = _warn_of_settings(self, state["settings"])
        if has_changed:
            self._buffered_inputs = None  # its old log-probs, say, are at another temperature
        self.resume_from_state(state["of_method"], has_changed)
        if self.args.sync_ref_model:
            _warn(
                self,
                "A checkpoint has no reference model: sync_ref_model=True goes on from that which the run began with. "
                "Losses will differ from those of the run that was not cut.",
            )

    # The weights. transformers saves those of some models, of most that see, under other names than it looks for here,
    # and would go on from those that the run began with.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The only change is that weights are found that are saved under other names."""
        self._has_other_names = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_other_names(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """The only change is that weights are found that are saved under other names."""
        self._has_other_names = False
        super()._load_best_model()
        self._load_other_names(self.state.best_model_checkpoint)
        if self.use_vllm:
            self._last_loaded_step = -1  # vLLM has the last weights

    def _load_other_names(self, checkpoint: str | None) -> None:
        if self._has_other_names:
            saved = type(self.model).from_pretrained(checkpoint, dtype=self.model.dtype)
            self.model.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The only change is that names are not missing that are found in another way."""
        tied = getattr(self.model, "all_tied_weights_keys", {})  # saved once, under the other name
        load_result = load_result._replace(missing_keys=[key for key in load_result.missing_keys if key not in tied])
        self._has_other_names = bool(load_result.missing_keys and load_result.unexpected_keys)
        if not self._has_other_names:
            super()._issue_warnings_after_load(load_result)


class NoteUpdates(TrainerCallback):
    """Has a trainer keep what each epoch and each update begin with."""

    def __init__(self, trainer: ExactResume):
        self.trainer = trainer

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.begin_epoch()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.begin_update()


def _moving(trainer: TypedTrainer) -> dict[str, Any]:
    """What an update moves on, of all that transformers and TRL put into a checkpoint."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),  # none without a GPU
        "num_tokens": trainer.state.num_input_tokens_seen,
        "entropy_control": (trainer.entropy_coef, trainer._last_world_entropy),
    }


def _move_to(trainer: TypedTrainer, moving: dict[str, Any]) -> None:
    """Go to what [`_moving`] returned."""
    random.setstate(moving["python"])
    np.random.set_state(moving["numpy"])
    torch.set_rng_state(moving["torch"])
    torch.cuda.set_rng_state_all(moving["cuda"])
    trainer.state.num_input_tokens_seen = moving["num_tokens"]
    trainer.entropy_coef, trainer._last_world_entropy = moving["entropy_control"]


def _forget(trainer: TypedTrainer) -> None:
    """What an earlier run in this process left behind, which may have ended at any point."""
    trainer._step, trainer._buffered_inputs = 0, None
    trainer._entropy_window_stats, trainer._current_train_step_time = None, 0.0
    if trainer.use_adaptive_entropy:  # else the coefficient is a setting
        trainer.entropy_coef, trainer._last_world_entropy = trainer.args.entropy_coef, math.inf
    for left in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
        left.clear()
    if trainer.use_vllm:
        trainer._last_loaded_step = -1  # its number of a step may be this run's too


def _tables(trainer: TypedTrainer) -> dict[str, Any]:
    """What `log_completions` shows of the batch, without images."""
    return {
        name: {key: list(values) for key, values in part.items()} if isinstance(part, dict) else list(part)
        for name, part in trainer._logs.items()
        if name != "images"
    }


def _fill(tables: Any, saved: dict[str, Any]) -> None:
    for name, values in saved.items():
        if isinstance(values, dict):
            _fill(tables[name], values)
        else:
            tables[name].extend(values)


def _plain(value: Any) -> Any:
    """A number or a text as Python's own. NumPy's pass for them, and a checkpoint refuses these."""
    return value.item() if isinstance(value, np.generic) else value


def _sizes(trainer: TypedTrainer) -> dict[str, int]:
    return {name: _plain(getattr(trainer.args, name)) for name in SIZES}


def _settings(trainer: TypedTrainer) -> dict[str, Any]:
    """What decides how a run goes on, beside the sizes, in plain values."""
    args = trainer.args
    names = [field.name for field in fields(args) if field.name not in GRPOConfig.__dataclass_fields__]
    names = [name for name in names if name not in NOT_DECISIVE and not name.startswith("vllm_")]
    settings = {name: _plain(getattr(args, name, None)) for name in (*names, *DECISIVE)}
    plain = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str | None)}
    has_length = isinstance(trainer.train_dataset, Sized)
    return plain | ({"examples of train_dataset": len(trainer.train_dataset)} if has_length else {})


def _read_state(file: Path) -> dict[str, Any]:
    """What a process saved. A `ValueError` names a file that is damaged."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        names = (*STATE, "sizes", "settings", "buffered_inputs", "metrics", "tables", "of_method")
        _ = {name: state[name] for name in names}
        _ = {name: state["sizes"][name] for name in SIZES}
    except (EOFError, KeyError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {error}). Resume from the checkpoint before it. Or remove all "
            "grpo_state_*.pt beside it, and the run goes on with a new batch, as from a checkpoint of GRPOTrainer's."
        ) from error
    return state


def _warn_of_settings(trainer: TypedTrainer, saved: dict[str, Any]) -> bool:
    """
    Name the settings that the checkpoint was saved with other values of, and what of it is kept.

    Returns:
        `bool`: Whether the run is another by them.
    """
    present = _settings(trainer)
    changed = [name for name in saved.keys() & present.keys() if saved[name] != present[name]]
    if "learning_rate" in changed:
        changed.remove("learning_rate")
        _warn(
            trainer,
            "The run goes on with learning_rate=%s, which the checkpoint's optimizer and scheduler have. The present "
            "one, %s, has no effect. To change it, begin a run with model_name_or_path=CHECKPOINT.",
            saved["learning_rate"],
            present["learning_rate"],
        )
    if not changed:
        return False
    kept = ["its weights, its optimizer and its place in the data"]
    if saved.get("value_tracker") and present["value_tracker"]:
        kept.append("the tracked values")
    if saved.get("max_refills") and present["max_refills"]:
        kept.append("the place in the order of prompts that refill draws from")
    _warn(
        trainer,
        "The checkpoint was saved with other settings: %s. From here on the present ones hold. Kept from it are %s.",
        ", ".join(f"{name}={saved[name]!r} (now {present[name]!r})" for name in sorted(changed)),
        " and ".join(kept),
    )
    return True


def _warn(trainer: TypedTrainer, message: str, *arguments: Any) -> None:
    if trainer.accelerator.is_main_process:
        logger.warning(message, *arguments)


def _begin_new_batch(trainer: TypedTrainer, saved_sizes: dict[str, int]) -> None:
    """Have the next step generate, from where transformers begins in the data, and say why."""
    trainer._step = 0  # counts within a batch: the new one has another length, or begins elsewhere in the data
    trainer._buffered_inputs = None
    if trainer.accelerator.is_main_process:
        changes = ", ".join(
            f"{name}={saved_sizes[name]} (now {size})"
            for name, size in _sizes(trainer).items()
            if size != saved_sizes[name]
        )
        logger.warning(
            "The checkpoint was saved with other sizes: %s. What was left of its generation batch is dropped, and "
            "the next step generates a new one, at the place in the data where as many steps of the present sizes end.",
            changes,
        )


def _state_file(checkpoint: str, process_index: int) -> Path:
    return Path(checkpoint) / f"grpo_state_{process_index}.pt"


def save_before(trainer: TypedTrainer, error: Exception) -> None:
    """Save a checkpoint of the last step before a run ends with `error`."""
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
    The last checkpoint that was written to its end.

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
    """Whether a checkpoint was written to its end: the state of the trainer is the last of it."""
    try:
        state = json.loads((Path(checkpoint) / TRAINER_STATE_FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and {"global_step", "log_history", "max_steps"} <= state.keys()


def checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Checkpoints in a directory, by their step, and those that are not complete too."""
    numbers = {path: path.name.rpartition("-")[2] for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    # There may be others, such as `checkpoint-best`
    return {int(number): path for path, number in numbers.items() if number.isdecimal()}
