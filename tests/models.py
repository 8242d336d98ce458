"""Tiny models, tokenizers and datasets, built here: nothing is downloaded."""

import atexit
import functools
import shutil
import tempfile

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocab = [*special, *"0123456789+-*=() abcdefghijklmnopqrstuvwxyz?.\n"]
    return make_word_tokenizer(vocab, "?", "", CHAT_TEMPLATE)


def make_word_tokenizer(words: list[str], unknown: str, pattern: str | Regex, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of `words`, which are where `pattern` splits."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>"}
    tokens["additional_special_tokens"] = [word for word in words if word.startswith("<|")]
    settings = {"chat_template": template, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, **settings)


# Settings of a tiny model, as most families' configurations name them
TINY = {"vocab_size": len(make_tokenizer()), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
TINY |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def make_model(seed: int = 0, **overrides) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers, with sharpened logits: its entropies differ from one position to the next."""
    set_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY | overrides))
    model.lm_head.weight.data.mul_(20)
    return model


@torch.no_grad()
def statistics_by_hand(model, prefix_ids, token_ids, temperature=1.0):
    """Log-probs and entropies (L,) of tokens after a prefix, by a plain forward pass."""
    ids = torch.tensor([[*map(int, prefix_ids), *map(int, token_ids)]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prefix_ids) - 1 : -1].float() / temperature
    policy = torch.distributions.Categorical(logits=logits)
    return policy.log_prob(ids[0, len(prefix_ids) :]), policy.entropy()


def cache_of(kwargs):
    """The cache among what a model is called with: `cache`, and `past_key_values` before transformers 5.24."""
    return kwargs["cache"] if "cache" in kwargs else kwargs.get("past_key_values")


@functools.cache
def model_on_disk() -> str:
    """Directory of a `make_model()`: a reference model is loaded from where the policy came from."""
    return on_disk(make_model(), make_tokenizer())


def on_disk(*parts) -> str:
    """A directory that models and tokenizers are saved in, for as long as this process lives."""
    directory = tempfile.mkdtemp(prefix="fr3e-trl-test-")
    atexit.register(shutil.rmtree, directory)
    for part in parts:
        part.save_pretrained(directory)
    return directory


def make_dataset(num_prompts: int = 16, conversational: bool = False) -> Dataset:
    """Sums of two digits, with prompts of different lengths."""
    questions = [f"{3 * i}+{i}=" for i in range(num_prompts)]
    if conversational:
        return Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in questions]})
    return Dataset.from_dict({"prompt": questions})


# For configurations: no GPU, no files, no noise
CPU = {"bf16": False, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
