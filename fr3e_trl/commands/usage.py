"""Errors that users can fix, reported in one line without a traceback."""

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

# The extra that installs a package
EXTRAS = {"math_verify": "math", "peft": "peft", "gguf": "lm", "sentencepiece": "lm"}
EXTRAS |= dict.fromkeys(("matplotlib", "reasoning_gym", "rich", "scipy"), "bench")

# Packages whose errors are written for the user: this one, and the benchmarks of a clone
OWN = ("fr3e_trl", "benchmarks")

# Packages whose errors are about the user's settings, such as lora_r=0
LIBRARIES = ("accelerate", "datasets", "peft", "torch", "transformers", "trl")

# Packages of services that receive the metrics
REPORTERS = ("clearml", "comet_ml", "mlflow", "trackio", "wandb")

# Where code that is not the user's lies: this package, Python, and installed packages
ROOT = Path(__file__).parents[2]
INSTALLED = [*((ROOT / name).resolve() for name in OWN), Path(sysconfig.get_path("stdlib")).resolve()]
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}

# Errors of writing to a full disk or beyond a quota. Those of PyTorch and safetensors have only a message
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_IN_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "PytorchStreamWriter failed")


class UsageError(ValueError):
    """An error that the user can fix. A command ends with its message alone, and exit code 2."""


class ExplainedError(Exception):
    """An error in another process, with the message of [`explain`] instead of a traceback."""


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line, and options that must not be abbreviated."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unrecognized(unknown, self._option_string_actions))
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{sentence(message)} See {self.prog} --help.")


def unrecognized(arguments: list[str], options: Iterable[str]) -> str:
    """The message for arguments that are not options."""
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return f"unrecognized arguments: {' '.join(arguments)}.{did_you_mean(names, options)}"


def did_you_mean(names: Iterable[str], known: Iterable[str]) -> str:
    """` Did you mean learning_rate?`: for each name, the shortest known one that begins with it, or a similar one."""
    known, found = list(known), []
    for name in names:
        longer = sorted((other for other in known if other.startswith(name)), key=len)
        found += (longer or difflib.get_close_matches(name, known, 1))[:1]
    return f" Did you mean {' and '.join(dict.fromkeys(found))}?" if found else ""


def sentence(message: str) -> str:
    """A message with a full stop, unless it ends with a question mark."""
    message = message.strip()
    return message if message.endswith((".", "?")) else f"{message.rstrip('!')}."


@contextlib.contextmanager
def usage_errors(argument: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a `UsageError` of one line: the argument, the reason, and the remedy."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.errno is not None and OSError in kinds and error.filename is None:
            raise  # about a disk or a connection, not the argument
        if _disk_error(error) is not None:
            raise
        cause = error if isinstance(error, RuntimeError) else error.__cause__ or error  # ours have whole messages
        reason = one_line(cause) or "it is empty"
        place = "" if reason.startswith(argument) else f"{argument}: "
        raise UsageError(f"{place}{sentence(reason)} {remedy}") from error


def require_argument(arguments: Any, name: str, recipe: str) -> None:
    """Raise a `UsageError` unless an argument is set, with a recipe as an example."""
    if getattr(arguments, name) is None:
        raise UsageError(f"{name} is not set. Use a recipe, for example --config {recipe}, or --{name}.")


def explain(error: Exception) -> str | None:
    """
    The message of an error that ends a command: one line, after the traceback from the user's own file on, if any.

    Returns:
        `str`, *optional*: `None` for an unexpected error, whose whole traceback is needed.
    """
    line = one_line(error)
    if isinstance(error, ExplainedError):
        return str(error)
    if isinstance(error, UsageError):
        return _with_notes(error, line)
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        return f"{package} is missing. Install it with: pip install 'fr3e-trl[{EXTRAS[package]}]'"
    disk_error = _disk_error(error)
    if disk_error is not None:
        return _with_notes(error, f"{_without_number(disk_error)}. Free some room, or use a directory elsewhere.")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return user_code_message(error) or _with_notes(error, f"{_without_number(error)}.")
    raiser = _raised_by(error)
    if raiser in OWN:
        return _with_notes(error, line)
    message = user_code_message(error)
    if message is not None:
        return message
    if raiser in LIBRARIES and isinstance(error, (ValueError, TypeError, ImportError, NotImplementedError, OSError)):
        return _with_notes(error, f"{line.rstrip('.')}. (Raised by {raiser}; --debug shows where.)")
    if raiser in REPORTERS:
        return _with_notes(error, f"{raiser}: {line.rstrip('.')}. To train without it, use --report_to none.")
    return None


def user_code_message(error: Exception) -> str | None:
    """The message of an error in a user's own file: the traceback from there on, and one line. `None` for others."""
    trace = error.__traceback__
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None:
        return None
    name, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
    frames = "".join(traceback.format_exception(type(error), error, trace))
    return f"{frames}{name}, line {line}, raised {type(error).__name__}. (--debug shows all of the traceback.)"


def is_users(path: str) -> bool:
    """Whether a file is the user's own code, rather than of this package, Python or an installed package."""
    file = Path(path).resolve()
    is_installed = any(file.is_relative_to(place) for place in INSTALLED) or {*file.parts} & PACKAGE_FOLDERS
    return file.is_file() and not is_installed


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())


def _disk_error(error: BaseException | None) -> BaseException | None:
    """The error, or a cause of it, that reports a full disk. `None` if there is none."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in FULL or (number is None and any(words in str(error) for words in FULL_IN_WORDS)):
            break
        error = error.__cause__
    return error


def _without_number(error: BaseException) -> str:
    """`No space left on device: 'out/model.safetensors'`, without the number that Python puts before it."""
    if not isinstance(error, OSError) or error.errno is None:
        return one_line(error).rstrip(".")
    return (error.strerror or os.strerror(error.errno)) + (f": {str(error.filename)!r}" if error.filename else "")


def _with_notes(error: BaseException, line: str) -> str:
    """The line with the notes of the error, such as where a checkpoint was saved."""
    return " ".join([line, *(" ".join(note.split()) for note in getattr(error, "__notes__", []))])


def _raised_by(error: BaseException) -> str | None:
    """
    The package that raised an error with a `raise` statement. `None` if Python itself raised it, such as an index out
    of range, because that is a bug.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return None
    frame, line = frames[-1]
    path = Path(frame.f_code.co_filename)
    if is_users(str(path)) or not linecache.getline(str(path), line).lstrip().startswith("raise "):
        return None
    return next((name for name in (*OWN, *LIBRARIES, *REPORTERS) if name in path.parts), None)
