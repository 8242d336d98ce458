"""
Completions of several turns: a sampler writes the policy's turns, and TRL's loop calls the tools in between.

A rollout that branches off a later turn runs the loop from the start, but replays the turns before its own: both they
and the tools' answers are read from the completion that it branches off. An environment must also be in the state that
it had at the end of the prefix, so it is copied where that is possible, and otherwise receives the same calls again.
All rollouts of a tree start in copies of one environment, so that a random reset is the same for all of them.
"""

import copy
import functools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator

from ..method.sampling import Sample, Sampler, SamplingRequest
from ..method.tree import Dialogue, TokenIds, as_ids
from ..processes import Lockstep

# Functions and coroutine functions, by name
ToolDicts = tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]

# Writes the next turns: maps the prompts with their completions so far, and the images that tools returned in each, to
# the new tokens of each
TurnWriter = Callable[[list[Any], list[list[Any]]], list[list[int]]]

# Rollouts per class of environments for which deep copies are tested for independence
NUM_CHECKED_ROLLOUTS = 4


class ToolLoop(Protocol):
    """TRL's loop, which calls tools; see `tool_loop.py`."""

    accelerator: Accelerator
    eos_token_id: int

    def run(
        self,
        tools: tuple[list[dict[str, Any]], list[dict[str, Any]]],
        environment_names: list[str | None],
        prompt_ids: list[list[int]],
        first_turns: list[list[int]],
        write_turns: TurnWriter,
    ) -> tuple[list[list[int]], list[list[dict[str, Any]]], int, int]:
        """
        Call the tools of completions, turn after turn.

        Args:
            tools (`tuple[list[dict], list[dict]]`):
                Functions and coroutine functions of each completion, by name. They may change between turns.
            environment_names (`list[str | None]`):
                The environment of each completion, where there are several.
            prompt_ids, first_turns (`list[list[int]]`):
                Token ids of the prompts and of the policy's first turns.
            write_turns (`TurnWriter`):
                Writes the turns that follow. Its inputs are made with the `+` of the lists in `prompt_ids`.

        Returns:
            `tuple`: Token ids and messages of the completions, the number of calls, and the number that failed.
        """

    def limited(self, tools: ToolDicts) -> ToolDicts:
        """The tools with the time limit for calls."""

    def call(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> str:
        """Call a tool, and return the answer or the error that the policy reads."""

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Decode tokens."""


class EnvironmentFailure(RuntimeError):
    """An environment does not behave as exploration requires."""


def copy_environment(environment: Any) -> Any:
    """An independent copy of an environment in the same state, or `None` if it cannot be copied."""
    if hasattr(environment, "_fork"):
        return None if environment._fork is None else environment._fork()
    try:
        return copy.deepcopy(environment)
    except Exception:  # of any class, depending on what the environment holds
        return None


def _obstacle_to_copies(environment: Any) -> str:
    """Why an environment cannot be copied."""
    if hasattr(environment, "_fork"):
        return "its _fork is None"
    try:
        copy.deepcopy(environment)
    except Exception as error:
        return f"copy.deepcopy raises {type(error).__name__}: {error}"
    return "copy.deepcopy raised an error"


@contextmanager
def _fixed_global_seeds() -> Iterator[None]:
    """Seed the global generators for this context, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class _Prompt(list[int]):
    """Token ids of a prompt. Lists that are made from it with `+` keep the index of its rollout."""

    def __init__(self, ids: Sequence[int], rollout: int):
        super().__init__(ids)
        self.rollout = rollout

    def __add__(self, ids: Any) -> "_Prompt":  # type: ignore[override]
        return _Prompt([*self, *ids], self.rollout)


@dataclass(eq=False)
class Instance:
    """
    The tools and environment of one rollout.

    Args:
        prompt_ids (`list[int]`):
            The prompt, including the observation of the environment's reset.
        tools (`ToolDicts`):
            Its tools.
        name (`str`, *optional*):
            Name of its environment, where there are several.
        environment (`Any`, *optional*):
            The environment.
    """

    prompt_ids: list[int]
    tools: ToolDicts
    name: str | None = None
    environment: Any = None

    def with_copy_of(self, original: Any) -> "Instance | None":
        """This instance with a copy of `original` as its environment, or `None` if that cannot be copied."""
        environment = copy_environment(original)
        if environment is None:
            return None
        sync_tools, async_tools = (
            {name: getattr(environment, name) if self.is_method(tool) else tool for name, tool in tools.items()}
            for tools in self.tools
        )
        return replace(self, tools=(sync_tools, async_tools), environment=environment)

    def is_method(self, tool: Callable[..., Any]) -> bool:
        """Whether a tool is a method of the environment."""
        return self.environment is not None and getattr(tool, "__self__", None) is self.environment


@dataclass(eq=False)
class _Rollout:
    """
    A completion that is being written.

    Args:
        request ([`SamplingRequest`]):
            The request that it is sampled for.
        instance ([`Instance`]):
            Its tools and environment.
        branch_turn (`int`):
            The first turn that it samples. Those before it are replayed.
        is_restored (`bool`):
            Whether its environment is in the state before that turn already.
        turns (`list[tuple[int, int]]`):
            Where the policy wrote, in tokens of the completion.
        samples (`list[tuple[int, Sample]]`):
            Its samples, each with the position of the first token.
        snapshots (`list[Any]`):
            Copies of its environment before each turn, if branches may need them.
        is_broken (`bool`):
            Whether its tools answered differently in the replay, so that it cannot continue its prefix.
        num_replayed_calls (`int`):
            Calls that were answered from the recording.
        num_replayed_failures (`int`):
            Those of them that TRL counts as failures a second time.
    """

    request: SamplingRequest
    instance: Instance
    branch_turn: int = 0
    is_restored: bool = False
    turns: list[tuple[int, int]] = field(default_factory=list)
    samples: list[tuple[int, Sample]] = field(default_factory=list)
    snapshots: list[Any] = field(default_factory=list)
    is_broken: bool = False
    num_replayed_calls: int = 0
    num_replayed_failures: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prefix_ids) - self.request.num_sampled_before
        self.prefix: list[int] = self.request.prefix_ids[self.num_prompt_tokens :].tolist()  # of the completion
        self.max_length = len(self.prefix) + self.request.max_new_tokens

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prefix_ids[: self.num_prompt_tokens].tolist()

    @property
    def base_dialogue(self) -> Dialogue:
        """The dialogue that it branches off."""
        assert self.request.dialogue is not None
        return self.request.dialogue

    def replay_tools(self) -> ToolDicts:
        """Tools for the replayed turns. They return the recorded answers, but an environment is called again."""
        answers = self._recorded_answers()
        sync_tools, async_tools = (
            {
                name: tool
                if self.instance.is_method(tool) and not self.is_restored
                else replay(tool, answers.get(name, deque()))
                for name, tool in tools.items()
            }
            for tools, replay in zip(self.instance.tools, (self._replay, self._replay_async), strict=True)
        )
        return sync_tools, async_tools

    def _recorded_answers(self) -> dict[str, deque[Any]]:
        """The answers of each tool, in the order of its calls."""
        answers: dict[str, deque[Any]] = {}
        calls: list[dict[str, Any]] = []  # of the last turn, in the order in which they are answered
        for message in self.base_dialogue.messages:
            if message["role"] != "tool":
                calls = sorted(message.get("tool_calls") or [], key=self._is_async_call)
                continue
            # A coroutine's call that fails at once is answered before its turn
            call = next((call for call in calls if self._call_name(call) == message["name"]), calls[0])
            calls.remove(call)
            if self._reaches_tool(call):
                answers.setdefault(message["name"], deque()).append(message["content"])
        return answers

    def _reaches_tool(self, call: dict[str, Any]) -> bool:
        """Whether the loop calls a tool, as opposed to answering with an error itself."""
        if call["type"] != "function":
            return False
        function = call["function"]
        return isinstance(function["arguments"], dict) and any(
            function["name"] in tools for tools in self.instance.tools
        )

    @staticmethod
    def _call_name(call: dict[str, Any]) -> str:
        """The name in the loop's answer to a call."""
        return call["function"]["name"] if call["type"] == "function" else call.get("name", "unknown")

    def _is_async_call(self, call: dict[str, Any]) -> bool:
        """Whether a call runs a coroutine: the loop answers these after all others of a turn."""
        return self._reaches_tool(call) and call["function"]["name"] not in self.instance.tools[0]

    @property
    def num_replayed_rejections(self) -> int:
        """Calls in replayed turns that reached no tool."""
        turns = [message for message in self.base_dialogue.messages if message["role"] != "tool"]
        calls = [call for turn in turns[: self.branch_turn] for call in turn.get("tool_calls") or []]
        return sum(not self._reaches_tool(call) for call in calls)

    def _replay(self, tool: Callable[..., Any], answers: deque[Any]) -> Callable[..., Any]:
        @functools.wraps(tool)  # the policy reads Python's errors, which contain the tool's name
        def replay(**arguments: Any) -> Any:
            self.num_replayed_calls += 1
            return answers.popleft()

        return replay

    def _replay_async(self, tool: Callable[..., Any], answers: deque[Any]) -> Callable[..., Any]:
        replay = self._replay(tool, answers)

        @functools.wraps(tool)
        def replay_async(**arguments: Any) -> Any:
            try:
                tool(**arguments).close()  # never starts, but wrong arguments raise the same error again
            except Exception:
                self.num_replayed_failures += 1
                replay()
                raise

            async def answer() -> Any:
                return replay()

            return answer()

        return replay_async

    def keep_snapshot(self) -> None:
        """Keep a copy of the environment before a turn, if rollouts may branch off that turn."""
        environment = self.instance.environment
        if not self.request.with_entropies or environment is None or len(self.snapshots) < len(self.turns):
            return
        copied = copy_environment(environment)
        self.snapshots = [] if copied is None else [*self.snapshots, copied]

    def to_sample(self, completion_ids: list[int], messages: list[dict[str, Any]], eos_token_id: int) -> Sample:
        """The finished completion without its prefix."""
        messages = self._prefix_messages() if self.is_broken else messages
        dialogue = Dialogue(messages, self.turns, self.instance.environment, self.snapshots, self.is_broken)
        if self.is_broken:
            return Sample([eos_token_id], mask=np.ones(1, bool), dialogue=dialogue)
        size, start = len(completion_ids), len(self.prefix)
        mask, logprobs, entropies = np.zeros(size, bool), np.zeros(size, np.float32), np.full(size, np.nan, np.float32)
        for first, end in self.turns:
            mask[first:end] = True
        for first, sample in self.samples:
            end = first + len(sample.token_ids)
            logprobs[first:end] = np.nan if sample.logprobs is None else np.asarray(sample.logprobs, np.float32)
            if sample.entropies is not None:
                entropies[first:end] = sample.entropies
        samples = [sample for _, sample in self.samples]
        return Sample(
            completion_ids[start:],
            None if any(sample.logprobs is None for sample in samples) else logprobs[start:],
            None if any(sample.entropies is None for sample in samples) else entropies[start:],
            mask=mask[start:],
            dialogue=dialogue,
        )

    def _prefix_messages(self) -> list[dict[str, Any]]:
        """The messages before the first turn that it samples."""
        messages = self.base_dialogue.messages
        turns = [i for i, message in enumerate(messages) if message["role"] != "tool"]
        return messages[: turns[self.branch_turn]]


class ToolCallingSampler:
    """
    Samples completions in which the policy calls tools.

    Args:
        loop ([`ToolLoop`]):
            Calls the tools.
        sampler ([`Sampler`]):
            Writes the turns.
        skip_mismatches (`bool`):
            Whether to drop rollouts whose environment answers differently in the replay, instead of raising an error.

    Attributes:
        num_calls, num_failures (`int`):
            Tool calls that were made, and how many of them failed.
    """

    def __init__(self, loop: ToolLoop, sampler: Sampler, skip_mismatches: bool):
        self.loop = loop
        self.sampler = sampler
        self.skip_mismatches = skip_mismatches
        self.num_calls = self.num_failures = 0
        self._instances: dict[int, deque[Instance]] = {}
        self._num_checked: Counter[type] = Counter()  # rollouts whose deep copies were tested, by class of environment

    @property
    def hit_rate(self) -> float | None:
        return getattr(self.sampler, "hit_rate", None)

    def take_counts(self) -> tuple[int, int]:
        """Calls and failures since the last time that this was called."""
        counts = self.num_calls, self.num_failures
        self.num_calls = self.num_failures = 0
        return counts

    def provide(self, instances: dict[int, list[Instance]]) -> None:
        """
        Set each tree's instances. Rollouts share the first one if it has no environment or one that can be copied.
        """
        self._instances = {tree: deque(tree_instances) for tree, tree_instances in instances.items()}

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        with Lockstep(self.loop.accelerator, lambda: self.sampler.sample([])) as lockstep:
            groups = [[self._start(request) for _ in range(request.num_samples)] for request in requests]
            rollouts = [rollout for group in groups for rollout in group]
            self._sample_first_turns(groups, lockstep)
            samples = self._run_loop(rollouts, lockstep) if rollouts else []
            self._check_copies(rollouts, samples)
        remaining = iter(samples)
        return [[next(remaining) for _ in group] for group in groups]

    def _start(self, request: SamplingRequest) -> _Rollout:
        assert request.tree is not None
        instances, dialogue = self._instances[request.tree], request.dialogue
        rollout = _Rollout(request, instances[0])
        if dialogue is not None:
            rollout.branch_turn = dialogue.turn_at(len(rollout.prefix))
        instance = None
        if dialogue is not None and dialogue.snapshots:
            instance = instances[0].with_copy_of(dialogue.snapshots[rollout.branch_turn])
        rollout.is_restored = instance is not None
        if instance is None and instances[0].environment is not None:
            instance = instances[0].with_copy_of(instances[0].environment) or self._next_instance(rollout)
        rollout.instance = instance or instances[0]
        rollout.keep_snapshot()
        return rollout

    def _next_instance(self, rollout: _Rollout) -> Instance:
        """The tree's next instance, for environments that cannot be copied."""
        assert rollout.request.tree is not None
        instance = self._instances[rollout.request.tree].popleft()
        if instance.prompt_ids != rollout.prompt_ids:
            raise EnvironmentFailure(
                f"The environment {type(instance.environment).__name__} returned different observations when it was "
                f"reset twice for the same example: {self._text(rollout.prompt_ids)!r} and "
                f"{self._text(instance.prompt_ids)!r}. All rollouts of a tree need the same prompt, and this "
                f"environment cannot be copied for them: {_obstacle_to_copies(instance.environment)}. Add a method "
                "_fork(self) that returns an independent copy in the same state, or make reset(**example) depend only "
                "on the example's columns, for example on a column 'seed', or set num_anchors=0 to train with plain "
                "GRPO."
            )
        return instance

    def _sample_first_turns(self, groups: list[list[_Rollout]], lockstep: Lockstep) -> None:
        """Sample the first turn of each rollout that does not replay it. `groups` has the rollouts of each request."""
        to_sample = [group for group in groups if group[0].branch_turn == 0]
        requests = [replace(group[0].request, branching=None, dialogue=None) for group in to_sample]
        drawn = lockstep.call(lambda: self.sampler.sample(requests))
        for group, samples in zip(to_sample, drawn, strict=True):
            for rollout, sample in zip(group, samples, strict=True):
                rollout.samples.append((len(rollout.prefix), sample))

    def _run_loop(self, rollouts: list[_Rollout], lockstep: Lockstep) -> list[Sample]:
        """Run TRL's loop until all rollouts are complete."""
        tools: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [{} for _ in rollouts], [{} for _ in rollouts]

        def set_tools(i: int, dicts: ToolDicts) -> None:
            tools[0][i], tools[1][i] = self.loop.limited(dicts)

        def write_turns(prompts_and_completions: list[Any], tool_images: list[list[Any]]) -> list[list[int]]:
            unfinished = [rollouts[ids.rollout] for ids in prompts_and_completions]
            turns: list[list[int]] = []
            requests: dict[int, SamplingRequest] = {}
            for i, (rollout, ids) in enumerate(zip(unfinished, prompts_and_completions, strict=True)):
                completion_ids = ids[rollout.num_prompt_tokens :]
                turns.append(self._replayed_turn(rollout, completion_ids))
                if rollout.is_broken or len(rollout.turns) < rollout.branch_turn:
                    continue
                rollout.keep_snapshot()
                budget = rollout.max_length - len(completion_ids) - len(turns[i])
                if budget > 0:
                    requests[i] = replace(
                        rollout.request,
                        prefix_ids=as_ids([*ids, *turns[i]]),
                        num_samples=1,
                        max_new_tokens=budget,
                        num_prompt_tokens=rollout.num_prompt_tokens,
                        branching=None,
                        dialogue=None,
                        tool_images=tool_images[i],
                    )
            drawn = lockstep.call(lambda: self.sampler.sample(list(requests.values())))
            for (i, request), (sample,) in zip(requests.items(), drawn, strict=True):
                unfinished[i].samples.append((request.num_sampled_before, sample))
                turns[i] = [*turns[i], *sample.token_ids]
            for rollout, ids, turn in zip(unfinished, prompts_and_completions, turns, strict=True):
                start = len(ids) - rollout.num_prompt_tokens
                if rollout.branch_turn == len(rollout.turns):
                    set_tools(ids.rollout, rollout.instance.tools)
                if turn:
                    rollout.turns.append((start, start + len(turn)))
            return turns

        first_turns = []
        for i, rollout in enumerate(rollouts):
            if rollout.branch_turn:
                ids = rollout.prefix[: rollout.base_dialogue.turns[0][1]]
            else:
                ids = rollout.prefix + [token for _, sample in rollout.samples for token in sample.token_ids]
            rollout.turns.append((0, len(ids)))
            first_turns.append(ids)
            set_tools(i, rollout.replay_tools() if rollout.branch_turn else rollout.instance.tools)
        prompt_ids: list[list[int]] = [_Prompt(rollout.prompt_ids, i) for i, rollout in enumerate(rollouts)]
        completion_ids, messages, num_calls, num_failures = self.loop.run(
            tools, [rollout.instance.name for rollout in rollouts], prompt_ids, first_turns, write_turns
        )
        num_rejections = sum(rollout.num_replayed_rejections for rollout in rollouts if rollout.branch_turn)
        self.num_calls += num_calls - num_rejections - sum(rollout.num_replayed_calls for rollout in rollouts)
        self.num_failures += num_failures - num_rejections - sum(rollout.num_replayed_failures for rollout in rollouts)
        for rollout, ids in zip(rollouts, completion_ids, strict=True):
            if len(rollout.turns) <= rollout.branch_turn and not rollout.is_broken:
                self._mark_broken(rollout, ids)  # a longer answer than the recorded one used up the budget
        return [
            rollout.to_sample(ids, completion, self.loop.eos_token_id)
            for rollout, ids, completion in zip(rollouts, completion_ids, messages, strict=True)
        ]

    def _replayed_turn(self, rollout: _Rollout, completion_ids: list[int]) -> list[int]:
        """The part of a rollout's next turn that is in its prefix, provided that the replay matches it so far."""
        turn = len(rollout.turns)
        if turn > rollout.branch_turn:
            return []
        start, end = rollout.base_dialogue.turns[turn]
        if completion_ids == rollout.prefix[:start]:
            return rollout.prefix[start : end if turn < rollout.branch_turn else None]
        self._mark_broken(rollout, completion_ids)
        return []

    def _mark_broken(self, rollout: _Rollout, completion_ids: list[int]) -> None:
        """End a rollout whose environment answered differently in the replay, or raise an error."""
        rollout.is_broken = True
        if self.skip_mismatches:
            return
        end = rollout.turns[-1][1]
        start, _ = rollout.base_dialogue.turns[len(rollout.turns)]
        environment = rollout.instance.environment
        name = type(environment).__name__
        if copy_environment(environment) is not None:
            raise EnvironmentFailure(
                f"The environment {name} can be copied, but its copies are in another process because the rows of a "
                "prompt are split across processes. Make per_device_train_batch_size times steps_per_generation a "
                "multiple of num_generations, or set replay_mismatch='skip' to drop such rollouts."
            )
        raise EnvironmentFailure(
            f"The environment {name} answered {self._text(completion_ids[end:])!r} when the same actions were "
            f"replayed, but had answered {self._text(rollout.prefix[end:start])!r}. A rollout that branches off a "
            "later turn needs an environment in the state of its prefix, and this one cannot be copied: "
            f"{_obstacle_to_copies(environment)}. Add a method _fork(self) that returns an independent copy in the "
            "same state, or make the environment depend only on the example and the actions, not on a global random "
            "generator or a server, or set replay_mismatch='skip' to drop such rollouts."
        )

    def _check_copies(self, rollouts: list[_Rollout], samples: list[Sample]) -> None:
        """
        Refuse an environment that keeps state outside its object, because its deep copies would share that state.

        The calls of each class's first rollouts are repeated in two copies of the environment after its reset, with the
        same global seeds. State that copies share then makes the answers in the second copy differ from the first.
        """
        for rollout, sample in zip(rollouts, samples, strict=True):
            environment = rollout.instance.environment
            kind = type(environment)
            if environment is None or hasattr(environment, "_fork") or self._num_checked[kind] == NUM_CHECKED_ROLLOUTS:
                continue
            if rollout.branch_turn or sample.dialogue is None:
                continue
            answers = [self._repeat_calls(rollout, sample.dialogue.messages) for _ in range(2)]
            self._num_checked[kind] += bool(answers[0])
            for first, second in zip(*answers, strict=True):
                if first != second:
                    raise EnvironmentFailure(
                        f"Two deep copies of the environment {kind.__name__} answered the same action with "
                        f"{first[-300:]!r} and {second[-300:]!r} after the same calls and with the same global seeds "
                        "(random, numpy and torch). It seems to keep state or randomness outside the object, for "
                        "example in a server, so a deep copy may not be independent. Add a method _fork(self) that "
                        "returns an independent copy, which may be copy.deepcopy(self), or set _fork = None in the "
                        "class to replay actions instead of copying, or set num_anchors=0 to train with plain GRPO."
                    )

    def _repeat_calls(self, rollout: _Rollout, messages: list[dict[str, Any]]) -> list[str]:
        """Make the environment calls of a dialogue in a new copy of the environment, and return its answers."""
        assert rollout.request.tree is not None
        instances = self._instances[rollout.request.tree]  # may be used up if they cannot be copied
        instance = instances[0].with_copy_of(instances[0].environment) if instances else None
        if instance is None:
            return []
        sync_tools, async_tools = instance.tools
        names = {name for name, tool in (sync_tools | async_tools).items() if instance.is_method(tool)}
        sync_tools, async_tools = self.loop.limited(instance.tools)
        tools = sync_tools | async_tools
        calls = [call for message in messages for call in message.get("tool_calls") or []]
        functions = [call["function"] for call in calls if call["type"] == "function"]
        with _fixed_global_seeds():
            return [
                self.loop.call(tools[function["name"]], function["arguments"])
                for function in functions
                if function["name"] in names and isinstance(function["arguments"], dict)
            ]

    def _text(self, ids: Sequence[int] | TokenIds) -> str:
        return self.loop.decode(ids)[-300:]
