"""What a task is."""

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Of 100 problems, by a hash of their words: no problem is in two splits, whatever the seeds and the order of its words.
SPLITS = {"policy": range(80), "train": range(80, 90), "heldout": range(90, 100)}

# Of the held-out examples, whatever the seed of a run: every run is measured on the same ones
HELDOUT_SEED = 2507

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]

# What a policy writes: text, or where it calls tools the messages of several turns, its own and the tools'
Completion = str | list[dict[str, Any]]


def prompt_text(prompt: Completion) -> str:
    """The text of a prompt, or of its messages."""
    return prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)


@dataclass(frozen=True)
class Task(ABC):
    """
    A family of problems with a reward for each completion: 1 for a right one and 0 for a wrong one, or a degree.

    All text is words with a space between them, and every word is one token.

    Every demonstration fits into `max_completion_length` tokens. The other settings are those of the starting policy,
    and of the supervised training that makes it.
    """

    name: str
    max_completion_length: int
    policy_steps: int
    policy_batch_size: int = 64
    policy_learning_rate: float = 3e-3
    hidden_size: int = 64
    num_layers: int = 2

    words: ClassVar[Sequence[str]]  # the vocabulary
    answer_columns: ClassVar[Sequence[str]] = ("answer",)  # what the reward needs of a problem
    tools: ClassVar[Sequence[Callable[..., Any]]] = ()  # with some, prompts and completions are lists of messages
    max_tool_calling_iterations: ClassVar[int | None] = None  # turns of a completion in which it may call them

    @abstractmethod
    def problem(self, rng: random.Random) -> dict[str, Any]:
        """A problem: its `"prompt"`, and the columns that the reward and the demonstrator need."""

    @abstractmethod
    def demonstrate(self, problem: dict[str, Any], rng: random.Random, is_noisy: bool = True) -> Completion:
        """What the demonstrator writes. Without the noise, it is right."""

    @abstractmethod
    def is_right(self, completion: Any, problem: dict[str, Any]) -> bool:
        """Whether a completion, a [`Completion`], solves a problem, given by its `answer_columns`."""

    def score(self, completion: Any, problem: dict[str, Any]) -> float:
        """The reward of a completion, in [0, 1]: 1 if it is right and 0 if not, unless the task knows degrees."""
        return float(self.is_right(completion, problem))

    def examples(self, split: str, seed: int, size: int) -> Dataset:
        """
        Problems of a split.

        Args:
            split (`str`):
                `"policy"`, for the starting policy, `"train"` or `"heldout"`. No two have a problem in common.
            seed (`int`):
                Decides which problems, and their order.
            size (`int`):
                How many. In a small family some come again.
        """
        rng = random.Random(f"{self.name} {seed}")
        problems: list[dict[str, Any]] = []
        while len(problems) < size:
            problem = self.problem(rng)
            words = sorted(prompt_text(problem["prompt"]).split())
            if zlib.crc32(" ".join(words).encode()) % 100 in SPLITS[split]:
                problems.append(problem)
        return Dataset.from_list(problems)

    def reward(self, completions: list[Any], **columns: Any) -> list[float]:
        """Reward function for a trainer: the score of each completion."""
        answers = zip(*(columns[name] for name in self.answer_columns), strict=True)
        return [
            self.score(completion, dict(zip(self.answer_columns, answer, strict=True)))
            for completion, answer in zip(completions, answers, strict=True)
        ]

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer of the task's words."""
        vocabulary = dict.fromkeys([*SPECIAL_TOKENS, *self.words])  # each word once
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
        )
