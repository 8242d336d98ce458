"""A training run that goes on from its last checkpoint, if it has one. A script: it is killed."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from factory import make_tool_trainer, make_trainer
from models import make_dataset
from peft import LoraConfig
from tool_policy import make_tool_dataset

from fr3e_trl import FR3ETrainer


def letters(completions, **kwargs):
    return [float(sum(map(ord, text)) % 97) for text in completions]


def parity(completions, **kwargs):
    """A reward that many completions share, so that states are rejected."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def main() -> None:
    """More than an epoch, batches for several steps, checkpoints in one, dropout, refill; with "tools", dialogues."""
    has_tools = sys.argv[1:] == ["tools"]
    sizes = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 2}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 20}
    refill = {"max_refills": 2, "value_prior_strength": 0.0}
    settings = {"learning_rate": 1e-2, "peft_config": LoraConfig(lora_dropout=0.1, target_modules="all-linear")}
    settings |= sizes | saving | refill
    if has_tools:
        trainer = make_tool_trainer(FR3ETrainer, dataset=make_tool_dataset(6), **settings)
    else:
        trainer = make_trainer(FR3ETrainer, reward_funcs=parity, dataset=make_dataset(6), **settings)
    print("training", flush=True)
    try:
        trainer.train(resume_from_checkpoint=True)
    except ValueError as error:
        assert "no complete checkpoint" in str(error)
        trainer.train()
    parameters = torch.cat([param.detach().flatten() for param in trainer.model.parameters()])
    timings = ("step_time", "runtime", "per_second", "train_loss")
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(timings)}
        for entry in trainer.state.log_history
    ]
    outcome = parameters.numpy().tobytes() + json.dumps(logs, sort_keys=True).encode()
    print("digest", hashlib.sha256(outcome).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    main()
