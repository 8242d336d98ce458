"""How long a completion may be: what the model's context leaves after its prompt."""

import logging
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

# Kinds of RoPE scaling beside which `max_position_embeddings` already is the context that they stretch to
STRETCHED_TO_MAXIMUM = ("llama3", "longrope")


def context_length(config: PreTrainedConfig) -> int | None:
    """
    The most tokens that a model takes, prompt and completion together.

    That is `max_position_embeddings`, but where RoPE scaling stretches it: to `factor` times the length that the model
    was first trained with (YaRN: Qwen2.5's recipe leaves `max_position_embeddings` as it was), or without end
    ("dynamic"). Configurations differ in whether `max_position_embeddings` is of before or after stretching; the longer
    reading is taken, since too short a one would cut completions that the model can write.

    Args:
        config (`~transformers.PreTrainedConfig`):
            Configuration of the model.

    Returns:
        `int` or `None`: Tokens. `None` if the model has no limit, or names none.
    """
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        return context
    lengths = [_stretched(context, of_layers) for of_layers in _rope(config)]
    return None if None in lengths else max([context, *filter(None, lengths)])


def knows_padding(config: PreTrainedConfig) -> bool:
    """
    Whether a model may tell where a left-padded row begins: it has learned positions, or RoPE that depends on how far
    they go.

    Args:
        config (`~transformers.PreTrainedConfig`):
            Configuration of the model.
    """
    config = config.get_text_config()
    kinds = [of_layers.get("rope_type", "default") for of_layers in _rope(config)]
    if not kinds:
        return getattr(config, "max_position_embeddings", None) is not None
    return not {"dynamic", "longrope"}.isdisjoint(kinds)


def _rope(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of RoPE, of each kind of layers. None if there is no RoPE."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [of_layers for of_layers in rope.values() if isinstance(of_layers, dict)]


def _stretched(context: int, rope: dict[str, Any]) -> int | None:
    kind = rope.get("rope_type", "default")
    if kind == "dynamic":
        return None
    if kind in STRETCHED_TO_MAXIMUM:
        return context
    return int((rope.get("factor") or 1) * rope.get("original_max_position_embeddings", context))


class CompletionBudget:
    """
    Longest completion of each prompt: `max_completion_length`, or what the context leaves, with a warning once.

    Args:
        max_completion_length (`int`):
            Tokens that were asked for.
        context (`int`, *optional*):
            Tokens of prompt and completion together. If `None`, there is no limit.
        tokenizer (`~transformers.PreTrainedTokenizerBase`):
            Decodes a prompt that is too long, for the error.
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
            ValueError: The prompt leaves no room for any.
        """
        if self.context is None:
            return self.max_completion_length
        left = self.context - len(prompt_ids)
        if left <= 0:
            raise ValueError(
                f"A prompt has {len(prompt_ids)} tokens, and the model's context {self.context}. Prompts must be "
                "shorter, to leave room for a completion: filter the dataset by length. The prompt begins with "
                f"{self.tokenizer.decode(prompt_ids[:20])!r}."
            )
        if left < self.max_completion_length and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Completions are cut before max_completion_length=%d: the model's context of %d tokens leaves %d after "
                "a prompt of %d, and as few or fewer after others. Lower max_completion_length or leave out long "
                "prompts; where the model takes more, say so in its configuration (max_position_embeddings).",
                self.max_completion_length,
                self.context,
                left,
                len(prompt_ids),
            )
        return min(self.max_completion_length, left)
