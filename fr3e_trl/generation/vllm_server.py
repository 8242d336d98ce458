"""Client of vLLM's own server (`vllm serve`): retries requests after faults, and loads adapters from a directory."""

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

# Keys of each choice in a completion, with `return_token_ids`
CHOICE_KEYS = {"index", "finish_reason", "token_ids"}

MAX_FAULTS = 5  # consecutive faults before an error is raised
MAX_IN_FLIGHT = 2048  # requests, each with a thread
DEFAULT_MAX_NUM_SEQS = 512  # sequences decoded at once, if the server's configuration has no `max_num_seqs`
CONTROL_TIMEOUT = 120.0  # seconds for a request that generates nothing
RETRIED_STATUSES = (404, 408, 429)  # 404: a restarted server does not have the adapter yet


class VLLMServerError(RuntimeError):
    """The vLLM server cannot be used. The message says what to do."""


class ServerFault(Exception):
    """A request failed in a way that may be temporary."""


class Aborted(Exception):
    """The request was cancelled by [`VLLMServer.abort`]."""


class Connections:
    """Connections that another thread can cut, which makes the server abort their requests."""

    def __init__(self) -> None:
        self.are_cut = threading.Event()
        self.pool_classes = {"http": self._tracked(HTTPConnectionPool), "https": self._tracked(HTTPSConnectionPool)}
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()

    def cut(self) -> None:
        """Cut all open connections, and those that are opened later."""
        self.are_cut.set()
        with self._lock:
            for opened in self._open:
                _shut(opened)

    def _tracked(self, pool: Any) -> Any:
        """A subclass of `pool` whose connections are tracked here."""
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
    """Opens tracked connections."""

    def __init__(self, connections: Connections):
        self._pool_classes = connections.pool_classes
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pool_classes


def _shut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        opened.shutdown(socket.SHUT_RDWR)


class VLLMServer:
    """
    Client of a vLLM server.

    A request that fails because the server cannot be reached, takes too long, or reports an internal error is retried
    once the server is up, at most 4 times, with growing pauses. A streamed response continues where it was interrupted.
    A restarted server gets the adapter again.

    Args:
        base_url (`str`):
            Address, for example `"http://localhost:8000"`.
        start_command (`str`):
            Command that starts such a server, for error messages.
        up_timeout (`float`):
            Seconds to wait for the server to be up, initially and after a fault.
        request_timeout (`float`):
            Seconds to wait for the response to a completion request, or for the next part of a streamed one.

    Attributes:
        base_model (`str`):
            Name of the served model.
        config (`dict`):
            The server's `VllmConfig`, as JSON.

    Raises:
        VLLMServerError: The server is not up in time, or has no development endpoints.
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
        """A client of the same server and adapter, whose [`abort`] ends only its own requests."""
        client = copy.copy(self)
        client._connections = Connections()
        return client

    def abort(self) -> None:
        """End all requests in flight, here and on the server. Their callers get [`Aborted`]."""
        self._connections.cut()

    @property
    def num_in_flight(self) -> int:
        """Maximum number of concurrent requests: more than the server decodes at once, but limited by open files."""
        max_num_seqs = self.config.get("scheduler_config", {}).get("max_num_seqs", DEFAULT_MAX_NUM_SEQS)
        num_replicas = self.config.get("parallel_config", {}).get("data_parallel_size", 1)
        max_open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(max_num_seqs * num_replicas * 5 // 4 + 1, max_open_files // 2, MAX_IN_FLIGHT)

    @property
    def model(self) -> str:
        """The model name in requests: the adapter's, or the served model's."""
        return self.adapter_name or self.base_model

    def get_server_info(self) -> dict[str, Any]:
        """The server's configuration, under the name that TRL uses."""
        return self.config

    def wait_until_up(self) -> None:
        """
        Wait for the server to respond.

        Raises:
            VLLMServerError: It does not respond within `up_timeout` seconds.
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
                        f"The vLLM server at {self.base_url} cannot be reached ({fault}) after waiting for "
                        f"{self.up_timeout:.0f} s (vllm_server_timeout). Start one with:\n{self.start_command}"
                    ) from fault
                if now - last_report >= 15:
                    last_report = now
                    logger.warning("Waiting for the vLLM server at %s: %.0f s", self.base_url, now - start)
                self._connections.are_cut.wait(1)

    def load_adapter(self, name: str, path: Path) -> None:
        """
        Load the LoRA adapter from a directory that the server can read, and use it in place of the last one.

        Each adapter needs its own name. If one is reloaded under the same name with vLLM's `load_inplace`, the prefix
        cache keeps the states that were computed before (vllm-project/vllm#42125), and later requests read the adapter
        from disk again (#41482), so that the engine dies when the directory is gone.

        Raises:
            VLLMServerError: The server refuses it.
        """
        self.unload_adapter()
        self.adapter_name, self.adapter_path = name, str(path)
        try:
            self._retry(self._load_adapter)
        except VLLMServerError:
            self.adapter_name = self.adapter_path = None  # the merged model may be sent instead
            raise

    def expect_no_restart(self) -> None:
        """Treat a restart as an error from now on, because it would lose weights that cannot be loaded again."""
        self._retry(self._read_config)
        self._instance_with_weights = self.config["instance_id"]

    def unload_adapter(self) -> None:
        """Unload the adapter, if there is one and the server responds."""
        if self.adapter_name is None:
            return
        with contextlib.suppress(requests.RequestException):
            requests.post(f"{self.base_url}/v1/unload_lora_adapter", json={"lora_name": self.adapter_name}, timeout=5)

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text on the server, without adding special tokens."""
        payload = {"model": self.base_model, "prompt": text, "add_special_tokens": False}
        return self._retry(lambda: self._read(self._request("POST", "/tokenize", json=payload), "tokens"))

    def prefix_cache_counters(self) -> tuple[float, float]:
        """Tokens looked up in the prefix cache since the server started, and the number of hits."""
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
        Send requests for completions concurrently.

        Args:
            payloads (`Sequence[dict]`):
                Bodies for `/v1/completions`, one prompt of token ids each. The model name is added. With
                `"stream": True` and a single sample, the response arrives in parts with the new tokens.
            follow (`Callable`, *optional*):
                Called with the index of each request and the result of `read`, one call at a time, as soon as that is
                available. Returns further payloads, which are sent while others are in flight.
            read (`Callable`, *optional*):
                Called with the index of each request and its response or a part of it, whose choices are in the order
                of their `index`, by several threads concurrently. Only its result is kept, because a response with
                log-probs of 4,096 tokens takes 3 MB.

        Returns:
            `list`: The result of `read` for each request, or for the last part of its response, followed by those for
            further payloads. By default, the response.

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
        """As [`~trl.generation.vllm_client.VLLMClient.generate`], for TRL's own generation."""
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
        """The response to a payload, or the parts of a streamed one. After each part the payload requests the rest."""
        payload = payloads[i]
        is_streamed = payload.get("stream", False)
        body = {**payload, "model": self.model, "return_token_ids": True}
        path = "/v1/completions"
        response = self._request("POST", path, timeout=self.request_timeout, json=body, stream=is_streamed)
        if not is_streamed:
            yield self._completion(response, self._read(response, "choices"))
            return
        with contextlib.closing(self._checked(response)):
            for event in self._events(response):
                if "error" in event:
                    raise ServerFault(f"{event['error']} at {path}")
                part = self._completion(response, event.get("choices"))
                (choice,) = part["choices"]
                payload = {**payload, "prompt": payload["prompt"] + choice["token_ids"]}
                for name in payload.keys() & {"max_tokens", "min_tokens"}:
                    payload[name] = max(0, payload[name] - len(choice["token_ids"]))
                payloads[i] = payload
                yield part
                if choice["finish_reason"] is not None:
                    return
        raise ServerFault(f"the response to {path} ended too early")

    def _events(self, response: requests.Response) -> Iterator[dict[str, Any]]:
        """The events of a streamed response as they arrive."""
        try:
            for line in response.iter_lines(chunk_size=None):
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))
        except (requests.RequestException, ValueError) as error:
            raise ServerFault(f"{type(error).__name__} in the response to {response.request.path_url}") from error

    def _completion(self, response: requests.Response, choices: Any) -> dict[str, Any]:
        """Validate and sort the choices of a completion."""
        if not choices or not all(isinstance(choice, dict) and choice.keys() >= CHOICE_KEYS for choice in choices):
            raise self._unexpected_response(response)
        if any(choice["finish_reason"] == "abort" for choice in choices):
            raise ServerFault("the server aborted the request")
        return {"choices": sorted(choices, key=lambda choice: choice["index"])}

    def _request(self, method: str, path: str, timeout: float = CONTROL_TIMEOUT, **kwargs: Any) -> requests.Response:
        if self._connections.are_cut.is_set():
            raise Aborted
        try:
            # A new session, because the server may close a kept connection just when it is reused
            with requests.Session() as session:
                adapter = _Adapter(self._connections)
                session.mount("http://", adapter)
                session.mount("https://", adapter)
                return session.request(method, self.base_url + path, timeout=(10, timeout), **kwargs)
        except requests.Timeout as error:
            raise ServerFault(f"no response to {path} within {timeout:.0f} s") from error
        except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema):
            raise VLLMServerError(
                f"vllm_server_base_url={self.base_url!r} is not a URL. It must be like 'http://localhost:8000'."
            ) from None
        except requests.RequestException as error:
            raise ServerFault(f"{type(error).__name__} at {path}") from error

    def _checked(self, response: requests.Response) -> requests.Response:
        if response.status_code == 200:
            return response
        detail = f"{response.status_code} at {response.request.path_url}: {response.text[:500]}"
        if response.status_code >= 500 or response.status_code in RETRIED_STATUSES:
            raise ServerFault(detail)
        raise VLLMServerError(f"The vLLM server at {self.base_url} refused a request: {detail}")

    def _read(self, response: requests.Response, name: str) -> Any:
        """A value in the JSON of a response."""
        try:
            return self._checked(response).json()[name]
        except (KeyError, TypeError, ValueError) as error:
            raise self._unexpected_response(response) from error

    def _unexpected_response(self, response: requests.Response) -> VLLMServerError:
        return VLLMServerError(
            f"The server at {self.base_url} responded to {response.request.path_url} with {response.text[:200]!r}, "
            "which no supported version of vLLM does. Is another service running at this address?"
        )

    def _retry(self, action: Callable[[], T]) -> T:
        """Call `action` until it succeeds, up to `MAX_FAULTS` times."""
        for attempt in range(1, MAX_FAULTS + 1):
            try:
                return action()
            except ServerFault as error:
                fault = error
            if self._connections.are_cut.is_set():
                raise Aborted
            if attempt < MAX_FAULTS:
                logger.warning("Fault %d of the vLLM server at %s: %s", attempt, self.base_url, fault)
                self._connections.are_cut.wait(2**attempt)
                self.wait_until_up()
        raise VLLMServerError(
            f"The vLLM server at {self.base_url} failed {MAX_FAULTS} times in a row, the last time with: {fault}. See "
            f"its log for the cause. If it hangs, restart it with:\n{self.start_command}"
        ) from fault

    # Weights

    def _check_weights(self) -> None:
        """Ensure that the server has the latest weights, even if it was restarted."""
        if self.adapter_name is not None:
            self._load_adapter()
        elif self._instance_with_weights is not None:
            self._read_config()
            if self.config["instance_id"] != self._instance_with_weights:
                raise VLLMServerError(
                    f"The vLLM server at {self.base_url} was restarted, and has lost the trained weights. Resume "
                    "training from the last checkpoint with trainer.train(resume_from_checkpoint=True)."
                )

    def _read_config(self) -> None:
        """Read the server's configuration, whose `instance_id` changes with each restart."""
        response = self._request("GET", "/server_info", params={"config_format": "json"})
        if response.status_code == 404:
            raise VLLMServerError(
                f"The vLLM server at {self.base_url} does not provide its configuration because it was started without "
                f"VLLM_SERVER_DEV_MODE=1. Start it with:\n{self.start_command}"
            )
        self.config, self.environment = self._read(response, "vllm_config"), self._read(response, "vllm_env")

    def _models(self) -> list[dict[str, Any]]:
        response = self._request("GET", "/v1/models")
        models = self._read(response, "data")
        if not isinstance(models, list) or not models or not all(isinstance(m, dict) and "id" in m for m in models):
            raise self._unexpected_response(response)
        return models

    def _load_adapter(self) -> None:
        """Load the adapter, unless the server has it already."""
        if self.adapter_name in [card["id"] for card in self._models()]:
            return
        payload = {"lora_name": self.adapter_name, "lora_path": self.adapter_path}
        response = self._request("POST", "/v1/load_lora_adapter", json=payload)
        if response.status_code != 200:
            self._checked(self._request("GET", "/health"))  # only a healthy server can refuse an adapter
            raise VLLMServerError(
                f"The vLLM server at {self.base_url} cannot load the adapter {self.adapter_path} "
                f"({response.status_code}: {response.text[:500]}). The server must be able to read that directory: see "
                "vllm_adapter_dir."
            )


def in_parallel(action: Callable[[Any], Iterable[Any]], items: Sequence[Any], limit: int) -> None:
    """
    Call `action` on every item and on each item that it yields, in up to `limit` threads at once.

    Yielded items come before others, because the server may still have a branch's prefix in its cache. After a failure
    no more calls are started, and the first error is raised once those in progress end. The threads are daemons, so
    that an interrupt ends the program without waiting for the server.
    """
    # A list with a yielded item, `None` at the end of a call, or its error
    outcomes: queue.SimpleQueue[list[Any] | Exception | None] = queue.SimpleQueue()
    todo, num_running = collections.deque(items), 0
    errors: list[Exception] = []

    def work(item: Any) -> None:
        try:
            for new_item in action(item):
                outcomes.put([new_item])
            outcomes.put(None)
        except Exception as error:
            outcomes.put(error)

    while num_running or (todo and not errors):
        while todo and not errors and num_running < limit:
            threading.Thread(target=work, args=[todo.popleft()], daemon=True, name="fr3e-vllm-request").start()
            num_running += 1
        outcome = outcomes.get()
        if isinstance(outcome, list):
            todo.extendleft(outcome)
            continue
        num_running -= 1
        if outcome is not None:
            errors.append(outcome)
    for error in errors:
        if not isinstance(error, ServerFault):
            raise error
    if errors:
        raise errors[0]
