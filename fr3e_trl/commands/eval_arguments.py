"""Arguments of `fr3e eval`."""

# ruff: noqa: RUF009 (`option` makes a field)

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from .data import FR3EScriptArguments, option


@dataclass(kw_only=True)
class EvalArguments(FR3EScriptArguments):
    """Arguments of `fr3e eval`."""

    output_dir: str = option("outputs/eval", "Directory of the results.")
    num_samples: int | None = option(None, "Completions per prompt. If `None`, 8, or 1 at temperature 0.")
    pass_at: list[int] | None = option(
        None,
        "Values of k in pass@k and maj@k, up to `num_samples`. If `None`, 1, 2, 4 and so on, and `num_samples`.",
    )
    temperature: float = option(1.0, "Sampling temperature. 0 takes the most likely token.")
    top_p: float = option(1.0, "Probability mass of the most likely tokens to sample from.")
    max_completion_length: int = option(1024, "Maximum number of tokens of a completion.")
    answer_regex: str | None = option(
        None,
        "Regular expression for the answers that vote in maj@k. Its last match in a completion, or the first group of "
        "that, is the answer. If `None`, answers are those that math-verify reads if a reward function is math_reward, "
        "accuracy_reward or reasoning_accuracy_reward, and else the whole completions.",
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None,
        "Further arguments of the chat template, for example {'enable_thinking': false}. On the command line, as JSON.",
    )
    limit: int | None = option(None, "Number of examples to evaluate on, from the first. If `None`, all of the split.")
    seed: int = option(0, "Seed of sampling.")
    batch_size: int = option(64, "Completions generated at once, without a server.")
    trust_remote_code: bool = option(False, "Whether code from the model's repository may run.")
    vllm_server_base_url: str | None = option(
        None,
        "Address of a vLLM server with the model, for example 'http://localhost:8000'. If `model_name_or_path` is the "
        "directory of a LoRA adapter, the server loads it. If `None`, the model is loaded in this process.",
    )
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the server to be up.")
    vllm_request_timeout: float = option(1800.0, "Seconds that the server may take to answer a request.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_samples", "max_completion_length", "limit", "seed", "batch_size"):
            value, least = getattr(self, name), int(name != "seed")
            is_optional = name in ("num_samples", "limit")
            if not (type(value) is int and value >= least) and not (is_optional and value is None):
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be 0 or more, for example 1.0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, for example 0.95.")
        if self.num_samples is None:
            self.num_samples = 8 if self.temperature else 1
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"temperature=0 would give the same completion num_samples={self.num_samples} times. Set "
                "num_samples=1, or a temperature, for example 0.6."
            )
        if self.pass_at is None:
            self.pass_at = sorted({*(2**i for i in range(self.num_samples.bit_length())), self.num_samples})
        if not self.pass_at or not 1 <= min(self.pass_at) <= max(self.pass_at) <= self.num_samples:
            raise ValueError(f"pass_at={self.pass_at} must be from 1 to num_samples={self.num_samples}.")
        if isinstance(self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
            except ValueError as error:
                raise ValueError(f"chat_template_kwargs={self.chat_template_kwargs!r} is not JSON: {error}.") from None
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise ValueError(
                f"chat_template_kwargs={self.chat_template_kwargs!r} must be a mapping, for example "
                '{"enable_thinking": false}.'
            )
        try:
            re.compile(self.answer_regex or "")
        except re.error as error:
            raise ValueError(f"answer_regex={self.answer_regex!r} is not a regular expression: {error}.") from None
