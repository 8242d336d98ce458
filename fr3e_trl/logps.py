"""
Log-probs of tokens from the hidden states that a language model's head projects.

Logits are computed in tiles, in the backward pass once more, so that those of all positions never exist at a time. A
model is run by its own forward: hooks on its head see the hidden states, and the weights however they are sharded.

Notation used for tensor shapes:
    - N: positions that are scored
    - H: hidden size
    - V: vocabulary
    - B, T: rows and columns that a model is called with
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig

# Positions and tokens of the vocabulary in a tile: at most 2**25 logits, 128 MiB, exist two or three times over
TILE_POSITIONS, TILE_VOCAB = 2**10, 2**15

# Logits of truncated distributions that exist at a time: 64 MiB of them, and several times that to sort them
MAX_LOGITS = 2**24

# Where configs have what logits are multiplied by, and divided by
MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVISOR = "logits_scaling"
# Of `DIVISOR`, models that multiply by it, and those that divide the hidden states, before the head
MULTIPLIED, DIVIDED_BEFORE = "hyperclovax", "minicpm3"

# Truncates logits of shape (N, V) for the distributions of N tokens, given as ids of shape (N, 1)
Truncation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Softmax:
    """
    The distribution of a token, from what a head returns: the softmax of `softcap * tanh(scale * x / softcap) /
    temperature`, or of `scale * x / temperature`.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, temperature: float) -> "Softmax":
        """As a model computes its logits, by its config."""
        config = config.get_text_config()
        multipliers = [getattr(config, name, None) for name in MULTIPLIERS]
        divisor = getattr(config, DIVISOR, None)
        if divisor is not None and config.model_type != DIVIDED_BEFORE:
            multipliers.append(divisor if config.model_type == MULTIPLIED else 1 / divisor)
        scale = next((value for value in multipliers if value is not None), 1.0)
        return cls(temperature, scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits in float32 of a head's outputs, which may be overwritten, and the tanh if there is one."""
        outputs = outputs.float()
        if self.scale != 1:
            outputs *= self.scale
        if self.softcap is None:
            return outputs.mul_(1 / self.temperature), None
        tanh = (outputs / self.softcap).tanh_()
        return torch.mul(tanh, self.softcap, out=outputs).mul_(1 / self.temperature), tanh


def tile_logps(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities of tokens and the entropies of their distributions, with gradients.

    Args:
        hidden (`torch.Tensor` of shape (N, H)):
            What the head projects.
        weight, bias (`torch.Tensor` of shape (V, H) and (V,)):
            The head.
        targets (`torch.Tensor` of shape (N,)):
            Token ids.
        softmax ([`Softmax`]):
            The distribution that a token is drawn from.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both of shape (N,), in nats, in float32.
    """
    return _TileLogps.apply(hidden, weight, bias, targets, softmax)


class _TileLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        softmax: Softmax,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        of_targets, log_norms, means = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _slices(len(hidden), TILE_POSITIONS):
            states = hidden[rows].to(dtype)
            tiles = []
            for columns in _slices(len(weight), TILE_VOCAB):
                logits, _ = softmax.logits(_project(states, weight, bias, columns))
                places, is_here = _places(targets[rows], columns)
                found = logits.gather(1, places).squeeze(1)
                of_targets[rows] = torch.where(is_here, found, of_targets[rows])
                most = logits.amax(1)
                weights = (logits - most.unsqueeze(1)).exp_()
                total = weights.sum(1)
                tiles.append((most + total.log(), weights.mul_(logits).sum(1) / total))
            # A distribution over tiles, and of each the log of its mass and the mean of its logits
            masses, of_tiles = (torch.stack(values) for values in zip(*tiles, strict=True))
            log_norms[rows] = masses.logsumexp(0)
            means[rows] = ((masses - log_norms[rows]).exp() * of_tiles).sum(0)
        entropies = log_norms - means
        ctx.save_for_backward(hidden, weight, bias, targets, log_norms, entropies)
        ctx.softmax, ctx.dtype = softmax, dtype
        return of_targets - log_norms, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Of a logit z, a log-prob has the gradient [z is the target's] - p, and an entropy -p (log p + entropy)."""
        grad_logps, grad_entropies = grads
        hidden, weight, bias, targets, log_norms, entropies = ctx.saved_tensors
        softmax = ctx.softmax
        grad_hidden, grad_weight, grad_bias = (  # summed up in float32
            torch.zeros_like(tensor, dtype=torch.float32) if is_wanted else None
            for tensor, is_wanted in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        for rows in _slices(len(hidden), TILE_POSITIONS):
            states = hidden[rows].to(ctx.dtype)
            for columns in _slices(len(weight), TILE_VOCAB):
                logits, tanh = softmax.logits(_project(states, weight, bias, columns))
                log_p = logits.sub_(log_norms[rows, None])
                p = log_p.exp()
                if grad_entropies is None:
                    grad = log_p.zero_()
                else:
                    grad = log_p.add_(entropies[rows, None]).mul_(p * -grad_entropies[rows, None])
                if grad_logps is not None:
                    places, is_here = _places(targets[rows], columns)
                    p.neg_().scatter_add_(1, places, is_here.unsqueeze(1).to(p))
                    grad += p.mul_(grad_logps[rows, None])
                grad *= 1 / softmax.temperature
                if tanh is not None:
                    grad *= 1 - tanh.square_()
                of_tile = grad.mul_(softmax.scale).to(ctx.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], of_tile, weight[columns].to(ctx.dtype))
                if grad_weight is not None:
                    _add_product(grad_weight[columns], of_tile.t(), states)
                if grad_bias is not None:
                    grad_bias[columns] += of_tile.sum(0, dtype=torch.float32)
        summed = zip((hidden, weight, bias), (grad_hidden, grad_weight, grad_bias), strict=True)
        return *(None if grad is None else grad.to(tensor.dtype) for tensor, grad in summed), None, None


@torch.no_grad()
def truncated_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    softmax: Softmax,
    truncation: Truncation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities of tokens under distributions that are truncated, without gradients.

    Args:
        truncation (`Callable`):
            Takes ids of shape (N, 1) and logits of shape (N, V), as a `LogitsProcessorList` does, and returns logits,
            of which some are -inf. A token that was sampled is never cut off: one at the edge may be by these weights,
            and not by an engine's rounding of them.

        All others are those of [`tile_logps`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: As [`tile_logps`]. The entropies are not computed, and 0.
    """
    num_positions = max(MAX_LOGITS // len(weight), 1)
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    logps = hidden.new_zeros(len(hidden), dtype=torch.float32)
    for rows in _slices(len(hidden), num_positions):
        ids = targets[rows].unsqueeze(1)
        logits, _ = softmax.logits(linear(hidden[rows], weight, bias))
        of_tokens = logits.gather(1, ids)
        kept = truncation(ids, logits).scatter(1, ids, of_tokens)
        logps[rows] = (of_tokens - kept.logsumexp(1, keepdim=True)).squeeze(1)
    return logps, torch.zeros_like(logps)


def score(
    model: nn.Module,
    head: nn.Module,
    inputs: dict[str, Any],
    targets: torch.Tensor,
    softmax: Softmax,
    truncation: Truncation | None = None,
    in_float32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities and entropies of tokens that are to follow those that a model is called with.

    Args:
        model (`nn.Module`):
            Called as it is, wrapped or not.
        head (`nn.Module`):
            Its output embeddings. While the model is called, they project no position; their hooks see the hidden
            states of those with a target.
        inputs (`dict`):
            What the model is called with: tokens of shape (B, T).
        targets (`torch.Tensor` of shape (B, T)):
            The token that follows each, -100 where it is not scored.
        softmax ([`Softmax`]):
            The distribution that a token is drawn from.
        truncation (`Callable`, *optional*):
            Truncates the distributions, see [`truncated_logps`].
        in_float32 (`bool`):
            Whether the head computes in float32, also in an autocast.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both of shape (B, T), in nats, 0 where nothing is scored.
    """
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    # What a compiled model leaves as it is, since targets are others in each call

    @torch.compiler.disable
    def score_tokens(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        device = module.weight.device  # a model that is split across devices may end on another one
        at = targets.to(device)
        states = args[0].to(device)[at != -100]
        with torch.autocast(device.type, enabled=False) if in_float32 else nullcontext():
            states = states.float() if in_float32 else states
            of_head = states, module.weight, module.bias, at[at != -100], softmax
            logps, entropies = tile_logps(*of_head) if truncation is None else truncated_logps(*of_head, truncation)
        found.append((logps, entropies, at))
        return (args[0][:, :0], *args[1:])

    @torch.compiler.disable
    def return_none(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Logits of no position, by which whatever wraps head and model sees the backward pass come."""
        return found[-1][0][:0].expand(*output.shape[:-2], output.size(-1), 0).mT

    # Inside of the hooks that gather weights, and those that see the backward pass
    hooks = [
        head.register_forward_pre_hook(score_tokens),
        head.register_forward_hook(return_none, prepend=True),
    ]
    try:
        logits = model(**inputs, use_cache=False)[0]
    finally:
        for hook in hooks:
            hook.remove()
    if len(found) != 1:
        raise RuntimeError(f"The head of {type(model).__name__} is called {len(found)} times in a forward pass.")
    ((logps, entropies, at),) = found
    zeros = logps.new_zeros(at.shape) + logits.sum().to(logps)
    mask = at != -100
    return zeros.masked_scatter(mask, logps), zeros.detach().masked_scatter(mask, entropies)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _project(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice) -> torch.Tensor:
    """What a part of the head returns."""
    outputs = states @ weight[columns].to(states.dtype).t()
    return outputs if bias is None else outputs.add_(bias[columns].to(states.dtype))


def _places(targets: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Where targets are in a part of the vocabulary, (n, 1), and whether they are in it at all, (n,)."""
    places = targets - columns.start
    last = columns.stop - columns.start - 1
    return places.clamp(0, last).unsqueeze(1), (places >= 0) & (places <= last)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `a @ b` to a total in float32. A product that is rounded to half precision first would bias the sum."""
    if total.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
