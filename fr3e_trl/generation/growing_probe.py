"""
Whether a model's rows can be reordered while they grow: tried on the model itself.

Rollouts leave a base trajectory as new rows of the batch, and rows that have ended leave it. Whatever a model keeps of
a row must be in a cache that can be reordered, or go with the batch. Some models keep a state elsewhere. They raise an
error or, worse, go on with another row's state.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..method.anchors import AboveThreshold
from ..method.sampling import Branching, Sample, SamplingRequest

# Tokens of each prompt that is tried, and of the longest row that follows
PROMPT, BUDGET = 40, 12

# How much further than rounding alone two ways to compute log-probs may be apart
MARGIN = 4.0


def special_tokens(config: Any, eos_token_ids: Sequence[int]) -> list[int]:
    """Token ids that mean something to a model, such as the place of an image, by its configuration."""
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
    """Token ids of a model that are text and no more."""
    return np.setdiff1d(np.arange(config.get_text_config().vocab_size), special_tokens(config, []))


def name_of(model: nn.Module) -> str:
    """The class of a model, without what PEFT puts around it."""
    return type(getattr(model, "get_base_model", lambda: model)()).__name__


def tolerance(dtype: torch.dtype, noise: float) -> float:
    """
    How far log-probs may be apart that are computed in two ways, in nats a token.

    Args:
        dtype (`torch.dtype`):
            What the model computes in.
        noise (`float`):
            How far they are apart where the same is computed in two batches.
    """
    return max(1e-4, torch.finfo(dtype).eps, MARGIN * noise)


def obstacle_to_growing(
    model: Any,
    draw: Callable[[Sequence[SamplingRequest], bool], list[Sample]],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """
    What keeps a model's rows from growing, if anything does.

    Rows are drawn of which some are left midway, and some end early. Their log-probs must be those of a plain forward
    pass.

    Args:
        model (`~transformers.PreTrainedModel`):
            The model.
        draw (`Callable`):
            Draws the samples of requests, which grow or do not.
        device (`torch.device`):
            Where the model computes.
        dtype (`torch.dtype`):
            What it computes in.

    Returns:
        `str` or `None`: A clause that says what is wrong.
    """
    name = name_of(model)
    requests = _requests(model)
    with without_dropout(model):
        try:
            difference = _difference(model, requests, draw(requests, True), device)
            noise = 0.0
            if difference > tolerance(dtype, noise):
                noise = _difference(model, requests, draw(requests, False), device)
        except Exception as error:
            draw(requests, False)  # raises too what is not about the order of rows
            return f"{name} raises {type(error).__name__} where its rows are reordered: {error}"
    if difference <= tolerance(dtype, noise):
        return None
    return (
        f"{name} keeps a state that does not follow rows where they are reordered, which changes log-probs by "
        f"{difference:.2g} nats a token"
    )


def _requests(model: Any) -> list[SamplingRequest]:
    """Base trajectories of which two are left twice and one once, and one that ends early."""
    prompts = np.random.default_rng(0).choice(usual_tokens(model.config), (3, PROMPT))

    def request(prompt: int, budget: int, shares: list[int]) -> SamplingRequest:
        # No entropy is below 0: each token but the first may be an anchor
        rule = AboveThreshold(threshold=-1.0, min_gap=4)
        branching = Branching(2, lambda request, samples: [], shares, rule) if any(shares) else None
        return SamplingRequest(prompts[prompt], len(shares), budget, 1.0, PROMPT, branching=branching)

    return [request(0, BUDGET, [2, 2]), request(1, BUDGET // 3, [0]), request(2, BUDGET - 2, [1])]


def _difference(model: Any, requests: list[SamplingRequest], samples: list[Sample], device: torch.device) -> float:
    """How far the log-probs of samples are from those of a plain forward pass, in nats a token."""
    prompts = [request.prefix_ids for request in requests for _ in range(request.num_samples)]
    rows = [(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]
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
    logprobs = [  # of each row alone: a vocabulary may be large
        of_row[:-1].float().log_softmax(1).cpu().gather(1, ids[1:, None])[:, 0].numpy()
        for of_row, ids in zip(logits, input_ids, strict=True)
    ]
    return float(
        np.concatenate(
            [
                np.abs(of_row[len(prefix) - 1 : len(prefix) + len(sample.token_ids) - 1] - sample.logprobs)
                for of_row, (prefix, sample) in zip(logprobs, rows, strict=True)
            ]
        ).mean()
    )


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Have a model compute without dropout, in whichever mode it is."""
    # Linear layers are left alone, since quantized ones change their weights for evaluation
    training = [part for part in model.modules() if part.training and not isinstance(part, nn.Linear)]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True
