"""What a run was made with."""

import functools
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("fr3e-trl", "trl", "transformers", "torch")


@functools.cache  # what this process has loaded, whatever is checked out later
def revision() -> dict[str, str]:
    """Versions of the packages, and the commit if the package lies in a clone: with `+changes` if files differ."""
    versions = {package: version(package) for package in PACKAGES}
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return versions
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout
            for arguments in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--", "fr3e_trl"])
        )
    except (OSError, subprocess.CalledProcessError):
        return versions  # there is no git, or it does not trust the folder
    return versions | {"commit": commit.strip() + ("+changes" if changes.strip() else "")}
