"""The completions of `fr3e eval`, from a model that is loaded in this process, or from a vLLM server."""

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl import ModelConfig, get_quantization_config

from ..generation.vllm_server import VLLMServer, VLLMServerError
from .completions import Completion, complete, sampling_config
from .data import model_argument
from .eval_arguments import EvalArguments
from .outputs import read_object
from .usage import usage_errors

logger = logging.getLogger(__name__)

# A completion by the number of its problem, and its number among that problem's completions
Key = tuple[int, int]

# From the completions that are wanted, and the tokens of all prompts, to the completions as they come
Batch = tuple[list[Key], list[Completion]]
EvalSampler = Callable[[list[Key], list[list[int]]], Iterator[Batch]]


def local_sampler(args: EvalArguments, model_args: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> EvalSampler:
    """Completions from a model that is loaded here, using transformers' `generate`."""
    with usage_errors(model_argument(model_args), "Use the directory or the id of a model or an adapter.", OSError):
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(model_args.model_name_or_path),
            revision=model_args.model_revision,
            attn_implementation=model_args.attn_implementation,
            dtype=model_args.dtype,
            quantization_config=get_quantization_config(model_args),
            trust_remote_code=args.trust_remote_code,
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = model.eval() if get_quantization_config(model_args) else model.to(device).eval()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    config = sampling_config(model, tokenizer, args.max_completion_length, args.temperature, args.top_p)

    def sample(missing: list[Key], prompt_ids: list[list[int]]) -> Iterator[Batch]:
        seeds = [seed_of(args.seed, *key) for key in missing]
        of_missing = [prompt_ids[problem] for problem, _ in missing]
        done = 0
        for batch in complete(model, tokenizer, of_missing, config, args.batch_size, seeds):
            yield missing[done : done + len(batch)], batch
            done += len(batch)

    return sample


def seed_of(seed: int, problem: int, sample: int) -> int:
    """A seed of its own for each completion, whatever was sampled before it."""
    return (seed * 1_000_003 + problem) * 1009 + sample


class _AnyServer(VLLMServer):
    """A server whose configuration is not read, because only completions are needed."""

    def _read_config(self) -> None:
        self.config = self.environment = {}


def server_sampler(args: EvalArguments, model_args: ModelConfig) -> EvalSampler:
    """Completions from a vLLM server, using its OpenAI-compatible API. All requests are sent at once."""
    directory = Path(str(model_args.model_name_or_path)).resolve()
    adapter = directory / "adapter_config.json"
    argument = f"vllm_server_base_url={args.vllm_server_base_url!r}"
    model = str(model_args.model_name_or_path)
    with usage_errors(argument, "Leave it out to load the model here.", VLLMServerError):
        url, timeouts = args.vllm_server_base_url or "", (args.vllm_server_timeout, args.vllm_request_timeout)
        server = _AnyServer(url, f"vllm serve {model}", *timeouts)
        if adapter.is_file():
            server.load_adapter(f"fr3e-eval-{uuid.uuid4().hex[:8]}", directory)
    name = read_object(adapter).get("base_model_name_or_path", model) if adapter.is_file() else model
    if Path(name).resolve() not in {Path(served).resolve() for served in (server.base_model, server.base_root)}:
        logger.warning(
            "The vLLM server at %s serves %r, but %r is to be evaluated. Unless these are two names of one model, "
            "start the server with the latter.",
            server.base_url,
            server.base_model,
            name,
        )
    sampling = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        # A server takes what is left out from the model's generation config, such as Qwen's
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }

    def sample(missing: list[Key], prompt_ids: list[list[int]]) -> Iterator[Batch]:
        payloads = [{**sampling, "prompt": prompt_ids[key[0]], "seed": seed_of(args.seed, *key)} for key in missing]
        arrived: queue.SimpleQueue[Batch | Exception | None] = queue.SimpleQueue()

        def take(i: int, response: dict[str, Any]) -> list[dict[str, Any]]:
            (choice,) = response["choices"]
            arrived.put(([missing[i]], [Completion(choice["token_ids"], choice["finish_reason"] == "stop")]))
            return []

        def send() -> None:
            try:
                server.complete(payloads, take)
                arrived.put(None)
            except Exception as error:
                arrived.put(error)

        threading.Thread(target=send, daemon=True, name="fr3e-eval").start()
        try:
            while (batch := arrived.get()) is not None:
                if isinstance(batch, Exception):
                    with usage_errors(argument, "The same command goes on from what was sampled.", VLLMServerError):
                        raise batch
                yield batch
        finally:
            if adapter.is_file():
                server.unload_adapter()

    return sample
