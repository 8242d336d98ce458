"""How good a policy is, on prompts that training never sees."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase
from trl import is_conversational

from ..trl_adapter.prompts import tokenize
from ..trl_adapter.tools import converse

if TYPE_CHECKING:
    from .own_task import OwnTask
    from .tasks import Task

HELDOUT_SEED = 2507  # whatever a run's seed: every run is measured on the same prompts, with the same random numbers


@dataclass
class Evaluation:
    """
    What a policy makes of P held-out prompts.

    Args:
        rewards (`list[list[float]]`):
            Rewards of the completions sampled of each prompt.
        num_distinct (`list[int]`):
            How many different completions have the highest reward among those of the prompt, for each prompt; 0 where
            that is 0. With rewards of 0 and 1, the distinct right ones.
        entropy (`float`):
            Mean entropy of the distributions that the sampled tokens were drawn from, in nats.
        completion_length (`float`):
            Mean length of the sampled completions, in tokens. What tools answer is not counted.
    """

    rewards: list[list[float]]
    num_distinct: list[int]
    entropy: float
    completion_length: float


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: "Task | OwnTask",
    heldout: Dataset,
    num_samples: int,
    batch_size: int,
    trainer: Any = None,
) -> Evaluation:
    """
    Measure a policy, and leave no trace in its training.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The policy.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer, which pads on the left.
        task ([`Task`] or [`OwnTask`]):
            Scores the completions.
        heldout (`Dataset`):
            Examples of the task.
        num_samples (`int`):
            Completions of each prompt at temperature 1.
        batch_size (`int`):
            Completions that are generated at once, at least.
        trainer ([`~trl.GRPOTrainer`], *optional*):
            The policy's trainer. For conversational prompts, which its chat template makes text of, and for a task with
            tools: they are called in its loop.
    """
    training = model.training
    model.eval()
    config = GenerationConfig(
        max_new_tokens=task.max_completion_length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(HELDOUT_SEED)
        if task.tools:
            sampled = _converse(trainer, task, heldout, num_samples, batch_size, config)
        else:
            sampled = _complete(model, tokenizer, task, heldout, num_samples, batch_size, config, trainer)
    model.train(training)
    starts = range(0, len(sampled.rewards), num_samples)
    rewards = [sampled.rewards[start : start + num_samples] for start in starts]
    texts = [sampled.texts[start : start + num_samples] for start in starts]
    return Evaluation(
        rewards=rewards,
        num_distinct=[_num_distinct(*of_prompt) for of_prompt in zip(rewards, texts, strict=True)],
        entropy=sampled.entropy_sum / sampled.num_tokens,
        completion_length=sampled.num_tokens / len(sampled.rewards),
    )


def _num_distinct(rewards: list[float], texts: list[str]) -> int:
    """Different texts of those with the highest reward, if that is above 0."""
    best = max(rewards)
    return len({text for reward, text in zip(rewards, texts, strict=True) if reward == best > 0})


@dataclass
class _Completions:
    rewards: list[float]
    texts: list[str]
    num_tokens: int = 0
    entropy_sum: float = 0.0


class _EntropyRecorder(LogitsProcessor):
    """
    Leaves the logits as they are, and keeps the entropy of each distribution that a token is drawn from.

    Kept logits would be a vocabulary for each token: 512 completions of 200 tokens, 62 GB for 152,000 words.
    """

    def __init__(self) -> None:
        self.entropies: list[torch.Tensor] = []  # of each step, in nats, one number for each completion

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.entropies.append(torch.distributions.Categorical(logits=scores.float()).entropy())
        return scores


def _complete(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: "Task | OwnTask",
    heldout: Dataset,
    num_samples: int,
    batch_size: int,
    config: GenerationConfig,
    trainer: Any,
) -> _Completions:
    """`num_samples` completions of each prompt, in order."""
    result = _Completions([], [])
    for examples in _batches(heldout, max(1, batch_size // num_samples)):
        prompts = examples["prompt"]
        prompt_ids = tokenizer(prompts).input_ids if trainer is None else tokenize(trainer, prompts)
        inputs = tokenizer.pad({"input_ids": prompt_ids}, return_tensors="pt").to(model.device)
        recorder = _EntropyRecorder()
        sequences = model.generate(
            **inputs, generation_config=config, num_return_sequences=num_samples, logits_processor=[recorder]
        )
        new_ids = sequences[:, inputs["input_ids"].shape[1] :]
        ended_before = (new_ids == tokenizer.eos_token_id).cumsum(1) - (new_ids == tokenizer.eos_token_id).int() > 0
        result.entropy_sum += torch.stack(recorder.entropies, dim=1)[~ended_before].sum().item()
        result.num_tokens += int((~ended_before).sum())
        texts = tokenizer.batch_decode(new_ids, skip_special_tokens=True)
        result.texts += texts
        conversational = is_conversational({"prompt": prompts[0]})
        result.rewards += task.reward(
            prompts=[prompt for prompt in prompts for _ in range(num_samples)],
            completions=[[{"role": "assistant", "content": text}] for text in texts] if conversational else texts,
            completion_ids=[ids[~gone].tolist() for ids, gone in zip(new_ids, ended_before, strict=True)],
            **_columns(examples, num_samples),
        )
    return result


def _converse(
    trainer: Any, task: "Task | OwnTask", heldout: Dataset, num_samples: int, batch_size: int, config: GenerationConfig
) -> _Completions:
    """The same in several turns, by TRL's own loop, whatever the trainer samples with when it trains."""
    settings = {
        "generation_config": config,
        "generation_kwargs": config.to_diff_dict(),
        "max_completion_length": task.max_completion_length,
        "max_tool_calling_iterations": task.max_tool_calling_iterations,
    }
    tools = {tool.__name__: tool for tool in trainer.tools}
    result = _Completions([], [])
    for examples in _batches(heldout, max(1, batch_size // num_samples)):
        prompts = [prompt for prompt in examples["prompt"] for _ in range(num_samples)]
        prompt_ids, completion_ids, is_own, completions = converse(trainer, prompts, tools, **settings)
        sequences = [torch.tensor(prompt + ids) for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
        own = [torch.tensor([0] * len(prompt) + mask) for prompt, mask in zip(prompt_ids, is_own, strict=True)]
        # What pads them comes behind, and is seen by none of their tokens
        logits = trainer.model(pad_sequence(sequences, batch_first=True).to(trainer.model.device)).logits[:, :-1]
        entropies = torch.distributions.Categorical(logits=logits.float()).entropy().cpu()
        sampled = pad_sequence(own, batch_first=True)[:, 1:].bool()
        result.entropy_sum += entropies[sampled].sum().item()
        result.num_tokens += int(sampled.sum())
        result.texts += map(str, completions)
        result.rewards += task.reward(completions=completions, **_columns(examples, num_samples))
    return result


def _columns(examples: dict[str, list[Any]], num_samples: int) -> dict[str, list[Any]]:
    """What the reward needs beside the completions of examples, for `num_samples` of each."""
    return {
        name: [value for value in values for _ in range(num_samples)]
        for name, values in examples.items()
        if name != "prompt"
    }


def _batches(examples: Dataset, size: int) -> Iterator[dict[str, list[Any]]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]
