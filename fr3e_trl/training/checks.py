"""What is refused before it costs anything, with errors that say what to do."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from trl.data_utils import is_conversational
from trl.trainer.utils import is_async_callable

from ..config import FR3EConfig

logger = logging.getLogger(__name__)

# Settings of vLLM that change what is sampled, and that neither the policy's log-probs nor ours take into account
UNSCORED_SAMPLING = {
    "allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "min_p", "min_tokens", "presence_penalty",
    "repetition_penalty", "structured_outputs", "top_k", "top_p",
}  # fmt: skip


def refuse_unsupported(args: FR3EConfig, tools: Any, rollout_func: Any, environment_factory: Any) -> None:
    unsupported = [
        ("tools", bool(tools), "Leave them out"),
        ("a rollout_func", rollout_func is not None, "Leave it out"),
        ("an environment_factory", environment_factory is not None, "Leave it out"),
        ("vllm_structured_outputs_regex", args.vllm_structured_outputs_regex is not None, "Leave it out"),
        (
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} in colocate mode",
            args.use_vllm and args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1,
            "Leave it out, or use a server",
        ),
    ]
    for what, given, remedy in unsupported:
        if given:
            raise NotImplementedError(
                f"FR3ETrainer does not support {what} yet. {remedy}, or set num_anchors=0 to train with plain GRPO."
            )


def refuse_unsupported_setup(trainer: Any) -> None:
    """Refuse what shows only when TRL has set up the trainer: how its processes are sharded, and its processor."""
    if trainer._dist.fsdp_version == 1:
        raise NotImplementedError(
            "FR3ETrainer does not support FSDP of version 1. Set fsdp_version: 2 in accelerate's configuration, or "
            "num_anchors=0 to train with plain GRPO."
        )
    if trainer._dist.is_fsdp and trainer.use_transformers_continuous_batching:
        raise NotImplementedError(
            "use_transformers_continuous_batching=True does not work with FSDP, whose processes must generate in "
            "step. Leave it out, or use vLLM."
        )
    if trainer._is_vlm:
        raise NotImplementedError(
            "FR3ETrainer does not support multimodal processors yet. To train a model on text alone, pass its "
            "tokenizer as `processing_class`; set num_anchors=0 to train with plain GRPO."
        )


def warn_of_unscored_sampling(args: FR3EConfig) -> None:
    """Tell of a bias that stays: vLLM samples with settings that the loss does not take into account."""
    unscored = sorted(UNSCORED_SAMPLING & set(args.generation_kwargs or {}))
    if args.repetition_penalty != 1:
        unscored.append("repetition_penalty")
    if unscored and args.vllm_importance_sampling_correction:
        logger.warning(
            "vLLM samples with %s, which the loss knows nothing of: log-probs of the two differ by more than "
            "rounding, and the importance ratio (importance_sampling_ratio) corrects for the difference as if the "
            "policy had changed. It is biased towards tokens that these settings make rarer. Leave them out, or "
            "set vllm_importance_sampling_correction=False.",
            " and ".join(unscored),
        )


def check_dataset(dataset: Dataset | IterableDataset, args: FR3EConfig) -> None:
    if args.max_refills > 0 and not isinstance(dataset, Dataset):
        raise ValueError(
            f"max_refills={args.max_refills} draws prompts from a Dataset, and train_dataset is an "
            f"{type(dataset).__name__}. Load it without streaming, or set max_refills=0."
        )
    example = next(iter(dataset), None)
    if example is None:
        raise ValueError("train_dataset is empty. It must have at least one example, with a 'prompt'.")
    if "prompt" not in example:
        raise ValueError(f"train_dataset has the columns {sorted(example)}. It must have one named 'prompt'.")
    if _has_images(example):
        raise NotImplementedError(
            "FR3ETrainer does not support images yet. Remove them from the dataset, or set num_anchors=0 to train with "
            "plain GRPO."
        )
    num_prompts = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < num_prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} examples, and one generation batch takes {num_prompts} "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}). Use a "
            "larger dataset or a smaller batch."
        )


def _has_images(example: dict[str, Any]) -> bool:
    messages = example["prompt"] if is_conversational(example) else []
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return "image" in example or "images" in example or any(part["type"] == "image" for part in parts)


def checked_reward_func(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A reward function that raises on a reward that is no number, and says which function raised."""
    if isinstance(func, nn.Module):
        return func

    def check(rewards: Any) -> list[float | None]:
        rewards = list(rewards)
        for i, reward in enumerate(rewards):
            if reward is not None and not math.isfinite(reward):
                raise ValueError(
                    f"The reward function '{name}' returned {reward} for completion {i} of {len(rewards)}. A reward "
                    "must be a finite number, or None for a completion that cannot be scored."
                )
        return rewards

    @contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"In the reward function '{name}'.")
            raise

    if is_async_callable(func):

        async def checked_async(*args: Any, **kwargs: Any) -> list[float | None]:
            with named():
                return check(await func(*args, **kwargs))

        return checked_async

    def checked(*args: Any, **kwargs: Any) -> list[float | None]:
        with named():
            return check(func(*args, **kwargs))

    return checked
