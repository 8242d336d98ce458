"""A stand-in for SmolLM2: a tiny Llama with its chat template, and a tokenizer trained on the problems."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from benchmarks.language.families import FAMILIES

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_language_model(directory) -> str:
    """Save the stand-in, and return the directory."""
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
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
            bos_token_id=fast.convert_tokens_to_ids("<|im_start|>"),
            tie_word_embeddings=True,
        )
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    fast.save_pretrained(directory)
    return str(directory)
