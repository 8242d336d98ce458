"""
What is relied on in TRL: the methods that are overridden, and how a trainer is set up.

[`check_trl`] looks whether the installed TRL has these methods when a trainer is made. No version number is compared.
tests/trl_names.py lists every name that the package relies on.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import trl
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOTrainer

from .method.rows import RowSharding

if TYPE_CHECKING:
    from peft import PeftModel

Rows = TypeVar("Rows", bound=Sequence[Any] | torch.Tensor)

# Methods that are overridden, and the arguments that the overrides take by name, in order
OVERRIDDEN: Mapping[str, str] = {
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_generate_single_turn": "prompt_ids images",
    "_tool_call_loop": "prompts prompt_ids completion_ids completions logprobs",
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_compute_loss": "model inputs",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep",
    "_prepare_inputs": "generation_batch",
    "_get_train_sampler": "",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs",
    "_save_rng_state": "output_dir",
    "_load_rng_state": "checkpoint",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_best_model": "",
    "_issue_warnings_after_load": "load_result",
    "create_model_card": "model_name dataset_name tags",
}


def check_trl(trainer: type[GRPOTrainer] = GRPOTrainer) -> None:
    """
    Check that TRL's methods are where the overrides expect them.

    Raises:
        ImportError: A method has moved, or takes other arguments. It names the method, TRL's version and what to do.
    """
    for name, arguments in OVERRIDDEN.items():
        expected, method = arguments.split(), getattr(trainer, name, None)
        found = [] if method is None else list(inspect.signature(method).parameters)[1:]
        if method is None or found[: len(expected)] != expected:
            has = "is gone" if method is None else f"takes ({', '.join(found)})"
            raise ImportError(
                f"TRL {trl.__version__} does not fit this version of fr3e_trl: GRPOTrainer.{name} {has}, and must take "
                f"({', '.join(expected)}) first. Upgrade fr3e_trl, or install an earlier TRL: pip install "
                f"'trl<{trl.__version__}'."
            )


def model_source(model: "str | PreTrainedModel | PeftModel") -> str:
    """The id or the directory that a model comes from, given as a trainer takes it. Empty if it was made here."""
    return model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", ""))


def model_name(model: "str | PreTrainedModel | PeftModel") -> str:
    """What a model is called, given as a trainer takes it."""
    return model_source(model).split("/")[-1]


def tokenizer_of(trainer: GRPOTrainer) -> PreTrainedTokenizerBase:
    """The tokenizer, that of the processor if there is one."""
    return trainer._tokenizer


def is_sharded(trainer: GRPOTrainer) -> bool:
    """Whether the policy's forward pass is a collective call, which all processes must make together."""
    return trainer._dist.is_fsdp or trainer._dist.is_zero3


def in_float32(trainer: GRPOTrainer) -> bool:
    """Whether two ways to compute the same agree to the rounding of float32."""
    return trainer.model.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"


def computed_in(trainer: GRPOTrainer) -> torch.dtype:
    """What the policy computes in."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return mixed.get(trainer.accelerator.mixed_precision, trainer.model.dtype)


def sharding(trainer: GRPOTrainer, num_rows: int) -> RowSharding:
    """How rows are dealt out to the processes."""
    return RowSharding(num_rows, trainer.accelerator.num_processes, trainer.accelerator.process_index)


def own_rows(trainer: GRPOTrainer, rows: Rows) -> Rows:
    """This process's part of the rows of all."""
    own = sharding(trainer, len(rows)).own
    return rows[own.start : own.stop]  # type: ignore[return-value]
