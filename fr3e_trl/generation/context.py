"""Longest completion of a prompt that fits into the model's context."""

import logging
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

# Types of RoPE scaling whose `max_position_embeddings` is the extended context
EXTENDED_TYPES = ("llama3", "longrope")


def context_length(config: PreTrainedConfig) -> int | None:
    """
    The model's maximum number of tokens, prompt and completion together.

    That is `max_position_embeddings`, unless RoPE scaling extends it to `factor` times the original length (YaRN:
    Qwen2.5's recipe does not change `max_position_embeddings`) or without limit ("dynamic"). In some configurations
    `max_position_embeddings` is the extended length already. The longer interpretation is used, because a context that
    is too short would truncate completions.

    Args:
        config (`~transformers.PreTrainedConfig`):
            Configuration of the model.

    Returns:
        `int` or `None`: Tokens. `None` if the model has no limit or its configuration has none.
    """
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        return context
    lengths = [_extended_length(context, rope) for rope in _rope_parameters(config)]
    return None if None in lengths else max([context, *filter(None, lengths)])


def depends_on_padding(config: PreTrainedConfig) -> bool:
    """
    Whether left padding may change a model's outputs: it has learned positions, or RoPE that depends on the length.

    Args:
        config (`~transformers.PreTrainedConfig`):
            Configuration of the model.
    """
    config = config.get_text_config()
    rope_types = [rope.get("rope_type", "default") for rope in _rope_parameters(config)]
    if not rope_types:
        return getattr(config, "max_position_embeddings", None) is not None
    return not {"dynamic", "longrope"}.isdisjoint(rope_types)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """RoPE parameters of each type of layer, empty if the model has no RoPE."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]


def _extended_length(context: int, rope: dict[str, Any]) -> int | None:
    rope_type = rope.get("rope_type", "default")
    if rope_type == "dynamic":
        return None
    if rope_type in EXTENDED_TYPES:
        return context
    return int((rope.get("factor") or 1) * rope.get("original_max_position_embeddings", context))


class CompletionBudget:
    """
    Longest completion of each prompt: `max_completion_length`, or less if the context is too short (with one warning).

    Args:
        max_completion_length (`int`):
            Tokens that the configuration allows.
        context (`int`, *optional*):
            Tokens of prompt and completion together. If `None`, there is no limit.
        tokenizer (`~transformers.PreTrainedTokenizerBase`):
            Decodes a prompt that is too long for the error message.
    """

    def __init__(
        self, max_completion_length: int, context: int | None, tokenizer: PreTrainedTokenizerBase | ProcessorMixin
    ):
        self.max_completion_length = max_completion_length
        self.context = context
        self.tokenizer = tokenizer
        self._has_warned = False

    def __call__(self, prompt_ids: list[int]) -> int:
        """
        Longest completion of a prompt, in tokens.

        Raises:
            ValueError: The prompt leaves no room for a completion.
        """
        if self.context is None:
            return self.max_completion_length
        left = self.context - len(prompt_ids)
        if left <= 0:
            raise ValueError(
                f"A prompt has {len(prompt_ids)} tokens, but the model's context is {self.context} tokens. Prompts "
                "must be shorter than the context to leave room for a completion: filter the dataset by length. The "
                f"prompt begins with {self.tokenizer.decode(prompt_ids[:20])!r}."
            )
        if left < self.max_completion_length and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Completions are cut before max_completion_length=%d: the model's context of %d tokens leaves %d after "
                "a prompt of %d, and fewer after longer prompts. Lower max_completion_length or filter out long "
                "prompts. If the model supports a longer context, set max_position_embeddings in its configuration.",
                self.max_completion_length,
                self.context,
                left,
                len(prompt_ids),
            )
        return min(self.max_completion_length, left)
