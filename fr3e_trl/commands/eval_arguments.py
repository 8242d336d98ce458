"""Arguments of `fr3e eval`."""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from .counts import check_counts
from .data import FR3EScriptArguments


@dataclass(kw_only=True)
class EvalArguments(FR3EScriptArguments):
    """Arguments of `fr3e eval`. Their `help` says what each does."""

    output_dir: str = field(default="outputs/eval", metadata={"help": "Directory of the results."})
    num_samples: int | None = field(
        default=None, metadata={"help": "Completions of each prompt. If `None`, 8, or 1 at temperature 0."}
    )
    pass_at: list[int] | None = field(
        default=None,
        metadata={
            "help": "Values of k in pass@k and maj@k, up to `num_samples`. If `None`, 1, 2, 4 and so on, and "
            "`num_samples`."
        },
    )
    temperature: float = field(
        default=1.0, metadata={"help": "Temperature of sampling. 0 takes the most likely token."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Share of the most likely tokens that is sampled from."})
    max_completion_length: int = field(default=1024, metadata={"help": "Tokens of the longest completion."})
    answer_regex: str | None = field(
        default=None,
        metadata={
            "help": "Pattern whose last match in a completion, or its first group if it has one, is the answer by "
            "which completions vote in maj@k, equal by their text. If `None`, what math-verify reads, equal by "
            "`verify`, if a reward function is math_reward, accuracy_reward or reasoning_accuracy_reward; else the "
            "whole text."
        },
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What the chat template is told beside the messages, for example {'enable_thinking': false}. On "
            "the command line, in JSON."
        },
    )
    limit: int | None = field(
        default=None, metadata={"help": "Examples to evaluate on, the first of the split. If `None`, all of them."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of sampling."})
    batch_size: int = field(default=64, metadata={"help": "Completions that are generated at once, without a server."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code of the model's repository may be run."}
    )
    vllm_server_base_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of a vLLM server that serves the model, for example 'http://localhost:8000'. If "
            "`model_name_or_path` is the directory of a LoRA adapter, the server is asked to load it. If `None`, the "
            "model is loaded here."
        },
    )
    vllm_server_timeout: float = field(default=240.0, metadata={"help": "Seconds to wait for the server to be up."})
    vllm_request_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds that the server may take to answer a request."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, num_samples=1, max_completion_length=1, limit=1, seed=0, batch_size=1)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be 0 or more, for example 1.0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, for example 0.95.")
        if self.num_samples is None:
            self.num_samples = 8 if self.temperature else 1
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"temperature=0 samples the same completion num_samples={self.num_samples} times: set num_samples=1, "
                "or a temperature, for example 0.6."
            )
        if self.pass_at is None:
            powers = [2**i for i in range(self.num_samples.bit_length())]
            self.pass_at = sorted({*powers, self.num_samples})
        if not self.pass_at or not 1 <= min(self.pass_at) <= max(self.pass_at) <= self.num_samples:
            raise ValueError(f"pass_at={self.pass_at} must be from 1 to num_samples={self.num_samples}.")
        if isinstance(self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
            except ValueError as error:
                raise ValueError(f"chat_template_kwargs={self.chat_template_kwargs!r} is no JSON: {error}.") from None
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise ValueError(
                f"chat_template_kwargs={self.chat_template_kwargs!r} must be a mapping, for example "
                '{"enable_thinking": false}.'
            )
        if self.answer_regex is not None:
            try:
                re.compile(self.answer_regex)
            except re.error as error:
                raise ValueError(f"answer_regex={self.answer_regex!r} is no regular expression: {error}.") from None
