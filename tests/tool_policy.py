"""A tiny policy that calls a tool: what it is asked takes two looks into a table."""

import functools
import random
import threading
from typing import Any, ClassVar

import torch
from datasets import Dataset
from models import make_model, make_word_tokenizer
from tokenizers import Regex
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|tool|>", "<call>", "</call>", *"0123456789?!{}:'", "error"]

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message.get('content') %}{{ message['content'] }}{% endif %}"
    # The one tool's name and its argument's go without saying
    "{% for call in message.get('tool_calls') or [] %}<call>"
    "{% if call['function']['name'] != 'look' %}{{ call['function']['name'] }}{% endif %}"
    "{% for key, value in call['function']['arguments'].items() %}"
    "{% if key != 'key' %}{{ key }}{% endif %}{{ value }}{% endfor %}</call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# What the policy writes, as messages
CALL = {"type": "function", "function": {"name": "look", "arguments": {"key": "{content}"}}}
OF_CALLS = {"open": "<call>", "close_pattern": "</call>", "repeats": True, "content": "text", "transform": CALL}
RESPONSE_TEMPLATE = {"defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>"}
RESPONSE_TEMPLATE |= {"fields": {"tool_calls": OF_CALLS, "content": {"close_pattern": "<eos>", "content": "text"}}}

CALLS: list[str] = []  # the arguments of all calls of `look`


def look(key: str) -> str:
    """
    Look a digit up.

    Args:
        key: The digit.
    """
    CALLS.append(key)
    return str((3 * int(key) + 1) % 10)


DOCUMENTATION = look.__doc__


def instead_of_look(tool):
    """The policy knows one tool, by its name and what it is for."""
    tool.__name__, tool.__doc__ = look.__name__, look.__doc__
    return tool


def make_tool_tokenizer() -> PreTrainedTokenizerFast:
    special = "|".join(word.replace("|", r"\|") for word in WORDS if len(word) > 1)
    tokenizer = make_word_tokenizer(WORDS, "!", Regex(f"{special}|."), TEMPLATE)
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def make_tool_dataset(num_prompts: int = 16) -> Dataset:
    """From a digit, two looks on: what is the second answer?"""
    digits = [i % 10 for i in range(num_prompts)]
    prompts = [[{"role": "user", "content": f"{digit}?"}] for digit in digits]
    answers = [str((3 * ((3 * digit + 1) % 10) + 1) % 10) for digit in digits]
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


class Walk:
    """An environment: what a look tells depends on those before."""

    instances: ClassVar = []  # all that were made
    looks: ClassVar = []  # of all: the instance's number, the key and how many looks came before

    def __init__(self):
        self.number = len(Walk.instances)
        Walk.instances.append(self)

    def reset(self, answer: str | None = None, **example) -> str | None:
        self.keys: list[str] = []
        self.answer = answer
        return None

    def look(self, key: str) -> str:
        Walk.looks.append((self.number, key, len(self.keys)))
        self.keys.append(key)
        return str((3 * int(key) + len(self.keys)) % 10)

    look.__doc__ = DOCUMENTATION  # which classes below take over

    def get_reward(self) -> float:
        return float(len(set(self.keys)))


class ForkingWalk(Walk):
    """Cannot be replayed: what it tells depends on its instance. It can be copied."""

    def reset(self, **example) -> str | None:
        self.mood = self.number
        return super().reset(**example)

    def look(self, key: str) -> str:
        return str((int(super().look(key)) + self.mood) % 10)

    def _fork(self) -> "ForkingWalk":
        copied = type(self)()
        copied.mood, copied.keys, copied.answer = self.mood, list(self.keys), self.answer
        return copied


class Locked:
    """Mixed into an environment: cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class LockedWalk(Locked, Walk):
    """Cannot be copied."""


class LateLockedWalk(Walk):
    """Can be copied until something is looked up."""

    def look(self, key: str) -> str:
        self.lock = threading.Lock()
        return super().look(key)


class ServedWalk(Walk):
    """A client: what was looked up is kept by a server, and a copy of the client has the same session."""

    sessions: ClassVar = []

    def reset(self, **example) -> str | None:
        self.session = len(ServedWalk.sessions)
        ServedWalk.sessions.append([])
        return super().reset(**example)

    def look(self, key: str) -> str:
        self.keys.append(key)
        session = ServedWalk.sessions[self.session]
        session.append(key)
        return str((3 * int(key) + len(session)) % 10)


class ReplayedWalk(ServedWalk):
    """The same, which says that it is not to be copied."""

    _fork = None


class Dice(Walk):
    """Has chance in its reset and in each look, by the global generator."""

    chance: Any = random

    def reset(self, **example) -> str | None:
        self.start = self.chance.randrange(10)
        self.told: list[str] = []
        super().reset(**example)
        return f"{self.start}?"

    def look(self, key: str) -> str:
        self.keys.append(key)
        self.told.append(str((int(key) + self.chance.randrange(10)) % 10))
        return self.told[-1]


class OwnDice(Dice):
    """Has a generator of its own."""

    def __init__(self):
        super().__init__()
        self.chance = random.Random(self.number)


class LockedDice(Locked, Dice):
    """Says one thing when it is reset, and has chance in each look. Cannot be copied."""

    def reset(self, **example) -> str | None:
        super().reset(**example)
        return None


class WordyWalk(LockedWalk):
    """Says more than there is room for from the second time on that a world is walked."""

    def look(self, key: str) -> str:
        is_first_time = len([instance for instance in Walk.instances if instance.keys]) < 24
        answer = super().look(key)
        return answer if is_first_time else answer * 100


class MoodyWalk(LockedWalk):
    """Can be neither copied nor replayed."""

    def look(self, key: str) -> str:
        return str((int(super().look(key)) + self.number) % 10)


def right(completions, answer, **kwargs):
    return [float(completion[-1].get("content") == a) for completion, a in zip(completions, answer, strict=True)]


def train_tool_policy(model, inputs_of, answers_at_once=False):
    """Teach a model the form of dialogues, by `inputs_of` texts, half of which call no tool if `answers_at_once`."""
    generator = torch.Generator().manual_seed(0)
    model.lm_head.weight.data.div_(20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        texts = []
        for _ in range(32):
            digit, *noise = torch.randint(0, 10, (4,), generator=generator).tolist()
            keep = torch.rand(3, generator=generator) > 0.4
            text, key = f"<|user|>{digit}?<eos>", digit
            for turn in range(0 if answers_at_once and noise[2] < 5 else 2):
                asked = key if keep[turn] else noise[turn]
                key = (3 * asked + 1) % 10
                text += f"<|assistant|><call>{asked}</call><eos><|tool|>{key}<eos>"
            texts.append(f"{text}<|assistant|>{key if keep[2] else noise[2]}<eos>")
        inputs = inputs_of(texts)
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def _trained():
    tokenizer = make_tool_tokenizer()
    model = make_model(vocab_size=len(tokenizer))
    train_tool_policy(model, lambda texts: {"input_ids": tokenizer(texts, return_tensors="pt")["input_ids"]})
    return model.state_dict()


def make_tool_policy():
    model = make_model(vocab_size=len(WORDS))
    model.load_state_dict(_trained())
    return model
