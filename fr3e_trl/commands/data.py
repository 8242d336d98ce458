"""Datasets, rewards and tokenizers that a recipe or the command line names."""

# ruff: noqa: RUF009 (`option` makes a field)

import asyncio
import copy
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import transformers
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, ScriptArguments, is_conversational, maybe_apply_chat_template

from .usage import UsageError, is_users, usage_errors

# Reward functions that can be given without an import path
REWARDS = {
    "math_reward": "fr3e_trl.rewards.math_reward",
    "accuracy_reward": "trl.rewards.accuracy_reward",
    "reasoning_accuracy_reward": "trl.rewards.reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards.think_format_reward",
}

# What TRL passes to all reward functions, in addition to the columns of the dataset
GIVEN_TO_REWARDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

# Formats of a local dataset, by the suffix of its file
FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def option(default: Any, text: str) -> Any:
    """A field of a command's dataclass, with its default and help."""
    if isinstance(default, list):
        return field(default_factory=lambda: [*default], metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class FR3EScriptArguments(ScriptArguments):
    """
    TRL's [`~trl.ScriptArguments`] with rewards, and with the columns of the dataset.

    `dataset_name` may also be a local JSON, JSON Lines, Parquet or CSV file, whose only split is `train`, or a
    directory with such a file for each split.
    """

    reward_funcs: list[str] = option(
        ["math_reward"],
        "Reward functions: math_reward, accuracy_reward, reasoning_accuracy_reward, think_format_reward, the import "
        "path of another, or my_rewards.py:score.",
    )
    prompt_column: str | None = option(
        None,
        "Column with the question as text, which becomes a user's message. If `None`, the dataset must have a `prompt` "
        "column in one of TRL's formats.",
    )
    system_prompt: str | None = option(None, "System message before the question of `prompt_column`.")
    answer_column: str | None = option(
        None,
        "Column with the final answer. It is boxed and becomes the `solution`, because math-verify reads `2\\sqrt{3}` "
        "as 2 unless it is marked as LaTeX. If `None`, a `solution` column is left as it is.",
    )
    answer_separator: str | None = option(
        None, "What comes before the final answer in `answer_column`, for example '####' in GSM8K."
    )
    max_prompt_length: int | None = option(
        None, "Maximum number of tokens of a prompt. Examples with longer prompts are dropped."
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):  # in a recipe, a single name needs no brackets
            self.reward_funcs = [self.reward_funcs]
        names = self.reward_funcs if isinstance(self.reward_funcs, list) else []
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"reward_funcs={self.reward_funcs!r} must name one reward function or several, for example math_reward."
            )
        for name in ("dataset_name", "eval_dataset_name"):
            value = getattr(self, name, None)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(
                    f"{name}={value!r} must be a file, a directory or the id of a dataset, for example data.jsonl."
                )
        for name, needed in (("system_prompt", "prompt_column"), ("answer_separator", "answer_column")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect without {needed}. Name the column, for example "
                    f"{needed}={needed.partition('_')[0]!r}."
                )


WITH_TEST_SPLIT = (
    "For evaluation, name a file as eval_dataset_name, or a directory with train.jsonl and test.jsonl as dataset_name."
)


def get_reward(name: str) -> Callable[..., list[float | None]]:
    """The reward function of that name, import path or file. Modules are looked for in the current directory too."""
    remedy = (
        f"Use one of {', '.join(REWARDS)}, or a function of your own, for example my_lib.rewards.my_reward or "
        "my_rewards.py:score."
    )
    is_file = ".py:" in name
    if name.endswith(".py"):
        raise UsageError(f"reward_funcs={name!r}: name the function in it too, for example {name}:score. {remedy}")
    module_name, _, attribute = REWARDS.get(name, name).rpartition(":" if is_file else ".")
    if not module_name:
        raise UsageError(f"There is no reward function {name!r}. {remedy}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with usage_errors(f"reward_funcs={name!r}", remedy, Exception):  # whatever a user's module raises
        module = import_file(module_name) if is_file else importlib.import_module(module_name)
    reward = getattr(module, attribute, None)
    if not callable(reward):
        raise UsageError(f"reward_funcs={name!r}: module {module_name!r} has no function {attribute!r}. {remedy}")
    return reward


def import_file(path: str) -> Any:
    """Import a file from anywhere."""
    name = str(Path(path).resolve())  # unlike the name of any other module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the file ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_reward_columns(rewards: dict[str, Callable[..., Any]], dataset: Dataset | IterableDataset) -> None:
    """Raise a `UsageError` if a reward function lacks a column that it needs, or cannot take one that it gets."""
    columns = {*next(iter(dataset))}
    for name, reward in rewards.items():
        try:
            parameters = inspect.signature(reward).parameters
        except (TypeError, ValueError):
            continue  # not written in Python
        kinds = {parameter.kind for parameter in parameters.values()}
        unexpected = [given for given in (*GIVEN_TO_REWARDS, *sorted(columns - {"prompt"})) if given not in parameters]
        if unexpected and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise UsageError(f"reward_funcs={name!r} is also given {unexpected[0]!r}. Add **kwargs to its parameters.")
        for needed, parameter in parameters.items():
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            is_given = needed in (*GIVEN_TO_REWARDS, "environments", *columns)
            if not (is_variadic or is_given) and parameter.default is parameter.empty:
                remedy = "Name the one with the answer as answer_column" if needed == "solution" else "Add it"
                raise UsageError(
                    f"reward_funcs={name!r} needs a column {needed!r}. The dataset has the columns "
                    f"{', '.join(sorted(columns))}. {remedy}, or use another reward function."
                )


def call_reward(name: str, reward: Callable[..., Any], /, **arguments: Any) -> list[float | None]:
    """
    Call a reward function, asynchronous or not, and return a number per completion, or `None` for `None` and NaN.

    Raises:
        UsageError: The function does not return a number or `None` for each completion.
    """
    rewards = reward(**arguments)
    rewards = asyncio.run(rewards) if inspect.iscoroutine(rewards) else rewards
    number = len(arguments["completions"])
    if not isinstance(rewards, Iterable) or isinstance(rewards, str) or len(rewards := list(rewards)) != number:
        returned = f"{len(rewards)} values" if isinstance(rewards, list) else f"{rewards!r}"
        raise UsageError(
            f"reward_funcs={name!r} returned {returned[:200]} for {number} completions. It must return a list with a "
            "number or None for each."
        )
    scores: list[float | None] = []
    for value in rewards:
        try:
            score = math.nan if value is None else float("text" if isinstance(value, str) else value)
        except (TypeError, ValueError):
            raise UsageError(
                f"reward_funcs={name!r} returned {str(value)[:200]!r} for a completion. It must be a number, or None "
                "for a completion that cannot be scored."
            ) from None
        scores.append(score if math.isfinite(score) else None)
    return scores


def map_columns(example: dict[str, Any], args: FR3EScriptArguments, row: int | None = None) -> dict[str, Any]:
    """The `prompt` and `solution` of an example, from the columns that `args` names. `row` is for errors."""
    for column in filter(None, (args.prompt_column, args.answer_column)):
        if column not in example:
            raise UsageError(f"The dataset has no column {column!r}. Its columns are {', '.join(sorted(example))}.")
        if example[column] is None or (column == args.prompt_column and not example[column]):
            raise UsageError(
                f"dataset_name={args.dataset_name!r}, row {row}: column {column!r} is {example[column]!r}. Fill it in, "
                "or drop such rows."
            )
    mapped: dict[str, Any] = {}
    if args.prompt_column is not None:
        system = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
        mapped["prompt"] = [*system, {"role": "user", "content": example[args.prompt_column]}]
    if args.answer_column is not None:
        mapped["solution"] = rf"\boxed{{{final_answer(example[args.answer_column], args.answer_separator)}}}"
    return mapped


def final_answer(answer: Any, separator: str | None) -> str:
    """The part of an answer after the last `separator`, or the whole if `None`. The items of a list are joined."""
    text = ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
    if separator is None:
        # math-verify would read the e of 4.5e33, as in Minerva Math, as Euler's number
        return re.sub(r"^([+-]?\d+\.?\d*)[eE]([+-]?\d+)$", r"\1 \\times 10^{\2}", text)
    _, found, answer = text.rpartition(separator)
    if not found:
        raise UsageError(f"answer_separator={separator!r} is not in the answer {text!r}. Drop such examples.")
    return answer.strip()


def load_examples(
    args: FR3EScriptArguments, split: str, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any] | None = None
) -> Dataset | IterableDataset:
    """
    A split of the dataset, with the columns that the trainer and the rewards need.

    Args:
        args ([`FR3EScriptArguments`]), split (`str`):
            The dataset with its columns, and the split.
        tokenizer (`PreTrainedTokenizerBase`), template (`dict[str, Any]`, *optional*):
            To count the tokens of prompts, and further arguments of its chat template.
    """
    remedy = f"Use a file ({', '.join(FORMATS)}), a directory with one for each split, or a dataset on the hub."
    argument = f"dataset_name={args.dataset_name!r}, split {split!r}"
    source = source_of(args)
    with usage_errors(argument, remedy, DatasetsError, OSError, ValueError, StopIteration):
        check_lines(args, for_json=False)
        try:
            dataset: Dataset | IterableDataset
            dataset = load_dataset(**source, split=split, streaming=args.dataset_streaming)  # type: ignore[call-overload]
            next(iter(dataset), None)  # a streamed file is first read here
        except (DatasetsError, ValueError) as error:
            check_lines(args, for_json=True)
            if "corresponds to no data" in str(error):
                raise UsageError(f"{argument}: it is empty. {remedy}") from error
            raise
    if args.prompt_column is not None or args.answer_column is not None:
        dataset = dataset.map(lambda example, row: map_columns(example, args, row), with_indices=True)
    if isinstance(dataset, IterableDataset):
        dataset = dataset.map(
            lambda example, row: check_prompt(example.get("prompt", "?"), args, row), with_indices=True
        )
    elif "prompt" in dataset.column_names:
        for row, prompt in enumerate(dataset["prompt"]):
            check_prompt(prompt, args, row)
    if args.max_prompt_length is not None:
        dataset = dataset.filter(
            has_short_prompt,
            fn_kwargs={"tokenizer": tokenizer, "max_length": args.max_prompt_length, "template": template or {}},
        )
    example = next(iter(dataset), None)
    if example is None:
        raise UsageError(f"{argument}, max_prompt_length={args.max_prompt_length}: no example is left.")
    if "prompt" not in example:
        raise UsageError(
            f"{argument}: there is no column 'prompt'. Its columns are {', '.join(sorted(example))}: name the one with "
            "the question as prompt_column."
        )
    if is_conversational(example) and tokenizer.chat_template is None:
        made = " (prompt_column makes messages)" if args.prompt_column is not None else ""
        raise UsageError(
            f"{argument}: prompts are messages{made}, but {tokenizer.name_or_path!r} has no chat template. Use an "
            "instruct model, or text in a column 'prompt'."
        )
    return dataset


def load_held_out(
    args: Any, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any] | None = None
) -> Dataset | IterableDataset:
    """The examples of `eval_dataset_name`, or of the dataset's test split; see [`load_examples`]."""
    other = copy.copy(args)
    if args.eval_dataset_name is not None:
        other.dataset_name, other.dataset_config = args.eval_dataset_name, None
    try:
        split = args.dataset_test_split if args.eval_dataset_name is None else test_split(other)
        return load_examples(other, split, tokenizer, template)
    except UsageError as error:
        if args.eval_dataset_name is not None:
            raise UsageError(str(error).replace("dataset_name=", "eval_dataset_name=")) from error
        if "Unknown split" in str(error):
            error.add_note(WITH_TEST_SPLIT)
        raise


def check_prompt(prompt: Any, args: FR3EScriptArguments, row: int) -> dict[str, Any]:
    """Raise a `UsageError` that names the row if its prompt or a message of it is empty. Adds nothing to the row."""
    reason = f"the prompt is {prompt!r}" if prompt in (None, "", []) else None
    for message in prompt if isinstance(prompt, list) else []:
        if isinstance(message, dict) and message.get("content") is None and not message.get("tool_calls"):
            reason = f"a message has no content: {message!r}"
    if reason is not None:
        raise UsageError(
            f"dataset_name={args.dataset_name!r}, row {row}: {reason[:200]}. Fill it in, or drop such rows."
        )
    return {}


def test_split(args: FR3EScriptArguments) -> str:
    """The split to evaluate on. The only split of a file is `train`."""
    if Path(args.dataset_name or "").suffix not in FORMATS:
        return args.dataset_test_split
    if args.dataset_test_split not in ("train", "test"):  # "test" is the default
        raise UsageError(
            f"dataset_test_split={args.dataset_test_split!r}: dataset_name={args.dataset_name!r} is a file, whose only "
            "split is 'train'. Leave dataset_test_split out, or name a directory with a file for each split."
        )
    return "train"


def source_of(args: FR3EScriptArguments) -> dict[str, Any]:
    """Where the dataset is, for `load_dataset`."""
    path = Path(str(args.dataset_name))
    if path.suffix not in FORMATS:
        if path.is_file():
            raise UsageError(f"dataset_name={args.dataset_name!r} must end with one of {', '.join(FORMATS)}.")
        return {"path": args.dataset_name, "name": args.dataset_config}
    source: dict[str, Any] = {"path": FORMATS[path.suffix], "data_files": str(path)}
    if path.suffix == ".csv":
        # Keep text as it is: 72 would become a number and NA a missing value, which no answer equals
        columns = ("prompt", "solution", args.prompt_column, args.answer_column)
        source["converters"] = {column: str for column in columns if column is not None}
        source["keep_default_na"] = False
    return source


def data_files(dataset_name: str | None) -> list[Path]:
    """The files of a local dataset. Empty for one on the hub."""
    path = Path(str(dataset_name))
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in FORMATS)


def digests(files: list[Path], rewards: dict[str, Callable[..., Any]], output_dir: Path) -> dict[str, str]:
    """
    Short hashes of the files that results depend on: those of the dataset, by path, and of the user's own reward
    functions, by name. Files in `output_dir`, with the results, are left out.
    """
    named = {str(file): file for file in files if output_dir.resolve() not in file.resolve().parents}
    for name, reward in rewards.items():
        code = getattr(inspect.unwrap(reward), "__code__", None)
        if code is not None and is_users(code.co_filename):
            named[name] = Path(code.co_filename)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in named.items()}


def check_lines(args: FR3EScriptArguments, for_json: bool) -> None:
    """Raise a `UsageError` that names the first line of a local JSON file that is not UTF-8, or not an object."""
    for path in data_files(args.dataset_name):
        if path.suffix not in ((".jsonl",) if for_json else (".json", ".jsonl")):
            continue
        for number, line in enumerate(path.open("rb"), 1):
            fault = None
            try:
                line.decode()
                if for_json and not isinstance(json.loads(line.strip() or "{}"), dict):
                    fault = "not a JSON object"
            except UnicodeDecodeError:
                fault = "not UTF-8"
            except ValueError as error:
                fault = f"not JSON: {error}"
            if fault is not None:
                text = line[:100].decode(errors="replace").strip()
                remedy = "Fix it, or remove it." if for_json else "Save the file as UTF-8."
                raise UsageError(f"dataset_name={str(path)!r}: line {number} is {fault}: {text!r}. {remedy}")


def has_short_prompt(
    example: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int, template: dict[str, Any]
) -> bool:
    """Whether the prompt has at most `max_length` tokens, including those of the chat template."""
    prompt = maybe_apply_chat_template({"prompt": example["prompt"]}, tokenizer, **template)["prompt"]
    return len(tokenizer(prompt).input_ids) <= max_length


def without_bars_in_logs() -> None:
    """Turn off the libraries' progress bars unless on a terminal, because they would fill a log file."""
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()


def load_tokenizer(model_args: ModelConfig, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with padding on the left. Raises a `UsageError` if there is no such model."""
    source = {"revision": model_args.model_revision, "trust_remote_code": trust_remote_code}
    remedy = "Use a directory with a model and its tokenizer, or the id of a model on the hub."
    with usage_errors(model_argument(model_args), remedy, OSError, ValueError):
        if not Path(str(model_args.model_name_or_path), "adapter_config.json").is_file():
            AutoConfig.from_pretrained(str(model_args.model_name_or_path), **source)
        return AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left", **source)


def model_argument(model_args: ModelConfig) -> str:
    """The argument that names the model, for errors."""
    return f"model_name_or_path={model_args.model_name_or_path!r}"
