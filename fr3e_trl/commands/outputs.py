"""Directories of results that a command goes on from when it is called again."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .usage import UsageError


def check_same(output_dir: Path, settings: dict[str, Any], has_results: bool, growing: str | None = None) -> bool:
    """
    Hold a call to the settings of the results that are there, and write its settings to `arguments.json`.

    Args:
        output_dir (`Path`):
            Directory of the results.
        settings (`dict[str, Any]`):
            The settings that results depend on.
        has_results (`bool`):
            Whether there are results. If not, settings may change.
        growing (`str`, *optional*):
            A setting that is a mapping, and may gain or lose entries. Those that stay must not change.

    Returns:
        `bool`: Whether settings have changed.

    Raises:
        UsageError: They have, and there are results.
    """
    settings = json.loads(json.dumps(settings, default=str))  # as JSON has them: a tuple is a list
    path = output_dir / "arguments.json"
    earlier = read_json(path) if path.exists() else {}
    was, now = _with_entries(earlier, growing), _with_entries(settings, growing)
    changed = [name for name, value in now.items() if was.get(name, value) != value]
    if changed and has_results:
        differences = ", ".join(f"{name} was {was[name]!r} and is {now[name]!r}" for name in changed)
        raise UsageError(
            f"output_dir={str(output_dir)!r} has results of other arguments: {differences}. Use another output_dir, or "
            "remove that one."
        )
    if growing is not None and not changed:
        settings[growing] = earlier.get(growing, {}) | settings[growing]
    write_json(path, settings)
    return bool(changed)


def _with_entries(settings: dict[str, Any], growing: str | None) -> dict[str, Any]:
    """The settings, with the entries of one in its place."""
    entries = {f"{growing}.{name}": value for name, value in settings.get(growing, {}).items()} if growing else {}
    return {name: value for name, value in settings.items() if name != growing} | entries


def read_json(path: str | Path) -> Any:
    """The content of a JSON file."""
    return json.loads(Path(path).read_text())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that is there as a whole, or not at all, whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(path)


@contextlib.contextmanager
def resumable(output_dir: str) -> Iterator[None]:
    """End on Ctrl-C with exit code 130, and say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nCut. The same command goes on from what is in {output_dir}.", file=sys.stderr)
        sys.exit(130)
