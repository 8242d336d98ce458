"""
Test whether rows of a model's batch can be added and removed during decoding.

Rollouts that branch off a base trajectory are added as new rows, and finished rows are removed. So whatever a model
stores for a row must be in a cache that can be reordered, or be an input that can be indexed. Some models keep state
elsewhere: they raise an error or, worse, continue with another row's state.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..method.anchors import AboveThreshold
from ..method.sampling import Branching, Sample, SamplingRequest

# Tokens of each test prompt, and of the longest completion
PROMPT_LENGTH, MAX_NEW_TOKENS = 40, 12

# Two ways of computing log-probs may differ by this factor more than rounding alone explains
MARGIN = 4.0


def special_tokens(config: Any, eos_token_ids: Sequence[int]) -> list[int]:
    """Token ids with a special meaning in a model's configuration, such as image placeholders, and EOS tokens."""
    found = set(eos_token_ids)

    def search(part: dict[str, Any]) -> None:
        for name, value in part.items():
            if isinstance(value, dict):
                search(value)
            elif str(name).endswith(("token_id", "token_index")):
                found.update(value if isinstance(value, list) else [value])

    search(config.to_dict())
    size = config.get_text_config().vocab_size
    return sorted(token_id for token_id in found if isinstance(token_id, int) and 0 <= token_id < size)


def usual_tokens(config: Any) -> np.ndarray:
    """Token ids without a special meaning in a model's configuration."""
    return np.setdiff1d(np.arange(config.get_text_config().vocab_size), special_tokens(config, []))


def name_of(model: nn.Module) -> str:
    """Name of a model's class, without PEFT's wrapper."""
    return type(getattr(model, "get_base_model", lambda: model)()).__name__


def tolerance(dtype: torch.dtype, noise: float) -> float:
    """
    Allowed difference, in nats per token, between log-probs that are computed in two ways.

    Args:
        dtype (`torch.dtype`):
            The model's compute dtype.
        noise (`float`):
            Difference between two batches that compute the same in the same way.
    """
    return max(1e-4, torch.finfo(dtype).eps, MARGIN * noise)


def obstacle_to_growing(
    model: Any,
    draw: Callable[[Sequence[SamplingRequest], bool], list[Sample]],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """
    Why rollouts cannot branch off rows of this model during decoding, or `None` if they can.

    Samples rows with branches and rows that end early, and compares their log-probs with those of a plain forward pass.

    Args:
        model (`~transformers.PreTrainedModel`):
            The model.
        draw (`Callable`):
            Draws the samples of requests. Its second argument is whether rollouts branch off during decoding.
        device (`torch.device`):
            The model's device.
        dtype (`torch.dtype`):
            Its compute dtype.

    Returns:
        `str` or `None`: The problem, as a clause.
    """
    name = name_of(model)
    requests = _test_requests(model)
    with without_dropout(model):
        try:
            difference = _difference(model, requests, draw(requests, True), device)
            noise = 0.0
            if difference > tolerance(dtype, noise):
                noise = _difference(model, requests, draw(requests, False), device)
        except Exception as error:
            draw(requests, False)  # raises errors that have other causes again
            return f"{name} raises {type(error).__name__} when its rows are reordered: {error}"
    if difference <= tolerance(dtype, noise):
        return None
    return (
        f"{name} keeps state that is not reordered with its rows, which changes log-probs by {difference:.2g} nats per "
        "token"
    )


def _test_requests(model: Any) -> list[SamplingRequest]:
    """Two base trajectories with two anchors each, one that ends early, and one with a single anchor."""
    prompts = np.random.default_rng(0).choice(usual_tokens(model.config), (3, PROMPT_LENGTH))

    def request(prompt: int, budget: int, shares: list[int]) -> SamplingRequest:
        # Entropies are not negative, so every token but the first may be an anchor
        rule = AboveThreshold(threshold=-1.0, min_gap=4)
        branching = Branching(2, lambda request, samples: [], shares, rule) if any(shares) else None
        return SamplingRequest(prompts[prompt], len(shares), budget, 1.0, PROMPT_LENGTH, branching=branching)

    return [
        request(0, MAX_NEW_TOKENS, [2, 2]),
        request(1, MAX_NEW_TOKENS // 3, [0]),
        request(2, MAX_NEW_TOKENS - 2, [1]),
    ]


def _difference(model: Any, requests: list[SamplingRequest], samples: list[Sample], device: torch.device) -> float:
    """Mean difference, in nats per token, between the log-probs of samples and those of a plain forward pass."""
    prompts = [request.prefix_ids for request in requests for _ in range(request.num_samples)]
    rows = list(zip(prompts, samples, strict=True))
    rows += [
        (np.concatenate([prompt, sample.token_ids[:position]]), branch)
        for prompt, sample in rows
        for position, branches in sample.branches.items()
        for branch in branches
    ]
    width = max(len(prefix) + len(sample.token_ids) for prefix, sample in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for ids, mask, (prefix, sample) in zip(input_ids, attention_mask, rows, strict=True):
        row = np.concatenate([prefix, sample.token_ids])
        ids[: len(row)], mask[: len(row)] = torch.from_numpy(row), 1
    logits = model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=False).logits
    differences = []
    for row_logits, ids, (prefix, sample) in zip(logits, input_ids, rows, strict=True):
        # Row by row, because the vocabulary may be large
        logprobs = row_logits[:-1].float().log_softmax(1).cpu().gather(1, ids[1:, None])[:, 0].numpy()
        sampled = slice(len(prefix) - 1, len(prefix) + len(sample.token_ids) - 1)
        differences.append(np.abs(logprobs[sampled] - sample.logprobs))
    return float(np.concatenate(differences).mean())


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Turn dropout off for this context, also in training mode."""
    # Except in linear layers, because quantized ones change their weights when the mode changes
    training = [part for part in model.modules() if part.training and not isinstance(part, nn.Linear)]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True
