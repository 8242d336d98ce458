"""
The options of commands that take recipes, and the recipes that set them, without importing PyTorch and TRL.

Importing these takes many seconds, so names and help are read from the source of the dataclasses, and a mistyped option
ends a command at once. What cannot be found in this way is checked after the import.
"""

import ast
import functools
import importlib.util
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .usage import UsageError, did_you_mean, sentence, unrecognized, usage_errors

# Keys of a recipe that are not options
OWN_KEYS = ("extends", "preset", "env")

# Arguments that may name files beside the recipe
FILES = ("dataset_name", "eval_dataset_name", "reward_funcs")

Dataclass = tuple[str, str]  # its module and its name


class Page(NamedTuple):
    """
    The help of a command: its summary, the dataclasses of all its options, and groups of the most used ones. A group
    lists options with their help, and dataclasses whose own fields are all shown.
    """

    summary: str
    dataclasses: list[Dataclass]
    groups: dict[str, list[Dataclass | dict[str, str]]]


MODEL_AND_DATA = {
    "config": "recipe whose settings the other options override",
    "model_name_or_path": "model on the hub, or a directory",
    "dataset_name": "dataset on the hub, or a JSON, JSON Lines, Parquet or CSV file",
}
DATA: Dataclass = ("fr3e_trl.commands.data", "FR3EScriptArguments")
TRAIN: Dataclass = ("fr3e_trl.commands.train", "TrainArguments")
EVAL: Dataclass = ("fr3e_trl.commands.eval", "EvalArguments")
FR3E: Dataclass = ("fr3e_trl", "FR3EConfig")
MODEL: Dataclass = ("trl", "ModelConfig")

PAGES = {
    "fr3e train": Page(
        "Train a model with FR3E.",
        [TRAIN, FR3E, MODEL],
        {
            "Model and data": [MODEL_AND_DATA, {"use_peft": "train a LoRA adapter"}, DATA, TRAIN],
            "Batch and generation": [
                {
                    "num_generations": "completions per prompt",
                    "max_completion_length": "maximum number of tokens of a completion",
                    "temperature": "sampling temperature",
                    "per_device_train_batch_size": "completions per micro-batch",
                    "gradient_accumulation_steps": "micro-batches per update",
                    "use_vllm": "generate with vLLM",
                }
            ],
            "Training": [
                {
                    "learning_rate": "learning rate",
                    "beta": "weight of the KL divergence from the reference model",
                    "max_steps": "number of steps, instead of epochs",
                    "output_dir": "directory for the model, checkpoints and metrics",
                    "save_steps": "steps between checkpoints",
                    "resume_from_checkpoint": "true: go on from the last checkpoint",
                    "eval_strategy": "when to evaluate: no, epoch, or steps with eval_steps",
                    "report_to": "services that get the metrics, or none",
                }
            ],
            "FR3E": [FR3E],
        },
    ),
    "fr3e eval": Page(
        "Evaluate a model on a dataset with answers: pass@1, pass@k and maj@k.",
        [EVAL, MODEL],
        {
            "Model and data": [
                MODEL_AND_DATA,
                {
                    "dataset_config": "configuration of the dataset, such as main",
                    "dataset_test_split": "split to evaluate on (default: test)",
                    "dtype": "type of the weights, such as bfloat16",
                },
                DATA,
            ],
            "Sampling and results": [EVAL],
        },
    ),
}


def print_help(prog: str) -> None:
    """Print the page of a command."""
    page = PAGES[prog]
    print(f"usage: {prog} [--config RECIPE.yaml] [--OPTION VALUE ...]\n")
    print(f"{page.summary} All options: {prog} --help-all")
    for group, parts in page.groups.items():
        print(f"\n{group}:")
        for part in parts:
            for name, text in (part if isinstance(part, dict) else own_help(*part)).items():
                print(textwrap.fill(text, 110, initial_indent=f"  --{name:<29} ", subsequent_indent=" " * 34))


def own_help(module: str, name: str) -> dict[str, str]:
    """The first sentence of the help of each field that a dataclass itself defines, with its default."""
    found = {}
    for field_name, field in fields_in(class_in(module, name)[1]):
        texts = [x.value for x in ast.walk(field) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        text = max(texts, key=len, default="")  # the help is the longest text in a field
        help_text = re.split(r"(?<=\.)\s", text)[0].rstrip(".")
        given = [k.value for k in getattr(field, "keywords", []) if k.arg == "default"] + getattr(field, "args", [])
        default = given[0].value if given and isinstance(given[0], ast.Constant) else None
        suffix = "" if default in (None, False) else f" (default: {default!s})"
        found[field_name] = help_text[:1].lower() + help_text[1:] + suffix
    return found


def check_options(prog: str, argv: list[str]) -> dict[str, Any]:
    """
    Check the names of options, on the command line and in the recipe, before heavy imports.

    Returns:
        `dict[str, Any]`: The recipe's settings, including those of the recipes that it extends.

    Raises:
        UsageError: There is no such option, or the recipe cannot be read.
    """
    with usage_errors("wrong arguments", f"See {prog} --help.", OSError, TypeError, ValueError, yaml.YAMLError):
        _, recipe = split_recipe(argv)
    try:
        known = option_names(prog)
    except (LookupError, OSError, SyntaxError):
        return recipe  # the parser checks them after the import
    names = {word: word[2:].partition("=")[0].replace("-", "_") for word in argv if word[:2] == "--" and word != "--"}
    wrong = [word for word, name in names.items() if name not in known and name.removeprefix("no_") not in known]
    if wrong:
        raise UsageError(f"{sentence(unrecognized(wrong, [f'--{name}' for name in known]))} See {prog} --help.")
    check_keys(recipe, known)
    return recipe


def check_keys(recipe: dict[str, Any], known: Iterable[str]) -> None:
    """Raise a `UsageError` if a key of a recipe is not an option."""
    wrong = [name for name in recipe if name not in {*known, *OWN_KEYS}]
    if wrong:
        raise UsageError(f"Unknown setting in the recipe: {', '.join(wrong)}.{did_you_mean(wrong, known)}")


def option_names(prog: str) -> set[str]:
    """Names of a command's options. Raises `LookupError` where the source of a dataclass is not found."""
    return {"config", "help"}.union(*(field_names(*where) for where in PAGES[prog].dataclasses))


def field_names(module: str, name: str) -> set[str]:
    """Names of the fields of a dataclass and its bases."""
    module, node = class_in(module, name)
    names = {field_name for field_name, _ in fields_in(node)}
    for base in node.bases:
        if not isinstance(base, ast.Name):
            raise LookupError(f"{module}.{ast.unparse(base)}")
        names |= field_names(module, base.id)
    return names


def fields_in(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Names of the fields that a class itself defines, with the expressions of their defaults."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.value or statement


def class_in(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """The module that defines a class, and its definition, starting from a module that defines or imports it."""
    tree, is_package = source_of(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    for node in ast.walk(tree):  # also under `if TYPE_CHECKING`, as in lazy modules
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    parts = module.split(".")[: -(node.level - is_package) or None] if node.level else []
                    return class_in(".".join([*parts, *filter(None, [node.module])]), alias.name)
    raise LookupError(f"{module}.{name}")


@functools.cache
def source_of(module: str) -> tuple[ast.Module, bool]:
    """The parsed source of a module, without importing it, and whether it is a package."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise LookupError(module)
    path = Path(spec.origin).parent.joinpath(*parts)
    is_package = path.is_dir()
    return ast.parse((path / "__init__.py" if is_package else path.with_suffix(".py")).read_text()), is_package


# Recipes


def split_recipe(argv: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without `--config`, and the settings of the recipe that it names."""
    args: list[str] = []
    for word in argv:
        args += ["--config", word.removeprefix("--config=")] if word.startswith("--config=") else [word]
    if "--config" not in args:
        return args, {}
    if args.count("--config") > 1:
        raise UsageError("--config is given twice. Give one recipe, which may extend the other (extends: FILE).")
    at = args.index("--config")
    if at + 1 == len(args):
        raise UsageError("--config must be followed by a recipe, for example --config recipes/smoke.yaml.")
    path = args[at + 1]
    try:
        return [*args[:at], *args[at + 2 :]], read_recipe(Path(path))
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path}: it, or a recipe that it extends, is not text: {error}.") from error


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings of a recipe, merged over those of the recipe that it extends."""
    with path.open() as file:  # not its text, so that YAML's errors name the file
        settings = yaml.safe_load(file)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must have a mapping of arguments to values.")
    if not isinstance(settings.get("env", {}), dict):
        raise ValueError(f"`env` in {path} must be a mapping of names to values.")
    settings = {name: beside(value, path.parent) if name in FILES else value for name, value in settings.items()}
    if "extends" not in settings:
        return settings
    other = settings.pop("extends")
    if not isinstance(other, str):
        raise ValueError(f"extends={other!r} must be the file of a recipe, for example other.yaml.")
    try:
        return merged(read_recipe(path.parent / other), settings)
    except RecursionError:
        raise ValueError(f"extends={other!r}: the recipes extend each other in a circle.") from None


def merged(below: Any, above: Any) -> Any:
    """The upper value, or the entries of both if they are mappings, merged at every depth."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {name: merged(below.get(name), value) for name, value in above.items()}


def beside(value: Any, folder: Path) -> Any:
    """The name of a file, or of several, prefixed with the recipe's folder if the file exists there."""
    if isinstance(value, list):
        return [beside(name, folder) for name in value]
    if not isinstance(value, str):
        return value
    path, is_reward, _ = value.partition(".py:")
    path += ".py" if is_reward else ""
    return str(folder / value) if path and (folder / path).exists() else value
