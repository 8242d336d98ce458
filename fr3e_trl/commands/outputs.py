"""Directories of results, from which the same command goes on when it is called again."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from .usage import UsageError

LOCK = ".lock"

# Settings whose value nobody else may see, and the same inside a value: `model_init_kwargs={"token": "hf_..."}`
SECRET = re.compile(r"(^|[_-])(token|key|secret|password)$", re.IGNORECASE)
SECRET_INSIDE = re.compile(
    r"""(\b(?:\w*_)?(?:token|key|secret|password)["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,}]+)""", re.IGNORECASE
)


def check_directory(output_dir: str | Path, name: str = "output_dir") -> None:
    """Raise a `UsageError` if a directory of results is a file, or below one."""
    path = Path(output_dir)
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise UsageError(f"{name}={str(output_dir)!r}: {str(part)!r} is a file. Use a directory.")


def weight_files(name: str) -> dict[str, str]:
    """The weight files of a local model, with their sizes and times. Empty for a model on the hub."""
    found = sorted(path for ending in ("safetensors", "bin") for path in Path(name).glob(f"*model*.{ending}"))
    return {
        path.name: f"{stat.st_size:,} bytes of {datetime.fromtimestamp(stat.st_mtime).isoformat(' ', 'milliseconds')}"
        for path in found
        if (stat := path.stat())
    }


@contextlib.contextmanager
def resumable(output_dir: str | Path) -> Iterator[None]:
    """
    Lock a directory of results for this process, until it ends in whatever way. On Ctrl-C, say how to go on.

    Raises:
        UsageError: Another process has locked it.
    """
    check_directory(output_dir)
    path = Path(output_dir) / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UsageError(
                f"output_dir={str(output_dir)!r} is in use by {file.read().strip() or 'another process'}. Wait for it "
                "to end, or use another output_dir."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename} ({shlex.join(sys.argv[:1])})\n")
        file.flush()
        try:
            yield
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"The same command goes on from what is in {output_dir}.")
            raise


def check_same(output_dir: Path, settings: dict[str, Any], has_results: bool, growing: str | None = None) -> bool:
    """
    Check that a call has the settings of earlier results, and write its settings to `arguments.json`.

    Args:
        output_dir (`Path`), settings (`dict[str, Any]`):
            Directory of the results, and the settings that they depend on.
        has_results (`bool`):
            Whether there are results. If not, settings may change.
        growing (`str`, *optional*):
            A setting that is a mapping, and may gain or lose entries. Other entries must not change.

    Returns:
        `bool`: Whether settings have changed.

    Raises:
        UsageError: Settings have changed, and there are results.
    """
    settings = as_json(settings)
    path = output_dir / "arguments.json"
    earlier = read_object(path) if path.exists() else {}
    differences = differing(earlier, settings, growing)
    if differences and has_results:
        raise UsageError(
            f"output_dir={str(output_dir)!r} has results of other arguments: {differences}. Use another output_dir, or "
            "remove that one."
        )
    if growing is not None and not differences:
        settings[growing] = earlier.get(growing, {}) | settings[growing]
    write_json(path, settings)
    return bool(differences)


def differing(earlier: dict[str, Any], settings: dict[str, Any], growing: str | None = None) -> str:
    """Settings that differ, with their earlier and present values; see [`check_same`]."""
    was, now = (
        {name: value for name, value in of.items() if name != growing}
        | {f"{growing}.{name}": value for name, value in of.get(growing or "", {}).items()}
        for of in (earlier, as_json(settings))
    )
    return ", ".join(
        f"{name} was {was[name]!r} and is {value!r}" for name, value in now.items() if was.get(name, value) != value
    )


def as_json(content: Any) -> Any:
    """The content as JSON returns it, with lists for tuples."""
    return json.loads(json.dumps(content, default=str))


def concealed(value: Any) -> Any:
    """A value of a setting without the secrets in it, however deep they are."""
    if isinstance(value, dict):
        return {key: concealed(of_key) for key, of_key in value.items() if not SECRET.search(str(key))}
    if isinstance(value, list):
        return [concealed(item) for item in value]
    return SECRET_INSIDE.sub(r"\1***", value) if isinstance(value, str) else value


def read_object(path: str | Path) -> dict[str, Any]:
    """The mapping in a JSON file. Raises a `UsageError` if the file is damaged."""
    try:
        content = json.loads(Path(path).read_text())
    except ValueError as error:
        raise damaged(path, error) from error
    if not isinstance(content, dict):
        raise damaged(path, f"{str(content)[:50]!r} is not a mapping")
    return content


def damaged(path: str | Path, reason: object) -> UsageError:
    """The error of a file of results that cannot be read."""
    return UsageError(f"{path} is damaged: {reason}. Move it away, and it is made again.")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, so that a killed process leaves the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a write does not know it
        raise
