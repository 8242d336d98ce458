"""
Models with random weights and a chat template, for what does not depend on what a model knows:

    python -m benchmarks.language.untrained DIRECTORY --shape qwen2.5-0.5b
"""

import argparse
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

from .families import FAMILIES

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_untrained(directory: Path, shape: str = "tiny") -> Path:
    """Save a model of a shape, and a tokenizer of 400 tokens for problems in English. Returns the directory."""
    problems = [row for family in FAMILIES.values() for row in family.examples("policy", 0, 50)]
    texts = [message["content"] for row in problems for message in (*row["prompt"], *row["completion"])]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    set_seed(0)
    ends = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape], **ends, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def coin(completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward of 0 or 1 that the tokens decide as by chance: rows of every prompt differ, whatever the policy is."""
    return [float(zlib.crc32(repr(list(ids)).encode()) % 2) for ids in completion_ids]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    options = parser.parse_args()
    print(save_untrained(options.directory, options.shape))
