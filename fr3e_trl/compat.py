"""
What the package relies on in TRL: the methods that it overrides, and how a trainer is set up.

[`check_trl`] checks these methods of the installed TRL in the constructor of a trainer, without comparing versions.
`python tests/test_trl_contract.py` lists every name that the package relies on.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import trl
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from .method.rows import RowSharding

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel

    class TypedTrainer(GRPOTrainer):
        """[`~trl.GRPOTrainer`], with the types of its attributes after the constructor."""

        args: GRPOConfig
        model: PreTrainedModel
        processing_class: PreTrainedTokenizerBase | ProcessorMixin
        tools: list[Any]
        train_dataset: Dataset  # or an iterable one, if it is not indexed
        num_generations: int
        max_completion_length: int
        chat_template_kwargs: dict[str, Any]
        shuffle_dataset: bool
        vllm_generation: Any  # `FR3EVLLMGeneration`, a subclass of TRL's
        has_own_sampler: bool  # only `FR3ETrainer`
        # TRL's constructor sets these to `None` or to an empty list
        environments: Any
        environment_factories: Any
        _batch_environments: Any
        _buffered_inputs: Any
        _image_pad_token_id: Any
        _logs: dict[str, Any]

        @property
        def scoring_temperature(self) -> float: ...  # only `FR3ETrainer`
else:
    TypedTrainer = GRPOTrainer

logger = logging.getLogger(__name__)

Rows = TypeVar("Rows", bound=Sequence[Any] | torch.Tensor)

# Losses that TRL divides by the tokens in the loss, of the batch or of a micro-batch. It divides others by the rows
PER_TOKEN = ("dapo", "cispo", "vespo", "bnpo")

# Overridden methods, and the arguments that the overrides take by name, in order
OVERRIDDEN: Mapping[str, str] = {
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_generate_single_turn": "prompt_ids images",
    "_tool_call_loop": "prompts prompt_ids completion_ids completions logprobs",
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_prepare_inputs": "generation_batch",
    "_compute_loss": "model inputs",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs",
    "_save_checkpoint": "model trial",
    "_save_rng_state": "output_dir",
    "_load_rng_state": "checkpoint",
    "create_model_card": "model_name dataset_name tags",
}

# Overridden methods whose arguments may change, and the feature that is then off
OPTIONAL: Mapping[str, tuple[str, str]] = {
    "_get_train_sampler": ("", "the order of the data in later epochs of a resumed run"),
    "_load_from_checkpoint": ("resume_from_checkpoint model", "resuming weights that are saved under other names"),
    "_load_best_model": ("", "loading the best weights where they are saved under other names"),
    "_issue_warnings_after_load": ("load_result", "resuming weights that are saved under other names"),
}


def check_trl(trainer: type[GRPOTrainer] = GRPOTrainer) -> None:
    """
    Check that TRL has the methods that the package overrides. A warning names features that are off without one.

    Raises:
        ImportError: A required method is missing or takes other arguments.
    """
    for name, arguments in OVERRIDDEN.items():
        if (problem := _difference(trainer, name, arguments.split())) is not None:
            raise ImportError(
                f"TRL {trl.__version__} does not fit this version of fr3e_trl: GRPOTrainer.{name} {problem}. Upgrade "
                f"fr3e_trl, or install an earlier TRL: pip install 'trl<{trl.__version__}'."
            )
    for name, (arguments, feature) in OPTIONAL.items():
        if (problem := _difference(trainer, name, arguments.split())) is not None:
            logger.warning("%s is off: GRPOTrainer.%s of TRL %s %s.", feature, name, trl.__version__, problem)


def _difference(trainer: type[GRPOTrainer], name: str, expected: list[str]) -> str | None:
    """How a method differs from its expected form, if it does."""
    method = getattr(trainer, name, None)
    if method is None:
        return "is gone"
    found = list(inspect.signature(method).parameters)[1:]
    if found[: len(expected)] == expected:
        return None
    return f"takes ({', '.join(found)}), and must take ({', '.join(expected)}) first"


def model_source(model: "str | PreTrainedModel | PeftModel") -> str:
    """The id or directory of a trainer's `model` argument. Empty if it was not loaded from anywhere."""
    return model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", ""))


def model_name(model: "str | PreTrainedModel | PeftModel") -> str:
    """The name of a trainer's `model` argument."""
    return model_source(model).split("/")[-1]


def tokenizer_of(trainer: TypedTrainer) -> PreTrainedTokenizerBase:
    """The tokenizer, or the processor's tokenizer."""
    return trainer._tokenizer


def is_sharded(trainer: TypedTrainer) -> bool:
    """Whether the policy's forward pass is a collective call, which all processes must make together."""
    return trainer._dist.is_fsdp or trainer._dist.is_zero3


def in_float32(trainer: TypedTrainer) -> bool:
    """Whether equivalent computations agree up to float32 rounding."""
    return trainer.model.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"


def computed_in(trainer: TypedTrainer) -> torch.dtype:
    """The dtype that the policy computes in."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return mixed.get(trainer.accelerator.mixed_precision, trainer.model.dtype)


def sharding(trainer: TypedTrainer, num_rows: int) -> RowSharding:
    """The assignment of rows to processes."""
    return RowSharding(num_rows, trainer.accelerator.num_processes, trainer.accelerator.process_index)


def own_rows(trainer: TypedTrainer, rows: Rows) -> Rows:
    """This process's part of the rows of all processes."""
    own = sharding(trainer, len(rows)).own
    return rows[own.start : own.stop]  # type: ignore[return-value]
