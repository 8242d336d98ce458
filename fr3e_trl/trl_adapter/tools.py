"""Tools and environments, by TRL's loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trl.chat_template_utils import parse_response

from ..generation.time_limit import limited
from ..generation.tools import Instance, ToolDicts, TurnWriter
from .checks import obstacle_to_tool_images
from .overriding import overridden
from .prompts import prepare, tokenize


class TRLToolLoop:
    """
    TRL's loop, which calls the tools of completions turn after turn: see [`~generation.tools.ToolLoop`].

    Args:
        trainer (`GRPOTrainer`):
            Has the loop.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.eos_token_id: int = trainer.eos_token_ids[0]

    def run(
        self,
        tools: tuple[list[dict[str, Any]], list[dict[str, Any]]],
        names: list[str | None],
        prompt_ids: list[list[int]],
        first_turns: list[list[int]],
        write_turns: TurnWriter,
    ) -> tuple[list[list[int]], list[list[dict[str, Any]]], int, int]:
        trainer = self.trainer

        def write(ids: list[Any], images: Any, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
            tool_images = [of_row or [] for of_row in images or [None] * len(ids)]
            if any(tool_images) and (obstacle := obstacle_to_tool_images(trainer)):
                raise NotImplementedError(
                    f"A tool returned an image, and FR3ETrainer cannot explore from it here: {obstacle}. Or have the "
                    "tool return text, or set num_anchors=0 to train with plain GRPO."
                )
            return write_turns(ids, tool_images), None

        # The tools that each prompt was rendered with
        known = [trainer.tools if trainer.environment_factories is None else trainer._env_tools[name] for name in names]
        messages = [
            [parse_response(trainer._tokenizer, ids, prefix=prompt, tools=of_row)]
            for prompt, ids, of_row in zip(prompt_ids, first_turns, known, strict=True)
        ]
        with overridden(
            trainer,
            _sync_tool_dicts=tools[0],
            _async_tool_dicts=tools[1],
            _batch_environments=names,
            _generate_single_turn=write,
        ):
            _, messages, completion_ids, _, num_calls, num_failures, _ = trainer._tool_call_loop(
                [[] for _ in prompt_ids], prompt_ids, list(first_turns), messages, None, None, {}
            )
        return completion_ids, messages, num_calls, num_failures

    def limited(self, tools: ToolDicts) -> ToolDicts:
        sync_tools, async_tools = (_limited(self.trainer, of_kind) for of_kind in tools)
        return sync_tools, async_tools

    def decode(self, ids: Any) -> str:
        return str(self.trainer._tokenizer.decode(ids))


def instances(trainer: Any, inputs: list[dict[str, Any]]) -> tuple[list[Any], list[Instance]]:
    """
    Have TRL provide rows with what they call their tools in.

    Args:
        trainer (`GRPOTrainer`):
            Has the tools and environments.
        inputs (`list[dict]`):
            The dataset's example of each row.

    Returns:
        `tuple`: The prompt of each row, with what its environment says to begin with, and its instance.
    """
    prompts = prepare(trainer, inputs)
    prompt_ids = tokenize(trainer, prompts)
    provided = []
    for k, ids in enumerate(prompt_ids):
        instance = Instance(ids, (trainer._sync_tool_dicts[k], trainer._async_tool_dicts[k]))
        if trainer.environments is not None:
            instance.name, instance.environment = trainer._batch_environments[k], trainer.environments[k]
        provided.append(instance)
    return prompts, provided


@contextmanager
def time_limit(trainer: Any) -> Iterator[None]:
    """Have tools that TRL's own loop calls fail where they take longer than `tool_timeout`."""
    call_tools = trainer._tool_call_loop

    def with_limit(*args: Any) -> tuple[Any, ...]:
        trainer._sync_tool_dicts, trainer._async_tool_dicts = (
            [_limited(trainer, of_row) for of_row in dicts]
            for dicts in (trainer._sync_tool_dicts, trainer._async_tool_dicts)
        )
        return call_tools(*args)

    with overridden(trainer, _tool_call_loop=with_limit):
        yield


def _limited(trainer: Any, tools: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    seconds = trainer.args.tool_timeout
    if seconds is None:
        return tools

    def abandon(tool: Callable[..., Any]) -> None:
        """Do not use the environment of a tool again that still goes on in its thread."""
        for pool in getattr(trainer, "_environment_pool", {}).values():
            pool[:] = [environment for environment in pool if environment is not getattr(tool, "__self__", None)]

    return {name: limited(name, tool, seconds, abandon) for name, tool in tools.items()}


def converse(
    trainer: Any, prompts: list[Any], tools: dict[str, Callable[..., Any]], **settings: Any
) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[Any]]:
    """
    Have TRL complete prompts in several turns, by its own way to generate.

    Args:
        trainer (`GRPOTrainer`):
            Generates.
        prompts (`list`):
            As in the dataset.
        tools (`dict[str, Callable]`):
            What all of them call.
        settings:
            Attributes of the trainer, for this call.

    Returns:
        `tuple`: Token ids of prompts and completions, 1 for each token of these that the policy wrote and 0 for
        others, and their messages.
    """
    with overridden(
        trainer, _sync_tool_dicts=[tools] * len(prompts), _async_tool_dicts=[{}] * len(prompts), **settings
    ):
        prompt_ids, completion_ids, is_own, completions, *_ = trainer._generate(prompts)
    return prompt_ids, completion_ids, is_own, completions
