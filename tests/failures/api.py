"""What a script passes to the trainer and that cannot be; more of it is in test_checks.py and test_config.py."""

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from models import CPU, make_dataset, make_model, make_tokenizer
from transformers import Qwen3Model, T5Config, T5ForConditionalGeneration

from fr3e_trl import FR3EConfig, FR3ETrainer

from .case import Case

SETTINGS = {"output_dir": "out", "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 4}
T5 = T5Config(vocab_size=51, num_layers=1, num_heads=2, d_ff=16, d_kv=8, d_model=16)
LONG = Dataset.from_dict({"prompt": ["1" * 400] * 16})


class Judge:
    pass


def zeros(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def made(**arguments: Any) -> None:
    """Make a trainer, and train it. What is called is made here; what is no argument of the trainer is a setting."""
    model, dataset = arguments.pop("model", make_model), arguments.pop("train_dataset", make_dataset)
    tokenizer = arguments.pop("processing_class", make_tokenizer)
    reward_funcs = arguments.pop("reward_funcs", zeros)
    made = [part() if callable(part) else part for part in (model, dataset, tokenizer)]
    model, dataset, tokenizer = made
    args = FR3EConfig(**CPU | SETTINGS | {"max_steps": 2} | arguments)
    FR3ETrainer(model, reward_funcs, args, dataset, processing_class=tokenizer).train()


def case(name: str, *says: str, **arguments: Any) -> Case:
    return Case(name, lambda: made(**arguments), says)


def returning(name: str, reward: Callable[[int], Any], *says: str) -> Case:
    """A reward function that makes something else than rewards of n completions."""

    def judge(completions: list[str], **kwargs: Any) -> Any:
        return reward(len(completions))

    return case(name, "'judge'", *says, reward_funcs=judge)


def with_completions() -> Dataset:
    return make_dataset().add_column("completions", ["x"] * 16)


def without_eos() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


CASES = [
    case("an encoder with a decoder", "T5ForCondition", "causal", model=lambda: T5ForConditionalGeneration(T5)),
    case("a model without a head", "Qwen3Model", "cannot generate", model=lambda: Qwen3Model(make_model().config)),
    case("a number for a model", "model is a int", model=5),
    case("a tokenizer without EOS", "EOS", "tokenizer.eos_token", processing_class=without_eos),
    case("a tokenizer with more tokens", "51 tokens", "10", model=lambda: make_model(vocab_size=10)),
    case("a text for a tokenizer", "processing_class", processing_class="tokenizer"),
    case("a list for a dataset", "train_dataset is a list", train_dataset=[{"prompt": "1+1="}]),
    case("a dict of datasets", "train_dataset is a dict", "split='train'", train_dataset={"train": 1}),
    case("a column of completions", "'completions'", "rename_column", train_dataset=with_completions),
    case("no column of prompts", "'prompt'", train_dataset=Dataset.from_dict({"question": ["1+1="] * 16})),
    case("prompts that are too long", "400 tokens", "256", train_dataset=LONG),
    case("no reward", "reward_funcs", reward_funcs=None),
    case("a class for a reward", "class Judge", "__call__", reward_funcs=Judge),
    case("an object for a reward", "cannot be called", "__call__", reward_funcs=Judge()),
    case("two weights for a reward", "2", "1", reward_weights=[1.0, 2.0]),
    returning("texts for rewards", lambda n: ["good"] * n, "'good'", "must be a number"),
    returning("two dimensions of rewards", lambda n: torch.zeros(n, 2), "must be a number"),
    returning("a text for rewards", lambda n: "good", "'g'", "must be a number"),
    returning("too few rewards", lambda n: [1.0], "1 rewards"),
]
