"""Prompts, as TRL makes them of examples, and tokens of rows, padded as TRL pads them."""

from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler, pad

from ..method.tree import TokenIds
from .overriding import overridden


class _Prepared(Exception):
    """Carries prompts out of TRL's step, at the point where it generates."""

    def __init__(self, prompts: list[Any]):
        self.prompts = prompts


def prepare(trainer: Any, inputs: list[dict[str, Any]]) -> list[Any]:
    """
    Have TRL do what it does with the examples of rows before it generates.

    Each row gets an environment of its own, reset, if there are any, and its tools: see [`tools.instances`].

    Returns:
        `list`: The prompt of each row, with what its environment says to begin with.
    """

    def stop(prompts: list[Any]) -> None:
        raise _Prepared(prompts)

    try:
        with overridden(trainer, _generate=stop):
            GRPOTrainer._generate_and_score_completions(trainer, inputs)
    except _Prepared as prepared:
        return prepared.prompts
    raise AssertionError("TRL did not generate.")


def tokenize(trainer: Any, prompts: list[Any]) -> list[list[int]]:
    """Token ids of prompts, standard or conversational."""
    return trainer._tokenize_prompts(prompts)[0]


def epoch_order(trainer: Any) -> RepeatSampler:
    """Indices of the training set, each once an epoch, in the order that TRL's sampler gives them."""
    return RepeatSampler(
        range(len(trainer.train_dataset)),
        mini_repeat_count=1,
        shuffle=trainer.shuffle_dataset,
        seed=trainer.args.seed,
    )


def padded(
    trainer: Any, prompt_ids: list[TokenIds], completion_ids: list[TokenIds]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, (B, T), prompts padded on the left and completions on the right, as by TRL."""
    sides = [(prompt_ids, "left"), (completion_ids, "right")]
    pad_id = trainer._tokenizer.pad_token_id
    input_ids = [pad([torch.as_tensor(ids, dtype=torch.long) for ids in rows], pad_id, side) for rows, side in sides]
    mask = [pad([torch.ones(len(ids), dtype=torch.long) for ids in rows], 0, side) for rows, side in sides]
    return torch.cat(input_ids, 1).to(trainer.accelerator.device), torch.cat(mask, 1).to(trainer.accelerator.device)
