"""
Make the policy that `examples/demo.py` starts from, from nothing, in about 10 minutes on two cores:

    python examples/make_demo_policy.py

A Qwen3 of 0.8 million parameters learns, by supervised fine-tuning, to solve sums of several terms as a hurried pupil
does. The sums are `chain_sum` problems of reasoning-gym; only the pupil is ours. The pupil works line by line, but more
often than not takes two terms in one line, and then forgets the second half of the time. The policy learns to do the
same: it solves some problems, by a route that it does not prefer. Reinforcement learning is to find out which.
"""

import argparse
import random
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import reasoning_gym
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

POLICY_DIR = Path(__file__).parent / "demo_policy"

# chain_sum problems of 5 or 6 digits: "... arithmetic problem: 5 + 8 - 7 + 1 - 9 ="
GENERATOR = reasoning_gym.create_dataset(
    "chain_sum", min_terms=5, max_terms=6, min_digits=1, max_digits=1, seed=0, size=1_000_000_000
)

# Of 100 problems, by a hash of their text: no problem is in two splits, whatever the seeds.
SPLITS = {"policy": range(80), "train": range(80, 90), "heldout": range(90, 100)}

# How the pupil works
HURRY = 0.6  # chance of two terms in a line, where two are left
SLIP = 0.5  # chance that the second of them is forgotten

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]
WORDS = ["State", " the", " final", " answer", " to", " following", " arithmetic", " problem", ": "]
SIGNS = [" + ", " - ", " = ", " =", "-", "\n", "<answer>", "</answer>"]


def problems(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """The problems of a split, in an order that `seed` decides, without end. None comes twice."""
    rng, seen = random.Random(seed), set()
    while True:
        problem = GENERATOR[rng.randrange(len(GENERATOR))]
        question = problem["question"]
        if question not in seen and zlib.crc32(question.encode()) % 100 in SPLITS[split]:
            seen.add(question)
            yield problem


def demonstrate(expression: str, rng: random.Random) -> str:
    """The pupil's solution of, for example, `"5 + 8 - 7 + 1 - 9"`: lines of one or two terms each, then the answer."""
    first, *rest = expression.split()
    total, terms = int(first), [f"{sign} {number}" for sign, number in zip(rest[::2], rest[1::2], strict=True)]
    lines = []
    while terms:
        size = 2 if len(terms) > 1 and rng.random() < HURRY else 1
        taken, terms = terms[:size], terms[size:]
        counted = taken[:1] if rng.random() < SLIP else taken
        result = total + sum(int(term.replace(" ", "")) for term in counted)
        lines.append(f"{total} {' '.join(taken)} = {result}")
        total = result
    return "\n".join(["", *lines, f"<answer>{total}</answer>"])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of digits, signs, and the words of the question."""
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *"0123456789", *SIGNS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?answer>| ?[A-Za-z]+|: | [-+=] | =|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the policy that the demo starts from.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--output_dir", type=Path, default=POLICY_DIR)
    options = parser.parse_args()

    set_seed(options.seed)
    rng, batch_size = random.Random(options.seed), 128
    demonstrations = [
        {"prompt": problem["question"], "completion": demonstrate(problem["metadata"]["expression"], rng)}
        for problem in islice(problems("policy", options.seed), options.max_steps * batch_size)
    ]
    tokenizer = make_tokenizer()
    trainer = SFTTrainer(
        model=make_model(tokenizer),
        args=SFTConfig(
            output_dir=str(options.output_dir),
            max_steps=options.max_steps,
            per_device_train_batch_size=batch_size,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=min(100, options.max_steps // 10),
            weight_decay=0.1,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            logging_steps=50,
            seed=options.seed,
        ),
        train_dataset=Dataset.from_list(demonstrations),
        processing_class=tokenizer,
    )
    trainer.train()
    assert isinstance(trainer.model, PreTrainedModel)
    trainer.model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
