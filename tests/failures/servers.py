"""vLLM servers that are not there, or something else."""

import json

from .case import EVAL, TRAIN, Case

SERVED = f"{EVAL} --vllm_server_base_url={{url}} --vllm_server_timeout=1"
TRAINED = f"{TRAIN} --use_vllm=true --vllm_mode=server --vllm_server_base_url={{url}} --vllm_server_timeout=1"
UP = {"/health": (200, "")}
MODELS = UP | {"/v1/models": (200, json.dumps({"data": [{"id": "model"}]}))}
PAGE = "<html>Welcome to nginx</html>"


def answers(name: str, server: dict, *says: str) -> Case:
    return Case(name, SERVED, ("vllm_server_base_url='http://127.0.0.1", *says), server=server)


def completed(name: str, body: str, *says: str, status: int = 200) -> Case:
    return answers(name, MODELS | {"/v1/completions": (status, body)}, *says)


def chosen(name: str, *says: str, **choice) -> Case:
    return completed(name, json.dumps({"choices": [choice]}), "/v1/completions", *says)


CASES = [
    Case("nobody", SERVED, ("http://127.0.0.1:9 cannot be reached", "1 s", "vllm serve model")),
    Case("no address", f"{EVAL} --vllm_server_base_url=localhost", ("'localhost'", "http://localhost:8000")),
    Case("no scheme", f"{EVAL} --vllm_server_base_url=ftp://x --vllm_server_timeout=1", ("'ftp://x'",)),
    answers("page for health", {"/health": (404, PAGE)}, "404 at /health", "nginx"),
    answers("refusal of health", {"/health": (401, "no key")}, "401 at /health", "no key"),
    answers("ill", {"/health": (503, "loading")}, "503 at /health", "loading"),
    answers("page for models", UP | {"/v1/models": (200, PAGE)}, "/v1/models", "nginx", "another service"),
    answers("no models", UP | {"/v1/models": (200, '{"data": []}')}, "/v1/models", "another service"),
    answers("null for models", UP | {"/v1/models": (200, "null")}, "/v1/models", "null"),
    answers("list for models", UP | {"/v1/models": (200, "[]")}, "/v1/models", "another service"),
    answers("models without a name", UP | {"/v1/models": (200, '{"data": [{}]}')}, "/v1/models"),
    answers("refused models", UP | {"/v1/models": (401, "no key")}, "401 at /v1/models", "no key"),
    completed("page for a completion", PAGE, "/v1/completions", "nginx"),
    completed("cut completion", '{"choices": [{', "/v1/completions"),
    completed("null for a completion", "null", "/v1/completions", "null"),
    completed("no choices", "{}", "/v1/completions", "another service"),
    completed("empty choices", '{"choices": []}', "/v1/completions"),
    chosen("no tokens", "version", index=0, finish_reason="stop", text="2"),
    chosen("no reason", index=0, token_ids=[1]),
    chosen("no index", finish_reason="stop", token_ids=[1]),
    completed("too long a prompt", "maximum context length", "maximum context length", status=400),
    Case("nobody to train with", TRAINED, ("vLLM",)),
]
