"""Recipes: files of arguments, which may extend each other."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from ..fr3e_config import with_preset
from .usage import UsageError, nearest_option, require_argument, unrecognized, usage_errors

# Arguments that may name files of the recipe's own
FILES = ("dataset_name", "eval_dataset_name", "reward_funcs")


class RecipeParser(TrlParser):
    """
    [`~trl.TrlParser`] with recipes that may extend another, or a preset.

    A recipe that says `extends: other.yaml` takes the arguments that it lacks from `other.yaml`. The path starts at the
    recipe's folder. Where both have a mapping of one name, the recipe's entries are laid over the other's, at every
    depth.

    A recipe that says `preset: paper` or `preset: released` takes the settings that it lacks from that preset.

    A dataset's or a reward's file that is not below the working directory is looked for beside the recipe.

    Options are taken by their whole names alone. After parsing, `given` has what differs from the defaults.

    Args:
        dataclass_types (`Iterable[Any]`):
            Dataclasses of the arguments.
        recipe_with_model (`str`, *optional*):
            The recipe that an error names if no model is given. Without it, none has to be given.
    """

    def __init__(self, dataclass_types: Iterable[Any], recipe_with_model: str | None = None):
        super().__init__(dataclass_types, allow_abbrev=False)
        self.recipe_with_model = recipe_with_model
        self._when_left_out = {action.dest: action.default for action in reversed(self._actions)}
        self.given: dict[str, Any] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and unknown[0].endswith((".yaml", ".yml")):
            self.error(f"unrecognized arguments: {' '.join(unknown)}. A recipe is given by --config {unknown[0]}")
        if unknown:
            self.error(unrecognized(unknown, self._option_string_actions))
        if self.recipe_with_model is not None:  # before settings are checked, which differ by model
            require_argument(options, "model_name_or_path", self.recipe_with_model)
        self.given = {name: value for name, value in vars(options).items() if value != self._when_left_out.get(name)}
        return options, unknown

    def parse_args_and_config(self, args: Iterable[str] | None = None, **kwargs: Any) -> tuple[Any, ...]:
        args = list(sys.argv[1:] if args is None else args)
        for i, argument in enumerate(args):
            if argument.startswith("--config="):
                args[i : i + 1] = ["--config", argument.removeprefix("--config=")]
        if args.count("--config") > 1:
            raise UsageError("--config is given twice. Give one recipe, which may extend the other (extends: FILE).")
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
        raise UsageError(f"{message.rstrip('.')}. See --help.")

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        settings = with_preset(extended(settings, self._folder))
        # Of the recipe itself, the parser has set it; of what it extends, nobody has
        for name, value in settings.pop("env", {}).items():
            os.environ.setdefault(name, str(value))
        unknown = super().set_defaults_with_config(**settings)
        if unknown:  # before what is set is checked
            found = [nearest_option(name, self._option_string_actions) for name in unknown[::2]]
            meant = " ".join(option.removeprefix("--") for option in found if option is not None)
            raise ValueError(
                f"Unknown arguments from config file: {unknown}. Remove them, or mend their names"
                f"{f' (the nearest: {meant})' if meant else ''}."
            )
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
    settings = {name: beside(value, folder) if name in FILES else value for name, value in settings.items()}
    if "extends" not in settings:
        return settings
    other = settings.pop("extends")
    if not isinstance(other, str):
        raise ValueError(f"extends={other!r} must be the file of a recipe, for example other.yaml.")
    try:
        merged = read_recipe(folder / other)
    except RecursionError:
        raise ValueError(f"extends={other!r}: the recipes extend each other in a circle.") from None
    return laid_over(merged, settings)


def laid_over(below: Any, above: Any) -> Any:
    """What is above, but that entries of mappings are laid over those below, at every depth."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {name: laid_over(below.get(name), value) for name, value in above.items()}


def beside(value: Any, folder: Path) -> Any:
    """The name of a file, or of several, with that of the recipe's folder where the file is there."""
    if isinstance(value, list):
        return [beside(name, folder) for name in value]
    if not isinstance(value, str):
        return value
    path, is_reward, _ = value.partition(".py:")
    path += ".py" if is_reward else ""
    return str(folder / value) if path and (folder / path).exists() else value


def parse_arguments(parser: TrlParser, argv: list[str]) -> tuple[Any, ...]:
    """The parsed arguments. What is wrong with them becomes a [`UsageError`]."""
    with usage_errors("wrong arguments", "See --help.", OSError, TypeError, ValueError, yaml.YAMLError):
        return parser.parse_args_and_config(argv)
