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
        num_samples (`int`):
            Completions sampled of each.
        num_right (`list[int]`):
            How many of them are right, for each prompt.
        greedy_right (`list[int]`):
            Whether the completion of likeliest tokens is right, for each prompt.
        entropy (`float`):
            Mean entropy of the distributions that the sampled tokens were drawn from, in nats.
        completion_length (`float`):
            Mean length of the sampled completions, in tokens.
    """

    num_samples: int
    num_right: list[int]
    greedy_right: list[int]
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
        greedy = _complete(model, tokenizer, task, heldout, 1, batch_size, do_sample=False)
        sampled = _complete(model, tokenizer, task, heldout, num_samples, batch_size, do_sample=True)
    model.train(training)
    right = torch.tensor(sampled.rewards).view(len(heldout), num_samples) > 0
    return Evaluation(
        num_samples=num_samples,
        num_right=right.sum(1).tolist(),
        greedy_right=[int(reward > 0) for reward in greedy.rewards],
        entropy=sampled.entropy_sum / sampled.num_tokens,
        completion_length=sampled.num_tokens / len(sampled.rewards),
    )


@dataclass
class _Completions:
    rewards: list[float]
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
    do_sample: bool,
) -> _Completions:
    """`num_samples` completions of each prompt, in order."""
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    config = GenerationConfig(
        max_new_tokens=task.max_completion_length,
        do_sample=do_sample,
        num_return_sequences=num_samples,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    result = _Completions([])
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
        result.rewards += task.reward(completions=completions, **columns)
    return result


def _batches(examples: Dataset, size: int) -> Iterator[dict[str, list[Any]]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]
