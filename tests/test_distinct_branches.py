"""Branches that begin with another token than their base trajectory, through `train()`."""

import math

import factory
import pytest
import torch
from factory import logged

from fr3e_trl.method.credit.tree import masses_of, set_weights
from fr3e_trl.method.metrics import tree_metrics
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
