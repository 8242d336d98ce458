"""Exact resume: a run that was cut, at any moment, goes on as the run that was not."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

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


class ResumableGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] whose checkpoints hold all that training goes on from.

    The difference from TRL's: the batch that is still being trained on (`num_iterations`, `steps_per_generation`), the
    place within it, metrics that were not yet logged, and the order of the data in later epochs.

    With other batch sizes, or another number of processes, what was left of the batch is dropped, with a warning.
    """

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        Train, as [`~transformers.Trainer.train`].

        `resume_from_checkpoint=True` takes the last checkpoint that is complete: one that was being written when the
        run was killed is passed over.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # Each process saves and loads its own, where transformers does so with the states of the random generators: when
    # the data are where they were, and before the next step.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        is_batch_used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        state = {name: getattr(self, name) for name in STATE}
        state["sizes"] = self._sizes()
        state["buffered_inputs"] = None if is_batch_used_up else self._buffered_inputs
        state["metrics"] = dict(self._metrics["train"])
        state["of_method"] = self.state_to_resume()
        torch.save(state, self._state_file(output_dir, self.args.process_index))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None or not self._state_file(checkpoint, 0).exists():
            return  # a checkpoint of GRPOTrainer's
        file = self._state_file(checkpoint, self.args.process_index)
        if not file.exists():
            file = self._state_file(checkpoint, 0)  # there were fewer processes
        state = torch.load(file, map_location="cpu", weights_only=True)
        for name in STATE:
            setattr(self, name, send_to_device(state[name], self.args.device))
        self._buffered_inputs = send_to_device(state["buffered_inputs"], self.args.device)
        self._metrics["train"].update(state["metrics"])
        self.resume_from_state(state["of_method"])
        if state["sizes"] != self._sizes():
            self._begin_new_batch(state["sizes"])

    # The weights. transformers saves those of some models, of most that see, under other names than it looks for here,
    # and would go on from those that the run began with.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._has_other_names = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._has_other_names:
            saved = type(self.model).from_pretrained(resume_from_checkpoint, dtype=self.model.dtype)
            self.model.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._has_other_names = bool(load_result.missing_keys and load_result.unexpected_keys)
        if not self._has_other_names:
            super()._issue_warnings_after_load(load_result)

    def _sizes(self) -> dict[str, int]:
        return {name: getattr(self.args, name) for name in SIZES}

    def _begin_new_batch(self, saved_sizes: dict[str, int]) -> None:
        """Have the next step generate, from where transformers begins in the data, and say why."""
        self._step = 0  # counts within a batch: the new one has another length, or begins elsewhere in the data
        self._buffered_inputs = None
        if self.accelerator.is_main_process:
            changes = ", ".join(
                f"{name}={saved_sizes[name]} (now {size})"
                for name, size in self._sizes().items()
                if size != saved_sizes[name]
            )
            logger.warning(
                "The checkpoint was saved with other sizes: %s. What was left of its generation batch is dropped, and "
                "the next step generates a new one, at the place in the data where as many steps of the present sizes "
                "end.",
                changes,
            )

    def state_to_resume(self) -> dict[str, Any]:
        """What else a subclass's next step depends on, in plain values and tensors."""
        return {}

    def resume_from_state(self, state: dict[str, Any]) -> None:
        """Take up what [`state_to_resume`] returned."""

    def _state_file(self, checkpoint: str, process_index: int) -> Path:
        return Path(checkpoint) / f"grpo_state_{process_index}.pt"

    # The order of the data. TRL's sampler shuffles by one random generator, which each epoch moves on.

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        epochs_trained, steps_trained_in_epoch = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs
        )
        if self.state.global_step >= max_steps:
            return num_train_epochs, 0  # transformers would train one step more
        for _ in range(epochs_trained):
            next(iter(self._train_sampler), None)
        return epochs_trained, steps_trained_in_epoch


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
