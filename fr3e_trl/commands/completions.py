"""Completions of prompts from a model in this process, for evaluation."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase, TrainerState
from trl import is_conversational

from ..checks import NEUTRAL
from ..generation.decoding import contiguous_at_head


class Completion(NamedTuple):
    """A completion's tokens, including its end token, and whether it has one rather than reaching the length limit."""

    token_ids: list[int]
    is_finished: bool


def sampling_config(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> GenerationConfig:
    """
    Sample as in training, ignoring settings of the model's generation config that change the distribution, such as
    Qwen's `top_k` and `repetition_penalty`. At temperature 0, decode greedily.
    """
    own = model.generation_config
    ends = [own.eos_token_id] if isinstance(own.eos_token_id, int) else own.eos_token_id or []
    sampling = {"temperature": temperature, "top_k": 0, "top_p": top_p} if temperature else {}
    sampling |= {name: neutral for name, neutral in NEUTRAL.items() if getattr(own, name, None) is not None}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted({*ends, tokenizer.eos_token_id} - {None}),
        **sampling,
    )


def complete(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[list[int]],
    config: GenerationConfig,
    batch_size: int,
    seeds: Sequence[int] | None = None,
    recorder: LogitsProcessor | None = None,
) -> Iterator[list[Completion]]:
    """
    Sample a completion of each prompt, and yield them batch by batch.

    Args:
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`):
            The policy, and its tokenizer, which pads on the left.
        prompt_ids (`Sequence[list[int]]`):
            Tokens of each prompt, repeated for several completions of one.
        config (`GenerationConfig`), batch_size (`int`):
            How to sample, and how many completions at once.
        seeds (`Sequence[int]`, *optional*):
            A seed for each completion; a batch uses that of its first. If `None`, the random state is not reset.
        recorder (`LogitsProcessor`, *optional*):
            Receives the logits of each step.
    """
    ends = config.eos_token_id
    eos_token_ids = [ends] if isinstance(ends, int) else ends or []
    for start in range(0, len(prompt_ids), batch_size):
        if seeds is not None:
            torch.manual_seed(seeds[start])
        inputs = tokenizer.pad({"input_ids": list(prompt_ids[start : start + batch_size])}, return_tensors="pt")
        with torch.no_grad(), contiguous_at_head(model):
            sequences = model.generate(
                **inputs.to(model.device),
                generation_config=config,
                logits_processor=None if recorder is None else [recorder],
            )
        rows = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        yield [until_end(token_ids, eos_token_ids) for token_ids in rows]


def until_end(token_ids: list[int], eos_token_ids: Sequence[int]) -> Completion:
    """Cut a row after its first end token, if it has one. What follows is padding."""
    end = next((i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids), None)
    return Completion(token_ids[: None if end is None else end + 1], end is not None)


def texts_of(completions: Sequence[Completion], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each completion."""
    return tokenizer.batch_decode([completion.token_ids for completion in completions], skip_special_tokens=True)


def reward_arguments(
    examples: Sequence[dict[str, Any]], completions: Sequence[Completion], texts: Sequence[str]
) -> dict[str, Any]:
    """What TRL's trainers pass to a reward function, except that its logs are discarded."""
    conversational = is_conversational(examples[0])
    return {
        **columns_of(examples),
        "prompts": [example["prompt"] for example in examples],
        "completions": [[{"role": "assistant", "content": text}] if conversational else text for text in texts],
        "completion_ids": [completion.token_ids for completion in completions],
        "trainer_state": TrainerState(),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }


def columns_of(examples: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The columns of examples, except their prompts."""
    return {name: [example[name] for example in examples] for name in examples[0] if name != "prompt"}
