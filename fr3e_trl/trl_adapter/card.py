"""The model card: what it tells of an FR3E run, beside what TRL writes."""

from dataclasses import fields
from pathlib import Path

from huggingface_hub import ModelCard
from trl import GRPOConfig

from ..config import FR3EConfig

# What the model card tells of a run
CARD_SETTINGS = [
    *(
        field.name
        for field in fields(FR3EConfig)
        if field.name not in GRPOConfig.__dataclass_fields__ and not field.name.startswith("vllm_")
    ),
    "num_generations",
    "max_completion_length",
    "temperature",
    "epsilon",
    "epsilon_high",
    "loss_type",
    "scale_rewards",
    "beta",
    "learning_rate",
]


def add_settings(path: Path, args: FR3EConfig) -> None:
    """Add a table of the run's settings to the card at `path`."""
    card = ModelCard.load(path)
    rows = "".join(f"| `{name}` | `{getattr(args, name)}` |\n" for name in CARD_SETTINGS)
    settings = f"### FR3E settings\n\n| setting | value |\n|---|---|\n{rows}\n"
    card.text = card.text.replace("### Framework versions", settings + "### Framework versions")
    card.save(path)
