"""Rows that share prefixes, forwarded once: see `trie.py` for how, and `forward.py` for what a trainer does with it."""

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
