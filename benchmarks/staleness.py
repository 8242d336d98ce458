"""Rollouts that are some updates old, as with `max_staleness`, but without a vLLM server."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from fr3e_trl.generation.ahead import AheadSampler
from fr3e_trl.generation.tools import ToolCallingSampler
from fr3e_trl.method.refill import PromptStream
from fr3e_trl.method.sampling import Sample, Sampler, SamplingRequest
from fr3e_trl.overlap import Overlap

from .measures import MeasuredFR3ETrainer


class Server:
    """
    Stands in for a vLLM server: samples with the weights that were sent last, or with the policy's if none were sent.

    A server samples the next batch in the background while the policy trains. This one samples it when it begins, which
    gives the same rollouts, because the weights that were sent do not change in between.
    """

    has_begun = False
    seconds_waited = seconds_hidden = 0.0

    def __init__(self, sampler: Sampler, model: nn.Module):
        self.sampler, self.parameters = sampler, list(model.parameters())
        self._sent: list[torch.Tensor] = []

    def sync_weights(self) -> None:
        self._sent = [parameter.detach().clone() for parameter in self.parameters]

    def begin(self, requests: Sequence[SamplingRequest]) -> None:
        self.has_begun = True
        self._begun, self._samples = requests, self._draw(requests)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        if not self.has_begun:  # the first batch, or a later turn of a dialogue
            return self._draw(requests)
        self.has_begun = False
        for request, begun in zip(requests, self._begun, strict=True):
            if request.prefix_ids.tolist() != begun.prefix_ids.tolist():
                raise RuntimeError("The prompts of this batch differ from those whose rollouts were drawn ahead.")
        return self._samples

    def _draw(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        kept = [parameter.data for parameter in self.parameters]
        for parameter, sent in zip(self.parameters, self._sent or kept, strict=True):
            parameter.data = sent
        try:
            return self.sampler.sample(requests)
        finally:
            for parameter, own in zip(self.parameters, kept, strict=True):
                parameter.data = own

    def finish(self) -> None:
        """Nothing is under way."""

    def abort(self) -> None:
        self.has_begun = False


class StaleFR3ETrainer(MeasuredFR3ETrainer):
    """
    A measured [`FR3ETrainer`] whose rollouts are up to `max_staleness` updates old, without a vLLM server.

    The order of events, the prompts and the correction of the loss are the same as with `max_staleness` and a server.

    Args:
        max_staleness (`int`):
            Updates.

        All others are those of `FR3ETrainer`.
    """

    def __init__(self, *args: Any, max_staleness: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.args.max_staleness = max_staleness  # checked when a trainer is made: it would want a server
        self.use_vllm, self.vllm_mode = True, "server"
        dialogues = self.sampler if isinstance(self.sampler, ToolCallingSampler) else None
        server = Server(dialogues.sampler if dialogues else self.sampler, self.model)
        if dialogues:
            dialogues.sampler = server
        else:
            self.sampler = server
        self.vllm_generation, self._ahead, self._last_loaded_step = server, server, -1

    def begin(self) -> None:
        """The only change is that rollouts overlap with training although no vLLM server samples them."""
        super().begin()
        assert self._explorer is not None
        self._ahead.abort()
        sampler = cast(AheadSampler, self._ahead)
        self._overlap = Overlap(
            self, self.args, self._explorer, sampler, PromptStream(self._epoch_order), is_shared=False
        )
