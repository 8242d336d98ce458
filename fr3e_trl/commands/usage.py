"""Errors of those who use the commands: told in one line, without a traceback."""

import argparse
import contextlib
import difflib
import errno
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

# The extra that brings a package
EXTRAS = {
    "gguf": "lm",
    "math_verify": "math",
    "matplotlib": "bench",
    "peft": "peft",
    "reasoning_gym": "bench",
    "rich": "bench",
    "scipy": "bench",
    "sentencepiece": "lm",
}

# Packages whose own refusals are for the user: this one, and the benchmarks of a clone
OWN = ("fr3e_trl", "benchmarks")

# Packages whose refusals are of what the user set, such as lora_r=0
LIBRARIES = ("accelerate", "datasets", "peft", "torch", "transformers", "trl")

# Services that get the metrics
REPORTERS = ("clearml", "comet_ml", "mlflow", "trackio", "wandb")

# Where code lies that is no user's own: this package, Python, and folders of what is installed
ROOT = Path(__file__).parents[2]
INSTALLED = [*((ROOT / name).resolve() for name in OWN), Path(sysconfig.get_path("stdlib")).resolve()]
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}

# What a disk that is full, or a limit on files, makes of a write. PyTorch and safetensors tell it in words
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_IN_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "PytorchStreamWriter failed")


class UsageError(ValueError):
    """What was asked for cannot be done. A command ends with its message alone, and exit code 2."""


class ExplainedError(Exception):
    """An error of another process, as [`explain`] tells it there: its traceback does not come along."""


class Parser(argparse.ArgumentParser):
    """A parser that tells what is wrong in one line, and takes options by their whole names alone."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unrecognized(unknown, self._option_string_actions))
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.rstrip('.')}. See {self.prog} --help.")


def unrecognized(arguments: list[str], options: Iterable[str]) -> str:
    """What to tell of arguments that are none of the options, with the nearest of these."""
    options = list(options)
    nearest = [nearest_option(argument.partition("=")[0], options) for argument in arguments]
    found = list(dict.fromkeys(option for option in nearest if option is not None))
    meant = f". The nearest: {' '.join(found)}" if found else ""
    return f"unrecognized arguments: {' '.join(arguments)}{meant}"


def nearest_option(name: str, options: Iterable[str]) -> str | None:
    """The option that begins with a name, the shortest if there are several, or else the one that is most like it."""
    if not name.startswith("--"):
        return None
    options = [option for option in options if option.startswith("--")]
    longer = sorted((option for option in options if option.startswith(name)), key=len)
    return next(iter(longer or difflib.get_close_matches(name, options, 1)), None)


@contextlib.contextmanager
def usage_errors(argument: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a `UsageError` of one line: the argument, the reason, and the remedy."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.errno is not None and OSError in kinds and error.filename is None:
            raise  # of a disk or a connection, and not of the argument
        if _of_disk(error) is not None:
            raise
        told = error if isinstance(error, RuntimeError) else error.__cause__ or error  # ours have whole messages
        reason = one_line(told) or "it is empty"
        place = "" if reason.startswith(argument) else f"{argument}: "
        raise UsageError(f"{place}{reason.rstrip('.!')}. {remedy}") from error


def require_argument(arguments: Any, name: str, recipe: str) -> None:
    """Raise a `UsageError` unless an argument is set. It names a recipe that has one."""
    if getattr(arguments, name) is None:
        raise UsageError(f"{name} is not set. Use a recipe, for example --config {recipe}, or --{name}.")


def explain(error: Exception) -> str | None:
    """
    What to tell of an error that ends a command: one line, and before it where in a user's own file it arose.

    Returns:
        `str`, *optional*: `None` for an error that nobody foresaw: its traceback says where the mistake is.
    """
    if isinstance(error, ExplainedError):
        return str(error)
    if isinstance(error, UsageError):
        return _with_notes(error, one_line(error))
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        return f"{package} is missing. Install it with: pip install 'fr3e-trl[{EXTRAS[package]}]'"
    of_disk = _of_disk(error)
    if of_disk is not None:
        return _with_notes(error, f"{_without_number(of_disk)}. Free some room, or name a directory elsewhere.")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return told_of_user_code(error) or _with_notes(error, f"{_without_number(error)}.")
    raiser = _raised_by(error)
    if raiser in OWN:
        return _with_notes(error, one_line(error))
    of_users = told_of_user_code(error)
    if of_users is not None:
        return of_users
    if raiser in LIBRARIES and isinstance(error, (ValueError, TypeError, ImportError, NotImplementedError, OSError)):
        return _with_notes(error, f"{one_line(error).rstrip('.')}. ({raiser} refused it; --debug shows where.)")
    if raiser in REPORTERS:
        return _with_notes(error, f"{raiser}: {one_line(error).rstrip('.')}. Or train without, by --report_to none.")
    return None


def told_of_user_code(error: Exception) -> str | None:
    """What to tell of an error in a file of the user's: the traceback from there on, and a line. `None` of others."""
    trace = error.__traceback__
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None:
        return None
    name, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
    frames = "".join(traceback.format_exception(type(error), error, trace))
    return f"{frames}{name}, line {line}, raised {type(error).__name__}. (--debug shows all of the traceback.)"


def is_users(path: str) -> bool:
    """Whether a file of code is a user's own: none of this package, of Python or of what is installed."""
    file = Path(path).resolve()
    is_installed = any(file.is_relative_to(place) for place in INSTALLED) or {*file.parts} & PACKAGE_FOLDERS
    return file.is_file() and not is_installed


def one_line(error: BaseException) -> str:
    """The message of an error, with spaces for the ends of its lines."""
    return " ".join(str(error).split())


def _of_disk(error: BaseException | None) -> BaseException | None:
    """The error, or the one that it came from, that says that there is no more room for a file."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in FULL or (number is None and any(words in str(error) for words in FULL_IN_WORDS)):
            return error
        error = error.__cause__
    return None


def _without_number(error: BaseException) -> str:
    """`No space left on device: 'out/model.safetensors'`, without the number that Python puts before it."""
    if not isinstance(error, OSError) or error.errno is None:
        return one_line(error).rstrip(".")
    return (error.strerror or os.strerror(error.errno)) + (f": {str(error.filename)!r}" if error.filename else "")


def _with_notes(error: BaseException, line: str) -> str:
    """With what was added to the error on its way, such as where a checkpoint was saved."""
    return " ".join([line, *(" ".join(note.split()) for note in getattr(error, "__notes__", []))])


def _raised_by(error: BaseException) -> str | None:
    """
    The package that raised an error by a `raise` of its own.

    `None` for what Python raised there, such as an index that is out of range: that is a mistake in the code.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return None
    frame, line = frames[-1]
    path = Path(frame.f_code.co_filename)
    if is_users(str(path)) or not linecache.getline(str(path), line).lstrip().startswith("raise "):
        return None
    return next((name for name in (*OWN, *LIBRARIES, *REPORTERS) if name in path.parts), None)
