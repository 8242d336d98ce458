"""How TRL has set up a trainer."""

from typing import Any

import torch
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import get_config_model_id

from ..method.rows import RowSharding

# The first three are what GRPOTrainer's constructor takes
__all__ = [
    "EnvironmentFactory",
    "RewardFunc",
    "RolloutFunc",
    "computed_in",
    "in_float32",
    "is_sharded",
    "model_name",
    "model_source",
    "own_rows",
    "sharding",
    "tokenizer_of",
]


def model_name(model: Any) -> str:
    """What a model is called, given as a trainer takes it."""
    return model_source(model).split("/")[-1]


def model_source(model: Any) -> str:
    """The id or the directory that a model comes from, given as a trainer takes it. Empty if it was made here."""
    return model if isinstance(model, str) else get_config_model_id(model.config)


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer, that of the processor if there is one."""
    return trainer._tokenizer


def is_sharded(trainer: Any) -> bool:
    """Whether the policy's forward pass is a collective call, which all processes must make together."""
    return trainer._dist.is_fsdp or trainer._dist.is_zero3


def in_float32(trainer: Any) -> bool:
    """Whether two ways to compute the same agree to the rounding of float32."""
    return trainer.model.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"


def computed_in(trainer: Any) -> torch.dtype:
    """What the policy computes in."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return mixed.get(trainer.accelerator.mixed_precision, trainer.model.dtype)


def sharding(trainer: Any, num_rows: int) -> RowSharding:
    """How rows are dealt out to the processes."""
    return RowSharding(num_rows, trainer.accelerator.num_processes, trainer.accelerator.process_index)


def own_rows(trainer: Any, rows: Any) -> Any:
    """This process's part of the rows of all."""
    own = sharding(trainer, len(rows)).own
    return rows[own.start : own.stop]
