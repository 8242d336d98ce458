"""How TRL has set up a trainer."""

from typing import Any

import torch

from ..method.rows import RowSharding


def is_sharded(trainer: Any) -> bool:
    """Whether the policy's forward pass is a collective call, which all processes must make together."""
    return trainer._dist.is_fsdp or trainer._dist.is_zero3


def in_float32(trainer: Any) -> bool:
    """Whether two ways to compute the same agree to the rounding of float32."""
    return trainer.model.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"


def sharding(trainer: Any, num_rows: int) -> RowSharding:
    """How rows are dealt out to the processes."""
    return RowSharding(num_rows, trainer.accelerator.num_processes, trainer.accelerator.process_index)


def own_rows(trainer: Any, rows: Any) -> Any:
    """This process's part of the rows of all."""
    own = sharding(trainer, len(rows)).own
    return rows[own.start : own.stop]
