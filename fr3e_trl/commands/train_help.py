"""`fr3e train --help`: one page, without the import of PyTorch and TRL, which takes seconds."""

import ast
import re
import textwrap
from pathlib import Path

CONFIG = Path(__file__).parent.parent / "fr3e_config.py"

# What people set most, beside FR3E's own
COMMON = {
    "Model and data": {
        "config": "file of a recipe, whose settings these options override",
        "model_name_or_path": "model on the hub, or a directory",
        "dataset_name": "dataset on the hub, or a JSON, JSON Lines, Parquet or CSV file",
        "reward_funcs": "rewards by name, import path or file, such as my_rewards.py:score",
        "prompt_column": "column with the question as text",
        "answer_column": "column with the answer",
        "use_peft": "train a LoRA adapter",
        "num_processes": "processes to start, one for each GPU",
        "dry_run": "say what the run will do and what memory it takes, and train nothing",
        "eval_dataset_name": "dataset or file to evaluate on while training",
    },
    "Batch and generation": {
        "num_generations": "rows of a prompt",
        "max_completion_length": "tokens of the longest completion",
        "temperature": "temperature of sampling",
        "per_device_train_batch_size": "rows of a micro-batch",
        "gradient_accumulation_steps": "micro-batches of an update",
        "use_vllm": "generate with vLLM",
    },
    "Training": {
        "learning_rate": "learning rate",
        "beta": "weight of the KL divergence from the reference model",
        "max_steps": "steps in all, in the place of epochs",
        "output_dir": "directory of the model, its checkpoints and its metrics",
        "save_steps": "steps from one checkpoint to the next",
        "resume_from_checkpoint": "true: go on from the last checkpoint",
        "eval_strategy": "when to evaluate: no, epoch, or steps with eval_steps",
        "report_to": "services that get the metrics, or none",
    },
}


def main(arguments: list[str]) -> None:
    """Print the page."""
    print("usage: fr3e train --config RECIPE.yaml [--SETTING VALUE ...]\n")
    print("Train a model, as a recipe says. All options: fr3e train --help-all")
    for group, options in {**COMMON, **own_options()}.items():
        print(f"\n{group}:")
        for name, what in options.items():
            print(textwrap.fill(what, 110, initial_indent=f"  --{name:<29} ", subsequent_indent=" " * 34))


def own_options() -> dict[str, dict[str, str]]:
    """What the docstring of `FR3EConfig` says of each setting, by its groups."""
    tree = ast.parse(CONFIG.read_text())
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "FR3EConfig")
    groups: dict[str, dict[str, str]] = {}
    settings = (ast.get_docstring(config) or "").partition("Parameters:")[2]
    for line in settings.splitlines():
        if group := re.fullmatch(r"    > (.+)", line):
            options = groups.setdefault(f"FR3E: {group[1]}", {})
        elif setting := re.fullmatch(r"    (\w+) \((.+?)\): (.+)", line):
            default = re.search(r"defaults to `(.+?)`", setting[2])
            options[setting[1]] = setting[3].rstrip(".") + (f" (default: {default[1]})" if default else "")
    return groups
