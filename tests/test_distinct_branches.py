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

from fr3e_trl.generation.vllm import RequestQueue
from fr3e_trl.method.credit.tree import masses_of, set_weights
from fr3e_trl.method.metrics import tree_metrics
from fr3e_trl.method.sampling import Sample, SamplingRequest
from fr3e_trl.method.tree import Rollout, Score, State, Tree

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


@pytest.mark.parametrize("settings", [{}, {"anchor_threshold": None}], ids=["while rows grow", "in a second round"])
def test_chances_are_those_of_the_policy(settings):
    """Where nothing is cut off, the tokens' log-probs say them."""
    trainer = factory.train(**SETTINGS | size_of(settings) | settings | {"temperature": 0.9})
    for _, trees in trainer.batches:
        for tree in trees:
            for base, state, rollouts in branches_of(tree):
                for rollout in rollouts:
                    of_base, own = rollout.chances
                    assert of_base == pytest.approx(math.exp(base.logprobs[state.position]), rel=1e-4)
                    assert own == pytest.approx(math.exp(rollout.logprobs[0]), rel=1e-4)


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


@pytest.mark.parametrize("num", [1, 2])
def test_vllms_first_tokens_are_drawn_without_replacement(num):
    """A queue's tokens, against the probabilities of drawing them one after the other."""
    rng = np.random.default_rng(0)
    probs = np.array([0.05, 0.45, 0.3, 0.2])

    def draw(request):
        rows = rng.choice(4, (request.num_samples, min(request.max_new_tokens, 3)), p=probs)
        return [Sample(row.tolist(), np.log(probs[row]).tolist()) for row in rows]

    request = SamplingRequest(
        [9, 9], num, 5, 1.0, num_prompt_tokens=1, distinct_from=1, distinct_logprob=math.log(0.45)
    )
    found = Counter()
    for _ in range(4000):
        (samples,) = answer(RequestQueue([request], [0], draws_branches=False), draw)
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


@pytest.mark.parametrize(("logprob", "nums"), [(-1e-3, [8, 64, 512, 1]), (0.0, [1])])
def test_where_no_other_token_comes_branches_are_independent(logprob, nums):
    request = SamplingRequest([9, 9], 1, 5, 1.0, num_prompt_tokens=1, distinct_from=1, distinct_logprob=logprob)
    asked = []

    def draw(request):
        asked.append(request.num_samples)
        return [Sample([1] * min(request.max_new_tokens, 3), [0.0] * 3) for _ in range(request.num_samples)]

    ((sample,),) = answer(RequestQueue([request], [0], draws_branches=False), draw)
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
    # Drawn independently, each branch takes one row
    for state in tree.states[1:]:
        state.rollouts[0].chances = None
    assert masses_of(tree) == [2, 1, 1, 1]
    assert "fr3e/branches/mass/mean" not in tree_metrics([tree], torch.ones(3), 4)


def test_weights_sum_to_one_whatever_the_chances():
    torch.manual_seed(0)
    for size in (2, 3, 4):
        for scale in (0.1, 1, 10):
            chances = (scale * torch.randn(size + 1)).softmax(0)[:size].tolist()
            weights = set_weights(chances)
            assert sum(weights) == pytest.approx(1) and min(weights) >= 0
