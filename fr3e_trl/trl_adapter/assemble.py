"""Rows in, TRL's batch out."""

import math
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import torch
from trl import GRPOTrainer

from ..method.credit import CREDIT_RULES
from ..method.rows import Row
from ..method.sampling import images_of
from .checks import check_all_or_none
from .images import with_images_in_prompt
from .old_logprobs import OldLogprobs, VLLMCorrection
from .overriding import overridden
from .setup import own_rows


def assemble(trainer: Any, rows: list[Row], tool_counts: tuple[int, int] = (0, 0)) -> dict[str, torch.Tensor]:
    """
    Have TRL make its batch of finished rows: padding, log-probs of the old and the reference policy, logs.

    Args:
        trainer (`GRPOTrainer`):
            Trains on the batch.
        rows (`list[Row]`):
            The rows of all processes, each of which holds its own.
        tool_counts (`tuple[int, int]`):
            Calls of tools that this process made for the batch, and how many of them failed.

    Returns:
        `dict[str, torch.Tensor]`: This process's part of TRL's batch.
    """
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    old_logprobs = (VLLMCorrection if corrects else OldLogprobs)(trainer, rows)
    batch = _trl_batch(trainer, rows, tool_counts, old_logprobs.score_in_place_of_trl)
    old_logprobs.finish(batch)
    return batch


def _logprobs_of(row: Row) -> list[float] | list[None]:
    """Log-probs of a row's own tokens. A rollout that was given up has none."""
    rollout = row.rollout
    return [None] * len(rollout.token_ids) if rollout.logprobs is None else rollout.logprobs.tolist()


def _trl_batch(
    trainer: Any,
    rows: list[Row],
    tool_counts: tuple[int, int],
    score_old: Callable[..., tuple[torch.Tensor, None, None]] | None,
) -> dict[str, torch.Tensor]:
    """TRL's step, in which rows take the place of what is generated, of rewards and, if given, of old log-probs."""
    own = own_rows(trainer, rows)
    dialogues = [row.rollout.dialogue for row in own]
    logprobs = None
    # In a process where all rollouts were given up too: those of all processes are corrected together
    is_corrected = trainer.vllm_importance_sampling_correction or any(row.rollout.logprobs is not None for row in own)
    if trainer.use_vllm and is_corrected:
        logprobs = [[*[None] * len(row.prefix_ids), *_logprobs_of(row)] for row in own]
    drawn = [row.completion_ids.tolist() for row in own], logprobs
    # TRL logs means over what was sampled: a copy has no reward of its own
    none = [math.nan] * len(trainer.reward_funcs)
    rewards = torch.tensor(
        [row.rollout.score.rewards if row.rollout.copy_of is None else none for row in rows],
        device=trainer.accelerator.device,
    )
    generate, score = trainer._generate, trainer._get_per_token_logps_and_entropies
    rule = CREDIT_RULES[trainer.args.plan.credit]

    def generated(prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, completion_ids, _, completions, logprobs, extra_fields, *_ = generate(prompts)
        # TRL finds images in messages only where it tokenizes them itself, or where it calls the tools
        images = [images_of(prompt) for prompt in prompts]
        check_all_or_none(list(map(len, images)))
        tool_images = [[] if dialogue is None else images_of(dialogue.messages) for dialogue in dialogues]
        images = [[*of_prompt, *of_tools] for of_prompt, of_tools in zip(images, tool_images, strict=True)]
        return (
            *(prompt_ids, completion_ids, [row.loss_mask for row in own], completions, logprobs, extra_fields),
            *(images if any(images) else None, tool_images),
        )

    def with_tools_called(
        prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, logprobs: Any, *_: Any
    ) -> tuple[Any, ...]:
        # TRL logs the lengths of whole completions, by this mask
        return [row.path_mask for row in own], completions, completion_ids, logprobs, *tool_counts, []

    # The old policy is the first that TRL scores, where it scores any
    scorers = chain([score_old or score], repeat(score))
    columns = {column for row in own for column in row.rollout.score.logs}
    trainer._pending_extra_logs.update({c: [row.rollout.score.logs.get(c) for row in own] for c in columns})
    with overridden(
        trainer,
        _generate=generated,
        _tokenize_prompts=lambda prompts: ([row.prompt_ids.tolist() for row in own], None, {}),
        _generate_single_turn=lambda *args: drawn,
        _tool_call_loop=with_tools_called,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: next(scorers)(*args, **kwargs),
        _calculate_rewards=lambda *args: rewards,
        environment_factories=None,  # what was generated needs no environment any more
        environments=None,
        _video_pad_token_id=None,  # no tool returns a video: such a token is the policy's
        # Where tokens of a row that is cut off are still credited, the loss masks those that are not
        mask_truncated_completions=trainer.mask_truncated_completions and not rule.leaves_out_truncated,
    ):
        examples = [with_images_in_prompt(trainer, row.example) for row in own]
        return GRPOTrainer._generate_and_score_completions(trainer, examples)
