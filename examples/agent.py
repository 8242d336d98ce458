"""
Train an agent, which calls a tool before it answers, from end to end on a CPU in a few minutes:

    python examples/agent.py

The tool is a function, `look_up`, that knows a register of 120 entries. A question such as
`town bado : heir seat twin oath =` asks for the oath of the twin of the seat of the heir of bado, and takes a look-up
for each of its titles. What a title means, as a relation of the register, differs from one kind of entry to the next,
and is what the agent learns, since only right answers are rewarded.

By default the agent is a small policy, which is made first and is right in a quarter of its answers. Another model is
told in a system message what to do (it needs a chat template with tools):

    accelerate launch examples/agent.py --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-6 \
        --per_device_train_batch_size 8 --steps_per_generation 8 --max_completion_length 1024 --bf16 true

For tools and questions of your own, put your functions in the place of `look_up`, and your dataset and its reward in
that of the task's. A tool needs type hints and a docstring that describes each of its arguments.
"""

import logging
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Some libraries warn while they are imported, of what does not matter here
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.simplefilter("ignore", FutureWarning)
sys.path.append(str(Path(__file__).parents[1]))  # the clone, for its benchmarks

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config  # noqa: E402

from benchmarks.policies import starting_policy  # noqa: E402
from benchmarks.tasks import Search  # noqa: E402
from benchmarks.tasks.search import RELATIONS, look_up  # noqa: E402
from fr3e_trl import FR3EConfig, FR3ETrainer  # noqa: E402

TASK = Search()

SYSTEM_PROMPT = f"""\
Each question names an entry of a register, with its kind before it, and some titles. Find the entry that has the first
title of it, then the one that has the second title of that one, and so on, by looking them up one after the other. A
title stands for one of the relations {", ".join(RELATIONS)}: which one depends on the title and on the kind of the
entry, and is for you to learn. A look-up that finds nothing had the wrong relation. There is time for
{TASK.max_tool_calling_iterations} look-ups. End with the name of the last entry behind an equals sign, for example:
= bado"""

# Settings of training that fit the small policy, where FR3EConfig's are for large ones
DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/agent",
    "max_steps": 40,
    "num_generations": 8,
    "per_device_train_batch_size": 128,  # 16 questions a step
    "per_device_eval_batch_size": 256,
    "max_completion_length": TASK.max_completion_length,
    "max_tool_calling_iterations": TASK.max_tool_calling_iterations,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": not torch.cuda.is_available(),
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 5,
}


@dataclass
class AgentScriptArguments:
    """Arguments of this script, beside those of [`FR3EConfig`] and of TRL's `ModelConfig`."""

    num_train_examples: int = field(default=2048, metadata={"help": "Questions to train on."})
    num_heldout: int = field(
        default=64,
        metadata={
            "help": "Other questions, by which the agent is measured before and after, with `num_generations` answers "
            "to each."
        },
    )


def is_right(completions: list[list[dict[str, Any]]], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward: 1 where the last message, behind its last equals sign if there is one, is the answer, else 0."""
    return [
        float(messages[-1]["role"] == "assistant" and messages[-1]["content"].rpartition("=")[2].strip() == name)
        for messages, name in zip(completions, answer, strict=True)
    ]


def questions(split: str, seed: int, size: int, system_prompt: str | None) -> Dataset:
    """Questions of a split with their answers. No two splits have one in common."""
    dataset = TASK.examples(split, seed, size)
    if system_prompt is None:
        return dataset
    opening = {"role": "system", "content": system_prompt}
    return dataset.map(lambda example: {"prompt": [opening, *example["prompt"]]})


def measure(trainer: FR3ETrainer, when: str) -> None:
    """Print how often the agent is right about held-out questions, and how many look-ups it makes for an answer."""
    trainer.evaluate()
    log = trainer.state.log_history[-1]
    trainer.accelerator.print(
        f"Held-out questions {when} training: {log['eval_reward']:.1%} right, "
        f"{log['eval_tools/call_frequency']:.1f} look-ups an answer"
    )


def main(script_args: AgentScriptArguments, training_args: FR3EConfig, model_args: ModelConfig) -> None:
    """Train, measure before and after, save the model, and push it to the hub if asked."""
    system_prompt = SYSTEM_PROMPT if model_args.model_name_or_path else None
    seed, size = training_args.seed, script_args.num_train_examples
    trainer = FR3ETrainer(
        model=model_args.model_name_or_path or str(starting_policy(TASK)),
        reward_funcs=is_right,
        args=training_args,
        train_dataset=questions("train", seed, size, system_prompt),
        eval_dataset=questions("heldout", 0, script_args.num_heldout, system_prompt),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        tools=[look_up],
    )
    measure(trainer, "before")
    trainer.train()
    measure(trainer, "after")
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub()


def make_parser() -> TrlParser:
    """Parser of the script's arguments, from a configuration file (`--config`) and the command line."""
    dataclasses: list[Any] = [AgentScriptArguments, FR3EConfig, ModelConfig]
    parser = TrlParser(
        dataclasses,
        description="Train an agent that looks things up before it answers: a small policy, or the model of "
        "--model_name_or_path. Defaults are for the small policy.",
    )
    parser.set_defaults(**DEFAULTS)
    return parser


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
