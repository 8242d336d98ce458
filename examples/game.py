"""
Train an agent that plays a game of chance, from end to end on a CPU:

    python examples/game.py

The game is a small 2048: tiles slide to one side of a board, two of the same number that meet become their sum, which
is added to the score, and a new tile comes up at random. `Tiles` is an environment as TRL has it. Its `reset` draws a
board, and its method `slide` is the tool that the agent calls. Nothing is needed for chance: all rollouts of a tree
begin with one board, in copies of the environment, and each draws tiles of its own.

By default the agent is a small policy, which is made first and slides at random. Another model is told what to do by
the environment (it needs a chat template with tools):

    accelerate launch examples/game.py --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-6 \
        --per_device_train_batch_size 8 --steps_per_generation 8 --max_completion_length 1024 --bf16 true
"""

import logging
import random
import sys
import warnings
from pathlib import Path
from typing import Any

# Some libraries warn while they are imported, of what does not matter here
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.simplefilter("ignore", FutureWarning)
sys.path.append(str(Path(__file__).parents[1]))  # the clone, for its benchmarks

import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    set_seed,
)
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config  # noqa: E402

from benchmarks.policies import small_config  # noqa: E402
from fr3e_trl import FR3EConfig, FR3ETrainer  # noqa: E402

SIZE = 3  # of the board
SIDES = ("left", "right", "up", "down")
NUM_MOVES = 8

RULES = f"""\
Tiles lie on a board of {SIZE} rows. Slide them to one side by the tool `slide`: two of the same number that meet become
one, and their sum is added to your score. Make {NUM_MOVES} moves, for a score as high as you can.

"""

# Settings of training that fit the small policy, where FR3EConfig's are for large ones
DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/game",
    "max_steps": 40,
    "num_generations": 8,
    "per_device_train_batch_size": 32,  # 4 boards a step
    "max_completion_length": 20 * NUM_MOVES,
    "max_tool_calling_iterations": NUM_MOVES,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": not torch.cuda.is_available(),
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 5,
}


class Tiles:
    """The game, an environment. TRL resets it for each rollout, and offers `slide` to the policy."""

    rules = RULES

    def reset(self, **example: Any) -> str:
        """Begin with two tiles. What it returns is the prompt, or the end of one that the dataset has."""
        self.board = [[0] * SIZE for _ in range(SIZE)]
        self.score = 0
        self._add_tile()
        self._add_tile()
        return self.rules + self._text()

    def slide(self, side: str) -> str:
        """
        Slide all tiles to one side of the board. Two of the same number that meet become one.

        Args:
            side: One of "left", "right", "up" and "down".

        Returns:
            The board, row by row, with a dot where there is no tile.
        """
        if side not in SIDES:
            raise ValueError(f"side must be one of {', '.join(SIDES)}.")
        before = [list(row) for row in self.board]
        is_upright, is_far = side in ("up", "down"), side in ("right", "down")
        lines = [list(line) for line in zip(*self.board, strict=True)] if is_upright else self.board
        lines = [self._slid(line[::-1])[::-1] if is_far else self._slid(line) for line in lines]
        self.board = [list(line) for line in zip(*lines, strict=True)] if is_upright else lines
        if self.board != before:
            self._add_tile()
        return self._text()

    def get_reward(self) -> float:
        """Reward: the score, in hundreds."""
        return self.score / 100

    def _slid(self, line: list[int]) -> list[int]:
        """A row or a column that has slid to its beginning."""
        slid: list[int] = []
        may_merge = False
        for tile in filter(None, line):
            if may_merge and slid[-1] == tile:
                slid[-1] *= 2
                self.score += slid[-1]
                may_merge = False
            else:
                slid.append(tile)
                may_merge = True
        return slid + [0] * (len(line) - len(slid))

    def _add_tile(self) -> None:
        empty = [(i, j) for i in range(SIZE) for j in range(SIZE) if self.board[i][j] == 0]
        i, j = random.choice(empty)
        self.board[i][j] = random.choice([2, 2, 2, 4])

    def _text(self) -> str:
        return "\n".join(" ".join(str(tile or ".") for tile in row) for row in self.board)


class BareTiles(Tiles):
    """Without rules, for the small policy, which knows no words for them."""

    rules = ""


# The small policy. Each message begins with its role, and the policy's end with <eos>

WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<agent>", "<tool>", "slide", "side", *SIDES, "."]
TILES = [str(2**power) for power in range(1, SIZE**2 + 2)]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<agent> ' ~ (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ ' ' ~ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %}{{ ' ' ~ name ~ ' ' ~ value }}{% endfor %}"
    "{% endfor %}{{ ' <eos> ' }}"
    "{% else %}{{ '<' ~ message.role ~ '> ' ~ message.content ~ ' ' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<agent>' }}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<agent>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\b(?P<name>slide)\b",
            "close": "<eos>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"\b(?P<key>side) (?P<value>\S+)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the game's words, each of which is a token."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, *TILES])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def game_at_random() -> list[dict[str, Any]]:
    """The messages of a game in which each move is drawn at random."""
    tiles = BareTiles()
    messages: list[dict[str, Any]] = [{"role": "user", "content": tiles.reset()}]
    for side in random.choices(SIDES, k=NUM_MOVES):
        call = {"type": "function", "function": {"name": "slide", "arguments": {"side": side}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "slide", "content": tiles.slide(side)})
    return messages


def make_policy(tokenizer: PreTrainedTokenizerFast, num_steps: int = 80) -> PreTrainedModel:
    """A small policy that has seen games, and slides at random."""
    set_seed(0)
    model = Qwen3ForCausalLM(
        small_config(tokenizer, len(tokenizer), hidden_size=64, num_layers=2, max_position_embeddings=1024)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        texts = [tokenizer.apply_chat_template(game_at_random(), tokenize=False) for _ in range(8)]
        input_ids = tokenizer(texts, return_tensors="pt", padding=True)["input_ids"]
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(training_args: FR3EConfig, model_args: ModelConfig) -> None:
    """Train, and save the model. The log shows the mean score under `rewards`."""
    model: Any = model_args.model_name_or_path
    tokenizer, environment = None, Tiles
    if model is None:
        tokenizer, environment = make_tokenizer(), BareTiles
        model = make_policy(tokenizer)
    trainer = FR3ETrainer(
        model=model,
        args=training_args,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        environment_factory=environment,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")


def make_parser() -> TrlParser:
    """Parser of the script's arguments, from a configuration file (`--config`) and the command line."""
    dataclasses: list[Any] = [FR3EConfig, ModelConfig]
    parser = TrlParser(
        dataclasses,
        description="Train an agent that plays a game of chance: a small policy, or the model of "
        "--model_name_or_path. Defaults are for the small policy.",
    )
    parser.set_defaults(**DEFAULTS)
    return parser


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
