"""Tools and environments in TRL's loop."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from trl.chat_template_utils import parse_response

from .compat import TypedTrainer, tokenizer_of
from .generation.time_limit import limited
from .generation.tools import Instance, ToolDicts, TurnWriter
from .images import NO_PROMPT, prompt_of


class TRLToolLoop:
    """
    TRL's loop, which calls the tools of completions turn after turn: see [`~generation.tools.ToolLoop`].

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Has the loop.
        obstacle_to_images (`Callable`):
            Returns why the trainer cannot explore where tools return images, or `None` if it can.
        timeout (`float`, *optional*):
            Time limit of a call, in seconds.

    Attributes:
        write_turns (`TurnWriter`, *optional*):
            While the loop runs for dialogues of trees, writes the next turns instead of the trainer's own generation.
    """

    def __init__(
        self, trainer: TypedTrainer, obstacle_to_images: Callable[[], str | None], timeout: float | None = None
    ):
        self.trainer = trainer
        self.obstacle_to_images = obstacle_to_images
        self.timeout = timeout
        self.write_turns: TurnWriter | None = None
        self.accelerator = trainer.accelerator
        self.eos_token_id: int = trainer.eos_token_ids[0]

    def run(
        self,
        tools: tuple[list[dict[str, Any]], list[dict[str, Any]]],
        environment_names: list[str | None],
        prompt_ids: list[list[int]],
        first_turns: list[list[int]],
        write_turns: TurnWriter,
    ) -> tuple[list[list[int]], list[list[dict[str, Any]]], int, int]:
        trainer = self.trainer
        rendered_tools = [  # the tools in each prompt
            trainer.tools if trainer.environment_factories is None else trainer._env_tools[name]
            for name in environment_names
        ]
        messages = [
            [parse_response(tokenizer_of(trainer), ids, prefix=prompt, tools=row_tools)]
            for prompt, ids, row_tools in zip(prompt_ids, first_turns, rendered_tools, strict=True)
        ]
        # Replaces what TRL's step has set up for its own rows; `Explorer` restores that
        trainer._sync_tool_dicts, trainer._async_tool_dicts = tools
        trainer._batch_environments = environment_names
        self.write_turns = write_turns
        try:
            _, messages, completion_ids, _, num_calls, num_failures, _ = trainer._tool_call_loop(
                [[] for _ in prompt_ids], prompt_ids, list(first_turns), messages, None, None, {}
            )
        finally:
            self.write_turns = None
        return completion_ids, messages, num_calls, num_failures

    def write(self, ids: list[Any], images: list[list[Any]] | None) -> list[list[int]]:
        """Write the next turns of dialogues instead of TRL's generation."""
        tool_images = [row_images or [] for row_images in images or [[]] * len(ids)]
        if any(tool_images) and (obstacle := self.obstacle_to_images()):
            raise NotImplementedError(
                f"A tool returned an image, and FR3ETrainer cannot explore from it here: {obstacle}. Alternatively, "
                "let the tool return text, or set num_anchors=0 to train with plain GRPO."
            )
        assert self.write_turns is not None
        return self.write_turns(ids, tool_images)

    def limited(self, tools: ToolDicts) -> ToolDicts:
        sync_tools, async_tools = (limited_tools(self.trainer, by_name, self.timeout) for by_name in tools)
        return sync_tools, async_tools

    def call(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> str:
        try:
            answer = tool(**arguments)
            if inspect.iscoroutine(answer):
                answer = asyncio.run_coroutine_threadsafe(answer, self.trainer.async_loop).result()
        except Exception as error:
            answer = {"error": str(error)}
        if isinstance(answer, list):  # images are left out
            answer = [part["text"] for part in answer if isinstance(part, dict) and part.get("type") == "text"]
        return str(answer)

    def decode(self, ids: Any) -> str:
        return str(tokenizer_of(self.trainer).decode(ids))


def limited_tools(
    trainer: TypedTrainer, tools: dict[str, Callable[..., Any]], seconds: float | None
) -> dict[str, Callable[..., Any]]:
    """Tools that raise an error after `seconds`."""
    if seconds is None:
        return tools

    def abandon(tool: Callable[..., Any]) -> None:
        """Never reuse the environment of a tool that is still running in its thread."""
        for pool in getattr(trainer, "_environment_pool", {}).values():
            pool[:] = [environment for environment in pool if environment is not getattr(tool, "__self__", None)]

    return {name: limited(name, tool, seconds, abandon) for name, tool in tools.items()}


def instances_of_trl(trainer: TypedTrainer, prompts: list[Any]) -> list[Instance]:
    """The tools and environments that TRL's step has set up for the rows of these prompts."""
    instances = []
    for k, ids in enumerate(trainer._tokenize_prompts(prompts)[0] if prompts else []):
        instance = Instance(ids, (trainer._sync_tool_dicts[k], trainer._async_tool_dicts[k]))
        if trainer.environments is not None:
            instance.name, instance.environment = trainer._batch_environments[k], trainer.environments[k]
        instances.append(instance)
    return instances


def new_instances(
    trainer: TypedTrainer, examples: list[dict[str, Any]], in_use: Counter[str | None]
) -> tuple[list[Any], list[Instance]]:
    """
    Set up tools and environments for further rollouts, as TRL's step does for its rows.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Has the tools and environments.
        examples (`list[dict]`):
            The dataset's example of each rollout.
        in_use (`Counter`):
            How many environments of each name are in use in this step, which is updated.

    Returns:
        `tuple`: The prompt of each rollout, including the observation of its environment's reset, and its instance.
    """
    if not examples:
        return [], []
    names: list[str | None] = [None] * len(examples)
    environments: list[Any] = [None] * len(examples)
    if trainer.environment_factories is not None:
        for k, example in enumerate(examples):
            name = example.get("environment") if trainer._multi_environment else None
            pool = trainer._environment_pool[name]
            if in_use[name] == len(pool):
                pool.append(trainer.environment_factories[name]())
            names[k], environments[k] = name, pool[in_use[name]]
            in_use[name] += 1
    prompts = []
    for example, environment in zip(examples, environments, strict=True):
        with_prompt = NO_PROMPT | example
        if environment is not None:
            columns = {k: v for k, v in example.items() if k != "environment" or not trainer._multi_environment}
            with_prompt["prompt"] = _with_observation(with_prompt["prompt"], environment.reset(**columns))
        prompts.append(prompt_of(trainer, with_prompt))
    trainer._batch_environments = names  # read by `_tokenize_prompts`
    all_ids = trainer._tokenize_prompts(prompts)[0]
    tools = [_tools_of(trainer, environment) for environment in environments]
    return prompts, [Instance(*fields) for fields in zip(all_ids, tools, names, environments, strict=True)]


def _with_observation(prompt: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """A prompt with the observation of its environment's reset at the end of the last message."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def _tools_of(trainer: TypedTrainer, environment: Any) -> ToolDicts:
    """The tools of a rollout: the trainer's, and the methods of its environment."""
    names = [
        name
        for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
        if environment is not None and name not in ("reset", "get_reward") and not name.startswith("_")
    ]
    tools = [*trainer._standalone_tools, *(getattr(environment, name) for name in names)]
    coroutines = {tool.__name__: tool for tool in tools if inspect.iscoroutinefunction(tool)}
    return {tool.__name__: tool for tool in tools if tool.__name__ not in coroutines}, coroutines
