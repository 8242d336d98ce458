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
from .options import check_keys, merged, split_recipe
from .usage import UsageError, require_argument, sentence, unrecognized, usage_errors


class RecipeParser(TrlParser):
    """
    [`~trl.TrlParser`] with recipes that may extend another, or a preset.

    A recipe with `extends: other.yaml` takes the settings that it lacks from `other.yaml`, a path relative to the
    recipe. Mappings that both set are merged at every depth, and so are those that the command line gives as JSON, such
    as `--arms '{"one_more": {}}'`. `preset: paper` or `preset: released` does the same with a preset. Files of data and
    rewards are looked for beside the recipe first.

    Options must not be abbreviated. After parsing, `given` has the arguments that differ from their defaults. With
    `recipe_with_model`, a model must be given, and the error otherwise names this recipe as an example.
    """

    def __init__(self, dataclass_types: Iterable[Any], recipe_with_model: str | None = None):
        super().__init__(dataclass_types, allow_abbrev=False)
        self.recipe_with_model = recipe_with_model
        self._default_values = {action.dest: action.default for action in reversed(self._actions)}
        self._mappings: dict[str, dict[str, Any]] = {}  # of the recipe
        self.given: dict[str, Any] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and unknown[0].endswith((".yaml", ".yml")):
            self.error(f"unrecognized arguments: {' '.join(unknown)}. To use a recipe, write --config {unknown[0]}")
        if unknown:
            self.error(unrecognized(unknown, self._option_string_actions))
        for name, below in self._mappings.items():
            with contextlib.suppress(TypeError, ValueError):  # not JSON: the dataclass raises the error
                setattr(options, name, merged(below, json.loads(getattr(options, name))))
        if self.recipe_with_model is not None:  # before settings are checked, because they depend on the model
            require_argument(options, "model_name_or_path", self.recipe_with_model)
        self.given = {name: value for name, value in vars(options).items() if value != self._default_values.get(name)}
        return options, unknown

    def parse_args_and_config(  # type: ignore[override]
        self, args: Iterable[str] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        args, settings = split_recipe(sys.argv[1:] if args is None else args)
        settings = with_preset(settings)
        check_keys(settings, self._default_values)
        os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
        self._mappings = {name: value for name, value in settings.items() if isinstance(value, dict)}
        self.set_defaults_with_config(**settings)
        return self.parse_args_into_dataclasses(args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{sentence(message)} See --help.")


def parse_arguments(parser: TrlParser, argv: list[str]) -> tuple[Any, ...]:
    """The parsed arguments. Raises a [`UsageError`] if they are wrong."""
    with usage_errors("wrong arguments", "See --help.", OSError, TypeError, ValueError, yaml.YAMLError):
        return parser.parse_args_and_config(argv)
