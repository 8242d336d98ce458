"""Rollouts that are some updates old, as `max_staleness` has a server draw them, without a server."""

from collections.abc import Sequence
from typing import Any, cast

from fr3e_trl.generation.ahead import AheadSampler
from fr3e_trl.method.refill import PromptStream
from fr3e_trl.method.sampling import Sample, Sampler, SamplingRequest
from fr3e_trl.overlap import Overlap

from .measures import MeasuredFR3ETrainer


class DrawnAhead:
    """
    Draws the rollouts of the next batch where a server would begin to: while that draws them in the background, the
    policy is trained, and its weights stay as they were sent. Drawn at once, they are of the same weights.
    """

    has_begun = False
    seconds_waited = seconds_hidden = 0.0

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def begin(self, requests: Sequence[SamplingRequest]) -> None:
        self.has_begun = True
        self._begun, self._samples = requests, self.sampler.sample(requests)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        if not self.has_begun:
            return self.sampler.sample(requests)
        self.has_begun = False
        for request, begun in zip(requests, self._begun, strict=True):
            if request.prefix_ids.tolist() != begun.prefix_ids.tolist():
                raise RuntimeError("The prompts of this batch are not those whose rollouts were drawn ahead of it.")
        return self._samples

    def finish(self) -> None:
        """Nothing is under way."""

    def abort(self) -> None:
        self.has_begun = False


class SharedWeights:
    """In the place of vLLM: what generates here has the policy's weights."""

    def sync_weights(self) -> None:
        """Nothing has to be sent."""


class StaleFR3ETrainer(MeasuredFR3ETrainer):
    """
    [`FR3ETrainer`], measured, whose rollouts are up to `max_staleness` updates old, without a vLLM server.

    The order of events, the prompts and the correction of the loss are those of `max_staleness` with a server.

    Args:
        max_staleness (`int`):
            Updates.

        All others are those of `FR3ETrainer`.
    """

    def __init__(self, *args: Any, max_staleness: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.args.max_staleness = max_staleness  # checked when a trainer is made: it would want a server
        self.use_vllm, self.vllm_mode = True, "server"
        self.vllm_generation, self._last_loaded_step = SharedWeights(), -1
        self.sampler = self._ahead = DrawnAhead(self.sampler)

    def begin(self) -> None:
        """The only change is that what overlaps with a server's rollouts overlaps with those drawn here."""
        super().begin()
        assert self._explorer is not None
        self._ahead.abort()
        sampler = cast(AheadSampler, self._ahead)
        self._overlap = Overlap(
            self, self.args, self._explorer, sampler, PromptStream(self._epoch_order), is_shared=False
        )
