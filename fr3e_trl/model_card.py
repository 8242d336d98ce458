"""TRL's model card, with a section on the run."""

import contextlib
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import ModelCard
from trl import GRPOConfig

from .callbacks import changes
from .compat import TypedTrainer
from .fr3e_config import FR3EConfig


def on_hub(dataset_name: str | None) -> str | None:
    """The name, unless it is a local path, because the hub only accepts its own datasets."""
    return None if dataset_name is None or Path(dataset_name).exists() else dataset_name


def complete(path: Path, trainer: TypedTrainer, dataset_name: str | None) -> None:
    """Add the model, the settings and the results of the run to TRL's card at `path`."""
    args, state, card = trainer.args, trainer.state, ModelCard.load(path)
    assert isinstance(args, FR3EConfig) and args.generation_batch_size and args.num_generations
    own = [f for f in fields(FR3EConfig) if f.name not in GRPOConfig.__dataclass_fields__ and f.name != "log_trees"]
    group = trainer.optimizer.param_groups[0] if trainer.optimizer is not None else {}
    rows = {
        "base model": shown(getattr(getattr(trainer.model, "config", None), "name_or_path", ""))
        or "made by the training script",
        "dataset": shown(dataset_name or ""),
        "rewards": ", ".join(trainer.reward_func_names),
        "generation batch": f"{args.generation_batch_size // args.num_generations} prompts × {args.num_generations}",
        "steps": f"{state.global_step:,} ({state.epoch or 0:.2f} epochs)",
        "weights of step": str((args.load_best_model_at_end and state.best_global_step) or ""),
        "learning rate": f"{group.get('initial_lr', args.learning_rate):g}",  # a resumed run keeps its own
        "seed": str(args.seed),
        "FR3E": ", ".join(f"{f.name}={getattr(args, f.name)!r}" for f in own if getattr(args, f.name) != f.default),
        "off": " ".join(args.parts_off()),
        **dict(changes(state.log_history)),
    }
    table = "".join(f"| {name} | `{text}` |\n" for name, text in rows.items() if text)
    versions = "### Framework versions\n\n"
    section = f"### Training run\n\n| | |\n|---|---|\n{table}\n{versions}"
    with contextlib.suppress(PackageNotFoundError):  # not installed
        section += f"- FR3E for TRL: {version('fr3e-trl')}\n"
    card.text = card.text.replace(versions, section)
    # TRL leaves out base models in a directory, and the location of models that are not on the hub
    card.text = card.text.replace("[None](https://huggingface.co/None)", f"`{rows['base model']}`")
    card.text = card.text.replace('model="None"', f'model="{trainer.hub_model_id or args.output_dir}"')
    card.save(path)


def shown(path: str) -> str:
    """A relative path or an id as it is, or only the name of an absolute path."""
    return Path(path).name if Path(path).is_absolute() else path
