"""How good a policy is, on prompts that training never sees."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
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
            Mean length of the sampled completions, in tokens.
    """

    rewards: list[list[float]]
    num_distinct: list[int]
    entropy: float
    completion_length: float


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: "Task",
    heldout: Dataset,
    num_samples: int,
    batch_size: int,
) -> Evaluation:
    """
    Measure a policy, and leave no trace in its training.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The policy.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer, which pads on the left.
        task ([`Task`]):
            Scores the completions.
        heldout (`Dataset`):
            Examples of the task.
        num_samples (`int`):
            Completions of each prompt at temperature 1.
        batch_size (`int`):
            Completions that are generated at once, at least.
    """
    training = model.training
    model.eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(HELDOUT_SEED)
        sampled = _complete(model, tokenizer, task, heldout, num_samples, batch_size)
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
    task: "Task",
    heldout: Dataset,
    num_samples: int,
    batch_size: int,
) -> _Completions:
    """`num_samples` completions of each prompt, in order."""
    config = GenerationConfig(
        max_new_tokens=task.max_completion_length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=num_samples,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    result = _Completions([], [])
    for examples in _batches(heldout, max(1, batch_size // num_samples)):
        inputs = tokenizer(examples["prompt"], padding=True, return_tensors="pt").to(model.device)
        recorder = _EntropyRecorder()
        sequences = model.generate(**inputs, generation_config=config, logits_processor=[recorder])
        new_ids = sequences[:, inputs["input_ids"].shape[1] :]
        ended_before = (new_ids == tokenizer.eos_token_id).cumsum(1) - (new_ids == tokenizer.eos_token_id).int() > 0
        result.entropy_sum += torch.stack(recorder.entropies, dim=1)[~ended_before].sum().item()
        result.num_tokens += int((~ended_before).sum())
        columns = {
            name: [value for value in values for _ in range(num_samples)]
            for name, values in examples.items()
            if name != "prompt"
        }
        completions = tokenizer.batch_decode(new_ids, skip_special_tokens=True)
        result.texts += completions
        result.rewards += task.reward(completions=completions, **columns)
    return result


def _batches(examples: Dataset, size: int) -> Iterator[dict[str, list[Any]]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]
