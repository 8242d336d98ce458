"""FR3E for TRL: reinforcement learning of language models with entropy-anchored exploration."""

from .config import FR3EConfig
from .trainer import FR3ETrainer

__all__ = ["FR3EConfig", "FR3ETrainer"]
