"""
Log-probs of tokens from the hidden states that enter a language model's head.

Logits are computed in tiles, and again in the backward pass, so that the logits of all positions never exist at once.
The model runs its own forward: hooks on its head get the hidden states, and the weights however they are sharded.

Notation used for tensor shapes:
    - N: scored positions
    - H: hidden size
    - V: vocabulary size
    - B, T: rows and columns of the model's inputs
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

# Logits of truncated distributions that exist at once: 64 MiB, and several times that for sorting
MAX_LOGITS = 2**24

# Names of the factors and the divisor of logits in model configs
MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVISOR = "logits_scaling"
# A model that multiplies by `DIVISOR`, and one that divides the hidden states before the head
MULTIPLIED, DIVIDED_BEFORE = "hyperclovax", "minicpm3"

# Truncates logits of shape (N, V) for the distributions of N tokens, given as ids of shape (N, 1)
Truncation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Softmax:
    """
    The distribution of a token given the head's outputs x: the softmax of `softcap * tanh(scale * x / softcap) /
    temperature`, or of `scale * x / temperature`.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, temperature: float) -> "Softmax":
        """The softmax of a model, from its config."""
        config = config.get_text_config()
        multipliers = [getattr(config, name, None) for name in MULTIPLIERS]
        divisor = getattr(config, DIVISOR, None)
        if divisor is not None and config.model_type != DIVIDED_BEFORE:
            multipliers.append(divisor if config.model_type == MULTIPLIED else 1 / divisor)
        scale = next((value for value in multipliers if value is not None), 1.0)
        return cls(temperature, scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits in float32 from a head's outputs, which may be overwritten, and the tanh if there is a softcap."""
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
            Inputs of the head.
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
        target_logits, log_norms, means = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _slices(len(hidden), TILE_POSITIONS):
            states = hidden[rows].to(dtype)
            tiles = []
            for columns in _slices(len(weight), TILE_VOCAB):
                logits, _ = softmax.logits(_project(states, weight, bias, columns))
                indices, is_in_tile = _tile_indices(targets[rows], columns)
                found = logits.gather(1, indices).squeeze(1)
                target_logits[rows] = torch.where(is_in_tile, found, target_logits[rows])
                maximum = logits.amax(1)
                weights = (logits - maximum.unsqueeze(1)).exp_()
                total = weights.sum(1)
                tiles.append((maximum + total.log(), weights.mul_(logits).sum(1) / total))
            # The log of the mass and the mean logit of each tile
            log_masses, tile_means = (torch.stack(values) for values in zip(*tiles, strict=True))
            log_norms[rows] = log_masses.logsumexp(0)
            means[rows] = ((log_masses - log_norms[rows]).exp() * tile_means).sum(0)
        entropies = log_norms - means
        ctx.save_for_backward(hidden, weight, bias, targets, log_norms, entropies)
        ctx.softmax, ctx.dtype = softmax, dtype
        return target_logits - log_norms, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients by a logit: [is the target's] - p of a log-prob, and -p (log p + entropy) of an entropy."""
        grad_logps, grad_entropies = grads
        hidden, weight, bias, targets, log_norms, entropies = ctx.saved_tensors
        softmax = ctx.softmax
        grad_hidden, grad_weight, grad_bias = (  # accumulated in float32
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
                    indices, is_in_tile = _tile_indices(targets[rows], columns)
                    p.neg_().scatter_add_(1, indices, is_in_tile.unsqueeze(1).to(p))
                    grad += p.mul_(grad_logps[rows, None])
                grad *= 1 / softmax.temperature
                if tanh is not None:
                    grad *= 1 - tanh.square_()
                grad_tile = grad.mul_(softmax.scale).to(ctx.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], grad_tile, weight[columns].to(ctx.dtype))
                if grad_weight is not None:
                    _add_product(grad_weight[columns], grad_tile.t(), states)
                if grad_bias is not None:
                    grad_bias[columns] += grad_tile.sum(0, dtype=torch.float32)
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
    Log-probabilities of tokens under truncated distributions, without gradients.

    Args:
        truncation (`Callable`):
            Maps ids of shape (N, 1) and logits of shape (N, V) to logits of which some are -inf, as a
            `LogitsProcessorList` does. A sampled token is always kept, because at the edge of the truncation an engine
            may round differently.

        All others are those of [`tile_logps`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: As [`tile_logps`], except that the entropies are not computed but 0.
    """
    num_positions = max(MAX_LOGITS // len(weight), 1)
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    logps = hidden.new_zeros(len(hidden), dtype=torch.float32)
    for rows in _slices(len(hidden), num_positions):
        ids = targets[rows].unsqueeze(1)
        logits, _ = softmax.logits(linear(hidden[rows], weight, bias))
        token_logits = logits.gather(1, ids)
        kept = truncation(ids, logits).scatter(1, ids, token_logits)
        logps[rows] = (token_logits - kept.logsumexp(1, keepdim=True)).squeeze(1)
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
    Log-probabilities and entropies of the tokens that follow a model's inputs.

    Args:
        model (`nn.Module`):
            The model, wrapped or not.
        head (`nn.Module`):
            Its output embeddings. During the call, hooks score the hidden states of positions with a target, and the
            head itself gets none.
        inputs (`dict`):
            The model's inputs, with tokens of shape (B, T).
        targets (`torch.Tensor` of shape (B, T)):
            The token that follows each position, -100 where it is not scored.
        softmax ([`Softmax`]):
            The distribution that a token is drawn from.
        truncation (`Callable`, *optional*):
            Truncates the distributions, see [`truncated_logps`].
        in_float32 (`bool`):
            Whether the head computes in float32, even in an autocast context.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both of shape (B, T), in nats, 0 where nothing is scored.
    """
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    # The hooks are excluded from compilation because targets differ in each call

    @torch.compiler.disable
    def score_tokens(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        device = module.weight.device  # the last device of a model that is split across several
        at = targets.to(device)
        states = args[0].to(device)[at != -100]
        with torch.autocast(device.type, enabled=False) if in_float32 else nullcontext():
            states = states.float() if in_float32 else states
            head_args = states, module.weight, module.bias, at[at != -100], softmax
            logps, entropies = tile_logps(*head_args) if truncation is None else truncated_logps(*head_args, truncation)
        found.append((logps, entropies, at))
        return (args[0][:, :0], *args[1:])

    @torch.compiler.disable
    def return_none(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Logits of no position, through which wrappers of the head and the model notice the backward pass."""
        return found[-1][0][:0].expand(*output.shape[:-2], output.size(-1), 0).mT

    # Inside the hooks that gather weights, and inside those that notice the backward pass
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
        raise RuntimeError(
            f"The head of {type(model).__name__} was called {len(found)} times in a forward pass instead of once."
        )
    ((logps, entropies, at),) = found
    zeros = logps.new_zeros(at.shape) + logits.sum().to(logps)
    mask = at != -100
    return zeros.masked_scatter(mask, logps), zeros.detach().masked_scatter(mask, entropies)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _project(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice) -> torch.Tensor:
    """Outputs of some columns of the head."""
    outputs = states @ weight[columns].to(states.dtype).t()
    return outputs if bias is None else outputs.add_(bias[columns].to(states.dtype))


def _tile_indices(targets: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of targets in a part of the vocabulary, (n, 1), and whether they are in it, (n,)."""
    indices = targets - columns.start
    last = columns.stop - columns.start - 1
    return indices.clamp(0, last).unsqueeze(1), (indices >= 0) & (indices <= last)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `a @ b` to a float32 total, without rounding the product to half precision, which would bias the sum."""
    if total.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
