"""Trees over completions of several turns, in which tools are called and environments change."""

import ast
import asyncio
import math
import re
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import factory
import pytest
import tool_policy
import torch
from datasets import Dataset
from factory import CONTINUOUS, DEFAULTS, logged, weights
from factory import make_tool_trainer as make_trainer
from models import CPU, statistics_by_hand
from recorder import Recorder
from tool_policy import CALLS, WORDS, ForkingWalk, Locked, LockedWalk, Walk, instead_of_look, look
from trees import rollouts_of
from trl.chat_template_utils import parse_response

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.generation.tools import EnvironmentFailure
from fr3e_trl.method.sampling import Sample

TOKENIZER = tool_policy.make_tool_tokenizer()
train = partial(factory.train, make=make_trainer)


@pytest.fixture(autouse=True)
def forget():
    CALLS.clear()
    Walk.instances.clear()
    Walk.looks.clear()


def explored(trainer):
    trainer.train()
    return [(trees, batch) for batch, trees in trainer.batches]


def keys_of(rollout):
    calls = [call for message in rollout.dialogue.messages for call in message.get("tool_calls") or []]
    return [call["function"]["arguments"]["key"] for call in calls]


def own_calls(state, rollout):
    """How many calls a rollout made: those of its prefix were made before, and a copy's by its base trajectory."""
    if rollout.copy_of is not None:
        return 0
    first = sum(end <= state.position for _, end in rollout.dialogue.turns)
    of_turns = [message.get("tool_calls") or [] for message in rollout.dialogue.messages if message["role"] != "tool"]
    return sum(map(len, of_turns[first:]))


PUBLISHED = {"reuse_base": False, "base_selection": "mixed", "num_generations": 12, "per_device_train_batch_size": 24}


@pytest.mark.parametrize("settings", [{}, PUBLISHED], ids=["defaults", "published"])
def test_branches_go_on_amid_a_dialogue(settings):
    """The prefix's calls stand. Entropies and log-probs of generation are those of a pass over the whole completion."""
    trainer = make_trainer(learning_rate=0.0, **settings)
    steps, depths, num_calls = explored(trainer), set(), 0
    all_calls = len(CALLS)
    for trees, batch in steps:
        rows = list(rollouts_of(trees))
        for (_, state, rollout), tool_mask in zip(rows, batch["tool_mask"].tolist(), strict=True):
            completion = state.prefix_ids + rollout.token_ids
            turns = rollout.dialogue.turns
            # By hand: the policy ends with <eos>, and the tool says "<|tool|>", its answer, <eos> and "<|assistant|>"
            expected = [True] * len(completion)
            for (begin, end), (start, _) in pairwise(turns):
                told, asked = completion[end:start], completion[begin:end]
                assert TOKENIZER.decode(told[:1]) == "<|tool|>" and TOKENIZER.decode(told[-1:]) == "<|assistant|>"
                keys = re.findall(r"<call>(\d+)</call>", TOKENIZER.decode(asked))
                answers = re.findall(r"<\|tool\|>(\d+)<eos>", TOKENIZER.decode(told))
                assert answers == [look(key) for key in keys] or "error" in TOKENIZER.decode(told)
                expected[end:start] = [False] * (start - end)
            size = len(state.prefix_ids)
            assert rollout.mask == expected[size:]
            if any(tool_mask):  # or else it is rejected
                assert tool_mask[: len(completion)] == [False] * size + expected[size:]
            assert [message["role"] for message in rollout.dialogue.messages[::2]] == ["assistant"] * len(turns)
            assert len(completion) <= 24
        for tree in trees:
            for base, entropies in zip(tree.bases, tree.entropies, strict=True):
                assert entropies.isnan().tolist() == [not written for written in base.mask]
                by_hand = statistics_by_hand(trainer.model, tree.prompt_ids, base.token_ids)
                for told, expected in zip((torch.tensor(base.logprobs), entropies), by_hand, strict=True):
                    torch.testing.assert_close(told[base.mask], expected[base.mask], rtol=1e-4, atol=1e-4)
            for state in tree.states[1:]:
                base, entropies = tree.bases[state.base], tree.entropies[state.base].tolist()
                assert base.mask[state.position] and state.entropy == pytest.approx(entropies[state.position])
                depths.add(base.dialogue.turn_at(state.position))
    assert {1, 2} <= depths  # branches of later turns there were
    for trees, _ in steps:
        thrown_away = [] if trainer.args.reuse_base else [base for tree in trees for base in tree.bases]
        made = sum(own_calls(state, rollout) for _, state, rollout in rollouts_of(trees))
        num_calls += made + sum(own_calls(trees[0].states[0], base) for base in thrown_away)
    assert all_calls == num_calls
    logged = sum(logs["tools/call_frequency"] for logs in trainer.state.log_history[:-1])
    assert logged * len(rows) == pytest.approx(num_calls)


class Scripted:
    """Writes what it is told to: by the words that a rollout's completion has so far, the words that follow."""

    def __init__(self, lines):
        self.lines = {tuple(TOKENIZER(key)["input_ids"]): TOKENIZER(line)["input_ids"] for key, line in lines.items()}
        self.requests = []

    def sample(self, requests):
        self.requests += requests
        return [[self.write(request)] * request.num_samples for request in requests]

    def write(self, request):
        so_far = tuple(request.prefix_ids[request.num_prompt_tokens :].tolist()) if request.num_prompt_tokens else ()
        ids = self.lines[so_far][: request.max_new_tokens]
        return Sample(ids, [-1.0] * len(ids), [3.0 if WORDS[token].isdigit() else 0.1 for token in ids])


TURN = "<|tool|>{}<eos><|assistant|>"


def test_a_dialogue_by_hand():
    first, second = "<call>1</call><eos>" + TURN.format(4), "<call>4</call><eos>" + TURN.format(3)
    sampler = Scripted(
        {
            "": "<call>1</call><eos>",
            first: "<call>4</call><eos>",
            first + second: "3<eos>",
            "<call>": "2</call><eos>",  # the branch of the first turn, which writes the rest of its call
            "<call>2</call><eos>" + TURN.format(7): "7<eos>",
            first + "<call>": "5</call><eos>",
            first + "<call>5</call><eos>" + TURN.format(6): "6<eos>",
        }
    )
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "num_base_trajectories": 1, "max_steps": 1}
    trainer = make_trainer(max_completion_length=20, reject_degenerate_states=False, **sizes)
    trainer.sampler.sampler = sampler
    ((trees, batch),) = explored(trainer)
    (tree,) = trees
    # Digits are uncertain: the tokens 1 and 9, and 16, whose branch is the base again
    assert [state.position for state in tree.states] == [0, 1, 9, 16]
    texts = [TOKENIZER.decode(state.rollouts[0].token_ids) for state in tree.states]
    assert texts == [
        first + second + "3<eos>",
        "2</call><eos>" + TURN.format(7) + "7<eos>",
        "5</call><eos>" + TURN.format(6) + "6<eos>",
        "3<eos>",
    ]
    masks = ["".join(str(int(bit)) for bit in state.rollouts[0].mask) for state in tree.states]
    assert masks == ["111100001111000011", "111000011", "111000011", "11"]
    assert ["".join(map(str, row)) for row in batch["tool_mask"].tolist()] == [
        "111100001111000011",
        "011100001111111111",  # padding, which completion_mask leaves out
        "000000000111000011",
        "000000000000000011",
    ]
    # Of 20 tokens, each request has what is left: first turns, then those after 8 and 16
    budgets = [(request.num_sampled_before, request.max_new_tokens) for request in sampler.requests]
    assert budgets == [(0, 20), (8, 12), (16, 4), (1, 19), (8, 12), (9, 11), (16, 4), (16, 4)]
    assert CALLS == ["1", "4", "2", "5"]


@instead_of_look
def failing(key: str) -> str:
    raise OSError("error!")


@instead_of_look
def huge(key: str) -> str:
    CALLS.append(key)
    return "7" * 1000


@instead_of_look
def hanging(key: str) -> str:
    time.sleep(3600)


@instead_of_look
async def hanging_coroutine(key: str) -> str:
    await asyncio.sleep(3600)


async def look_later(key: str) -> str:
    await asyncio.sleep(0.001)
    return look(key)


look_later.__doc__ = look.__doc__


TOO_LONG = "look took longer than 0.05 seconds."


@pytest.mark.parametrize(("tool", "error"), [(failing, "error!"), (hanging, TOO_LONG), (hanging_coroutine, TOO_LONG)])
@pytest.mark.parametrize("num_anchors", [0, None])
def test_a_tool_that_fails_or_hangs_is_an_answer(tool, error, num_anchors):
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 1, "max_completion_length": 100}
    trainer = make_trainer(tools=[tool], tool_timeout=0.05, num_anchors=num_anchors, **sizes)
    trainer.train()
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 1
    for _, _, rollout in rollouts_of(trainer.trees):
        told = [message["content"] for message in rollout.dialogue.messages if message["role"] == "tool"]
        assert set(told) <= {f"{{'error': '{error}'}}"}


def test_turns_end_at_their_limit_and_with_an_answer_too_long_for_the_budget():
    for trees, _ in explored(make_trainer(max_tool_calling_iterations=1)):
        assert all(len(rollout.dialogue.turns) <= 2 for _, _, rollout in rollouts_of(trees))
    CALLS.clear()
    for trees, _ in explored(make_trainer(tools=[huge])):
        assert all(all(r.mask) and len(r.dialogue.messages) == 1 for _, _, r in rollouts_of(trees))
    assert CALLS


def change_calls(monkeypatch, change):
    def parse(*args, **kwargs):
        message = parse_response(*args, **kwargs)
        if message.get("tool_calls"):
            message["tool_calls"] = change(message["tool_calls"])
        return message

    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", parse)
    monkeypatch.setattr("fr3e_trl.tool_loop.parse_response", parse)


@pytest.mark.parametrize("name", ["key", "kye"])
def test_a_coroutine_that_is_called_amiss_is_answered_in_the_same_order(name, monkeypatch):

    def three(calls):
        key = calls[0]["function"]["arguments"]["key"]
        called = [("look_later", {name: key}), ("look", {"key": key}), ("nothing", {"key": key})]
        return [{"type": "function", "function": {"name": tool, "arguments": given}} for tool, given in called]

    change_calls(monkeypatch, three)
    trainer = make_trainer(tools=[look, look_later], max_completion_length=200)
    branched = [rollout for trees, _ in explored(trainer) for _, state, rollout in rollouts_of(trees) if state.position]
    turns = [rollout.dialogue.messages for rollout in branched if len(rollout.dialogue.messages) > 3]
    assert turns
    for messages in turns:
        names = [message["name"] for message in messages if message["role"] == "tool"]
        first = ["look_later", "look", "nothing"] if name == "kye" else ["look", "nothing", "look_later"]
        assert names[:3] == first


class Quiz:
    """Has no tools: it asks, and scores."""

    def reset(self, **kwargs):
        return "1+1="

    def get_reward(self, completion):
        return 1.0


def test_an_environment_without_tools_is_refused():
    with pytest.raises(NotImplementedError, match=r"environments without tools.*num_anchors=0"):
        make_trainer(environment_factory=Quiz)
    make_trainer(environment_factory=Quiz, num_anchors=0)


@instead_of_look
def look_at(answers: str) -> str:
    return look(answers)


@instead_of_look
async def look_at_later(answers: str) -> str:
    return look(answers)


look_at.__doc__ = look_at_later.__doc__ = look.__doc__.replace("key:", "answers:")  # a name of the trainer's own


def amiss(calls):
    """Those of the keys 0 to 3 have no dict of arguments, and those of 8 and 9 name no tool."""
    for call in calls:
        key = call["function"]["arguments"]["key"]
        arguments, name = key if key < "4" else {"answers": key}, "nothing" if key > "7" else "look"
        call["function"] |= {"arguments": arguments, "name": name}
    return calls


@pytest.mark.parametrize(
    "settings",
    [{"tools": [look_at]}, {"tools": [look_at_later]}, {"tools": [look_at], "tool_timeout": 60.0}],
    ids=["functions", "coroutines", "a time limit"],
)
def test_calls_that_reach_no_tool_are_answered_alike_in_every_branch(settings, monkeypatch):
    change_calls(monkeypatch, amiss)
    trainer = make_trainer(**settings, max_completion_length=200, max_steps=8)  # calls of all kinds precede branches
    before, made, answers, reached = [], 0, [], 0
    for trees, _ in explored(trainer):
        rows = list(rollouts_of(trees))
        for _, state, rollout in rows:
            turns, told = rollout.dialogue.messages[::2], rollout.dialogue.messages[1::2]
            first = sum(end <= state.position for _, end in rollout.dialogue.turns)
            for turn, message in zip(turns, told, strict=False):
                (call,) = turn["tool_calls"]
                if call["function"]["name"] == "nothing":
                    assert message["content"] == "{'error': 'Tool nothing not found.'}"
                elif isinstance(call["function"]["arguments"], str):
                    assert re.search(r"look_at(_later)?\(\) argument after \*\* must be a mapping", message["content"])
            functions = [turn["tool_calls"][0]["function"] for turn in turns if turn.get("tool_calls")]
            before += functions[:first]
            if rollout.copy_of is None:
                own = functions[first:]
                made += len(own)
                answers += [message["content"] for message in told[first:]]
                reached += sum(f["name"] == "look" and isinstance(f["arguments"], dict) for f in own)
    assert {(f["name"], type(f["arguments"])) for f in before} >= {("look", str), ("look", dict), ("nothing", dict)}
    logs = trainer.state.log_history[:-1]
    assert sum(log["tools/call_frequency"] for log in logs) * len(rows) == pytest.approx(made)
    failed = sum(log["tools/call_frequency"] * log["tools/failure_frequency"] for log in logs) * len(rows)
    num_errors = sum(answer.startswith("{'error'") for answer in answers)
    assert num_errors <= round(failed) <= num_errors + made - len(answers)  # some answers were too long
    assert len(CALLS) == reached > 0


def owned(environments, **kwargs):
    return [float(len(environment.keys)) for environment in environments]


def check_rewards(trees):
    """A rollout's reward is of an environment that has seen its completion's calls, and no others."""
    for _, _, rollout in rollouts_of(trees):
        keys = keys_of(rollout)
        assert rollout.score.rewards == [float(len(keys)), float(len(set(keys)))]
        assert rollout.dialogue.environment is None and not rollout.dialogue.snapshots


@pytest.mark.parametrize(
    "environment", [ForkingWalk, Walk, tool_policy.LateLockedWalk, tool_policy.ReplayedWalk, LockedWalk]
)
def test_an_environment_is_copied_or_replayed(environment):
    """By its own method, by a deep copy as long as there is one, or repeated, once for each branch of a later turn."""
    trainer = make_trainer(environment_factory=environment, reward_funcs=[owned], max_steps=1)
    ((trees, _),) = explored(trainer)
    check_rewards(trees)
    rows = rollouts_of(trees)
    made = sum(own_calls(state, rollout) for _, state, rollout in rows)
    branches = [(tree.bases[state.base].dialogue, state.position) for tree, state, _ in rows if state.base is not None]
    replayed = sum(dialogue.turn_at(position) for dialogue, position in branches)
    assert made > 0 and replayed > 0
    if environment is LockedWalk:
        assert len(Walk.looks) == made + replayed
        assert len(Walk.instances) <= 1 + 32  # the one that TRL tries, and one for each row at most
        assert trainer.state.log_history[0]["tools/call_frequency"] * 32 == pytest.approx(len(Walk.looks))


NO_PROMPTS = Dataset.from_dict({"number": list(range(16))})


def told(prompts, completions, environments, **kwargs):
    """What an instance has told, which is what its completion and its prompt say."""
    for prompt, completion, environment in zip(prompts, completions, environments, strict=True):
        answers = [message["content"] for message in completion if message["role"] == "tool"]
        assert environment.told[: len(answers)] == answers and len(environment.told) <= len(answers) + 1
        assert prompt[-1]["content"] == f"{environment.start}?"
    return [sum(map(float, environment.told)) for environment in environments]


@pytest.mark.parametrize(
    ("environment", "settings"),
    [(tool_policy.Dice, {}), (tool_policy.OwnDice, {"max_refills": 1, "base_selection": "mixed"})],
)
def test_chance_in_an_environment(environment, settings):
    """All rollouts of a tree begin in copies of one, and each goes on by itself: none is given up."""
    settings |= {"environment_factory": environment, "dataset": NO_PROMPTS, "reward_funcs": [told], "max_steps": 3}
    trainer = make_trainer(**settings)
    starts, depths, answers = set(), set(), defaultdict(set)
    for trees, _ in explored(trainer):
        for tree in trees:
            starts.add(TOKENIZER.decode(tree.prompt_ids)[-len("0?<eos><|assistant|>")])
            for asked, answered, *_ in (base.dialogue.messages for base in tree.bases if base.dialogue.messages[1:]):
                answers[id(tree), str(asked["tool_calls"])].add(answered["content"])
        for tree, state, rollout in rollouts_of(trees):
            assert not rollout.dialogue.is_broken
            depths.add(0 if state.base is None else tree.bases[state.base].dialogue.turn_at(state.position))
    assert len(starts) > 2 and {0, 1} <= depths
    if environment is tool_policy.Dice:  # they do not share what a global generator draws
        assert any(len(of_call) > 1 for of_call in answers.values())
    assert trainer.state.global_step == 3


def test_several_environments():
    """Each example has its own, of which one is copied and one repeated; each scores its own rows."""
    dataset = tool_policy.make_tool_dataset().add_column("environment", ["dice", "walk"] * 8)
    factories, kinds = {"dice": tool_policy.Dice, "walk": LockedWalk}, set()
    trainer = make_trainer(environment_factory=factories, reward_funcs=None, dataset=dataset, max_steps=3)
    for trees, _ in explored(trainer):
        for _, _, rollout in rollouts_of(trees):
            of_dice, of_walk = rollout.score.rewards
            assert math.isnan(of_dice) != math.isnan(of_walk)
            assert (of_walk if math.isnan(of_dice) else of_dice) == len(set(keys_of(rollout)))
            kinds.add(math.isnan(of_dice))
    assert kinds == {True, False}


class Greeting(Walk):
    """Owns the data: the question comes from its reset."""

    def reset(self, digit: int = 0, **example):
        super().reset(**example)
        return f"{digit}?"


class Greetings(Locked, Greeting):
    """Asks another question each time. Cannot be copied."""

    def reset(self, **example):
        return super().reset(digit=self.number % 10)


class ForkingGreeting(Greeting, ForkingWalk):
    """Has a method to be copied by."""


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (tool_policy.LockedDice, r"(?s)LockedDice answered .*cannot be copied: copy.deepcopy raises"),
        # A state outside, which deep copies share
        (tool_policy.ServedWalk, r"(?s)copies of the environment ServedWalk answered .*outside the object.*_fork"),
        (tool_policy.MoodyWalk, r"MoodyWalk answered .* but had answered .*_fork\(self\)"),
        (Greetings, r"(?s)Greetings returned different observations.*cannot be copied"),
    ],
)
def test_an_environment_that_can_be_neither_copied_nor_replayed_is_an_error(environment, says):
    with pytest.raises(EnvironmentFailure, match=says):
        make_trainer(environment_factory=environment, reward_funcs=[owned], max_steps=3).train()


@pytest.mark.parametrize("environment", [tool_policy.MoodyWalk, tool_policy.WordyWalk])
def test_rollouts_that_cannot_go_on_leave_the_loss(environment):
    settings = {"environment_factory": environment, "replay_mismatch": "skip", "anchor_threshold": None}
    trainer = make_trainer(reward_funcs=[owned], **settings)
    for trees, batch in explored(trainer):
        broken = [rollout.dialogue.is_broken for _, _, rollout in rollouts_of(trees)]
        in_loss = batch["in_loss"].tolist()
        assert any(broken) and not any(b and kept for b, kept in zip(broken, in_loss, strict=True))
        for _, _, rollout in rollouts_of(trees):
            assert rollout.dialogue.is_broken == math.isnan(rollout.score.reward)
    assert trainer.state.log_history[0]["fr3e/tools/skipped"] == pytest.approx(sum(broken) / 32, abs=0.2)


def test_an_environment_owns_the_data(tmp_path):
    dataset = Dataset.from_dict({"digit": [1, 2, 3, 4], "environment": ["a", "b", "a", "b"]})
    prompts_seen = []

    def reward(prompts, completions, environments, **kwargs):
        prompts_seen.extend(prompt[-1]["content"] for prompt in prompts)
        return owned(environments)

    saving = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    factories = {"a": Greeting, "b": ForkingGreeting}
    trainer = make_trainer(environment_factory=factories, reward_funcs=[reward], dataset=dataset, max_steps=1, **saving)
    ((trees, _),) = explored(trainer)
    texts = {TOKENIZER.decode(tree.prompt_ids) for tree in trees}
    assert texts == {f"<|user|>{digit}?<eos><|assistant|>" for digit in (1, 2, 3, 4)}
    assert set(prompts_seen) == {"1?", "2?", "3?", "4?"}
    assert (tmp_path / "checkpoint-1").is_dir()  # whose card has no prompt of the dataset to show


def test_an_environment_owns_all_of_the_data():
    """Without a dataset, as in TRL: the world asks, and `max_steps` says how often."""
    args = FR3EConfig(**CPU | DEFAULTS | {"per_device_train_batch_size": 32, "max_completion_length": 24})
    parts = {"processing_class": tool_policy.make_tool_tokenizer(), "environment_factory": Greeting}
    trainer = Recorder(tool_policy.make_tool_policy(), [owned], args, **parts)
    for trees, _ in explored(trainer):
        assert {TOKENIZER.decode(tree.prompt_ids) for tree in trees} == {"<|user|>0?<eos><|assistant|>"}
        assert len(trees) == 4


def test_a_reset_that_fails_loses_nothing(tmp_path, monkeypatch):
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 3, "output_dir": str(tmp_path)}
    trainer, again = (make_trainer(environment_factory=Walk, reward_funcs=[owned], **sizes) for _ in range(2))
    reset = Walk.reset

    def fail(self, **example):
        if trainer.state.global_step == 2:
            raise OSError("no such world")
        return reset(self, **example)

    with monkeypatch.context() as patch, pytest.raises(EnvironmentFailure, match="OSError: no such world") as error:
        patch.setattr(Walk, "reset", fail)
        trainer.train()
    assert "Step 2, the last that was trained, is saved" in "".join(error.value.__notes__)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_a_run_that_was_cut_goes_on():
    """With an environment; with tools see test_kill_9_at_random_moments."""
    settings = {"environment_factory": Walk, "max_steps": 4, "max_refills": 1, "num_anchors": 3}
    settings |= {"value_prior_strength": 0.0, "save_strategy": "steps", "save_steps": 2}
    whole, resumed = (weights(train(resume=resume, **settings)) for resume in (None, "output/checkpoint-2"))
    assert resumed.equal(whole)


def test_other_ways_to_train():
    trainer = make_trainer(**CONTINUOUS | {"bf16": False})
    before = weights(trainer)
    trainer.train()
    assert not weights(trainer).equal(before)
    # Shared prefixes change nothing
    runs = (weights(train(share_prefixes=share_prefixes, max_steps=3)) for share_prefixes in (True, False))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


def test_the_game_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import game

    tiles = game.Tiles()
    tiles.reset()
    tiles.board = [[2, 2, 4], [0, 8, 8], [2, 0, 2]]
    tiles.slide("right")
    assert [row[1:] for row in tiles.board] == [[4, 4], [tiles.board[1][1], 16], [tiles.board[2][1], 4]]
    assert tiles.score == 4 + 16 + 4 and tiles.get_reward() == 0.24
    settings = {"max_steps": 3, "per_device_train_batch_size": 16, "logging_steps": 1, "output_dir": tmp_path}
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    game.main(*game.make_parser().parse_args_and_config([*arguments, "--disable_tqdm=true"]))
    logs = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{'loss'")]
    assert len(logs) == 3 and (tmp_path / "model.safetensors").exists()
    for log in logs:
        assert float(log["tools/call_frequency"]) > 2 and float(log["tools/failure_frequency"]) < 0.2
        assert float(log["reward_std"]) > 0 and float(log["fr3e/anchor/count"]) > 0


def test_what_a_tool_wrote_may_be_very_unlikely():
    """Its old log-prob, of below -88, is not taken for a ratio. TRL logs a NaN as 0, unless it is told otherwise."""

    class Unlikely(FR3ETrainer):
        def _with_credit(self, batch):
            outside = batch["completion_mask"] * batch["tool_mask"] == 0
            batch["old_per_token_logps"] = batch["old_per_token_logps"].masked_fill(outside, -120.0)
            return super()._with_credit(batch)

    trainer = make_trainer(Unlikely, num_iterations=2, max_steps=2, logging_nan_inf_filter=False)
    trainer.train()
    assert trainer.shares_prefixes
    assert all(math.isfinite(loss) for (loss,) in logged(trainer, "loss"))
