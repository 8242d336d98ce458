"""Rewards, by TRL's own reward computation."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from torch import nn
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.trainer import grpo_trainer

from ..method.credit.rollout import weighted_rewards
from ..method.tree import Dialogue, Score, TokenIds
from .images import prompt_of
from .overriding import overridden
from .prompts import prepare, tokenize
from .setup import is_sharded


def score(
    trainer: Any,
    inputs: list[dict[str, Any]],
    prompt_ids: list[TokenIds],
    completion_ids: list[TokenIds],
    dialogues: Sequence[Dialogue | None] = (),
) -> list[Score]:
    """
    Score completions with the trainer's reward functions, by one call of each, in this process alone.

    Args:
        trainer (`GRPOTrainer`):
            Has the reward functions.
        inputs (`list[dict]`):
            The dataset's example of each, with the prompt as it was rendered.
        prompt_ids, completion_ids (`list[TokenIds]`):
            The tokens.
        dialogues (`Sequence[Dialogue | None]`):
            The turns of each, if there are tools.
    """
    num_own = len(inputs)
    if num_own == 0:
        if not (is_sharded(trainer) and any(isinstance(func, nn.Module) for func in trainer.reward_funcs)):
            return []
        # A reward model whose weights are sharded runs in all processes together
        inputs, completion_ids = [next(iter(trainer.train_dataset))], [np.array(trainer.eos_token_ids[:1])]
        inputs[0] = inputs[0] | {"prompt": prepare(trainer, inputs)[0]}
        prompt_ids = [np.array(tokenize(trainer, [inputs[0]["prompt"]])[0])]
    prompts = [prompt_of(trainer, example) for example in inputs]  # with their images, as TRL hands them on
    ids = [row.tolist() for row in completion_ids]
    environments = trainer.environments
    if any(dialogues):
        completions: list[Any] = [dialogue.messages for dialogue in dialogues if dialogue is not None]
        if trainer.environment_factories is not None:
            environments = [dialogue.environment for dialogue in dialogues if dialogue is not None]
    else:
        completions = decode(trainer, prompts, [row.tolist() for row in prompt_ids], ids)
    logged, trainer._pending_metrics = trainer._pending_metrics, defaultdict(list)
    # TRL's last step gathers, which wants as many rows of each process
    with overridden(grpo_trainer, gather=lambda tensor: tensor), overridden(trainer, environments=environments):
        rewards_per_func = trainer._calculate_rewards(inputs, prompts, completions, ids)
    rewards = weighted_rewards(rewards_per_func, trainer.reward_weights.to(rewards_per_func.device)).tolist()
    logs = {column: v for column, v in trainer._pending_extra_logs.items() if len(v) == len(inputs)}
    trainer._pending_extra_logs.clear()
    # TRL takes the mean of all values: those of a call count by its rows
    for name, values in trainer._pending_metrics.items():
        logged[name] += [fmean(values)] * num_own
    trainer._pending_metrics = logged
    return [
        Score(*scores, {column: values[row] for column, values in logs.items()})
        for row, scores in enumerate(zip(rewards_per_func.tolist(), rewards, strict=True))
    ][:num_own]


def decode(trainer: Any, prompts: list[Any], prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[Any]:
    """Completions as reward functions receive them, the same as those that TRL decodes."""
    if not is_conversational({"prompt": prompts[0]}):
        return trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    tokenizer = trainer._tokenizer
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return [
            [parse_response(tokenizer, ids, prefix=prefix, tools=trainer.tools)]
            for prefix, ids in zip(prompt_ids, completion_ids, strict=True)
        ]
    contents = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": content}] for content in contents]
