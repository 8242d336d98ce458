"""Shared prefixes are forwarded once: see `trie.py` for the method, and `forward.py` for its use by the trainer."""

from .attention import without_cudnn
from .batch import keep_together, numbered
from .forward import can_share, logps_and_entropies, obstacle_by_design, obstacle_to_sharing

__all__ = [
    "can_share",
    "keep_together",
    "logps_and_entropies",
    "numbered",
    "obstacle_by_design",
    "obstacle_to_sharing",
    "without_cudnn",
]
