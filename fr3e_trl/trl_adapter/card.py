"""The model card: what it tells of an FR3E run, beside what TRL writes."""

import contextlib
import copy
import importlib.metadata
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from pprint import pformat
from typing import Any

from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import ProcessorMixin
from trl import GRPOConfig

from ..fr3e_config import FR3EConfig
from .course import Change, changes
from .setup import model_source

# Settings of the method that the card tells where they differ from the defaults
SETTINGS = [
    *(
        field.name
        for field in fields(FR3EConfig)
        if field.name not in GRPOConfig.__dataclass_fields__
        and not field.name.startswith("vllm_")
        and field.name != "log_trees"
    ),
    "temperature",
    "top_p",
    "epsilon",
    "epsilon_high",
    "loss_type",
    "scale_rewards",
    "beta",
    "num_iterations",
]

# Options whose value is not told to others
SECRET = re.compile(r"(^|[_-])(token|key|secret|password)$", re.IGNORECASE)
# The same within a value, such as `model_init_kwargs={"token": "hf_..."}`
SECRET_INSIDE = re.compile(
    r"""(\b(?:\w*_)?(?:token|key|secret|password)["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,}]+)""", re.I
)

QUICK_START = """\
```python
from transformers import pipeline

generator = pipeline("text-generation", model="{model}", device_map="auto")
prompt = {prompt}
output = generator(prompt, max_new_tokens={max_new_tokens}, return_full_text=False)[0]
print(output["generated_text"])
```"""

INTERVALS = (
    "±: half of a 95% interval. That of `eval_reward` is of drawing the prompts, at most too wide; that of the others "
    "comes from how much neighbouring logs differ."
)


def complete(path: Path, trainer: Any, dataset_name: str | None) -> None:
    """
    Have TRL's card at `path` say what was trained, on what, how, and what came of it.

    Args:
        path (`Path`):
            The card.
        trainer ([`FR3ETrainer`]):
            Has trained the model.
        dataset_name (`str`, *optional*):
            The dataset: the id of one on the hub, or a local path.
    """
    card = ModelCard.load(path)
    before, after = card.text.index("This model is "), card.text.index("## Training procedure")
    quick_start = _quick_start(trainer, dataset_name) or card.text[card.text.index("```python") : after].strip()
    opening = [_opening(trainer, dataset_name), "## Quick start", quick_start]
    card.text = card.text[:before] + "\n\n".join(opening) + "\n\n" + card.text[after:]
    sections = [_result(trainer), _training(trainer, dataset_name), _settings(trainer.args)]
    versions = "### Framework versions\n\n"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from its folder
        versions += f"- FR3E for TRL: {importlib.metadata.version('fr3e-trl')}\n"
    card.text = card.text.replace("### Framework versions\n\n", "\n\n".join([*filter(None, sections), versions]))
    card.text = card.text.replace('model="None"', f'model="{_place(trainer)}"')
    card.save(path)


def on_hub(dataset_name: str | None) -> str | None:
    """The name, if it is that of a dataset on the hub and not a local path: the hub refuses cards with others."""
    return None if dataset_name is None or Path(dataset_name).exists() else dataset_name


def _opening(trainer: Any, dataset_name: str | None) -> str:
    method = f"[{trainer._paper['title']}](https://huggingface.co/papers/{trainer._paper['id']})"
    return (
        f"This model is {_base(trainer)}, trained on {_dataset(trainer, dataset_name)} by FR3E ({method}), with "
        "[TRL](https://github.com/huggingface/trl)."
    )


def _base(trainer: Any) -> str:
    """The model that was trained: a link to the hub, or the name of a directory."""
    name = model_source(trainer.model)
    if not name:
        return "a model that the training script made"
    return f"`{_shown(name)}`" if Path(name).is_dir() else f"[{name}](https://huggingface.co/{name})"


def _dataset(trainer: Any, name: str | None) -> str:
    dataset = trainer.train_dataset
    size = f"{len(dataset):,} prompts" if isinstance(dataset, Dataset) else "prompts"
    if name is None:
        return size
    link = f"[{name}](https://huggingface.co/datasets/{name})" if on_hub(name) else f"`{_shown(name)}`"
    return f"{size} of {link}"


def _shown(path: str) -> str:
    """A path as it was given, without the folders of somebody's machine."""
    return Path(path).name if Path(path).is_absolute() else path


def _place(trainer: Any) -> str:
    """From where the model is loaded."""
    return trainer.hub_model_id or trainer.args.output_dir


def _quick_start(trainer: Any, dataset_name: str | None) -> str | None:
    """A prompt of the training set put to the model. `None` for a model of images: TRL's stays."""
    if isinstance(trainer.processing_class, ProcessorMixin):
        return None
    prompt: Any = "A prompt like those of the training set"
    # A model on the hub may be public, and a dataset from elsewhere private
    if isinstance(trainer.train_dataset, Dataset) and (trainer.hub_model_id is None or on_hub(dataset_name)):
        prompt = trainer.train_dataset[0].get("prompt", prompt)  # an environment may give it
    return QUICK_START.format(
        model=_place(trainer),
        prompt=pformat(prompt, width=100, sort_dicts=False),
        max_new_tokens=trainer.args.max_completion_length,
    )


def _result(trainer: Any) -> str | None:
    found = changes(trainer)
    if not found:
        return None
    rows = "".join(
        f"| `{change.name}`, {change.when} | {'' if change.first is None else _with_noise(change.first, change.noise)} "
        f"| {_with_noise(change.last, change.noise)} | {_difference(change)} |\n"
        for change in found
    )
    return f"### Result\n\n| mean reward | before | after | change |\n|---|---|---|---|\n{rows}\n{INTERVALS}"


def _with_noise(value: float, noise: float | None) -> str:
    return f"{value:.3f}" if noise is None else f"{value:.3f} ± {noise:.3f}"


def _difference(change: Change) -> str:
    if change.difference is None:
        return ""
    sign = "+" if change.difference >= 0 else "−"
    return sign + _with_noise(abs(change.difference), change.noise_of_difference)


def _training(trainer: Any, dataset_name: str | None) -> str:
    args, state = trainer.args, trainer.state
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    prompts = args.generation_batch_size // args.num_generations
    weights = trainer.reward_weights.tolist()
    rewards = [
        f"`{name}`" if set(weights) == {1.0} else f"{weight:g} × `{name}`"
        for name, weight in zip(trainer.reward_func_names, weights, strict=True)
    ]
    best = state.best_global_step if args.load_best_model_at_end else None
    rate = args.learning_rate if trainer.optimizer is None else trainer.optimizer.param_groups[0].get("initial_lr")
    table = {
        "base model": _base(trainer),
        "dataset": _dataset(trainer, dataset_name),
        "rewards": ", ".join(rewards),
        "generation batch": f"{prompts} prompts, {args.num_generations} rows each",
        "rows of a step": f"{rows:,}",
        "steps": f"{state.global_step:,} of {state.max_steps:,}, {state.epoch or 0:.2f} epochs",
        "weights": f"of step {best:,}, the best by `{args.metric_for_best_model}`" if best else None,
        "longest completion": f"{args.max_completion_length:,} tokens",
        "learning rate": f"{args.learning_rate if rate is None else rate:g}",  # a run that is resumed keeps its own
        "seed": str(args.seed),
        "command": f"`{_command()}`" if _command() else None,
    }
    lines = "".join(f"| {name} | {_in_cell(value)} |\n" for name, value in table.items() if value is not None)
    return f"### Training run\n\n| | |\n|---|---|\n{lines}".rstrip()


def _in_cell(value: Any) -> str:
    """Text of a table's cell, which a line break or a bar would end."""
    return " ".join(str(value).splitlines()).replace("|", "\\|")


def _command() -> str | None:
    """The command line of this process, without secrets. `None` where no script was called, as in a notebook."""
    program, *arguments = sys.argv
    if program.startswith("fr3e "):
        words = program.split()
    elif program.endswith(".py") and Path(program).name not in ("__main__.py", "ipykernel_launcher.py"):
        words = ["python", _shown(program)]
    else:
        return None
    is_secret = False
    for argument in arguments:
        name, _, value = argument.partition("=")
        shown = concealed(argument)
        words.append("***" if is_secret else f"{name}=***" if value and SECRET.search(name) else shown)
        is_secret = argument.startswith("-") and not value and bool(SECRET.search(name))
    return shlex.join(words)


def concealed(value: Any) -> Any:
    """A value of a setting without the secrets in it, however deep they are."""
    if isinstance(value, dict):
        return {key: concealed(of_key) for key, of_key in value.items() if not SECRET.search(str(key))}
    if isinstance(value, list):
        return [concealed(item) for item in value]
    return SECRET_INSIDE.sub(r"\1***", value) if isinstance(value, str) else value


def _settings(args: FR3EConfig) -> str:
    """The settings that differ from what they are when they are left out."""
    default = copy.copy(args)
    for name in SETTINGS:
        setattr(default, name, FR3EConfig.__dataclass_fields__[name].default)
    default.resolve()
    rows = "".join(
        f"| `{name}` | `{getattr(args, name)}` | `{getattr(default, name)}` |\n"
        for name in SETTINGS
        if getattr(args, name) != getattr(default, name)
    )
    table = f"| setting | here | default |\n|---|---|---|\n{rows}".rstrip() if rows else "All are the defaults."
    off = "".join(f"\n\n{line[0].upper()}{line[1:]}" for line in args.parts_off())
    return f"### FR3E settings\n\n{table}{off}"
