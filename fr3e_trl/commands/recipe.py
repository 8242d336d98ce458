"""Recipes: files of arguments, which may extend each other."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from ..config import with_preset
from .usage import usage_errors


class RecipeParser(TrlParser):
    """
    [`~trl.TrlParser`] with recipes that may extend another, or a preset.

    A recipe that says `extends: other.yaml` takes the arguments that it lacks from `other.yaml`. The path starts at the
    recipe's folder. Where both have a mapping of one name, the recipe's entries are laid over the other's.

    A recipe that says `preset: paper` or `preset: released` takes the settings that it lacks from that preset.
    """

    def parse_args_and_config(self, args: Iterable[str] | None = None, **kwargs: Any) -> tuple[Any, ...]:
        args = list(sys.argv[1:] if args is None else args)
        recipe = args[args.index("--config") + 1 :][:1] if "--config" in args else []
        self._folder = Path(*recipe).parent
        return super().parse_args_and_config(args, **kwargs)

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        return super().set_defaults_with_config(**with_preset(extended(settings, self._folder)))


def read_recipe(path: Path) -> dict[str, Any]:
    """The arguments of a recipe, with those of the recipes that it extends."""
    settings = yaml.safe_load(path.read_text())
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must have a mapping of arguments to values.")
    return extended(settings, path.parent)


def extended(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of a recipe in `folder`, laid over those of the recipe that it extends."""
    settings = dict(settings)
    if "extends" not in settings:
        return settings
    merged = read_recipe(folder / settings.pop("extends"))
    for name, value in settings.items():
        below = merged.get(name)
        merged[name] = below | value if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def parse_arguments(parser: TrlParser, argv: list[str] | None) -> tuple[Any, ...]:
    """The parsed arguments. What is wrong with them becomes a [`UsageError`]."""
    with usage_errors("wrong arguments", "See --help.", OSError, TypeError, ValueError, yaml.YAMLError):
        return parser.parse_args_and_config(argv)
