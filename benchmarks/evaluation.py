"""How good a policy is, on prompts that training never sees."""

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor

from fr3e_trl.commands.completions import columns_of, complete, reward_arguments, sampling_config, texts_of
from fr3e_trl.commands.usage import UsageError
from fr3e_trl.compat import TypedTrainer, tokenizer_of
from fr3e_trl.rollout import tokenized

from .own_task import OwnTask
from .tasks import HELDOUT_SEED, Task


@dataclass
class Evaluation:
    """
    What a policy makes of P held-out prompts.

    A prompt is left out if one of its completions has no score. Of each of the others: the rewards of its completions.
    The entropy is the mean over sampled tokens of the distributions that they were drawn from, in
    nats, and the length is in sampled tokens: what tools answer is not counted.
    """

    rewards: list[list[float]]
    entropy: float
    completion_length: float
    num_unscored: int = 0


def evaluate(
    trainer: TypedTrainer, task: Task | OwnTask, heldout: Dataset, num_samples: int, batch_size: int
) -> Evaluation:
    """
    Measure the policy of a [`~trl.GRPOTrainer`], and leave no trace in its training.

    Of each held-out example, `num_samples` completions are sampled at temperature 1, `batch_size` at once, at least.
    """
    model, tokenizer = trainer.model, tokenizer_of(trainer)
    training = model.training
    model.eval()
    config = sampling_config(model, tokenizer, task.max_completion_length)
    examples = [example for example in heldout for _ in range(num_samples)]
    batch_size = max(1, batch_size // num_samples) * num_samples  # those of a prompt are in one batch
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(HELDOUT_SEED)
        if task.tools:
            sampled = _converse(trainer, task, examples, batch_size, config)
        else:
            sampled = _complete(trainer, task, examples, batch_size, config)
    model.train(training)
    starts = range(0, len(sampled.rewards), num_samples)
    rewards = [sampled.rewards[start : start + num_samples] for start in starts]
    scored = [i for i, prompt_rewards in enumerate(rewards) if None not in prompt_rewards]
    if not scored:
        raise UsageError(
            f"The reward functions returned no score (None or NaN) for a completion of each of the {len(rewards)} "
            "held-out prompts, so nothing can be compared. Fix the reward functions, or the solutions in the dataset."
        )
    return Evaluation(
        rewards=[rewards[i] for i in scored],
        entropy=sampled.entropy_sum / sampled.num_tokens,
        completion_length=sampled.num_tokens / len(sampled.rewards),
        num_unscored=sampled.rewards.count(None),
    )


@dataclass
class _Completions:
    rewards: list[Any]  # numbers, or `None`
    num_tokens: int = 0
    entropy_sum: float = 0.0


class _EntropyRecorder(LogitsProcessor):
    """
    Leaves the logits as they are, and keeps the entropy of each distribution that a token is drawn from.

    Kept logits would be a vocabulary for each token: 512 completions of 200 tokens, 62 GB for 152,000 words.
    """

    def __init__(self) -> None:
        self.entropies: list[torch.Tensor] = []  # of each step, in nats, a number for each completion

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.entropies.append(torch.distributions.Categorical(logits=scores.float()).entropy())
        return scores

    def take_sum(self, lengths: list[int]) -> float:
        """The sum over the tokens of a batch, whose completions are so long. Afterwards nothing is kept."""
        entropies = torch.stack(self.entropies, dim=1)
        ends = torch.tensor(lengths, device=entropies.device)
        self.entropies = []
        return entropies[torch.arange(entropies.shape[1], device=entropies.device) < ends[:, None]].sum().item()


def _complete(
    trainer: TypedTrainer,
    task: Task | OwnTask,
    examples: list[dict[str, Any]],
    batch_size: int,
    config: GenerationConfig,
) -> _Completions:
    """A completion of each example, in order."""
    model, tokenizer = trainer.model, tokenizer_of(trainer)
    prompt_ids = tokenized(trainer, [example["prompt"] for example in examples])
    recorder = _EntropyRecorder()
    result = _Completions([])
    for completions in complete(model, tokenizer, prompt_ids, config, batch_size, recorder=recorder):
        result.entropy_sum += recorder.take_sum([len(completion.token_ids) for completion in completions])
        result.num_tokens += sum(len(completion.token_ids) for completion in completions)
        texts = texts_of(completions, tokenizer)
        done = len(result.rewards)
        result.rewards += task.reward(**reward_arguments(examples[done : done + len(texts)], completions, texts))
    return result


def _converse(
    trainer: TypedTrainer,
    task: Task | OwnTask,
    examples: list[dict[str, Any]],
    batch_size: int,
    config: GenerationConfig,
) -> _Completions:
    """The same in several turns, by TRL's own loop, whatever the trainer samples with when it trains."""
    settings = {
        "generation_config": config,
        "generation_kwargs": config.to_diff_dict(),
        "max_completion_length": task.max_completion_length,
        "max_tool_calling_iterations": task.max_tool_calling_iterations,
        "use_vllm": False,
    }
    tools = {tool.__name__: tool for tool in trainer.tools}
    before = {name: getattr(trainer, name) for name in settings}
    for name, value in settings.items():
        setattr(trainer, name, value)
    result = _Completions([])
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        trainer._sync_tool_dicts, trainer._async_tool_dicts = [tools] * len(batch), [{} for _ in batch]
        generated = trainer._generate([example["prompt"] for example in batch])
        prompt_ids, completion_ids, is_own, completions, *_ = generated
        sequences = [torch.tensor(prompt + ids) for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
        own = [torch.tensor([0] * len(prompt) + mask) for prompt, mask in zip(prompt_ids, is_own, strict=True)]
        # What pads them comes behind, and is seen by none of their tokens
        logits = trainer.model(pad_sequence(sequences, batch_first=True).to(trainer.model.device)).logits[:, :-1]
        entropies = torch.distributions.Categorical(logits=logits.float()).entropy().cpu()
        sampled = pad_sequence(own, batch_first=True)[:, 1:].bool()
        result.entropy_sum += entropies[sampled].sum().item()
        result.num_tokens += int(sampled.sum())
        result.rewards += task.reward(completions=completions, **columns_of(batch))
    for name, value in before.items():
        setattr(trainer, name, value)
    return result
