"""
Completions over several turns: a sampler writes each turn, and TRL's loop calls the tools.

A rollout that branches off a later turn is the loop run once more, with a script. The turns before its own are not
sampled but read from the completion that it branches off, and so are the answers of tools. Environments are another
matter, since theirs must be in the state of the prefix: one that can be copied is copied, and any other is asked again.
All rollouts of a tree begin in copies of one environment, so that chance in its reset is the same for all of them.
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
from ..processes import Turns

# Functions and coroutine functions, by their names
ToolDicts = tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]

# Writes the next turns of completions: prompts and completions so far, and the images that tools returned to each, to
# the tokens of each
TurnWriter = Callable[[list[Any], list[list[Any]]], list[list[int]]]

# Rollouts of a class of environments by which it is checked whether a deep copy goes on by itself
NUM_CHECKED = 4


class ToolLoop(Protocol):
    """TRL's loop, which calls tools; see `tool_loop.py`."""

    accelerator: Accelerator
    eos_token_id: int

    def run(
        self,
        tools: tuple[list[dict[str, Any]], list[dict[str, Any]]],
        names: list[str | None],
        prompt_ids: list[list[int]],
        first_turns: list[list[int]],
        write_turns: TurnWriter,
    ) -> tuple[list[list[int]], list[list[dict[str, Any]]], int, int]:
        """
        Call the tools of completions, turn after turn.

        Args:
            tools (`tuple[list[dict], list[dict]]`):
                Functions and coroutine functions of each completion, by their names. They may change between turns.
            names (`list[str | None]`):
                The environment of each completion, where there are several.
            prompt_ids, first_turns (`list[list[int]]`):
                Token ids of the prompts, and of what the policy wrote first.
            write_turns (`TurnWriter`):
                Writes the turns that follow. What it is given begins with a prompt's list, by that list's `+`.

        Returns:
            `tuple`: Token ids and messages of the completions, how many calls were made, and how many failed.
        """

    def limited(self, tools: ToolDicts) -> ToolDicts:
        """Tools that fail where they take longer than they may."""

    def call(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> str:
        """What the policy reads of a call, if it fails too."""

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Tokens as text."""


class EnvironmentFailure(RuntimeError):
    """An environment does not do what exploration needs."""


def copy_of(environment: Any) -> Any:
    """A copy of an environment, which goes on by itself in the same state, or `None` if it cannot be copied."""
    if hasattr(environment, "_fork"):
        return None if environment._fork is None else environment._fork()
    try:
        return copy.deepcopy(environment)
    except Exception:  # of any class: what is copied decides
        return None


def _obstacle_to_copies(environment: Any) -> str:
    """Why an environment that cannot be copied cannot be."""
    if hasattr(environment, "_fork"):
        return "its _fork is None"
    try:
        copy.deepcopy(environment)
    except Exception as error:
        return f"copy.deepcopy raises {type(error).__name__}: {error}"
    return "copy.deepcopy raised an error"


@contextmanager
def _same_chance() -> Iterator[None]:
    """Have the global generators draw the same each time, and go on afterwards as if nothing had been drawn."""
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
    """Token ids of a prompt. A list that begins with it says which rollout it is of."""

    def __init__(self, ids: Sequence[int], rollout: int):
        super().__init__(ids)
        self.rollout = rollout

    def __add__(self, ids: Any) -> "_Prompt":  # type: ignore[override]
        return _Prompt([*self, *ids], self.rollout)


@dataclass(eq=False)
class Instance:
    """
    What one rollout calls its tools in.

    Args:
        prompt_ids (`list[int]`):
            The prompt, with what the environment said when it was reset.
        tools (`ToolDicts`):
            Its tools.
        name (`str`, *optional*):
            Which environment it is, where there are several.
        environment (`Any`, *optional*):
            The environment.
    """

    prompt_ids: list[int]
    tools: ToolDicts
    name: str | None = None
    environment: Any = None

    def copied(self, original: Any) -> "Instance | None":
        """The same with a copy of an environment in the place of its own, or `None` if that cannot be copied."""
        environment = copy_of(original)
        if environment is None:
            return None
        sync_tools, async_tools = (
            {
                name: getattr(environment, name) if self.is_of_environment(tool) else tool
                for name, tool in of_kind.items()
            }
            for of_kind in self.tools
        )
        return replace(self, tools=(sync_tools, async_tools), environment=environment)

    def is_of_environment(self, tool: Callable[..., Any]) -> bool:
        return self.environment is not None and getattr(tool, "__self__", None) is self.environment


@dataclass(eq=False)
class _Rollout:
    """
    A completion that is being written.

    Args:
        request ([`SamplingRequest`]):
            What it was asked for by.
        instance ([`Instance`]):
            What it calls its tools in.
        branch_turn (`int`):
            The turn that it begins to write in. Those before it are its script.
        is_copied (`bool`):
            Whether its environment is in that turn's state already.
        turns (`list[tuple[int, int]]`):
            Where the policy wrote, in tokens of the completion.
        samples (`list[tuple[int, Sample]]`):
            What was sampled for it, each with the position of its first token.
        snapshots (`list[Any]`):
            Copies of its environment before each turn, if branches may want them.
        is_broken (`bool`):
            Whether it could not go on from its prefix.
        num_retold (`int`):
            Calls that were not made again.
        num_failed_again (`int`):
            Those of them that TRL counts as failed once more.
    """

    request: SamplingRequest
    instance: Instance
    branch_turn: int = 0
    is_copied: bool = False
    turns: list[tuple[int, int]] = field(default_factory=list)
    samples: list[tuple[int, Sample]] = field(default_factory=list)
    snapshots: list[Any] = field(default_factory=list)
    is_broken: bool = False
    num_retold: int = 0
    num_failed_again: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prefix_ids) - self.request.num_sampled_before
        self.given: list[int] = self.request.prefix_ids[self.num_prompt_tokens :].tolist()
        self.end = len(self.given) + self.request.max_new_tokens

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prefix_ids[: self.num_prompt_tokens].tolist()

    @property
    def script(self) -> list[tuple[int, int]]:
        """Its turns that are not its own to write."""
        return [] if self.request.dialogue is None else self.request.dialogue.turns[: self.branch_turn]

    def retold_tools(self) -> ToolDicts:
        """Its tools in the turns of its script: they only tell again what they told, but for an environment's."""
        answers = self._answers()
        retold: ToolDicts = {}, {}
        told_again = self._retold, self._retold_later
        for of_kind, tools, tell in zip(self.instance.tools, retold, told_again, strict=True):
            for name, tool in of_kind.items():
                called_again = self.instance.is_of_environment(tool) and not self.is_copied
                tools[name] = tool if called_again else tell(tool, answers.get(name, deque()))
        return retold

    def _answers(self) -> dict[str, deque[Any]]:
        """What each tool answered where it was called, in order."""
        assert self.request.dialogue is not None
        answers: dict[str, deque[Any]] = {}
        calls: list[dict[str, Any]] = []  # of the last turn, in the order of their answers
        for message in self.request.dialogue.messages:
            if message["role"] != "tool":
                calls = sorted(message.get("tool_calls") or [], key=self._is_answered_later)
                continue
            # A coroutine's call that fails at once is answered before its turn
            call = next((call for call in calls if self._name_of(call) == message["name"]), calls[0])
            calls.remove(call)
            if self._reaches_tool(call):
                answers.setdefault(message["name"], deque()).append(message["content"])
        return answers

    def _reaches_tool(self, call: dict[str, Any]) -> bool:
        """Whether the loop calls a tool. Otherwise it answers by itself, with an error."""
        if call["type"] != "function":
            return False
        function = call["function"]
        return isinstance(function["arguments"], dict) and any(
            function["name"] in tools for tools in self.instance.tools
        )

    @staticmethod
    def _name_of(call: dict[str, Any]) -> str:
        """The name by which the loop answers a call."""
        return call["function"]["name"] if call["type"] == "function" else call.get("name", "unknown")

    def _is_answered_later(self, call: dict[str, Any]) -> bool:
        """Whether a call's answer comes after all that are no coroutine's."""
        return self._reaches_tool(call) and call["function"]["name"] not in self.instance.tools[0]

    @property
    def num_refused_before(self) -> int:
        """Calls in the turns of its script that reached no tool."""
        assert self.request.dialogue is not None
        turns = [message for message in self.request.dialogue.messages if message["role"] != "tool"]
        calls = [call for turn in turns[: self.branch_turn] for call in turn.get("tool_calls") or []]
        return sum(not self._reaches_tool(call) for call in calls)

    def _retold(self, tool: Callable[..., Any], answers: deque[Any]) -> Callable[..., Any]:
        """What tells the answers again. Like the tool, it has its name in Python's errors: the policy reads them."""

        @functools.wraps(tool)
        def retold(**arguments: Any) -> Any:
            self.num_retold += 1
            return answers.popleft()

        return retold

    def _retold_later(self, tool: Callable[..., Any], answers: deque[Any]) -> Callable[..., Any]:
        retold = self._retold(tool, answers)

        @functools.wraps(tool)
        def retold_later(**arguments: Any) -> Any:
            try:
                tool(**arguments).close()  # which does not begin. Wrong arguments fail at once, as they did
            except Exception:
                self.num_failed_again += 1
                retold()
                raise

            async def told() -> Any:
                return retold()

            return told()

        return retold_later

    def keep_snapshot(self) -> None:
        """Keep a copy of the environment, as it is before a turn, if there may be branches of that turn."""
        environment = self.instance.environment
        if not self.request.with_entropies or environment is None or len(self.snapshots) < len(self.turns):
            return
        copied = copy_of(environment)
        self.snapshots = [] if copied is None else [*self.snapshots, copied]

    def sample_of(self, completion_ids: list[int], messages: list[dict[str, Any]], eos_token_id: int) -> Sample:
        """What became of it, without its prefix."""
        messages = self._messages_of_prefix() if self.is_broken else messages
        dialogue = Dialogue(messages, self.turns, self.instance.environment, self.snapshots, self.is_broken)
        if self.is_broken:
            return Sample([eos_token_id], mask=np.ones(1, bool), dialogue=dialogue)
        size, start = len(completion_ids), len(self.given)
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

    def _messages_of_prefix(self) -> list[dict[str, Any]]:
        """Those before the turn that it begins to write in."""
        assert self.request.dialogue is not None
        messages = self.request.dialogue.messages
        turns = [i for i, message in enumerate(messages) if message["role"] != "tool"]
        return messages[: turns[self.branch_turn]]


class ToolCallingSampler:
    """
    Has the policy call tools.

    Args:
        loop ([`ToolLoop`]):
            Calls the tools.
        sampler ([`Sampler`]):
            Writes the turns.
        skip_mismatches (`bool`):
            Whether rollouts whose environment answers otherwise than it did are given up. If not, it is an error.

    Attributes:
        num_calls, num_failures (`int`):
            Calls of tools that were made, and how many of them failed.
    """

    def __init__(self, loop: ToolLoop, sampler: Sampler, skip_mismatches: bool):
        self.loop = loop
        self.sampler = sampler
        self.skip_mismatches = skip_mismatches
        self.num_calls = self.num_failures = 0
        self._instances: dict[int, deque[Instance]] = {}
        self._num_checked: Counter[type] = Counter()  # rollouts by which deep copies were checked, by their class

    @property
    def hit_rate(self) -> float | None:
        return getattr(self.sampler, "hit_rate", None)

    def take_counts(self) -> tuple[int, int]:
        """Calls and failures since they were taken last."""
        counts = self.num_calls, self.num_failures
        self.num_calls = self.num_failures = 0
        return counts

    def provide(self, instances: dict[int, list[Instance]]) -> None:
        """
        Take what rollouts will call tools in, those of each tree. One without an environment serves all of them, and
        so does the first whose environment can be copied.
        """
        self._instances = {tree: deque(of_tree) for tree, of_tree in instances.items()}

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        with Turns(self.loop.accelerator, lambda: self.sampler.sample([])) as turns:
            rollouts = [self._begun(request) for request in requests for _ in range(request.num_samples)]
            first_turns = self._first_turns(requests, rollouts, turns)
            samples = self._with_tools(rollouts, first_turns, turns) if rollouts else []
            self._check_copies(rollouts, samples)
        remaining = iter(samples)
        return [[next(remaining) for _ in range(request.num_samples)] for request in requests]

    def _begun(self, request: SamplingRequest) -> _Rollout:
        assert request.tree is not None
        instances, dialogue = self._instances[request.tree], request.dialogue
        rollout = _Rollout(request, instances[0])
        if dialogue is not None:
            rollout.branch_turn = dialogue.turn_at(len(rollout.given))
        copied = None
        if dialogue is not None and dialogue.snapshots:
            copied = instances[0].copied(dialogue.snapshots[rollout.branch_turn])
        rollout.is_copied = copied is not None
        if copied is None and instances[0].environment is not None:
            copied = instances[0].copied(instances[0].environment) or self._next(request.tree, rollout)
        rollout.instance = copied or instances[0]
        rollout.keep_snapshot()
        return rollout

    def _next(self, tree: int, rollout: _Rollout) -> Instance:
        """The next instance of a tree, where the first cannot be copied."""
        instance = self._instances[tree].popleft()
        if instance.prompt_ids != rollout.prompt_ids:
            raise EnvironmentFailure(
                f"The environment {type(instance.environment).__name__} says one thing and another when it is reset "
                f"for one example: {self._text(rollout.prompt_ids)!r} and {self._text(instance.prompt_ids)!r}. All "
                "rollouts of a tree have one prompt, and its environment cannot be copied for them: "
                f"{_obstacle_to_copies(instance.environment)}. Give the environment a method _fork(self), which "
                "returns a copy that goes on by itself, in the same state; or have reset(**example) depend on nothing "
                "but the example's columns, for example on a column 'seed'; or set num_anchors=0 to train with plain "
                "GRPO."
            )
        return instance

    def _first_turns(
        self, requests: Sequence[SamplingRequest], rollouts: list[_Rollout], turns: Turns
    ) -> list[list[int]]:
        """The first turn of each rollout: sampled, or from its script."""
        remaining = iter(rollouts)
        of_requests = [[next(remaining) for _ in range(request.num_samples)] for request in requests]
        asked = [of_request for of_request in of_requests if of_request[0].branch_turn == 0]
        drawn = turns.take(
            lambda: self.sampler.sample(
                [replace(of_request[0].request, branching=None, dialogue=None) for of_request in asked]
            )
        )
        for of_request, samples in zip(asked, drawn, strict=True):
            for rollout, sample in zip(of_request, samples, strict=True):
                rollout.samples.append((len(rollout.given), sample))
        first_turns = []
        for rollout in rollouts:
            sampled = [token for _, sample in rollout.samples for token in sample.token_ids]
            ids = rollout.given + sampled if rollout.branch_turn == 0 else rollout.given[: rollout.script[0][1]]
            rollout.turns.append((0, len(ids)))
            first_turns.append(ids)
        return first_turns

    def _with_tools(self, rollouts: list[_Rollout], first_turns: list[list[int]], turns: Turns) -> list[Sample]:
        """The rollouts in full."""
        tools: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [{} for _ in rollouts], [{} for _ in rollouts]

        def set_tools(i: int, dicts: ToolDicts) -> None:
            tools[0][i], tools[1][i] = self.loop.limited(dicts)

        def write_turns(prompts_and_completions: list[Any], tool_images: list[list[Any]]) -> list[list[int]]:
            going_on = [rollouts[ids.rollout] for ids in prompts_and_completions]
            written: list[list[int]] = []
            asked: dict[int, SamplingRequest] = {}
            for i, (rollout, ids) in enumerate(zip(going_on, prompts_and_completions, strict=True)):
                completion_ids = ids[rollout.num_prompt_tokens :]
                written.append(self._from_script(rollout, completion_ids))
                if rollout.is_broken or len(rollout.turns) < rollout.branch_turn:
                    continue
                rollout.keep_snapshot()
                budget = rollout.end - len(completion_ids) - len(written[i])
                if budget > 0:
                    request = replace(
                        rollout.request,
                        prefix_ids=as_ids([*ids, *written[i]]),
                        num_samples=1,
                        max_new_tokens=budget,
                        num_prompt_tokens=rollout.num_prompt_tokens,
                        branching=None,
                        dialogue=None,
                        tool_images=tool_images[i],
                    )
                    asked[i] = request
            drawn = turns.take(lambda: self.sampler.sample(list(asked.values())))
            for (i, request), (sample,) in zip(asked.items(), drawn, strict=True):
                going_on[i].samples.append((request.num_sampled_before, sample))
                written[i] = [*written[i], *sample.token_ids]
            for rollout, ids, of_turn in zip(going_on, prompts_and_completions, written, strict=True):
                start = len(ids) - rollout.num_prompt_tokens
                if rollout.branch_turn == len(rollout.turns):
                    set_tools(ids.rollout, rollout.instance.tools)
                if of_turn:
                    rollout.turns.append((start, start + len(of_turn)))
            return written

        for i, rollout in enumerate(rollouts):
            set_tools(i, rollout.retold_tools() if rollout.branch_turn else rollout.instance.tools)
        prompt_ids: list[list[int]] = [_Prompt(rollout.prompt_ids, i) for i, rollout in enumerate(rollouts)]
        completion_ids, messages, num_calls, num_failures = self.loop.run(
            tools, [rollout.instance.name for rollout in rollouts], prompt_ids, first_turns, write_turns
        )
        num_refused_before = sum(rollout.num_refused_before for rollout in rollouts if rollout.branch_turn)
        self.num_calls += num_calls - sum(rollout.num_retold for rollout in rollouts) - num_refused_before
        num_failed_again = sum(rollout.num_failed_again for rollout in rollouts)
        self.num_failures += num_failures - num_refused_before - num_failed_again
        for rollout, ids in zip(rollouts, completion_ids, strict=True):
            if len(rollout.turns) <= rollout.branch_turn and not rollout.is_broken:
                self._give_up(rollout, ids)  # an answer too long for the budget has ended it before
        return [
            rollout.sample_of(ids, of_completion, self.loop.eos_token_id)
            for rollout, ids, of_completion in zip(rollouts, completion_ids, messages, strict=True)
        ]

    def _from_script(self, rollout: _Rollout, completion_ids: list[int]) -> list[int]:
        """What a rollout's prefix has of its next turn, after a look at whether all before it is as it was."""
        turn = len(rollout.turns)
        if turn > rollout.branch_turn:
            return []
        assert rollout.request.dialogue is not None
        start, end = rollout.request.dialogue.turns[turn]
        if completion_ids == rollout.given[:start]:
            return rollout.given[start : end if turn < rollout.branch_turn else None]
        self._give_up(rollout, completion_ids)
        return []

    def _give_up(self, rollout: _Rollout, completion_ids: list[int]) -> None:
        """Have a rollout end whose environment does not answer as it did: with an error, unless these are skipped."""
        rollout.is_broken = True
        if self.skip_mismatches:
            return
        assert rollout.request.dialogue is not None
        end = rollout.turns[-1][1]
        start, _ = rollout.request.dialogue.turns[len(rollout.turns)]
        environment = rollout.instance.environment
        name = type(environment).__name__
        if copy_of(environment) is not None:
            raise EnvironmentFailure(
                f"The environment {name} can be copied, but the copy is in another process: a prompt's rows lie in "
                "several. Have per_device_train_batch_size times steps_per_generation be a multiple of "
                "num_generations; or set replay_mismatch='skip', with which such rollouts are given up."
            )
        raise EnvironmentFailure(
            f"The environment {name} answered the same actions with {self._text(completion_ids[end:])!r} where it had "
            f"answered {self._text(rollout.given[end:start])!r}. A rollout that branches off a later turn needs an "
            f"environment in the state of its prefix, and it cannot be copied: {_obstacle_to_copies(environment)}. "
            "Give the environment a method _fork(self), which returns a copy that goes on by itself, in the same "
            "state; or have it depend on nothing but the example and the actions, without chance that lies outside "
            "the object, in a global generator or a server; or set replay_mismatch='skip', with which such rollouts "
            "are given up."
        )

    def _check_copies(self, rollouts: list[_Rollout], samples: list[Sample]) -> None:
        """
        Refuse an environment that has its state outside the object, where a deep copy shares it with the original.

        The first rollouts of each class do their calls twice more, in two copies of their environment as it was reset,
        with the same chance in global generators: the rollouts and the first copy would leave their traces.
        """
        for rollout, sample in zip(rollouts, samples, strict=True):
            environment = rollout.instance.environment
            kind = type(environment)
            is_checked = environment is None or hasattr(environment, "_fork") or self._num_checked[kind] == NUM_CHECKED
            if is_checked or rollout.branch_turn or sample.dialogue is None:
                continue
            answers = [self._called_again(rollout, sample.dialogue.messages) for _ in range(2)]
            self._num_checked[kind] += bool(answers[0])
            for first, second in zip(*answers, strict=True):
                if first != second:
                    raise EnvironmentFailure(
                        f"The environment {kind.__name__} answered one action with {first[-300:]!r} and with "
                        f"{second[-300:]!r} in two deep copies that had seen the same, with global generators (of "
                        "random, numpy and torch) in the same state. So its state or its chance lies outside the "
                        "object, for example in a server, and a deep copy may not go on by itself. Give the "
                        "environment a method _fork(self), which returns a copy that does: copy.deepcopy(self), if "
                        "that is one. Or set _fork = None in its class to have actions repeated in place of copies, "
                        "or num_anchors=0 to train with plain GRPO."
                    )

    def _called_again(self, rollout: _Rollout, messages: list[dict[str, Any]]) -> list[str]:
        """What a fresh copy of a rollout's environment answers to its calls."""
        assert rollout.request.tree is not None
        instances = self._instances[rollout.request.tree]  # none are left if they cannot be copied
        instance = instances[0].copied(instances[0].environment) if instances else None
        if instance is None:
            return []
        tools = {name: tool for of_kind in self.loop.limited(instance.tools) for name, tool in of_kind.items()}
        own = {name for of_kind in instance.tools for name, tool in of_kind.items() if instance.is_of_environment(tool)}
        calls = [call for message in messages for call in message.get("tool_calls") or []]
        functions = [call["function"] for call in calls if call["type"] == "function"]
        with _same_chance():
            return [
                self.loop.call(tools[function["name"]], function["arguments"])
                for function in functions
                if function["name"] in own and isinstance(function["arguments"], dict)
            ]

    def _text(self, ids: Sequence[int] | TokenIds) -> str:
        return self.loop.decode(ids)[-300:]
