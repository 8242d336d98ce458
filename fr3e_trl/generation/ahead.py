"""Sampling the next batch while this one is trained on."""

import copy
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..method.sampling import Sample, SamplingRequest
from ..processes import through_main_process
from .vllm import VLLMServerSampler
from .vllm_server import VLLMServer


class AheadSampler(VLLMServerSampler):
    """
    [`VLLMServerSampler`] that can begin what it will be asked for next, and draws that in the background.

    Requests are gathered when they begin, and samples dealt out when they are asked for. In between, one thread of the
    main process asks the server, and nothing else: no collective call is made outside the main thread.

    Attributes:
        has_begun (`bool`):
            Whether rollouts are under way, or drawn and not yet asked for. The same in every process.
        seconds_waited, seconds_hidden (`float`):
            How long the main process waited for the last of them, and how long they were drawn before that.
    """

    has_begun = False
    seconds_waited = seconds_hidden = 0.0
    _batch: "_Batch | None" = None

    def begin(self, requests: Sequence[SamplingRequest]) -> None:
        """Begin to draw what the next call of [`sample`] will ask for. All processes call this together."""
        self.has_begun = True
        through_main_process(self.generation.accelerator, self._begin, requests)

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        """
        Draw, or wait for what has begun.

        Raises:
            RuntimeError: What has begun are other prompts.
        """
        self.has_begun = False
        return super().sample(requests)

    def finish(self) -> None:
        """Wait until what has begun is drawn, whether it failed or not."""
        if self._batch is not None:
            self._batch.wait()

    def abort(self) -> None:
        """Give up what has begun. When this returns, neither a thread is left here nor a request on the server."""
        self.has_begun = False
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.server.abort()
            batch.wait()

    def _begin(self, requests: list[SamplingRequest]) -> list[None]:
        server = self._server.abortable()
        # A copy: the list of tokens that end a completion is changed in place
        asked = copy.deepcopy([self.sampling_params(request) for request in requests])
        self._batch = _Batch(self, server, requests, asked)
        self._batch.thread.start()  # known by then, so that an interrupt that comes now leaves nobody's thread
        return [None] * len(requests)

    def _ask(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        batch = self._batch
        if batch is None:
            return super()._ask(requests)
        prompts, begun = ([request.prefix_ids.tolist() for request in some] for some in (requests, batch.requests))
        if prompts != begun:
            raise RuntimeError(
                "The prompts of this batch are not those whose rollouts were begun during the last one. Rollouts ahead "
                "of a batch take the order of train_dataset as TRL shuffles it: set max_staleness=0 if a dataloader, "
                "a sampler of data or a callback changes that order."
            )
        if [self.sampling_params(request) for request in requests] != batch.asked:  # they were changed since
            self.abort()
            return super()._ask(requests)
        asked_for = time.monotonic()
        batch.wait()
        self._batch = None
        self.seconds_waited = time.monotonic() - asked_for
        self.seconds_hidden = min(asked_for, batch.ended) - batch.began
        if batch.error is not None:
            raise batch.error
        return batch.samples


class _Batch:
    """Rollouts that a thread draws."""

    def __init__(
        self,
        sampler: VLLMServerSampler,
        server: VLLMServer,
        requests: list[SamplingRequest],
        asked: list[dict[str, Any]],
    ):
        self.server, self.requests, self.asked = server, requests, asked
        self.samples: list[list[Sample]] = []
        self.error: Exception | None = None
        self.began = time.monotonic()
        self.is_done = threading.Event()
        self.thread = threading.Thread(target=self._run, args=[sampler], daemon=True, name="fr3e-sampling-ahead")

    def wait(self) -> None:
        """
        Wait until everything is drawn, or was given up. Python before 3.13 takes a thread for ended whose `join` was
        interrupted once.
        """
        if self.thread.ident is not None:  # it was started
            self.is_done.wait()
            self.thread.join()

    def _run(self, sampler: VLLMServerSampler) -> None:
        try:
            self.samples = sampler._draw(self.requests, self.server)
        except Exception as error:
            self.error = error
        self.ended = time.monotonic()
        self.is_done.set()
