"""Recipes: files of arguments, which may extend each other."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from ..config import with_preset
from .usage import UsageError, usage_errors


class RecipeParser(TrlParser):
    """
    [`~trl.TrlParser`] with recipes that may extend another, or a preset.

    A recipe that says `extends: other.yaml` takes the arguments that it lacks from `other.yaml`. The path starts at the
    recipe's folder. Where both have a mapping of one name, the recipe's entries are laid over the other's.

    A recipe that says `preset: paper` or `preset: released` takes the settings that it lacks from that preset.
    """

    def parse_args_and_config(self, args: Iterable[str] | None = None, **kwargs: Any) -> tuple[Any, ...]:
        args = list(sys.argv[1:] if args is None else args)
        for i, argument in enumerate(args):
            if argument.startswith("--config="):
                args[i : i + 1] = ["--config", argument.removeprefix("--config=")]
        recipe = args[args.index("--config") + 1 :][:1] if "--config" in args else None
        if recipe == []:
            raise UsageError("--config needs the file of a recipe, for example --config recipes/smoke.yaml.")
        self._folder = Path(*recipe or []).parent
        try:
            return super().parse_args_and_config(args, **kwargs)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"--config {' '.join(recipe or [])}: it, or what it extends, is no text: {error}."
            ) from error

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See --help.")

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        unknown = super().set_defaults_with_config(**with_preset(extended(settings, self._folder)))
        if unknown:  # before what is set is checked
            raise ValueError(f"Unknown arguments from config file: {unknown}. Remove them, or mend their names.")
        return unknown


def read_recipe(path: Path) -> dict[str, Any]:
    """The arguments of a recipe, with those of the recipes that it extends."""
    with path.open() as file:  # of which YAML's errors have the name
        settings = yaml.safe_load(file)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must have a mapping of arguments to values.")
    return extended(settings, path.parent)


def extended(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of a recipe in `folder`, laid over those of the recipe that it extends."""
    settings = dict(settings)
    if "extends" not in settings:
        return settings
    other = settings.pop("extends")
    if not isinstance(other, str):
        raise ValueError(f"extends={other!r} must be the file of a recipe, for example other.yaml.")
    try:
        merged = read_recipe(folder / other)
    except RecursionError:
        raise ValueError(f"extends={other!r}: the recipes extend each other in a circle.") from None
    for name, value in settings.items():
        below = merged.get(name)
        merged[name] = below | value if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def parse_arguments(parser: TrlParser, argv: list[str] | None) -> tuple[Any, ...]:
    """The parsed arguments. What is wrong with them becomes a [`UsageError`]."""
    with usage_errors("wrong arguments", "See --help.", OSError, TypeError, ValueError, yaml.YAMLError):
        return parser.parse_args_and_config(argv)
