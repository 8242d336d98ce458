"""vLLM's own server (`vllm serve`): requests that outlive its faults, and adapters that it loads from a directory."""

import collections
import contextlib
import copy
import json
import logging
import queue
import resource
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What each choice of a completion has, with `return_token_ids`
CHOICE = {"index", "finish_reason", "token_ids"}

MAX_FAULTS = 5  # in a row, before a server that is up is given up
MAX_IN_FLIGHT = 2048  # requests, each with a thread
DECODED_AT_ONCE = 512  # sequences, by a server that does not tell
CONTROL_TIMEOUT = 120.0  # seconds for a request that generates nothing
RETRIED_STATUSES = (404, 408, 429)  # 404: a server that was restarted does not know the adapter yet


class VLLMServerError(RuntimeError):
    """The vLLM server cannot be used, or not any more. The message says what to do."""


class ServerFault(Exception):
    """A request failed in a way that may pass."""


class Aborted(Exception):
    """What was asked of the server is not wanted any more."""


class Connections:
    """Connections that another thread can cut. A server that loses the connection of a request aborts the request."""

    def __init__(self) -> None:
        self.are_cut = threading.Event()
        self.pool_classes = {"http": self._noting(HTTPConnectionPool), "https": self._noting(HTTPSConnectionPool)}
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()

    def cut(self) -> None:
        """Cut what is open, and whatever is opened from now on."""
        self.are_cut.set()
        with self._lock:
            for opened in self._open:
                _shut(opened)

    def _noting(self, pool: Any) -> Any:
        """A pool whose connections are these."""
        connections = self

        class Connection(pool.ConnectionCls):
            def connect(self) -> None:
                super().connect()
                with connections._lock:
                    connections._open.add(self.sock)
                    if connections.are_cut.is_set():
                        _shut(self.sock)

        return type(pool.__name__, (pool,), {"ConnectionCls": Connection})


class _Adapter(HTTPAdapter):
    """Opens connections as one of `connections`."""

    def __init__(self, connections: Connections):
        self._pool_classes = connections.pool_classes
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pool_classes


def _shut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is over
        opened.shutdown(socket.SHUT_RDWR)


class VLLMServer:
    """
    Client of a vLLM server.

    A request that fails because the server cannot be reached, takes too long, or reports an error of its own is sent
    again once the server is up, at most 4 times, with growing pauses. An answer that was streamed goes on from where it
    broke. A server that was restarted gets the adapter again.

    Args:
        base_url (`str`):
            Address, for example `"http://localhost:8000"`.
        start_command (`str`):
            Command that starts such a server, for errors to tell.
        up_timeout (`float`):
            Seconds to wait for the server to be up, at first and after a fault.
        request_timeout (`float`):
            Seconds for an answer to a request that generates, or for the next part of one that is streamed.

    Attributes:
        base_model (`str`):
            Name of the model that is served.
        config (`dict`):
            The server's `VllmConfig`, as JSON.

    Raises:
        VLLMServerError: The server is not up in time, or lacks its development endpoints.
    """

    def __init__(self, base_url: str, start_command: str, up_timeout: float, request_timeout: float):
        self.base_url = base_url.rstrip("/")
        self.start_command = start_command
        self.up_timeout = up_timeout
        self.request_timeout = request_timeout
        self.adapter_name: str | None = None
        self.adapter_path: str | None = None
        self._instance_with_weights: str | None = None
        self._connections = Connections()
        self.config: dict[str, Any]
        self.environment: dict[str, Any]
        self.wait_until_up()
        self._retry(self._read_config)
        model = self._retry(self._models)[0]
        self.base_model: str = model["id"]
        self.base_root: str = model.get("root") or self.base_model

    def abortable(self) -> "VLLMServer":
        """A client of the same server, with the weights that it has now, whose requests alone [`abort`] ends."""
        client = copy.copy(self)
        client._connections = Connections()
        return client

    def abort(self) -> None:
        """End what is under way, here and on the server. Whoever waits for it gets [`Aborted`]."""
        self._connections.cut()

    @property
    def num_in_flight(self) -> int:
        """Requests at a time: more than the server decodes at once, and no more than half of what may be open here."""
        decoded = self.config.get("scheduler_config", {}).get("max_num_seqs", DECODED_AT_ONCE)
        num_replicas = self.config.get("parallel_config", {}).get("data_parallel_size", 1)
        most_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(decoded * num_replicas * 5 // 4 + 1, most_open // 2, MAX_IN_FLIGHT)

    @property
    def model(self) -> str:
        """Name that requests ask for: the adapter's, or the served model's."""
        return self.adapter_name or self.base_model

    def get_server_info(self) -> dict[str, Any]:
        """The server's configuration, by the name that TRL asks for it."""
        return self.config

    def wait_until_up(self) -> None:
        """
        Wait for the server to answer.

        Raises:
            VLLMServerError: It does not within `up_timeout` seconds.
        """
        start = last_report = time.monotonic()
        while True:
            try:
                self._checked(self._request("GET", "/health", timeout=10))
                return
            except ServerFault as fault:
                now = time.monotonic()
                if now - start >= self.up_timeout:
                    raise VLLMServerError(
                        f"The vLLM server at {self.base_url} cannot be reached ({fault}); it was waited for "
                        f"{self.up_timeout:.0f} s (vllm_server_timeout). Start one with:\n{self.start_command}"
                    ) from fault
                if now - last_report >= 15:
                    last_report = now
                    logger.warning("Waiting for the vLLM server at %s: %.0f s", self.base_url, now - start)
                self._connections.are_cut.wait(1)

    def load_adapter(self, name: str, path: Path) -> None:
        """
        Load the LoRA adapter in a directory that the server can read, in place of the last one.

        From then on requests ask for it. Each needs a name of its own. One that is loaded again under its name, in
        vLLM's way (`load_inplace`), leaves the prefix cache with what was computed before (vllm-project/vllm#42125),
        and is read from the disk again by later requests (#41482): the engine dies when the directory is gone.

        Raises:
            VLLMServerError: The server refuses it.
        """
        self.unload_adapter()
        self.adapter_name, self.adapter_path = name, str(path)
        try:
            self._retry(self._load_adapter)
        except VLLMServerError:
            self.adapter_name = self.adapter_path = None  # the model may be merged and sent in its place
            raise

    def expect_no_restart(self) -> None:
        """From now on, take a restart for an error: the server has weights that nothing can load into it again."""
        self._retry(self._read_config)
        self._instance_with_weights = self.config["instance_id"]

    def unload_adapter(self) -> None:
        """Have the server forget the adapter, if there is one and it still can be asked to."""
        if self.adapter_name is None:
            return
        with contextlib.suppress(requests.RequestException):
            requests.post(f"{self.base_url}/v1/unload_lora_adapter", json={"lora_name": self.adapter_name}, timeout=5)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text by the server's tokenizer, without special tokens added."""
        payload = {"model": self.base_model, "prompt": text, "add_special_tokens": False}
        return self._retry(lambda: self._read(self._request("POST", "/tokenize", json=payload), "tokens"))

    def prefix_cache_counters(self) -> tuple[float, float]:
        """Tokens that were looked for in the prefix cache since the server started, and those that were there."""
        with contextlib.suppress(ServerFault):
            lines = self._request("GET", "/metrics").text.splitlines()
            queries, hits = (
                sum(
                    float(line.rpartition(" ")[2])
                    for line in lines
                    if line.startswith(f"vllm:prefix_cache_{name}_total")
                )
                for name in ("queries", "hits")
            )
            return queries, hits
        return 0.0, 0.0

    def complete(
        self,
        payloads: Sequence[dict[str, Any]],
        follow: Callable[[int, Any], list[dict[str, Any]]] | None = None,
        read: Callable[[int, dict[str, Any]], Any] = lambda i, response: response,
    ) -> list[Any]:
        """
        Send requests for completions, all in flight together.

        Args:
            payloads (`Sequence[dict]`):
                Bodies of `/v1/completions`, one prompt of token ids each. The model is filled in. With `"stream": True`
                and a single sample, the response comes in parts, each with the tokens that are new.
            follow (`Callable`, *optional*):
                Called with the index of each request and what `read` returned, one at a time, as soon as it is there.
                Returns further payloads, which are sent while others are still under way.
            read (`Callable`, *optional*):
                Called with the index of each request and its response, or a part of that, with its choices in the order
                of their `index`. Several threads call it at once. What it returns is kept, and not the response: one
                with log-probs of 4,096 tokens has 3 MB.

        Returns:
            `list`: What `read` returned for each request, or for the last part of its response, those of further
            payloads behind. By default, the response.

        Raises:
            VLLMServerError: A request is refused, or the server does not recover.
        """
        payloads = list(payloads)
        results: list[Any] = [None] * len(payloads)
        lock = threading.Lock()

        def send(i: int) -> Iterator[int]:
            for body in self._parts(payloads, i):
                result = read(i, body)
                with lock:
                    further = follow(i, result) if follow else []
                    payloads.extend(further)
                    results.extend([None] * len(further))
                    added = range(len(payloads) - len(further), len(payloads))
                yield from added
            results[i] = result

        def send_pending() -> None:
            self._check_weights()
            in_parallel(send, [i for i, result in enumerate(results) if result is None], self.num_in_flight)

        self._retry(send_pending)
        return results

    def generate(
        self,
        prompts: list[list[int]],
        features: None = None,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **sampling_params: Any,
    ) -> dict[str, list[Any]]:
        """As [`~trl.generation.vllm_client.VLLMClient.generate`]: what TRL calls where it generates by itself."""
        if structured_outputs_regex is not None:
            sampling_params["structured_outputs"] = {"regex": structured_outputs_regex}
        sampling_params |= generation_kwargs or {}
        responses = self.complete([{**sampling_params, "prompt": prompt} for prompt in prompts])
        choices = [choice for response in responses for choice in response["choices"]]
        return {
            "prompt_ids": prompts,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [[[logprob] for logprob in choice["logprobs"]["token_logprobs"]] for choice in choices],
            "logprob_token_ids": [[[token_id] for token_id in choice["token_ids"]] for choice in choices],
        }

    # One request

    def _parts(self, payloads: list[dict[str, Any]], i: int) -> Iterator[dict[str, Any]]:
        """The response to a payload, or the parts of one that is streamed: after each, the payload is for the rest."""
        payload = payloads[i]
        is_streamed = payload.get("stream", False)
        named = {**payload, "model": self.model, "return_token_ids": True}
        path = "/v1/completions"
        response = self._request("POST", path, timeout=self.request_timeout, json=named, stream=is_streamed)
        if not is_streamed:
            yield self._understood(response, self._read(response, "choices"))
            return
        with contextlib.closing(self._checked(response)):
            for event in self._events(response):
                if "error" in event:
                    raise ServerFault(f"{event['error']} at {path}")
                body = self._understood(response, event.get("choices"))
                (choice,) = body["choices"]
                payload = {**payload, "prompt": payload["prompt"] + choice["token_ids"]}
                for name in payload.keys() & {"max_tokens", "min_tokens"}:
                    payload[name] = max(0, payload[name] - len(choice["token_ids"]))
                payloads[i] = payload
                yield body
                if choice["finish_reason"] is not None:
                    return
        raise ServerFault(f"the answer to {path} ended too early")

    def _events(self, response: requests.Response) -> Iterator[dict[str, Any]]:
        """What a streamed response tells, as it comes."""
        try:
            for line in response.iter_lines(chunk_size=None):
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))
        except (requests.RequestException, ValueError) as error:
            raise ServerFault(f"{type(error).__name__} in the answer to {response.request.path_url}") from error

    def _understood(self, response: requests.Response, choices: Any) -> dict[str, Any]:
        """The choices of a completion, in order."""
        if not choices or not all(isinstance(choice, dict) and choice.keys() >= CHOICE for choice in choices):
            raise self._not_understood(response)
        if any(choice["finish_reason"] == "abort" for choice in choices):
            raise ServerFault("it aborted the request")
        return {"choices": sorted(choices, key=lambda choice: choice["index"])}

    def _request(self, method: str, path: str, timeout: float = CONTROL_TIMEOUT, **kwargs: Any) -> requests.Response:
        if self._connections.are_cut.is_set():
            raise Aborted
        try:
            # A session of its own: a connection that is kept may be closed by the server just as it is used again
            with requests.Session() as session:
                adapter = _Adapter(self._connections)
                session.mount("http://", adapter)
                session.mount("https://", adapter)
                return session.request(method, self.base_url + path, timeout=(10, timeout), **kwargs)
        except requests.Timeout as error:
            raise ServerFault(f"no answer to {path} within {timeout:.0f} s") from error
        except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema):
            raise VLLMServerError(
                f"vllm_server_base_url={self.base_url!r} is no address. It must be like 'http://localhost:8000'."
            ) from None
        except requests.RequestException as error:
            raise ServerFault(f"{type(error).__name__} at {path}") from error

    def _checked(self, response: requests.Response) -> requests.Response:
        if response.status_code == 200:
            return response
        what = f"{response.status_code} at {response.request.path_url}: {response.text[:500]}"
        if response.status_code >= 500 or response.status_code in RETRIED_STATUSES:
            raise ServerFault(what)
        raise VLLMServerError(f"The vLLM server at {self.base_url} refused a request: {what}")

    def _read(self, response: requests.Response, name: str) -> Any:
        """What a response has under a name."""
        try:
            return self._checked(response).json()[name]
        except (KeyError, TypeError, ValueError) as error:
            raise self._not_understood(response) from error

    def _not_understood(self, response: requests.Response) -> VLLMServerError:
        return VLLMServerError(
            f"The server at {self.base_url} answered {response.request.path_url} with {response.text[:200]!r}, which "
            "no vLLM server of a version that is supported does. Is another service at this address?"
        )

    def _retry(self, action: Callable[[], T]) -> T:
        """Call `action` until no fault stops it."""
        for number in range(1, MAX_FAULTS + 1):
            try:
                return action()
            except ServerFault as error:
                fault = error
            if self._connections.are_cut.is_set():
                raise Aborted
            if number < MAX_FAULTS:
                logger.warning("Fault %d of the vLLM server at %s: %s", number, self.base_url, fault)
                self._connections.are_cut.wait(2**number)
                self.wait_until_up()
        raise VLLMServerError(
            f"The vLLM server at {self.base_url} failed {MAX_FAULTS} times in a row, the last time with: {fault}. Its "
            f"own log says more. If it hangs, start it again with:\n{self.start_command}"
        ) from fault

    # Weights

    def _check_weights(self) -> None:
        """See to it that the server generates with what it was last given, also if it was restarted since."""
        if self.adapter_name is not None:
            self._load_adapter()
        elif self._instance_with_weights is not None:
            self._read_config()
            if self.config["instance_id"] != self._instance_with_weights:
                raise VLLMServerError(
                    f"The vLLM server at {self.base_url} was restarted, and has lost the trained weights. Start the "
                    "training again from its last checkpoint: trainer.train(resume_from_checkpoint=True)."
                )

    def _read_config(self) -> None:
        """Read the server's configuration. Its `instance_id` is another one after a restart."""
        response = self._request("GET", "/server_info", params={"config_format": "json"})
        if response.status_code == 404:
            raise VLLMServerError(
                f"The vLLM server at {self.base_url} does not tell its configuration: it was started without "
                f"VLLM_SERVER_DEV_MODE=1. Start it with:\n{self.start_command}"
            )
        self.config, self.environment = self._read(response, "vllm_config"), self._read(response, "vllm_env")

    def _models(self) -> list[dict[str, Any]]:
        response = self._request("GET", "/v1/models")
        models = self._read(response, "data")
        if not isinstance(models, list) or not models or not all(isinstance(m, dict) and "id" in m for m in models):
            raise self._not_understood(response)
        return models

    def _load_adapter(self) -> None:
        """Load the adapter, unless the server has it."""
        if self.adapter_name in [card["id"] for card in self._models()]:
            return
        payload = {"lora_name": self.adapter_name, "lora_path": self.adapter_path}
        response = self._request("POST", "/v1/load_lora_adapter", json=payload)
        if response.status_code != 200:
            self._checked(self._request("GET", "/health"))  # a refusal is the answer of a server that is well
            raise VLLMServerError(
                f"The vLLM server at {self.base_url} cannot load the adapter {self.adapter_path} "
                f"({response.status_code}: {response.text[:500]}). It must see that directory: see vllm_adapter_dir."
            )


def in_parallel(action: Callable[[Any], Iterable[Any]], items: Sequence[Any], most: int) -> None:
    """
    Call `action` on every item, and on those that it gives while it goes on, up to `most` at a time, and raise what the
    first that failed raised. After a failure nothing more is begun. What it gives comes before other items: the server
    may still have a branch's prefix.

    The threads are daemons: an interrupt ends the program at once, not when the server has answered.
    """
    # Of what is under way: an item more, or that it is over, perhaps by an error
    outcomes: queue.SimpleQueue[list[Any] | Exception | None] = queue.SimpleQueue()
    todo, num_open = collections.deque(items), 0
    errors: list[Exception] = []

    def work(item: Any) -> None:
        try:
            for further in action(item):
                outcomes.put([further])
            outcomes.put(None)
        except Exception as error:
            outcomes.put(error)

    while num_open or (todo and not errors):
        while todo and not errors and num_open < most:
            threading.Thread(target=work, args=[todo.popleft()], daemon=True, name="fr3e-vllm-request").start()
            num_open += 1
        outcome = outcomes.get()
        if isinstance(outcome, list):
            todo.extendleft(outcome)
            continue
        num_open -= 1
        if outcome is not None:
            errors.append(outcome)
    for error in errors:
        if not isinstance(error, ServerFault):
            raise error
    if errors:
        raise errors[0]
