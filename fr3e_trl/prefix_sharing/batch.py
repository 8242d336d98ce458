"""The rows of a batch in micro-batches that share as much as they can."""

from typing import Any

import torch

# The column of a batch that numbers its rows, until they are dealt out to micro-batches
ROW = "row"

Batch = dict[str, Any]  # what TRL's step returns: tensors and lists of rows, numbers, and `None`


def numbered(batch: Batch) -> Batch:
    """A batch with its rows numbered, for [`keep_together`], which does without where a subclass returns another."""
    return batch | {ROW: torch.arange(len(batch["prompt_ids"]))}


def keep_together(micro_batches: list[Batch]) -> None:
    """
    Deal the rows of a batch out to its micro-batches anew, so that prompts are shuffled where TRL has shuffled rows.

    The rows of a prompt stay together, and are sorted by their tokens: of micro-batches smaller than that, each has
    those that share most. A gradient that is accumulated over all micro-batches stays the same, but for what is a mean
    over those of each; of several optimizer steps a batch, each has fewer prompts, with more rows of them.

    Args:
        micro_batches (`list[Batch]`):
            Of equal size, changed in place. Their rows may be [`numbered`], and are no longer afterwards.
    """
    if ROW in micro_batches[0]:
        shuffled = torch.cat([batch.pop(ROW) for batch in micro_batches])
    else:
        shuffled = torch.arange(sum(len(batch["prompt_ids"]) for batch in micro_batches))
    back = shuffled.argsort().tolist()
    rows = {name: _joined([batch[name] for batch in micro_batches], back) for name in micro_batches[0]}
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
    """What micro-batches have of each row, in an order of the rows; `None` where they have nothing of rows."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)[order] if parts[0].dim() > 0 else None
    return _selected([value for part in parts for value in part], order) if isinstance(parts[0], list) else None


def _selected(values: Any, rows: list[int]) -> Any:
    return values[rows] if isinstance(values, torch.Tensor) else [values[row] for row in rows]
