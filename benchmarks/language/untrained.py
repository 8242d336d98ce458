"""
Models with random weights and a chat template, for what does not depend on what a model knows:

    python -m benchmarks.language.untrained DIRECTORY qwen2.5-0.5b
"""

import sys
import zlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

from .families import FAMILIES

# Vocabulary, width, inner width, layers, heads, heads of keys
SHAPES = {"tiny": (400, 32, 64, 2, 4, 2), "qwen2.5-0.5b": (151_936, 896, 4864, 24, 14, 2)}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "num_key_value_heads",
)
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
    sizes: Any = dict(zip(SIZES, SHAPES[shape], strict=True))
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **ends, tie_word_embeddings=True))
    model.bfloat16().save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def coin(completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward of 0 or 1 that the tokens decide as by chance: rows of every prompt differ, whatever the policy is."""
    return [float(zlib.crc32(repr(list(ids)).encode()) % 2) for ids in completion_ids]


if __name__ == "__main__":
    print(save_untrained(Path(sys.argv[1]), sys.argv[2]))
