"""Exact resume: a run that was cut, at any moment, goes on as the run that was not."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .overriding import overridden

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


@contextmanager
def exact_resume(trainer: Any) -> Iterator[None]:
    """
    Have a trainer write checkpoints, while it trains, that hold all that training goes on from, and go on from them.

    The difference from TRL's: the batch that is still being trained on (`num_iterations`, `steps_per_generation`), the
    place within it, metrics that were not yet logged, the order of the data in later epochs, and what the trainer's
    `state_to_resume` returns.

    With other batch sizes, or another number of processes, what was left of the batch is dropped, with a warning.

    Args:
        trainer (`GRPOTrainer`):
            Has three methods more: `begin`, called before the first step of a run, when the order of the data is
            decided; `state_to_resume`, which returns what else its next step depends on, in plain values and tensors;
            and `resume_from_state`, which takes that up.
    """
    resume = _Resume(trainer)
    with overridden(
        trainer,
        _get_train_sampler=resume.get_train_sampler,
        _init_training_state=resume.init_training_state,
        _save_rng_state=resume.save_state,
        _load_rng_state=resume.load_state,
        _load_from_checkpoint=resume.load_weights,
        _issue_warnings_after_load=resume.note_names,
    ):
        yield


class _Resume:
    """What takes the place of a trainer's methods in [`exact_resume`]. Each calls the method and adds to it."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._get_train_sampler = trainer._get_train_sampler
        self._init_training_state = trainer._init_training_state
        self._save_rng_state = trainer._save_rng_state
        self._load_rng_state = trainer._load_rng_state
        self._load_from_checkpoint = trainer._load_from_checkpoint
        self._issue_warnings_after_load = trainer._issue_warnings_after_load
        self._train_sampler: Any = None
        self._has_other_names = False

    # The order of the data. TRL's sampler shuffles by one random generator, which each epoch moves on.

    def get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self.trainer.begin()
        self._train_sampler = self._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        epochs_trained, steps_trained_in_epoch = self._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs
        )
        if self.trainer.state.global_step >= max_steps:
            return num_train_epochs, 0  # transformers would train one step more
        for _ in range(epochs_trained):
            next(iter(self._train_sampler), None)
        return epochs_trained, steps_trained_in_epoch

    # Each process saves and loads its own, where transformers does so with the states of the random generators: when
    # the data are where they were, and before the next step.

    def save_state(self, output_dir: str) -> None:
        self._save_rng_state(output_dir)
        trainer = self.trainer
        is_batch_used_up = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0
        state = {name: getattr(trainer, name) for name in STATE}
        state["sizes"] = _sizes(trainer)
        state["buffered_inputs"] = None if is_batch_used_up else trainer._buffered_inputs
        state["metrics"] = dict(trainer._metrics["train"])
        state["of_method"] = trainer.state_to_resume()
        torch.save(state, _state_file(output_dir, trainer.args.process_index))

    def load_state(self, checkpoint: str | None) -> None:
        self._load_rng_state(checkpoint)
        if checkpoint is None or not _state_file(checkpoint, 0).exists():
            return  # a checkpoint of GRPOTrainer's
        trainer = self.trainer
        file = _state_file(checkpoint, trainer.args.process_index)
        if not file.exists():
            file = _state_file(checkpoint, 0)  # there were fewer processes
        state = torch.load(file, map_location="cpu", weights_only=True)
        for name in STATE:
            setattr(trainer, name, send_to_device(state[name], trainer.args.device))
        trainer._buffered_inputs = send_to_device(state["buffered_inputs"], trainer.args.device)
        trainer._metrics["train"].update(state["metrics"])
        trainer.resume_from_state(state["of_method"])
        if state["sizes"] != _sizes(trainer):
            _begin_new_batch(trainer, state["sizes"])

    # The weights. transformers saves those of some models, of most that see, under other names than it looks for here,
    # and would go on from those that the run began with.

    def load_weights(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._has_other_names = False
        self._load_from_checkpoint(resume_from_checkpoint, model)
        if self._has_other_names:
            policy = self.trainer.model
            saved = type(policy).from_pretrained(resume_from_checkpoint, dtype=policy.dtype)
            policy.load_state_dict(saved.state_dict())

    def note_names(self, load_result: Any) -> None:
        self._has_other_names = bool(load_result.missing_keys and load_result.unexpected_keys)
        if not self._has_other_names:
            self._issue_warnings_after_load(load_result)


def _sizes(trainer: Any) -> dict[str, int]:
    return {name: getattr(trainer.args, name) for name in SIZES}


def _begin_new_batch(trainer: Any, saved_sizes: dict[str, int]) -> None:
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


def save_before(trainer: Any, error: Exception) -> None:
    """Save a checkpoint of the last step before a run ends with `error`."""
    if trainer.state.global_step > 0:
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        error.add_note(
            f"Step {trainer.state.global_step}, the last that was trained, is saved in {trainer.args.output_dir}. When "
            "that is mended, go on with trainer.train(resume_from_checkpoint=True)."
        )


def last_complete_checkpoint(output_dir: str) -> str:
    """
    The last checkpoint that was written to its end.

    Raises:
        ValueError: There is none.
    """
    checkpoints = sorted(
        Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: int(path.name.rpartition("-")[2])
    )
    for checkpoint in reversed(checkpoints):
        try:
            json.loads((checkpoint / TRAINER_STATE_FILE).read_text())  # what is written last
            return str(checkpoint)
        except (OSError, ValueError):
            continue
    raise ValueError(
        f"There is no complete checkpoint in {output_dir!r} to resume from. Train without resume_from_checkpoint."
    )
