"""
A stand-in for a vLLM server, that takes stated times and computes nothing: it shows the order of events without noise.

It answers what `fr3e_trl` asks a server, with adapters. Each token comes from a distribution that follows from the
tokens before it alone, so that what is drawn does not depend on when it is asked for.
"""

import json
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np


@dataclass
class StandIn:
    """
    Args:
        tokenize (`Callable`):
            The policy's tokenizer, without special tokens.
        vocabulary (`int`):
            Tokens with an id below it are drawn, nearly alike: a fresh policy is nearly uniform too.
        end (`int`):
            Token that ends a completion. It is drawn as the others are.
        seconds_per_token (`float`):
            Of every request, however many there are.

    Attributes:
        url (`str`):
            Its address, once it is entered as a context.
        events (`list[tuple[float, str, str]]`):
            What happened: when, "begin", "end", "aborted" (a request), "load" or "unload" (an adapter), and the name of
            the adapter.
        num_in_flight (`int`):
            Requests that are being answered.
        is_dead (`bool`):
            Set it to have all requests fail from then on, those that are under way too.
    """

    tokenize: Callable[[str], list[int]]
    vocabulary: int
    end: int
    seconds_per_token: float = 0.0
    events: list[tuple[float, str, str]] = field(default_factory=list)
    num_in_flight: int = 0
    is_dead: bool = False
    adapters: list[str] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)

    def __enter__(self) -> "StandIn":
        stand_in = self

        class Handler(_Handler):
            server_of = stand_in

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def note(self, what: str, adapter: str) -> None:
        with self._lock:
            self.events.append((time.monotonic(), what, adapter))
            self.num_in_flight += {"begin": 1, "end": -1, "aborted": -1}.get(what, 0)

    def draw(self, prefix: list[int], *seed: int) -> tuple[int, np.ndarray]:
        """The next token after a prefix, and the log-probs of all."""
        # Of some tokens more is known than of others, so that entropies differ
        noise = np.random.default_rng([7, *prefix])
        logits = noise.uniform(0, 2) * noise.uniform(-1, 1, self.vocabulary)
        logprobs = logits - np.log(np.exp(logits).sum())
        return int(np.random.default_rng([*seed, *prefix]).choice(self.vocabulary, p=np.exp(logprobs))), logprobs


class _Handler(BaseHTTPRequestHandler):
    server_of: StandIn
    protocol_version = "HTTP/1.0"  # a connection for each request

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        stand_in = self.server_of
        models = [{"id": name} for name in ("base", *stand_in.adapters)]
        config = {
            "instance_id": "1",
            "model_config": {"logprobs_mode": "processed_logprobs", "max_logprobs": 20, "max_model_len": 4096},
            "lora_config": {"max_lora_rank": 64},
            "parallel_config": {"data_parallel_size": 1},
            "scheduler_config": {"max_num_seqs": 256},
        }
        answers: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": models},
            "/server_info": {"vllm_config": config, "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True}},
        }
        self._answer(answers.get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        stand_in = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._answer({"tokens": stand_in.tokenize(body["prompt"])})
        elif self.path == "/v1/load_lora_adapter":
            stand_in.adapters.append(body["lora_name"])
            stand_in.note("load", body["lora_name"])
            self._answer({})
        elif self.path == "/v1/unload_lora_adapter":
            stand_in.adapters.remove(body["lora_name"])
            stand_in.note("unload", body["lora_name"])
            self._answer({})
        elif body["model"] not in ("base", *stand_in.adapters):
            self._answer(None)
        else:
            stand_in.note("begin", body["model"])
            is_done = False
            try:
                is_done = self._complete(body)
            except OSError:  # the client has gone
                pass
            finally:
                stand_in.note("end" if is_done else "aborted", body["model"])

    def _answer(self, answer: dict[str, Any] | None) -> None:
        self.send_response(500 if self.server_of.is_dead else 404 if answer is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer or {}).encode())

    def _complete(self, body: dict[str, Any]) -> bool:
        """Answer with samples. Returns whether someone still listens at the end."""
        samples = [self._sample(body, number) for number in range(body.get("n", 1))]
        if body.get("stream"):
            self.send_response(200)
            self.end_headers()
            (parts,) = samples
            for part in parts:
                if self._pause(len(part["token_ids"])):
                    return False
                self.wfile.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
            return True
        choices = []
        for index, parts in enumerate(samples):
            (choice,) = parts  # what is not streamed comes in one
            choices.append(choice | {"index": index})
        if self._pause(max(len(choice["token_ids"]) for choice in choices)):
            return False
        self._answer({"choices": choices})
        return True

    def _pause(self, num_tokens: int) -> bool:
        """Take the time of some tokens. Returns whether the client has gone, or the server died."""
        seconds = num_tokens * self.server_of.seconds_per_token
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            readable, _, _ = select.select([self.connection], [], [], min(max(left, 0), 0.01))
            if readable or self.server_of.is_dead:  # of a client that waits there is nothing to read but its end
                return True
            if left <= 0:
                return False

    def _sample(self, body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
        """A sample in parts."""
        seed = number, len(body["prompt"])  # a branch is not the rest of its base trajectory again
        prefix, size = list(body["prompt"]), body.get("stream_interval") or body["max_tokens"]
        ends = {self.server_of.end, *body.get("stop_token_ids", [])}
        num_left, reason = body["max_tokens"], None
        while reason is None:
            part: dict[str, Any] = {"index": 0, "token_ids": [], "logprobs": {"token_logprobs": [], "top_logprobs": []}}
            while reason is None and len(part["token_ids"]) < size:
                token, logprobs = self.server_of.draw(prefix, *seed)
                prefix.append(token)
                num_left -= 1
                part["token_ids"].append(token)
                part["logprobs"]["token_logprobs"].append(logprobs[token])
                top = {*np.argsort(-logprobs)[: body["logprobs"]].tolist(), token}
                part["logprobs"]["top_logprobs"].append({f"token_id:{i}": logprobs[i] for i in top})
                reason = "stop" if token in ends else "length" if num_left == 0 else None
            yield part | {"finish_reason": reason}
