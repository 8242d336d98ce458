"""Tokens of rows, padded as TRL pads them."""

import torch
from trl import GRPOTrainer
from trl.trainer.utils import pad

from ..method.tree import TokenIds


def padded(
    trainer: GRPOTrainer, prompt_ids: list[TokenIds], completion_ids: list[TokenIds]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, (B, T), prompts padded on the left and completions on the right, as by TRL."""
    sides = [(prompt_ids, "left"), (completion_ids, "right")]
    pad_id = trainer._tokenizer.pad_token_id
    input_ids = [pad([torch.as_tensor(ids, dtype=torch.long) for ids in rows], pad_id, side) for rows, side in sides]
    mask = [pad([torch.ones(len(ids), dtype=torch.long) for ids in rows], 0, side) for rows, side in sides]
    return torch.cat(input_ids, 1).to(trainer.accelerator.device), torch.cat(mask, 1).to(trainer.accelerator.device)
