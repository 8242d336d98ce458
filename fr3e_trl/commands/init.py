"""A recipe, a reward and ten lines of data to begin with: `fr3e init`."""

import json
import shlex
from pathlib import Path

from .outputs import check_directory
from .usage import Parser, UsageError

RECIPE = """\
# A run to begin with: LoRA on ten sums, a few minutes on a GPU.
#
#     {command}
#
# Its data and its reward are the files beside it. Put your own in their place.
# Without a GPU, add: --use_cpu true --bf16 false

# Model and data
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
use_peft: true
dataset_name: data.jsonl
prompt_column: question
system_prompt: Think briefly. End with the number alone.
reward_funcs: [rewards.py:last_number]

# Rollouts: 8 prompts a batch, 4 rows each
num_generations: 4
max_completion_length: 128

# Training: four steps on each batch
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_iterations: 4
learning_rate: 1.0e-5
max_steps: 40
logging_steps: 1
report_to: none
output_dir: {output_dir}
"""

REWARDS = '''\
"""Rewards of completions. Each column of the dataset comes as a list by its name."""

import re


def last_number(completions: list, solution: list[str], **kwargs) -> list[float]:
    """1 where the last number of a completion is the solution, else 0."""
    texts = [completion[-1]["content"] for completion in completions]
    numbers = [re.findall(r"-?\\d+", text)[-1:] for text in texts]
    return [float(found == [answer]) for found, answer in zip(numbers, solution, strict=True)]
'''

SUMS = [(17, 26), (48, 35), (64, 19), (7, 88), (53, 29), (91, 46), (38, 38), (12, 79), (85, 57), (26, 66)]
DATA = "".join(json.dumps({"question": f"What is {a} + {b}?", "solution": str(a + b)}) + "\n" for a, b in SUMS)


def main(arguments: list[str]) -> None:
    """The command `fr3e init`."""
    parser = Parser(
        prog="fr3e init",
        description="Write recipe.yaml, rewards.py and data.jsonl to a directory, and say how to train with them.",
    )
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where the files go")
    directory = parser.parse_args(arguments).directory
    check_directory(directory, "DIRECTORY")
    command = shlex.join(["fr3e", "train", "--config", str(directory / "recipe.yaml")])
    output_dir = json.dumps(f"outputs/{directory.resolve().name}", ensure_ascii=False)  # quoted, whatever is in it
    files = {
        "recipe.yaml": RECIPE.format(command=command, output_dir=output_dir),
        "rewards.py": REWARDS,
        "data.jsonl": DATA,
    }
    for name in files:
        if (directory / name).exists():
            raise UsageError(f"{directory / name} is there already. Name another directory, or move it away.")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    print(f"{directory}: {', '.join(files)}\nnext: {command}")
