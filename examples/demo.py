"""
FR3E from end to end, on a CPU in a few minutes:

    python examples/demo.py

A small policy (`demo_policy`, made by `make_demo_policy.py`) solves some sums of several terms. FR3E trains it on sums
that reasoning-gym generates and scores. Its accuracy is measured before and after, on sums that it has never seen.
"""

# ruff: noqa: E402
import argparse
import logging
import time
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

# Some libraries warn while they are imported, of what does not matter here
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.simplefilter("ignore", FutureWarning)

import datasets
import torch
import transformers
from datasets import Dataset
from huggingface_hub import ModelCard
from make_demo_policy import GENERATOR, POLICY_DIR, problems
from reasoning_gym.utils import extract_answer
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands.completions import complete, texts_of
from fr3e_trl.method.tree import Tree
from fr3e_trl.tree_log.display import render_tree

MAX_COMPLETION_LENGTH = 64  # tokens; a worked solution takes up to 58
HELDOUT_SEED = 2507  # whatever the run's seed: every run is measured on the same problems

TABLE_HEAD = """
Training. S0, anchors: rollouts that are right, from the prompt and from the anchors. rejected: states that taught
nothing. rescued: of the problems that no base trajectory solved, those that a rollout from an anchor did.

 step         S0    anchors   rejected    rescued      time"""

CARD_OPENING = """
# Model Card for fr3e-demo

A policy that solves sums of five or six digits (`chain_sum` of reasoning-gym), line by line. It was trained from
`examples/demo_policy` of fr3e-trl by `examples/demo.py`.

{results}

"""


def make_dataset(split: str, seed: int, size: int) -> Dataset:
    rows = [{"prompt": p["question"], "answer": p["answer"]} for p in islice(problems(split, seed), size)]
    return Dataset.from_list(rows)


def is_right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward: 1 where reasoning-gym gives the answer that a completion ends with its full score, else 0."""
    return [
        float(GENERATOR.score_answer(extract_answer(completion), {"answer": oracle}) == 1)
        for completion, oracle in zip(completions, answer, strict=True)
    ]


def accuracy(policy: Path, heldout: Dataset, do_sample: bool) -> float:
    """Share of the held-out problems that a saved policy solves with one completion each."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    model.generation_config.update(max_new_tokens=MAX_COMPLETION_LENGTH, do_sample=do_sample)
    prompt_ids = tokenizer(list(heldout["prompt"])).input_ids
    with torch.random.fork_rng():  # measuring leaves no trace in the training that follows
        torch.manual_seed(HELDOUT_SEED)
        (completions,) = complete(model, tokenizer, prompt_ids, model.generation_config, batch_size=len(heldout))
    return sum(is_right(texts_of(completions, tokenizer), list(heldout["answer"]))) / len(heldout)


def measure(when: str, policy: Path, heldout: Dataset) -> str:
    """Print and return a saved policy's accuracy, when it samples and when it takes the likeliest token."""
    sampled = accuracy(policy, heldout, do_sample=True)
    error = (sampled * (1 - sampled) / len(heldout)) ** 0.5
    result = (
        f"Held-out accuracy {when} training: {sampled:.1%} ± {error:.1%} sampled at temperature 1, "
        f"{accuracy(policy, heldout, do_sample=False):.1%} greedy ({len(heldout)} problems)"
    )
    print(f"\n{result}", flush=True)
    return result


def spread(tree: Tree) -> float:
    """How much there is to see in a tree: the range of its states' values."""
    values = [state.value for state in tree.states]
    return max(values) - min(values)


class Progress(TrainerCallback):
    """Prints a tree of the first step, and a line of metrics now and then."""

    trainer: FR3ETrainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, processing_class: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            print("\nWhat FR3E explored of one problem in its first step:\n")
            print(render_tree(max(self.trainer.trees, key=spread), processing_class))
            print(TABLE_HEAD, flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "fr3e/value/S0" in logs:
            rescued = f"{logs['fr3e/prompts/rescued']:.0%}" if "fr3e/prompts/rescued" in logs else "-"
            print(
                f"{state.global_step:5} {logs['fr3e/value/S0']:10.0%} {logs['fr3e/value/anchors']:10.0%} "
                f"{logs['fr3e/states/rejected']:10.0%} {rescued:>10} {time.monotonic() - self.start:8.0f} s",
                flush=True,
            )


def write_model_card(trainer: FR3ETrainer, results: list[str]) -> None:
    """TRL's card, opening with what this policy does: TRL's own opening is about chat models from the hub."""
    trainer.create_model_card(model_name="fr3e-demo")
    path = Path(trainer.args.output_dir) / "README.md"
    card = ModelCard.load(path)
    card.text = (
        CARD_OPENING.format(results="\n".join(f"- {result}" for result in results))
        + card.text[card.text.index("## Training procedure") :]
    )
    card.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small policy by FR3E, and measure what it gains.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=150)
    parser.add_argument("--num_heldout", type=int, default=500)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--log_trees", type=int, help="log the trees of every so many steps, with a page: trees.html")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    heldout = make_dataset("heldout", HELDOUT_SEED, options.num_heldout)
    progress = Progress()
    trainer = FR3ETrainer(
        model=str(POLICY_DIR),
        reward_funcs=is_right,
        args=FR3EConfig(
            output_dir=str(options.output_dir),
            seed=options.seed,
            max_steps=options.max_steps,
            num_generations=8,
            per_device_train_batch_size=128,  # 16 problems a step
            max_completion_length=MAX_COMPLETION_LENGTH,
            learning_rate=5e-5,  # the paper's 1e-6 is for billions of parameters
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=20,
            log_trees=options.log_trees,
        ),
        train_dataset=make_dataset("train", options.seed, 1200),
        callbacks=[progress],
    )
    progress.trainer = trainer
    trainer.remove_callback(PrinterCallback)

    print(f"Policy: {POLICY_DIR}, {trainer.model.num_parameters() / 1e6:.1f} million parameters")
    print(f"Problems: {len(trainer.train_dataset)} to train on, {len(heldout)} others held out")
    print(f"Seed: {options.seed}")
    before = measure("before", POLICY_DIR, heldout)
    trainer.train()
    trainer.save_model()
    after = measure("after", options.output_dir, heldout)  # of what was saved, loaded by plain transformers
    write_model_card(trainer, [before, after])
    print(f"\nCheckpoint and model card: {options.output_dir}")


if __name__ == "__main__":
    main()
