"""FR3E for TRL: reinforcement learning of language models with entropy-anchored exploration."""

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fr3e_config import FR3EConfig
    from .fr3e_trainer import FR3ETrainer
    from .method.sampling import Sample, Sampler, SamplingRequest

__all__ = ["FR3EConfig", "FR3ETrainer", "Sample", "Sampler", "SamplingRequest"]

# Warnings of other libraries that users cannot act on: TRL uses deprecated settings of transformers, and DeepSpeed and
# bitsandbytes, if installed, look for a GPU
_USELESS = ("Setting accelerator to CPU", "Failed to load CPU gemm_4bit_forward")


def _is_useful(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_USELESS)


warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing\w*` is deprecated", FutureWarning)
for _name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(_name).addFilter(_is_useful)

# Imported on first access, because they take seconds, which `fr3e --help` does not need
_MODULES = {
    "FR3EConfig": "fr3e_config",
    "FR3ETrainer": "fr3e_trainer",
    **dict.fromkeys(("Sample", "Sampler", "SamplingRequest"), "method.sampling"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
