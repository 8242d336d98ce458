"""Versions of what runs, and the commit."""

import functools
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("fr3e_trl", "trl", "transformers", "torch")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of what trains, without importing it."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@functools.cache  # what this process has loaded, whatever is checked out later
def revision() -> dict[str, str]:
    """The versions, and the commit if the package lies in a clone: with `+changes` if files differ."""
    root, found = Path(__file__).parents[2], versions()
    if not (root / ".git").exists():
        return found
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout
            for arguments in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--", "fr3e_trl"])
        )
    except (OSError, subprocess.CalledProcessError):
        return found  # there is no git, or it does not trust the folder
    return found | {"commit": commit.strip() + ("+changes" if changes.strip() else "")}
