"""Less of what takes time and changes nothing: going through all that was imported, again and again."""

import functools
import gc
import importlib.metadata
import sys

num_kept = 0  # modules


def keep_imports() -> None:
    """
    Leave what was imported out of the search for garbage, if that is much.

    Each `train()` asks for one, which takes half a second where torch, transformers and TRL are imported, and without
    them next to nothing. What a test leaves behind is still looked for.
    """
    global num_kept
    if len(sys.modules) > num_kept + 50:
        gc.collect()
        gc.freeze()
        num_kept = len(sys.modules)


def read_metadata_once() -> None:
    """Have a package's metadata read once. accelerate reads some each time that it unwraps a model."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
