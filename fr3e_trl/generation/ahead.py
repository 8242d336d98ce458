"""Sampling the next batch while the trainer updates on the current one."""

import copy
import logging
import threading
import time
from collections.abc import Sequence

from ..method.sampling import Sample, SamplingRequest
from ..processes import through_main_process
from .vllm import VLLMServerSampler
from .vllm_server import VLLMServer

logger = logging.getLogger(__name__)


class AheadSampler(VLLMServerSampler):
    """
    [`VLLMServerSampler`] that can sample the next call's requests in the background.

    [`begin`] gathers the requests in the main process, where a thread sends them to the server, and [`sample`] scatters
    the samples. All collective calls are made by the main thread.

    Attributes:
        has_begun (`bool`):
            Whether a batch is in progress or waits to be used. The same in every process.
        seconds_waited, seconds_hidden (`float`):
            For the last batch, how long the main process waited for it, and how long it was sampled before that.
    """

    has_begun = False
    seconds_waited = seconds_hidden = 0.0
    _batch: "_Batch | None" = None
    _last_difference: str | None = None  # what the last batch had other than was requested then

    def begin(self, requests: Sequence[SamplingRequest]) -> None:
        """Start sampling what the next call of [`sample`] will request. All processes must call this together."""
        self.has_begun = True
        through_main_process(self.generation.accelerator, self._begin, requests)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        """
        Sample, or wait for the batch in progress.

        Raises:
            RuntimeError: Two batches in a row have had other prompts.
        """
        self.has_begun = False
        return super().sample(requests)

    def finish(self) -> None:
        """Wait until the batch in progress is complete or has failed."""
        if self._batch is not None:
            self._batch.wait()

    def abort(self) -> None:
        """Abort the batch in progress. When this returns, its thread and its requests on the server have ended."""
        self.has_begun, self._last_difference = False, None
        self.seconds_waited = self.seconds_hidden = 0.0
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.server.abort()
            batch.wait()

    def _begin(self, requests: list[SamplingRequest]) -> list[None]:
        sampler = copy.copy(self)  # with the settings of now, whatever changes while it samples
        sampler.generation, sampler.eos_token_ids = copy.copy(self.generation), list(self.eos_token_ids)
        sampler.generation.generation_kwargs = dict(self.generation.generation_kwargs)
        self._batch = _Batch(sampler, self._server.abortable(), requests)
        self._batch.thread.start()  # after the assignment, so that `abort` finds it even if this is interrupted
        return [None] * len(requests)

    def _ask(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        batch = self._batch
        if batch is None:
            return super()._ask(requests)
        difference, last_difference = self._difference(requests, batch), self._last_difference
        if difference is not None:
            if difference == last_difference == "prompts":
                raise RuntimeError(
                    "The prompts of two batches in a row are not those whose rollouts were started ahead, in the order "
                    "in which TRL shuffles train_dataset. Set max_staleness=0 if a custom dataloader, data sampler or "
                    "callback changes that order, or if prompts are made by chance or with the time of day."
                )
            if last_difference is None:
                logger.warning(
                    "The rollouts that were started ahead are drawn again, because %s have changed since. Where this "
                    "happens at every batch, max_staleness saves no time.",
                    difference,
                )
            self.abort()
            self._last_difference = difference
            return super()._ask(requests)
        wait_start = time.monotonic()
        batch.wait()
        self._batch, self._last_difference, self.hit_rate = None, None, batch.sampler.hit_rate
        self.seconds_waited = time.monotonic() - wait_start
        self.seconds_hidden = min(wait_start, batch.end) - batch.start
        if batch.error is not None:
            raise batch.error
        return batch.samples

    def _difference(self, requests: Sequence[SamplingRequest], batch: "_Batch") -> str | None:
        """What the batch in progress has other than `requests`, if anything."""
        if [request.prefix_ids.tolist() for request in requests] != [r.prefix_ids.tolist() for r in batch.requests]:
            return "prompts"
        settings = [batch.sampler.sampling_params(request) for request in batch.requests]
        return None if settings == [self.sampling_params(request) for request in requests] else "sampling settings"


class _Batch:
    """Samples that a thread requests from the server."""

    def __init__(self, sampler: VLLMServerSampler, server: VLLMServer, requests: list[SamplingRequest]):
        self.sampler, self.server, self.requests = sampler, server, requests
        self.samples: list[list[Sample]] = []
        self.error: Exception | None = None
        self.start = time.monotonic()
        self.is_done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="fr3e-sampling-ahead")

    def wait(self) -> None:
        """Wait until the batch is complete, has failed or was aborted."""
        if self.thread.ident is not None:  # it was started
            # Before Python 3.13, a thread counts as ended once a `join` was interrupted
            self.is_done.wait()
            self.thread.join()

    def _run(self) -> None:
        try:
            self.samples = self.sampler._draw(self.requests, self.server)
        except Exception as error:
            self.error = error
        self.end = time.monotonic()
        self.is_done.set()
