"""The parser of options and recipes."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from ..fr3e_config import with_preset
from .options import check_keys, laid_over, split_recipe
from .usage import UsageError, require_argument, sentence, unrecognized, usage_errors


class RecipeParser(TrlParser):
    """
    [`~trl.TrlParser`] with recipes that may extend another, or a preset.

    A recipe that says `extends: other.yaml` takes the settings that it lacks from `other.yaml`, whose path starts at
    the recipe's folder. Where both have a mapping of one name, entries are merged at every depth, and so are those of a
    mapping that the command line gives in JSON, such as `--arms '{"one_more": {}}'`. `preset: paper` or
    `preset: released` does the same with a preset. Files of data and rewards are looked for beside the recipe first.

    Options must be given by their whole names. After parsing, `given` has what differs from the defaults. If no model
    is given, an error names `recipe_with_model` as an example; without it, none has to be given.
    """

    def __init__(self, dataclass_types: Iterable[Any], recipe_with_model: str | None = None):
        super().__init__(dataclass_types, allow_abbrev=False)
        self.recipe_with_model = recipe_with_model
        self._when_left_out = {action.dest: action.default for action in reversed(self._actions)}
        self._mappings: dict[str, dict[str, Any]] = {}  # of the recipe
        self.given: dict[str, Any] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and unknown[0].endswith((".yaml", ".yml")):
            self.error(f"unrecognized arguments: {' '.join(unknown)}. To use a recipe, write --config {unknown[0]}")
        if unknown:
            self.error(unrecognized(unknown, self._option_string_actions))
        for name, below in self._mappings.items():
            with contextlib.suppress(TypeError, ValueError):  # not JSON: the dataclass says so
                setattr(options, name, laid_over(below, json.loads(getattr(options, name))))
        if self.recipe_with_model is not None:  # before settings are checked, which differ by model
            require_argument(options, "model_name_or_path", self.recipe_with_model)
        self.given = {name: value for name, value in vars(options).items() if value != self._when_left_out.get(name)}
        return options, unknown

    def parse_args_and_config(  # type: ignore[override]
        self, args: Iterable[str] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        args, settings = split_recipe(sys.argv[1:] if args is None else args)
        settings = with_preset(settings)
        check_keys(settings, self._when_left_out)
        os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
        self._mappings = {name: value for name, value in settings.items() if isinstance(value, dict)}
        self.set_defaults_with_config(**settings)
        return self.parse_args_into_dataclasses(args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{sentence(message)} See --help.")


def parse_arguments(parser: TrlParser, argv: list[str]) -> tuple[Any, ...]:
    """The parsed arguments. What is wrong with them becomes a [`UsageError`]."""
    with usage_errors("wrong arguments", "See --help.", OSError, TypeError, ValueError, yaml.YAMLError):
        return parser.parse_args_and_config(argv)
