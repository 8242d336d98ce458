"""Requests to samplers and their results: the interface between the method and generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .anchors import StoppingRule
from .tree import Dialogue, TokenIds, as_ids


@dataclass(frozen=True)
class Branching:
    """
    Where rollouts branch off the samples of a request, for samplers that draw branches without a second request.

    Args:
        num_rollouts (`int`): Number of rollouts from each anchor.
        anchors (`Callable`): Finds the anchors of each of a request's samples, given their entropies.
        shares (`Sequence[int]`): Maximum number of anchors of each sample.
        rule ([`StoppingRule`], *optional*):
            The stopping rule, if anchors are found by one. Branches may then leave a trajectory that still grows.
    """

    num_rollouts: int
    anchors: "Callable[[SamplingRequest, Sequence[Sample]], list[list[int]]]"
    shares: Sequence[int]
    rule: StoppingRule | None = None


def images_of(prompt: str | list[dict[str, Any]]) -> list[Any]:
    """The images in the messages of a prompt or a dialogue, in order."""
    messages = [] if isinstance(prompt, str) else prompt
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    parts = [part for content in contents for part in content if isinstance(part, dict)]  # a tool may return any list
    return [part["image"] for part in parts if part.get("type") == "image" and "image" in part]


@dataclass(frozen=True)
class SamplingRequest:
    """
    A prefix to continue, and how.

    Args:
        prefix_ids (`TokenIds`): Token ids to continue: a prompt, or a prompt and the first tokens of a completion.
        num_samples (`int`): How many continuations to draw.
        max_new_tokens (`int`), temperature (`float`):
            Token budget and sampling temperature of each continuation. They differ between requests of one call.
        num_prompt_tokens (`int`, *optional*):
            How many of `prefix_ids` are the prompt. The others were sampled before. If `None`, all are.
        with_entropies (`bool`):
            Whether to return entropies along the samples, if the backend computes them only on request.
        branching ([`Branching`], *optional*):
            Branches that will be requested next. A sampler may draw them together with the samples, or ignore this.
        tree (`int`, *optional*):
            Index of the tree that the samples belong to, if its rollouts have an environment.
        dialogue ([`Dialogue`], *optional*): The dialogue that they continue, if there are tools.
        multimodal (`list[dict]`, *optional*):
            The prompt's messages, if they contain images. The tokens of the images are in `prefix_ids`.
        tool_images (`list`): Images that tools have returned since. Their tokens are in `prefix_ids` too.
    """

    prefix_ids: TokenIds
    num_samples: int
    max_new_tokens: int
    temperature: float
    num_prompt_tokens: int | None = None
    with_entropies: bool = False
    branching: Branching | None = None
    tree: int | None = None
    dialogue: Dialogue | None = None
    multimodal: list[dict[str, Any]] | None = None
    tool_images: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix_ids", as_ids(self.prefix_ids))

    @property
    def rule(self) -> StoppingRule | None:
        """The rule that finds anchors while the samples grow, if there is one."""
        return None if self.branching is None else self.branching.rule

    @property
    def num_sampled_before(self) -> int:
        """Number of tokens of `prefix_ids` that belong to the completion."""
        return 0 if self.num_prompt_tokens is None else len(self.prefix_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class Sample:
    """
    A continuation, without its prefix.

    Args:
        token_ids (`Sequence[int]` or `TokenIds`): At least one token id. The last is EOS, unless the budget ran out.
        logprobs (`Sequence[float]` or `np.ndarray`, *optional*):
            Log-probability of each token under the distribution that it was drawn from, if the backend knows it. If
            `None`, the sample counts as drawn from the policy itself.
        entropies (`Sequence[float]` or `np.ndarray`, *optional*):
            Entropy of the policy before each token, in nats, at that temperature, if the backend knows it.
        branches (`dict[int, list[Sample]]`):
            Branches that were drawn with it, by the position of their anchor.
        mask (`np.ndarray` of shape (L,), *optional*):
            Which tokens the policy wrote, as opposed to a tool. If `None`, all. The others have an entropy of NaN.
        dialogue ([`Dialogue`], *optional*): The turns of the whole completion, if there are tools.
    """

    token_ids: Sequence[int] | TokenIds
    logprobs: Any = None
    entropies: Any = None
    branches: "dict[int, list[Sample]]" = field(default_factory=dict)
    mask: NDArray[np.bool_] | None = None
    dialogue: Dialogue | None = None


def anchors_of(request: SamplingRequest, samples: Sequence[Sample]) -> list[tuple[Sample, int]]:
    """
    Where rollouts branch off the finished samples of a request: pairs of a sample and a position in it. Empty if the
    request has no branching, or entropies are unknown.
    """
    branching = request.branching
    if branching is None or any(sample.entropies is None for sample in samples):
        return []
    anchors = zip(samples, branching.anchors(request, samples), strict=True)
    return [(sample, position) for sample, positions in anchors for position in positions]


def branch_request(request: SamplingRequest, sample: Sample, position: int) -> SamplingRequest:
    """The request for the rollouts that branch off a sample at a position."""
    branching = request.branching
    assert branching is not None
    return SamplingRequest(
        np.concatenate([request.prefix_ids, as_ids(sample.token_ids[:position])]),
        branching.num_rollouts,
        request.max_new_tokens - position,
        request.temperature,
        num_prompt_tokens=len(request.prefix_ids),
        multimodal=request.multimodal,
    )


class Sampler(Protocol):
    """
    Draws continuations of prefixes.

    With several processes, each calls its own sampler for its own rows. All call it equally often, with an empty
    list if a process has nothing to request.
    """

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        """
        Draw the continuations that `requests` ask for, all at the same time if the backend can.

        Args:
            requests (`Sequence[SamplingRequest]`): What to continue, in any order and with any budgets.

        Returns:
            `list[list[Sample]]`: For each request, in order, its `num_samples` continuations.
        """
        ...
