"""
How large tensors are with long completions and large vocabularies. They are counted, and most of them never made.

    fr3e cost tensors --lengths 4096 8192 16384

The first table has one layer, forward and backward: its largest mask, its largest tensor, and all that are alive at
once. A micro-batch is one prompt with 8 rows by default, with anchors anywhere. The tensors are fake: they have shapes
and no memory. The MLP is small, for attention to have the largest. The second table has the logits that are alive at
once, at the longest of the lengths. `generate` draws 32 tokens for it, by a small model with this vocabulary. The
defaults are the shape of Qwen2.5-0.5B in bfloat16.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LogitsProcessorList, Qwen2Config, TopPLogitsWarper

from ...logps import TILE_VOCAB, Softmax, tile_logps, truncated_logps
from ...method.anchors import AboveThreshold
from ...method.sampling import Branching, SamplingRequest
from ...prefix_sharing import attention as shared_attention
from ...prefix_sharing.trie import Trie, fold
from ...trl_adapter.decoding import generation_model
from ...trl_adapter.overriding import overridden
from ..runs import be_quiet
from .common import make_parser, make_table
from .update import NUM_BASES, branches_of, make_batch, make_update_trainer, parse_with_rows

MIB = 2**20

# What `generate` draws for the second table, and the hidden size of the model that it does it with
NUM_DRAWN, SMALL = 32, 16


class Tensors(TorchDispatchMode):
    """
    Counts tensors as operations make them; views of others are none.

    Args:
        is_counted (`Callable`):
            Whether a tensor is. By default, all are.

    Attributes:
        largest (`int`):
            Bytes of the largest.
        alive (`int`):
            Bytes of all that were alive together, at most.
    """

    def __init__(self, is_counted: Callable[[torch.Tensor], bool] = lambda tensor: True):
        super().__init__()
        self.is_counted = is_counted
        self.largest = self.alive = 0
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage for storage, _ in _storages((args, kwargs))}
        outputs = func(*args, **kwargs or {})
        made = {
            storage: tensor.untyped_storage().nbytes()
            for storage, tensor in _storages(outputs)
            if storage not in given and self.is_counted(tensor)
        }
        if made:
            self.storages = {storage: size for storage, size in self.storages.items() if not storage.expired()} | made
            self.largest = max(self.largest, *made.values())
            self.alive = max(self.alive, sum(self.storages.values()))
        return outputs


def _storages(values: Any) -> Iterator[tuple[StorageWeakRef, torch.Tensor]]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield StorageWeakRef(leaf.untyped_storage()), leaf


def main(argv: list[str]) -> None:
    """Count, and print two tables."""
    parser = make_parser(
        __doc__,
        hidden_size=(896, "of the policy"),
        num_heads=(14, "of queries"),
        num_key_value_heads=(2, "of keys and values"),
        vocab_size=(151_936, "of the policy"),
    )
    options = parse_with_rows(parser, argv, [4096, 8192, 16_384])
    be_quiet()
    table = make_table("One layer, MiB", "largest mask", "largest tensor", "alive at once")
    for length in options.lengths:
        trie, mask = make_trie(options, length)
        for name, (masks, tensors) in {
            "rows apart, sdpa": in_layer_apart(options, mask),
            "shared, sdpa": in_layer_shared(options, trie, flash=False),
            "shared, FlashAttention": in_layer_shared(options, trie, flash=True),
        }.items():
            sizes = masks.largest, tensors.largest, tensors.alive
            table.add_row(f"{length} tokens, {name}", *(f"{size / MIB:,.0f}" for size in sizes))
    Console(width=100).print(table)
    positions = options.num_prompts * options.num_generations * max(options.lengths)
    table = make_table("Logits alive at once, MiB", "positions", "alive", "of all positions")
    for name, num_positions, alive in logits_by_path(options, positions):
        all_of_them = 4 * num_positions * options.vocab_size
        table.add_row(name, f"{num_positions}", f"{alive / MIB:,.0f}", f"{all_of_them / MIB:,.0f}")
    Console(width=100).print(table)


# The layers


def make_trie(options: argparse.Namespace, length: int) -> tuple[Trie, torch.Tensor]:
    """The trie of a micro-batch with an anchor for each branch, anywhere, and the mask of its rows: one is shorter."""
    branches = branches_of(options.num_generations - NUM_BASES, length)
    batch = make_batch(options, length, next(iter(branches.values()))["even"])
    input_ids, mask = (
        torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
    )
    mask[0, 0] = 0
    return fold(input_ids, mask, batch["tool_mask"].bool()), mask


def in_layer_apart(options: argparse.Namespace, mask: torch.Tensor) -> tuple[Tensors, Tensors]:
    """With every row forwarded whole, some of them padded, as TRL does."""
    return in_layer(options, lambda: {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask)})


def in_layer_shared(options: argparse.Namespace, trie: Trie, flash: bool) -> tuple[Tensors, Tensors]:
    """With sdpa as it is on a CPU, or as on a GPU in half precision."""
    trie.masks.clear()
    runs = {"runs_flash": lambda *states: True} if flash else {}
    with overridden(shared_attention, **runs):
        counted = in_layer(options, lambda: trie.model_inputs)
    trie.masks.clear()  # fake ones
    return counted


def in_layer(options: argparse.Namespace, make_inputs: Callable[[], dict[str, Any]]) -> tuple[Tensors, Tensors]:
    """Masks of a layer and all of its tensors, forward and backward."""

    def is_mask(tensor: torch.Tensor) -> bool:
        """Masks alone are wider than hidden states, but for sums over queries, which are in float32."""
        return tensor.dim() > 1 and tensor.size(-1) > 2 * options.hidden_size and tensor.dtype != torch.float32

    config = Qwen2Config(
        vocab_size=2,  # the second table has it
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size,  # attention shall have the largest
        num_hidden_layers=1,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_key_value_heads,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
        shared_attention.share(model, "sdpa")
        with Tensors(is_mask) as masks, Tensors() as tensors:
            model.model(**make_inputs(), use_cache=False).last_hidden_state.sum().backward()
    return masks, tensors


# The vocabulary


def logits_by_path(options: argparse.Namespace, num_positions: int) -> Iterator[tuple[str, int, int]]:
    """Name of each path on which logits are made, of how many positions in all, and bytes alive at once."""
    yield "loss: both trainers", num_positions, in_head(options, num_positions, backward=True)
    yield "entropies, log-probs: both", num_positions, in_head(options, num_positions, backward=False)
    yield "old log-probs, vLLM with top_p", num_positions, in_truncated(options, num_positions)
    for name, draw in (("GRPOTrainer", _draw_as_grpo), ("two rounds", _draw), ("leaving rows", _draw_leaving)):
        yield f"generate: {name}", options.num_generations * NUM_DRAWN, in_generate(options, draw)


def logits(options: argparse.Namespace) -> Tensors:
    """Counts what has the vocabulary, or a part of it as wide as a tile of TRL's head, as its last dimension."""
    width = min(options.vocab_size % TILE_VOCAB or options.vocab_size, options.vocab_size)
    return Tensors(lambda tensor: tensor.dim() > 1 and tensor.size(-1) >= width)


def in_head(options: argparse.Namespace, num_positions: int, backward: bool) -> int:
    """In TRL's LM head."""
    with FakeTensorMode(), nullcontext() if backward else torch.no_grad():
        hidden, weight, targets = _head(options, num_positions)
        with logits(options) as made:
            logprobs, entropies = tile_logps(hidden, weight, None, targets, Softmax())
            if backward:
                (logprobs + entropies).sum().backward()
    return made.alive


def in_truncated(options: argparse.Namespace, num_positions: int) -> int:
    """In the kernel that takes its place where vLLM truncates."""
    warpers = LogitsProcessorList([TopPLogitsWarper(0.9)])
    with FakeTensorMode(), torch.no_grad():
        hidden, weight, targets = _head(options, num_positions)
        with logits(options) as made:
            truncated_logps(hidden, weight, None, targets, Softmax(), warpers)
    return made.alive


def _head(options: argparse.Namespace, num_positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights, and tokens."""
    make = partial(torch.empty, dtype=torch.bfloat16, requires_grad=True)
    return (
        make(num_positions, options.hidden_size),
        make(options.vocab_size, options.hidden_size),
        torch.empty(num_positions, dtype=torch.long),
    )


def in_generate(options: argparse.Namespace, draw: Callable[[Any, np.ndarray, int], Any]) -> int:
    """In `generate`, with as many rows as one prompt has."""
    sizes = {"hidden_size": SMALL, "num_layers": 1, "num_prompts": 2}
    small = argparse.Namespace(**vars(options) | sizes, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_update_trainer(small, output_dir)
        prompt = np.arange(2, 2 + options.prompt_length) % options.vocab_size
        draw(trainer, prompt, 2)  # what is tried out on the model first is no step's
        with logits(options) as made:
            draw(trainer, prompt, options.num_generations)
    return made.alive


def _draw_as_grpo(trainer: Any, prompt: np.ndarray, num_rows: int) -> None:
    with generation_model(trainer) as model:
        input_ids = torch.from_numpy(prompt).repeat(num_rows, 1).to(model.device)
        model.generate(input_ids, max_new_tokens=NUM_DRAWN, do_sample=True, generation_config=trainer.generation_config)


def _draw(trainer: Any, prompt: np.ndarray, num_rows: int) -> None:
    trainer.sampler.sample([SamplingRequest(prompt, num_rows, NUM_DRAWN, 1.0, with_entropies=True)])


def _draw_leaving(trainer: Any, prompt: np.ndarray, num_rows: int) -> None:
    """Half of the rows leave the others."""
    rule = AboveThreshold(threshold=-1.0, min_gap=4)
    num_bases = num_rows // 2
    branching = Branching(2, lambda request, samples: [], [1] * num_bases, rule)
    trainer.sampler.sample(
        [SamplingRequest(prompt, num_bases, NUM_DRAWN, 1.0, with_entropies=True, branching=branching)]
    )
