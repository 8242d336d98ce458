"""A recipe, a reward function and ten lines of data to start from: `fr3e init`."""

import json
import shlex
from pathlib import Path

from .outputs import check_directory
from .usage import Parser, UsageError

RECIPE = """\
# A first run: LoRA on ten sums.
#
#     {command}
#
# The data and the reward function are the files beside this one. Replace them with your own.

# Model and data
model_name_or_path: {model}
use_peft: true
dataset_name: data.jsonl
prompt_column: question
system_prompt: Think briefly. End with the number alone.
reward_funcs: [rewards.py:last_number]

# Generation: 8 prompts per batch, 4 completions each
num_generations: 4
max_completion_length: 128

# Training: four updates per batch
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_iterations: 4
learning_rate: 1.0e-5
max_steps: 40
logging_steps: 1
report_to: none
output_dir: {output_dir}

# This machine: {machine}
{precision}
"""

REWARDS = '''\
"""Rewards of completions. Each column of the dataset is passed as a list, under its name."""

import re


def last_number(completions: list, solution: list[str], **kwargs) -> list[float]:
    """1 if the last number of a completion is the solution, else 0."""
    texts = [completion[-1]["content"] for completion in completions]
    numbers = [re.findall(r"-?\\d+", text)[-1:] for text in texts]
    return [float(found == [answer]) for found, answer in zip(numbers, solution, strict=True)]
'''

SUMS = [(17, 26), (48, 35), (64, 19), (7, 88), (53, 29), (91, 46), (38, 38), (12, 79), (85, 57), (26, 66)]
DATA = "".join(json.dumps({"question": f"What is {a} + {b}?", "solution": str(a + b)}) + "\n" for a, b in SUMS)

MODEL, SMALL_MODEL = "Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"


def main(arguments: list[str]) -> None:
    """The command `fr3e init`."""
    parser = Parser(
        prog="fr3e init",
        description="Write recipe.yaml, rewards.py and data.jsonl to a directory, and print how to train with them. "
        "The recipe fits this machine.",
    )
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where the files go")
    directory = parser.parse_args(arguments).directory
    check_directory(directory, "DIRECTORY")
    command = shlex.join(["fr3e", "train", "--config", str(directory / "recipe.yaml")])
    output_dir = json.dumps(
        f"outputs/{directory.resolve().name}", ensure_ascii=False
    )  # quoted, because it may have any characters
    files = {"rewards.py": REWARDS, "data.jsonl": DATA, "recipe.yaml": ""}
    for name in files:
        if (directory / name).exists():
            raise UsageError(f"{directory / name} already exists. Use another directory, or move it away.")
    model, machine, precision = machine_settings()
    files["recipe.yaml"] = RECIPE.format(
        command=command, model=model, output_dir=output_dir, machine=machine, precision=precision
    )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    print(f"Wrote {', '.join(files)} to {directory}, for this machine ({machine}).\nnext: {command}")


def machine_settings() -> tuple[str, str, str]:
    """A model to start from on this machine, a description of the machine, and the settings for it."""
    import torch
    from transformers.utils import is_torch_bf16_gpu_available  # as TRL checks bf16

    if is_torch_bf16_gpu_available():  # without dtype, the weights would be float32
        return MODEL, "a GPU with bfloat16", "bf16: true\ndtype: bfloat16"
    if torch.accelerator.is_available():
        return MODEL, "a GPU without bfloat16", "bf16: false"
    return SMALL_MODEL, "no GPU", "bf16: false\nuse_cpu: true"
