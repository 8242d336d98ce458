"""Directories of results, which the same command continues when it is called again, and the versions that made them."""

import contextlib
import fcntl
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .usage import UsageError

LOCK = ".lock"

PACKAGES = ("fr3e_trl", "trl", "transformers", "torch")

# Settings with secret values, and secrets inside values, such as `model_init_kwargs={"token": "hf_..."}`
SECRET = re.compile(r"(^|[_-])(token|key|secret|password)$", re.IGNORECASE)
SECRET_INSIDE = re.compile(
    r"""(\b(?:\w*_)?(?:token|key|secret|password)["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,}]+)""", re.IGNORECASE
)


def check_directory(output_dir: str | Path, name: str = "output_dir") -> None:
    """Raise a `UsageError` if a directory of results, or a parent of it, is a file."""
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
    Lock a directory of results until this process ends, even if it is killed. On Ctrl-C, say how to continue.

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
            interrupt.add_note(f"The same command continues from what is in {output_dir}.")
            raise


def check_same(output_dir: Path, settings: dict[str, Any], has_results: bool, growing: str | None = None) -> bool:
    """
    Check that earlier results were made with the same settings, and write the settings to `arguments.json`.

    Args:
        output_dir (`Path`), settings (`dict[str, Any]`):
            Directory of the results, and the settings that they depend on.
        has_results (`bool`):
            Whether there are results. If there are none, settings may change.
        growing (`str`, *optional*):
            A setting that is a mapping and may gain or lose entries, whose values must not change.

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
        {name: value for name, value in values.items() if name != growing}
        | {f"{growing}.{name}": value for name, value in values.get(growing or "", {}).items()}
        for values in (earlier, as_json(settings))
    )
    return ", ".join(
        f"{name} was {was[name]!r} and is {value!r}" for name, value in now.items() if was.get(name, value) != value
    )


def as_json(content: Any) -> Any:
    """The content after a round trip through JSON, with lists for tuples."""
    return json.loads(json.dumps(content, default=str))


def concealed(value: Any) -> Any:
    """A setting's value without secrets, at any depth."""
    if isinstance(value, dict):
        return {key: concealed(item) for key, item in value.items() if not SECRET.search(str(key))}
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
    """The error for a file of results that cannot be read."""
    return UsageError(f"{path} is damaged: {reason}. Move it away, and it will be made again.")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, so that a killed process leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # an error of writing has no name
        raise


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of installed packages, without importing them."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@functools.cache  # of the code that this process runs, even if another commit is checked out later
def revision() -> dict[str, str]:
    """The versions, and the commit if the package is in a clone, with `+changes` if it differs from the commit."""
    root, found = Path(__file__).parents[2], versions()
    if not (root / ".git").exists():
        return found
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout
            for arguments in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--", "fr3e_trl"])
        )
    except (OSError, subprocess.CalledProcessError):
        return found  # git is not installed, or does not trust the folder
    return found | {"commit": commit.strip() + ("+changes" if changes.strip() else "")}
