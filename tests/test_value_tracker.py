"""What prompts are worth, remembered from step to step."""

import json
import math

import factory
import pytest
import torch
from factory import graded
from launches import launch
from models import make_dataset
from test_processes import assert_same_training, weights_of

from fr3e_trl.method.credit.prior import ValueTracker, prompt_key
from fr3e_trl.method.tree import as_ids

NAN = math.nan
A, B, C, D = -5, 7, 2**62, 0  # keys, in no order


def learn(memory: ValueTracker, values: dict[int, list[float]]) -> None:
    """A step, given the rewards of each prompt's rows, which are worth their mean."""
    rewards = torch.tensor([reward for of_prompt in values.values() for reward in of_prompt], dtype=torch.float64)
    prompts = torch.tensor([i for i, of_prompt in enumerate(values.values()) for _ in of_prompt])
    means = [torch.tensor(of_prompt, dtype=torch.float64).nanmean().item() for of_prompt in values.values()]
    memory.learn(list(values), torch.tensor(means, dtype=torch.float64), rewards, prompts)


def priors(memory: ValueTracker, values: dict[int, float]) -> list[float]:
    return memory.priors(list(values), torch.tensor(list(values.values()), dtype=torch.float64)).tolist()


def known(memory: ValueTracker) -> dict[int, tuple[float, float]]:
    """The offset of each prompt that came, and how many visits it counts as."""
    columns = (memory.state()[name].tolist() for name in ("keys", "offsets", "weights"))
    return {key: (offset, weight) for key, offset, weight in zip(*columns, strict=True)}


def test_the_level_by_hand():
    memory = ValueTracker()
    assert math.isnan(priors(memory, {A: 0.5})[0])
    # The others of the batch, as without a memory
    assert priors(memory, {A: 0.5, B: 1.0, C: 0.0}) == pytest.approx([0.5, 0.25, 0.75])
    learn(memory, {A: [0.5], B: [1.0], C: [0.0]})
    assert (memory.level, memory.num_prompts) == (0.5, 3)
    # New prompts: (3 * .5 + 1) / 4 = .625 and (3 * .5 + .2) / 4 = .425; one alone: .5, whatever it turns out to be
    assert priors(memory, {D: 0.2, 9: 1.0}) == pytest.approx([0.625, 0.425])
    assert priors(memory, {D: 100.0}) == pytest.approx([0.5])
    # A prompt without a scorable row has a prior, and is none's
    assert priors(memory, {D: NAN, 9: 1.0}) == pytest.approx([0.625, 0.5])
    # It counts as 64 prompts at most
    memory = ValueTracker()
    for i in range(10):
        learn(memory, {10 * i + j: [0.0] for j in range(10)})
    assert (memory.level, memory.num_prompts) == (0, 64)
    learn(memory, {1000: [1.0]})
    assert memory.level == pytest.approx(1 / 65)
    assert memory.num_prompts == 64


def test_offsets_and_their_slope_by_hand():
    memory = ValueTracker()
    learn(memory, {A: [1.0], B: [0.0], C: [0.5]})
    # Levels without each: .25, .75, .5. Offsets .75, -.75 and 0, of one visit each
    assert known(memory) == {A: (0.75, 1), B: (-0.75, 1), C: (0, 1)}
    # Nothing has shown yet that an offset lasts: the level alone
    assert priors(memory, {A: 0.0}) == [0.5]
    learn(memory, {A: [0.8]})
    # Level .5, so .3 above it after .75. .75 * .3 / .75 ** 2 = .4, as of 1 prompt, beside 16 of slope 0: .4 / 17
    assert memory.slope.value == pytest.approx(0.4 / 17)
    # In the mean of its visits the first counts .75: (.75 * .75 + .3) / 1.75
    assert known(memory)[A] == pytest.approx((0.8625 / 1.75, 1.75))
    # Level (3 * .5 + .8) / 4 = .575, and B is expected that much below it
    assert priors(memory, {B: NAN}) == pytest.approx([0.575 - 0.4 / 17 * 0.75])
    assert memory.num_known([B, D, C, 123]) == 2


def test_the_strength_by_hand():
    memory = ValueTracker()
    assert memory.prior_strength == pytest.approx(4)
    memory.learn([A], torch.tensor([NAN]), torch.tensor([NAN, NAN]), torch.tensor([0, 0]))
    assert memory.prior_strength == pytest.approx(4)
    assert not known(memory) and memory.num_prompts == 0  # prompts that cannot be scored teach nothing
    memory.level, memory.num_prompts = 0.5, 64
    learn(memory, {A: [1.0, 1.0, 0.0], B: [1.0, NAN], C: [0.0, 0.0]})
    # Priors near .5: without A (32 + 1 + 0) / 66 = .5; without B (32 + 2 / 3) / 66; without C (32 + 5 / 3) / 66
    b, c = (32 + 2 / 3) / 66, (32 + 5 / 3) / 66
    # Errors of A .5 .5 -.5: three pairs, products .25 -.25 -.25, mean -1/12; squares .25. B has no pair. C: -c, -c
    products, squares = -1 / 12 + c**2, 0.25 + c**2
    assert 0 < b < 1 and memory.correlation.value == pytest.approx((2 * products / squares + 16 * 0.2) / 18)
    rho = memory.correlation.value
    assert memory.prior_strength == pytest.approx((1 - rho) / rho)
    # It has a bound, where rewards of a prompt differ more than those of different prompts
    memory = ValueTracker()
    for _ in range(20):
        learn(memory, {A: [0.0, 1.0], B: [1.0, 0.0]})
    assert memory.correlation.value < 0
    assert memory.prior_strength == pytest.approx(99)


def test_a_prompt_that_comes_again_is_known():
    """Eight prompts worth 0 to .7 while all get better: the prior's error falls to that of what was seen."""
    generator = torch.Generator().manual_seed(0)
    memory = ValueTracker()
    errors = []
    for step in range(200):
        truth = torch.arange(8, dtype=torch.float64) / 10 + step / 500
        values = truth + 0.1 * torch.randn(8, generator=generator, dtype=torch.float64)
        errors.append((memory.priors(list(range(8)), values) - truth).abs().mean().item())
        learn(memory, dict(enumerate(values[:, None].tolist())))
    assert errors[1] > 0.15 and sum(errors[-50:]) / 50 < 0.06
    assert memory.slope.value > 0.7


def test_prompts_are_told_apart_whatever_their_number_and_order():
    """Against a dictionary: more than a table begins with, some twice in a batch, some that share their place."""
    generator = torch.Generator().manual_seed(0)
    memory, offsets, weights = ValueTracker(), {}, {}
    keys = [*range(0, 2**24, 2**20), *torch.randint(-(2**62), 2**62, (1500,), generator=generator).tolist()]
    keys = [keys[i] for i in torch.randint(0, len(keys), (4000,), generator=generator)]
    for start in range(0, 4000, 100):
        batch, values = keys[start : start + 100], torch.rand(100, generator=generator, dtype=torch.float64)
        levels = (memory.num_prompts * memory.level + values.sum() - values) / (memory.num_prompts + 99)
        slope = min(max(memory.slope.value, 0), 1)
        expected = levels + slope * torch.tensor([offsets.get(key, 0.0) for key in batch])
        torch.testing.assert_close(memory.priors(batch, values), expected, atol=1e-6, rtol=1e-6)
        assert memory.num_known(batch) == sum(key in offsets for key in batch)
        memory.learn(batch, values, values, torch.arange(100))
        for key in set(batch):
            found = [(value - level).item() for k, value, level in zip(batch, values, levels, strict=True) if k == key]
            before = 0.75 * weights.get(key, 0.0)
            offsets[key] = (before * offsets.get(key, 0.0) + sum(found) / len(found)) / (before + 1)
            weights[key] = before + 1
    assert known(memory) == {key: pytest.approx((offsets[key], weights[key]), abs=1e-5) for key in offsets}
    assert memory.state()["keys"].tolist() == sorted(offsets)  # whatever the order that they came in
    again = ValueTracker()
    again.resume(memory.state())
    assert known(again) == known(memory)


def test_a_checkpoint_is_small_and_plain(tmp_path):
    memory = ValueTracker()
    for step in range(10):
        learn(memory, {prompt_key(as_ids([step, i])): [0.1 * (i % 10), 0.5] for i in range(1000)})
    torch.save(memory.state(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 16 * 10_000 + 4000
    again = ValueTracker()
    again.resume(torch.load(tmp_path / "state.pt", weights_only=True))
    batch = {prompt_key(as_ids([3, i])): [0.3, 0.2] for i in range(50)}
    for each in (memory, again):
        learn(each, batch)
    assert json.dumps(memory.state(), default=torch.Tensor.tolist) == json.dumps(
        again.state(), default=torch.Tensor.tolist
    )


def digits(completions, **kwargs):
    return [float(sum(map(ord, text)) % 5) for text in completions]


def train(reward_func=graded, **settings):
    three_steps_an_epoch = make_dataset(6)
    defaults = {"max_completion_length": 10, "max_steps": 6, "learning_rate": 1e-2, "value_tracker": True}
    return factory.train(reward_funcs=reward_func, dataset=three_steps_an_epoch, **defaults | settings)


def value_of(tree, args):
    """What a prompt turned out to be worth: V(S_0), or under tree credit the mean over its trees."""
    if args.credit != "tree":
        return tree.states[0].value
    trees = []
    for b, base in enumerate(rollout for rollout in tree.states[0].rollouts if rollout.copy_of is None):
        branches = [rollout for state in tree.states if state.base == b for rollout in state.rollouts]
        num_copies = 1 + args.num_anchors // args.num_bases - len(branches)
        trees.append(mean([base.score.reward] * num_copies + [rollout.score.reward for rollout in branches]))
    return mean(trees)


def mean(values):
    exist = [value for value in values if not math.isnan(value)]
    return sum(exist) / len(exist) if exist else NAN


def steps_of(trainer):
    """For each step the memory before it, the trees, and what was logged and trained on."""
    memory = ValueTracker()
    for (batch, trees), entry in zip(trainer.batches, trainer.state.log_history, strict=False):
        keys = [prompt_key(tree.prompt_ids) for tree in trees]
        values = torch.tensor([value_of(tree, trainer.args) for tree in trees], dtype=torch.float64)
        yield memory.priors(keys, values).tolist(), memory.prior_strength, trees, entry, batch
        rollouts = [(i, r) for i, tree in enumerate(trees) for state in tree.states for r in state.rollouts]
        rows = [(i, NAN if rollout.copy_of is not None else rollout.score.reward) for i, rollout in rollouts]
        prompts, rewards = torch.tensor(rows, dtype=torch.float64).T
        memory.learn(keys, values, rewards, prompts.long())
    torch.testing.assert_close(trainer._value_tracker.state(), memory.state())


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_the_baselines_are_those_of_the_memory(num_prompts):
    """Of rollouts of the prompt: in an epoch with new prompts, then two with known ones."""
    trainer = train(num_anchors=0, per_device_train_batch_size=8 * num_prompts, max_steps=18 // num_prompts)
    for priors_P, strength, trees, entry, batch in steps_of(trainer):
        assert entry["fr3e/prior/strength"] == pytest.approx(strength)
        assert num_prompts == 1 or entry["fr3e/prior/known"] == (entry["step"] > 3)
        advantages = []
        for tree, prior in zip(trees, priors_P, strict=True):
            rewards = [rollout.score.reward for rollout in tree.states[0].rollouts]
            scorable = [reward for reward in rewards if not math.isnan(reward)]
            if math.isnan(prior):  # the first that ever came, alone
                assert (num_prompts, entry["step"]) == (1, 1)
                strength = prior = 0
            for reward in rewards:
                baseline = (strength * prior + sum(scorable) - reward) / (strength + len(scorable) - 1)
                advantages.append(0 if math.isnan(reward) else reward - baseline)
        assert batch["advantages"].tolist() == pytest.approx(advantages, abs=1e-5)
    assert trainer._value_tracker.num_prompts == 18 and trainer._value_tracker.slope.num_prompts > 10


@pytest.mark.parametrize("credit", ["rollout", "tree"])
def test_the_baselines_of_trees_are_those_of_the_memory(credit):
    """What the first token of a base trajectory is compared with, where nothing branches before it."""
    sizes = {"num_generations": 4, "num_base_trajectories": 1, "max_completion_length": 20}
    trainer = train(digits, credit=credit, **sizes, value_prior_strength=2.0)
    num_checked = 0
    for priors_P, _, trees, entry, _ in steps_of(trainer):
        assert entry["fr3e/prior/strength"] == 2
        for tree, prior in zip(trees, priors_P, strict=True):
            rewards = [rollout.score.reward for state in tree.states for rollout in state.rollouts]
            branches = tree.states[1:]
            if len(branches) < 3 or branches[0].position == 0:
                continue
            num_checked += 1
            _, _, first = tree.bases[0].credit[0]
            expected = sum(rewards) - 4 * prior if credit == "tree" else rewards[0] - prior
            assert first == pytest.approx(expected, abs=1e-4)
    assert num_checked > 3


TREE = {"credit": "tree", "anchor_threshold": 0.3}
REFILL = {"max_refills": 4, "reject_degenerate_states": True, "value_prior_strength": 1.0, "num_anchors": 1}


def test_without_it_nothing_is_remembered_and_such_a_checkpoint_is_gone_on_from():
    trainer = train(value_tracker=False, save_strategy="steps", save_steps=1, max_steps=1)
    assert not any("prior" in name for name in trainer.state.log_history[0])
    assert trainer.state_to_resume().keys() == {"anchor_threshold"}
    trainer = train(max_steps=3, output_dir="resumed", resume="output/checkpoint-1")
    assert trainer._value_tracker.num_prompts == 4


@pytest.mark.parametrize("settings", [TREE, REFILL | {"num_rewards": 2}], ids=["tree", "refill"])
def test_two_processes_are_one_and_resume_exactly(settings, tmp_path):
    """Three prompts, of which one's rows lie in both: each is told what it is remembered by."""
    settings = settings | {"num_generations": 8, "max_steps": 7, "value_tracker": True, "optim": "sgd"}
    alone = launch(tmp_path / "alone", 1, settings | {"per_device_train_batch_size": 24}, "fake")
    settings |= {"per_device_train_batch_size": 12, "save_strategy": "steps", "save_steps": 5}
    shared = launch(tmp_path / "shared", 2, settings, "fake")
    names = ["fr3e/prior/strength", "fr3e/advantage/std"]
    assert_same_training((shared, tmp_path / "shared"), (alone, tmp_path / "alone"), *names)
    known = [[entry.get("fr3e/prior/known", 0) for entry in result["logs"]] for result in (alone[0], shared[0])]
    assert known[0] == known[1] and known[0][0] == 0 and max(known[0]) > 0.5
    if settings.items() >= TREE.items():
        checkpoint = str(tmp_path / "shared" / "output" / "checkpoint-5")
        resumed = launch(tmp_path / "resumed", 2, settings | {"resume": checkpoint}, "fake")
        assert [result["trees"] for result in resumed] == [result["trees"][-2:] for result in shared]
        assert all(map(torch.equal, weights_of(tmp_path / "resumed"), weights_of(tmp_path / "shared")))
