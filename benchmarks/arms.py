"""From an arm's settings to its trainer."""

import difflib
import functools
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig

from benchmarks.counts import check_count, check_rate
from fr3e_trl.commands.data import model_argument
from fr3e_trl.commands.train import set_model_init
from fr3e_trl.commands.usage import usage_errors
from fr3e_trl.fr3e_config import FR3EConfig
from fr3e_trl.generation.decoding import contiguous_at_head

from .measures import MeasuredFR3ETrainer, MeasuredGRPOTrainer, MeasuredTrainer
from .own_task import OwnTask
from .staleness import StaleFR3ETrainer
from .tasks import Task

TRAINERS: dict[str, tuple[type[MeasuredTrainer], type[GRPOConfig]]] = {
    "fr3e": (MeasuredFR3ETrainer, FR3EConfig),
    "grpo": (MeasuredGRPOTrainer, GRPOConfig),
    "half_swap": (MeasuredFR3ETrainer, GRPOConfig),  # a script whose trainer alone was swapped
}

# An arm's settings that are not of the trainer's configuration
OWN_SETTINGS = ("trainer", "num_prompts", "num_train_examples", "staleness")

# What every arm has unless it says otherwise: nothing that belongs to a method
DEFAULTS: dict[str, Any] = {
    "num_train_examples": 4096,
    "bf16": False,
    "gradient_checkpointing": False,
    "temperature": 1.0,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 100,
}

# Schedules of the learning rate that go by the share of its budget that a run has spent
FALLING = ("linear", "cosine")

# Settings of an arm that are whole numbers of at least 1
COUNTS = (
    "num_prompts",
    "num_generations",
    "num_train_examples",
    "per_device_train_batch_size",
    "steps_per_generation",
    "num_iterations",
    "max_completion_length",
)

# Settings whose default is not the same for both trainers: a comparison must say what it wants
DISPUTED = ("epsilon_high", "scale_rewards")


def make_trainer(
    settings: dict[str, Any], policy: Path, task: Task | OwnTask, output_dir: Path, seed: int, **overrides: Any
) -> MeasuredTrainer:
    """
    The trainer of an arm: the real [`FR3ETrainer`] or [`~trl.GRPOTrainer`], with measurements taken.

    A batch of `num_prompts` prompts is one optimizer step, unless the settings say otherwise. The seed decides the
    prompts, their order and the sampling.

    Args:
        settings (`dict[str, Any]`):
            `trainer` (a name of `TRAINERS`), `num_prompts` (prompts per generation batch), `num_train_examples` (how
            many prompts to train on), `staleness` (how old rollouts are, in shares of the updates of a batch, 0 to 1:
            what `max_staleness` is with a server), and any setting of [`FR3EConfig`] or [`~trl.GRPOConfig`].
        **overrides:
            Settings that take the place of those in `settings`.

    Raises:
        ValueError: A setting is unknown, missing or impossible.
    """
    limits = {name: getattr(task, name) for name in ("max_completion_length", "max_tool_calling_iterations")}
    settings = DEFAULTS | limits | settings | overrides
    trainer_class, _ = TRAINERS[settings["trainer"]]
    config = make_config(settings, output_dir, seed)
    arguments: dict[str, Any] = {
        "reward_funcs": task.reward,
        "args": config,
        "train_dataset": _train_examples(task, seed, settings["num_train_examples"]),
        "tools": list(task.tools),
    }
    if staleness := settings.get("staleness"):
        trainer_class = StaleFR3ETrainer
        arguments["max_staleness"] = max(1, round(staleness * config.num_iterations))
    if isinstance(task, OwnTask):
        set_model_init(config, task.args)
        with usage_errors(
            model_argument(task.args), "Use a directory with a model's weights, or one on the hub.", OSError
        ):
            trainer = trainer_class(**arguments, **task.trainer_arguments())
    else:
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
            **arguments,
        )
    trainer.remove_callback(PrinterCallback)
    contiguous_at_head(trainer.model)  # when TRL generates, too: seconds are compared
    return trainer


@functools.lru_cache(maxsize=16)  # the runs of a process share few seeds
def _train_examples(task: Task | OwnTask, seed: int, size: int) -> Dataset:
    return task.examples("train", seed, size)


def make_config(settings: dict[str, Any], output_dir: Path, seed: int) -> GRPOConfig:
    """The trainer's configuration of an arm's settings, see [`make_trainer`]."""
    settings = DEFAULTS | settings
    check_settings(settings)
    _, config_class = TRAINERS[settings["trainer"]]
    config = {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
    num_rows = settings["num_prompts"] * settings["num_generations"] // int(os.environ.get("WORLD_SIZE", 1))
    part = "steps_per_generation" if "steps_per_generation" in settings else "per_device_train_batch_size"
    if num_rows % settings.get(part, 1) != 0:
        raise ValueError(
            f"{part}={settings[part]} must divide the {num_rows} rows of a generation batch (num_prompts times "
            "num_generations). Remove it to process them all at once."
        )
    batch_size = config.setdefault("per_device_train_batch_size", num_rows // settings.get("steps_per_generation", 1))
    steps = config.setdefault("steps_per_generation", num_rows // batch_size)
    if batch_size * steps != num_rows:
        raise ValueError(
            f"per_device_train_batch_size={batch_size} times steps_per_generation={steps} must be the {num_rows} rows "
            "of a generation batch (num_prompts times num_generations). Leave one of them out."
        )
    config.setdefault("gradient_accumulation_steps", config["steps_per_generation"])
    config.setdefault("use_cpu", not torch.cuda.is_available())
    return config_class(output_dir=str(output_dir), seed=seed, **config)


def whole_prompts(wanted: float, settings: dict[str, Any]) -> int:
    """Prompts of a batch, as near to `wanted` as its division into micro-batches and the training set allow."""
    parts = settings.get("steps_per_generation", settings.get("per_device_train_batch_size", 1))
    unit = parts // math.gcd(parts, settings["num_generations"])
    most = (DEFAULTS | settings)["num_train_examples"] // unit
    return unit * max(1, min(round(wanted / unit), most))


def read_settings(value: dict[str, Any] | str | None, name: str = "settings") -> dict[str, Any]:
    """Settings as a configuration file or, in JSON, the command line has them, with numbers for texts such as 1e-3."""
    try:
        settings = yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError(f"{name}={value!r} cannot be read: {' '.join(str(error).split())}.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{name}={value!r} must be a mapping of names to settings.")
    return {name: _with_numbers(setting) for name, setting in settings.items()}


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_numbers(setting) for name, setting in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def check_settings(settings: dict[str, Any]) -> None:
    """Raise a `ValueError` that says what to do if an arm's settings are not those of its trainer."""
    if settings.get("trainer") not in TRAINERS:
        raise ValueError(
            f"trainer={settings.get('trainer')!r} must be one of {', '.join(TRAINERS)}, in every arm or in the base."
        )
    _, config_class = TRAINERS[settings["trainer"]]
    known = [*OWN_SETTINGS, *(field.name for field in fields(config_class) if field.init)]
    for name in settings:
        if name not in known:
            raise ValueError(_unknown(name, settings["trainer"], known))
    for name in ("num_prompts", "num_generations", *DISPUTED):
        if name not in settings:
            reason = ", because the defaults of the trainers differ" if name in DISPUTED else ""
            raise ValueError(f"{name} is not set. Set it in every arm, or in the base{reason}.")
    for name in COUNTS:
        if name in settings:
            check_count(name, settings[name])
    check_rate("learning_rate", settings.get("learning_rate", 0.0))
    _check_staleness(settings)
    num_examples = (DEFAULTS | settings)["num_train_examples"]
    if settings["num_prompts"] > num_examples:
        raise ValueError(
            f"num_prompts={settings['num_prompts']} must be at most num_train_examples={num_examples}: a batch has no "
            "prompt twice."
        )


def _check_staleness(settings: dict[str, Any]) -> None:
    staleness = settings.get("staleness", 0)
    if not (isinstance(staleness, int | float) and 0 <= staleness <= 1):
        raise ValueError(f"staleness={staleness!r} must be a share of the updates of a batch, from 0 to 1.")
    if staleness and settings["trainer"] != "fr3e":
        raise ValueError(f"staleness={staleness} only works with trainer='fr3e', not with {settings['trainer']!r}.")


def _unknown(name: str, trainer: str, known: list[str]) -> str:
    message = f"There is no setting {name!r} for trainer={trainer!r}."
    if name in {field.name for field in fields(FR3EConfig)}:
        return f"{message} It is one of FR3E's: use trainer='fr3e', also for GRPO with rejection (num_anchors=0)."
    near = difflib.get_close_matches(name, known, n=3)
    return f"{message} Did you mean {' or '.join(near)}?" if near else message
