"""Branches that begin with another token than their base trajectory, through `train()`."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import factory
import numpy as np
import pytest
import torch
from factory import logged
from tool_policy import ForkingWalk

from fr3e_trl.generation.generate import _DistinctTokens
from fr3e_trl.generation.tools import ToolCallingSampler
from fr3e_trl.generation.vllm import RequestQueue
from fr3e_trl.method.anchors import AboveThreshold
from fr3e_trl.method.credit.tree import masses_of, set_weights
from fr3e_trl.method.metrics import tree_metrics
from fr3e_trl.method.sampling import Branching, Sample, SamplingRequest
from fr3e_trl.method.tree import Rollout, Score, State, Tree, as_ids

SETTINGS = {"distinct_branches": True, "num_generations": 4, "max_steps": 4, "reward_funcs": factory.letters}
SHAPES = {
    "while rows grow": {},
    "in a second round": {"anchor_threshold": None},
    "sets of three": {"num_generations": 7, "num_anchors": 3, "num_base_trajectories": 1},
    "sets of three in a second round": {
        "num_generations": 7,
        "num_anchors": 3,
        "num_base_trajectories": 1,
        "anchor_threshold": None,
    },
    "two base trajectories": {"num_generations": 8},
    "truncated distributions": {"top_k": 4, "temperature": 1.3},
    "LoRA's settings": {"gradient_checkpointing": True, "num_iterations": 2},
}


def size_of(settings):
    rows = (SETTINGS | settings)["num_generations"]
    return {"per_device_train_batch_size": 4 * rows}


def branches_of(tree):
    """(base trajectory, state, its rollouts) of each anchor."""
    return [(tree.bases[state.base], state, state.rollouts) for state in tree.states[1:]]


@pytest.mark.parametrize("name", SHAPES)
def test_no_branch_begins_as_another(name):
    settings = SHAPES[name]
    trainer = factory.train(**SETTINGS | size_of(settings) | settings)
    num_anchors = 0
    for _, trees in trainer.batches:
        for tree in trees:
            for base, state, rollouts in branches_of(tree):
                first = [base.token_ids[state.position], *(rollout.token_ids[0] for rollout in rollouts)]
                assert len(set(first)) == len(first)
                assert all(rollout.chances is not None for rollout in rollouts)
                num_anchors += 1
            num_rows = len([rollout for state in tree.states for rollout in state.rollouts])
            masses = [
                mass
                for mass, rollout in zip(masses_of(tree), [r for s in tree.states for r in s.rollouts], strict=True)
                if rollout.copy_of is None
            ]
            assert sum(masses) == pytest.approx(num_rows)
    assert num_anchors > 0
    entries = [entry for entry in trainer.state.log_history if "fr3e/branches/distinct" in entry]
    assert entries and all(entry["fr3e/branches/distinct"] == 1 for entry in entries)
    assert all(0 < entry["fr3e/branches/mass/min"] <= entry["fr3e/branches/mass/mean"] for entry in entries)
    assert all(math.isfinite(value) for step in logged(trainer, "loss", "grad_norm") for value in step)


@torch.no_grad()
def check_chances(trainer):
    """Against the policy, which has not changed."""
    num_checked = 0
    for _, trees in trainer.batches:
        for tree in trees:
            for base, state, rollouts in branches_of(tree):
                prefix = torch.tensor([[*tree.prompt_ids, *base.token_ids[: state.position]]])
                probs = (trainer.model(prefix).logits[0, -1].float() / trainer.temperature).softmax(0)
                tokens = [base.token_ids[state.position], *(rollout.token_ids[0] for rollout in rollouts)]
                assert len(set(tokens)) == len(tokens)
                for rollout, token in zip(rollouts, tokens[1:], strict=True):
                    assert rollout.chances == pytest.approx((probs[tokens[0]].item(), probs[token].item()), rel=1e-3)
                    num_checked += 1
    assert num_checked > 4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"anchor_threshold": None},
        {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"num_blocks": 64, "block_size": 16, "max_batch_tokens": 128},
            "num_generations": 7,
            "num_anchors": 3,
            "num_base_trajectories": 1,
            "max_steps": 1,
        },
    ],
    ids=["while rows grow", "in a second round", "continuous batching"],
)
def test_chances_are_those_of_the_policy(settings):
    model = factory.make_model(max_position_embeddings=128)
    settings = SETTINGS | size_of(settings) | {"temperature": 0.9, "learning_rate": 0, "max_steps": 2} | settings
    check_chances(factory.train(model=model, **settings))


@pytest.mark.parametrize("given", [{}, {"environment_factory": ForkingWalk}], ids=["tools", "environment"])
def test_branches_amid_a_dialogue(given):
    """The turn that is redrawn begins with another token, and no later one."""
    trainer = factory.make_tool_trainer(
        distinct_branches=True,
        num_generations=7,
        num_anchors=3,
        num_base_trajectories=1,
        per_device_train_batch_size=28,
        learning_rate=0.0,
        **given,
    )
    assert isinstance(trainer.sampler, ToolCallingSampler)
    turns, asked = trainer.sampler.sampler, []

    class Recorded:
        draws_distinct = turns.draws_distinct

        def sample(self, requests):
            asked.extend(request for request in requests if request.distinct_from is not None)
            return turns.sample(requests)

    trainer.sampler.sampler = Recorded()
    trainer.train()
    check_chances(trainer)
    anchors = [(tree, *anchor) for _, trees in trainer.batches for tree in trees for anchor in branches_of(tree)]
    assert any(base.dialogue.turn_at(state.position) > 0 for _, base, state, _ in anchors)
    expected = sorted((*tree.prompt_ids, *state.prefix_ids) for tree, _, state, _ in anchors)
    assert sorted(tuple(request.prefix_ids) for request in asked) == expected
    assert {request.num_samples for request in asked} == {2}


def test_what_cannot_draw_them_says_so(caplog):
    class Own:
        def __init__(self, trainer):
            self.sampler = trainer.sampler

        def sample(self, requests):
            return self.sampler.sample(requests)

    factory.make_trainer(**SETTINGS | {"sampler": Own})
    assert [record.message for record in caplog.records if "distinct_branches=True has no effect" in record.message]
    caplog.clear()
    factory.make_trainer(**SETTINGS)
    assert not [record.message for record in caplog.records if "distinct_branches" in record.message]


class Distinct:
    """A sampler of one's own that says that it draws without replacement, and changes what it drew by `spoil`."""

    draws_distinct = True

    def __init__(self, trainer, spoil=lambda sample: sample):
        self.sampler, self.spoil = trainer.sampler, spoil

    def sample(self, requests):
        samples = self.sampler.sample(requests)
        for request, of_request in zip(requests, samples, strict=True):
            if request.distinct_from is not None:
                of_request[:] = [self.spoil(sample) for sample in of_request]
        return samples


def test_a_sampler_of_ones_own_draws_them(caplog):
    trainer = factory.train(**SETTINGS | size_of({}) | {"sampler": Distinct})
    assert not [record.message for record in caplog.records if "distinct_branches" in record.message]
    assert any(
        rollout.chances
        for _, trees in trainer.batches
        for tree in trees
        for *_, of in branches_of(tree)
        for rollout in of
    )


@pytest.mark.parametrize(
    ("chances", "message"),
    [
        ((0.5, 0.0), r"have the chances \[\(0\.5, 0\.0\)\]. They must be above 0, and 1 at most"),
        ("same", "All must differ"),
    ],
    ids=["no probability", "the same token"],
)
def test_a_sampler_of_ones_own_is_told_what_is_wrong(chances, message):
    def spoil(sample):
        if chances == "same":
            return replace(sample, token_ids=[spoil.token, *sample.token_ids[1:]])
        return replace(sample, chances=chances)

    def sampler(trainer):
        own = Distinct(trainer, spoil)
        ask = own.sample

        def sample(requests):
            spoil.token = next((r.distinct_from for r in requests if r.distinct_from is not None), None)
            return ask(requests)

        own.sample = sample
        return own

    with pytest.raises(ValueError, match=message):
        factory.train(**SETTINGS | size_of({}) | {"sampler": sampler, "num_generations": 2, "num_anchors": 1})


def answer(queue, draw):
    """Answer all that a queue asks, one after the other."""
    i = 0
    while i < len(queue.asked):
        queue.answer(i, draw(queue.asked[i]))
        i += 1
    return queue.samples


@pytest.mark.parametrize("leaves_out", [False, True])
@pytest.mark.parametrize("num", [1, 2])
def test_vllms_first_tokens_are_drawn_without_replacement(num, leaves_out):
    """A queue's tokens, against the probabilities of drawing them one after the other."""
    rng = np.random.default_rng(0)
    probs = np.array([0.05, 0.45, 0.3, 0.2])

    def draw(request):
        left = np.where(np.arange(4) == request.distinct_from, 0, probs)  # without a token, where it is asked for so
        left /= left.sum()
        rows = rng.choice(4, (request.num_samples, min(request.max_new_tokens, 3)), p=left)
        return [Sample(row.tolist(), np.log(left[row]).tolist()) for row in rows]

    request = SamplingRequest(
        [9, 9], num, 5, 1.0, num_prompt_tokens=1, distinct_from=1, distinct_logprob=math.log(0.45)
    )
    found = Counter()
    for _ in range(4000):
        queue = RequestQueue([request], [0], draws_branches=False, leaves_out=leaves_out)
        (samples,) = answer(queue, draw)
        if leaves_out and num == 1:
            assert [asked.num_samples for asked in queue.asked] in ([1], [1, 1])
        assert len(samples) == num
        for sample in samples:
            assert sample.chances == pytest.approx((0.45, probs[sample.token_ids[0]]))
            assert len(sample.token_ids) == len(sample.logprobs) == (1 if sample.token_ids[0] == 0 else 4)
        found[tuple(sample.token_ids[0] for sample in samples)] += 1
    expected = {}
    for tokens in itertools.permutations([0, 2, 3], num):
        expected[tokens], left = 1.0, 0.55
        for token in tokens:
            expected[tokens], left = expected[tokens] * probs[token] / left, left - probs[token]
    assert found.keys() == expected.keys()
    chi_square = sum((found[tokens] - 4000 * p) ** 2 / (4000 * p) for tokens, p in expected.items())
    assert chi_square < 20  # 5 degrees of freedom at most: .0012


@pytest.mark.parametrize("distinct", [False, True])
def test_vllms_branches_leave_while_their_base_trajectories_grow(distinct):
    """Two of them, told in turns, three tokens at a time. A branch is asked for with the part that has its anchor."""
    branching = Branching(2, None, [2, 1], AboveThreshold(threshold=0.5, min_gap=2), distinct)
    request = SamplingRequest([9, 9], 2, 6, 1.0, with_entropies=True, branching=branching)
    queue = RequestQueue([request], [0], draws_branches=True, leaves_out=True)
    assert [asked.num_samples for asked in queue.asked] == [1, 1]
    assert all(queue.is_growing(asked) for asked in queue.asked)
    parts = [Sample([3, 4, 5], [-0.5] * 3, np.array(h, np.float32)) for h in ([0.9, 0.8, 0.9], [0.6, 0.4, 0.7])]
    asked = [
        [(further.prefix_ids.tolist(), further.max_new_tokens) for further in queue.answer(b, [part])]
        for part in parts
        for b in range(2)
    ]
    # Never position 0; position 2 is too near to 1; the second one has a single anchor
    after = {1: ([9, 9, 3], 5), 3: ([9, 9, 3, 4, 5], 3)}
    first = {position: (ids, 1 if distinct else budget) for position, (ids, budget) in after.items()}
    assert asked == [[first[1]], [first[1]], [first[3]], []]
    i = 2
    while i < len(queue.asked):
        of_branch = queue.asked[i]
        assert not queue.is_growing(of_branch)
        queue.answer(i, [Sample([6 + k], [-1.0]) for k in range(of_branch.num_samples)])
        i += 1
    ((one, other),) = queue.samples
    assert one.token_ids == other.token_ids == [3, 4, 5] * 2
    assert one.entropies == pytest.approx([0.9, 0.8, 0.9, 0.6, 0.4, 0.7]) and len(one.logprobs) == 6
    assert [list(sample.branches) for sample in (one, other)] == [[1, 3], [1]]
    for sample in (one, other):
        for branches in sample.branches.values():
            assert [branch.token_ids[0] for branch in branches] == [6, 7]
            assert all((branch.chances is not None) == distinct for branch in branches)


@pytest.mark.parametrize(("logprob", "nums"), [(-1e-3, [8, 64, 512, 1]), (0.0, [1])])
def test_where_no_other_token_comes_branches_are_independent(logprob, nums):
    request = SamplingRequest([9, 9], 1, 5, 1.0, num_prompt_tokens=1, distinct_from=1, distinct_logprob=logprob)
    asked = []

    def draw(request):
        asked.append(request.num_samples)
        return [Sample([1] * min(request.max_new_tokens, 3), [0.0] * 3) for _ in range(request.num_samples)]

    ((sample,),) = answer(RequestQueue([request], [0], draws_branches=False, leaves_out=False), draw)
    assert sample.chances is None and list(sample.token_ids) == [1, 1, 1, 1][: len(sample.token_ids)]
    assert asked == nums


def test_rollout_credit_does_not_take_them():
    with pytest.raises(
        ValueError, match="distinct_branches=True is not allowed: it must be False unless credit='tree'"
    ):
        factory.make_trainer(**SETTINGS | {"credit": "rollout"})


def rollout_of(length, chances=None, copy_of=None):
    return Rollout([5] * length, score=Score([1.0], 1.0), chances=chances, copy_of=copy_of)


def test_masses_by_hand():
    """Four rows, of which one is a copy: an anchor with chances of .5 and .2, and then one with .6 and .3."""
    base = rollout_of(9)
    tree = Tree([1], 12, bases=[base], mean_entropies=[1.0])
    tree.states[0].rollouts = [base, rollout_of(9, copy_of=0)]
    tree.states.append(State(2, parent=0, base=0, rollouts=[rollout_of(7, (0.5, 0.2))]))
    tree.states.append(State(4, parent=1, base=0, rollouts=[rollout_of(5, (0.6, 0.3))]))
    # Two rows draw a token at the first anchor. The branch takes .5 / 1.3 of them
    first = 2 * 0.5 / 1.3
    # The others go on as three rows, of which two draw at the second anchor
    second = (4 - first) / 3 * 2 * 0.4 / 1.1
    assert masses_of(tree) == pytest.approx([4 - first - second, 1, first, second])
    metrics = tree_metrics([tree], torch.ones(3), 4)
    assert metrics["fr3e/branches/mass/mean"] == pytest.approx((first + second) / 2)
    assert metrics["fr3e/branches/mass/min"] == pytest.approx(min(first, second))
    # A branch whose environment could not go on takes a row of what is left, the other goes on drawing
    tree.states[2].rollouts.append(rollout_of(1))
    first = 2 * 0.5 / 1.3
    rest = (5 - first) / 4
    second = rest * 2 * 0.4 / 1.1
    assert masses_of(tree) == pytest.approx([5 - first - second - rest, 1, first, second, rest])
    tree.states[2].rollouts.pop()
    # Drawn independently, each branch takes one row
    for state in tree.states[1:]:
        state.rollouts[0].chances = None
    assert masses_of(tree) == [2, 1, 1, 1]
    assert "fr3e/branches/mass/mean" not in tree_metrics([tree], torch.ones(3), 4)


def test_a_base_trajectorys_token_that_fell_out_of_the_nucleus():
    """Rounding can do that where its distribution is computed again."""
    request = SamplingRequest(as_ids([1, 2, 3]), 1, 4, 1.0, distinct_from=2)
    draw = _DistinctTokens([request], [3])
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf, 2.0]])
    draw(torch.ones(1, 3, dtype=torch.long), logits.clone())
    of_base, chance = draw.chances[0]
    assert of_base > 0
    assert set_weights([of_base, chance]) == pytest.approx([(1 - chance) / (2 - chance), 1 / (2 - chance)])


def test_weights_sum_to_one_whatever_the_chances():
    torch.manual_seed(0)
    for size in (2, 3, 4):
        for scale in (0.1, 1, 10):
            chances = (scale * torch.randn(size + 1)).softmax(0)[:size].tolist()
            weights = set_weights(chances)
            assert sum(weights) == pytest.approx(1) and min(weights) >= 0
