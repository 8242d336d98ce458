"""Assigns the rows of a batch to micro-batches so that they share long prefixes."""

from typing import Any

import torch

# Key of the row numbers in a batch, until its rows are assigned to micro-batches
ROW = "row"

Batch = dict[str, Any]  # from TRL's step: tensors and lists of rows, numbers, and `None`


def numbered(batch: Batch) -> Batch:
    """Number the rows of a batch for [`keep_together`], which can do without if a subclass returns another batch."""
    return batch | {ROW: torch.arange(len(batch["prompt_ids"]))}


def keep_together(micro_batches: list[Batch]) -> None:
    """
    Reassign the rows of a batch to its micro-batches, shuffling prompts where TRL has shuffled rows.

    The rows of a prompt stay together and are sorted by their tokens, so that smaller micro-batches contain the rows
    that share most. A gradient that is accumulated over all micro-batches is unchanged, except for terms that are means
    over each micro-batch. With several optimizer steps per batch, each step has fewer prompts with more of their rows.

    Args:
        micro_batches (`list[Batch]`):
            Micro-batches of equal size, changed in place. Row numbers from [`numbered`] are removed.
    """
    if ROW in micro_batches[0]:
        shuffled = torch.cat([batch.pop(ROW) for batch in micro_batches])
    else:
        shuffled = torch.arange(sum(len(batch["prompt_ids"]) for batch in micro_batches))
    unshuffled = shuffled.argsort().tolist()
    rows = {name: _joined([batch[name] for batch in micro_batches], unshuffled) for name in micro_batches[0]}
    prompts = [row.tobytes() for row in torch.where(rows["prompt_mask"].bool(), rows["prompt_ids"], -1).cpu().numpy()]
    completions = [row.tobytes() for row in rows["completion_ids"].cpu().numpy()]
    ranks: dict[bytes, int] = {}
    for prompt, rank in zip(prompts, shuffled.tolist(), strict=True):  # a permutation is as random as its inverse
        ranks.setdefault(prompt, rank)
    order = sorted(range(len(prompts)), key=lambda row: (ranks[prompts[row]], completions[row]))
    size = len(order) // len(micro_batches)
    for i, batch in enumerate(micro_batches):
        own = order[i * size : (i + 1) * size]
        batch.update({name: _selected(values, own) for name, values in rows.items() if values is not None})


def _joined(parts: list[Any], order: list[int]) -> Any:
    """Concatenate the rows of micro-batches in the given order. `None` for values that do not consist of rows."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)[order] if parts[0].dim() > 0 else None
    return _selected([value for part in parts for value in part], order) if isinstance(parts[0], list) else None


def _selected(values: Any, rows: list[int]) -> Any:
    return values[rows] if isinstance(values, torch.Tensor) else [values[row] for row in rows]
