"""Tree credit as a setting: advantages of tokens from the trees to the loss, through `train()`."""

import functools
import math
from dataclasses import replace

import factory
import pytest
import torch
from factory import graded
from models import CPU, make_tokenizer
from processes_train import FakeSampler
from recorder import Recorder
from test_credit import by_definition

from fr3e_trl import FR3EConfig
from fr3e_trl.method.credit import credit_rows
from fr3e_trl.method.credit.tree import TREE_LOSSES, paths_of
from fr3e_trl.method.refill import row_from, row_state
from fr3e_trl.method.rows import RowSharding, rows_of, token_credit
from fr3e_trl.method.tree import Rollout, Score, Tree
from fr3e_trl.tree_log.display import render_tree

NAN = math.nan
DEFAULTS = {"credit": "tree", "anchor_threshold": 0.3, "learning_rate": 1e-2}
DEFAULTS |= {"per_device_train_batch_size": 32, "max_completion_length": 10}


def parity(prompts, completions, **kwargs):
    """Half of the prompts teach nothing."""
    hopeful = [sum(map(ord, prompt)) % 2 == 0 for prompt in prompts]
    return [is_hopeful * float(sum(map(ord, text)) % 5) for is_hopeful, text in zip(hopeful, completions, strict=True)]


def make_trainer(cls=Recorder, sampler=None, reward_func=graded, **settings):
    trainer = factory.make_trainer(cls, reward_funcs=reward_func, **DEFAULTS | settings)
    trainer.sampler = sampler or trainer.sampler
    return trainer


train = functools.partial(factory.train, make=make_trainer)


def paths_in(trees):
    """Rows as in test_credit.py, and their prompts. A copy is a branch that leaves at the end: no token is its own."""
    rows, prompts = [], []
    for prompt, tree in enumerate(trees):
        first, rollouts = len(rows), [(state, rollout) for state in tree.states for rollout in state.rollouts]
        for state, rollout in rollouts:
            base, start, end = state.base, state.position, state.position + rollout.length
            if rollout.copy_of is not None:
                base, start = rollout.copy_of, end
            rows.append((rollout.score.reward, None if base is None else first + base, start, end))
        prompts += [prompt] * len(rollouts)
    return rows, prompts


@pytest.mark.parametrize(
    ("reward_func", "num_anchors", "strength", "scale"),
    [(graded, 6, 4.0, 1.0), (graded, 6, 1.0, 0.5), (parity, 3, 0.0, 1.0)],
    ids=["graded", "scaled", "rejected"],
)
def test_the_batch_has_the_advantages_of_the_definition(reward_func, num_anchors, strength, scale):
    settings = {"num_base_trajectories": 2, "num_anchors": num_anchors}
    settings |= {"value_prior_strength": strength, "negative_advantage_scale": scale}
    trainer = train(sampler=FakeSampler(), reward_func=reward_func, **settings)
    num_short = num_unscorable = num_rejected = 0
    assert len(trainer.batches) == 2
    logs = factory.logged(trainer, "fr3e/advantage/mean", "fr3e/advantage/std")
    for (batch, trees), metrics in zip(trainer.batches, logs, strict=True):
        rows, prompts = paths_in(trees)
        advantages, numbers = by_definition(rows, prompts, strength, batch["completion_ids"].size(1))
        expected = torch.where(advantages < 0, scale * advantages, advantages).float()
        in_loss = expected.abs().amax(1) > 1e-6
        assert batch["in_loss"].tolist() == in_loss.tolist() and len(rows) == 32
        lengths = torch.tensor([end - start for _, _, start, end in rows])
        means = (expected.sum(1) / lengths)[in_loss]
        assert metrics == pytest.approx((means.mean().item(), means.std(correction=0).item()), abs=1e-5)
        factor = lengths[in_loss].sum() / numbers[in_loss].sum()  # of what the loss is divided by
        assert batch["num_items_in_batch"] == lengths[in_loss].sum() and factor < 1
        torch.testing.assert_close(batch["advantages"], expected * factor, atol=1e-5, rtol=1e-5, check_dtype=False)
        num_short += sum(len(tree.states[0].rollouts) > 2 for tree in trees)
        num_unscorable += sum(math.isnan(r.score.reward) for tree in trees for s in tree.states for r in s.rollouts)
        num_rejected += (~in_loss).sum()
    assert num_short and (num_unscorable if reward_func is graded else num_rejected > 8)


def make_tree(rewards=(0.0, 1.0, 0.0)):
    """A base trajectory of 10 tokens, branches at 3 and 7 to 8 and 12 tokens."""
    tree = Tree([5, 6], budget=12)
    score = [Score([reward], reward) for reward in rewards]
    tree.bases = [Rollout(list(range(10, 20)), score=score[0])]
    tree.branch(0, {3: 1.0, 7: 0.8})
    tree.states[0].rollouts = list(tree.bases)
    tree.states[1].rollouts = [Rollout(list(range(20, 25)), score=score[1])]
    tree.states[2].rollouts = [Rollout(list(range(30, 35)), score=score[2])]
    return tree


def credited(trees, plan=None, **settings):
    sizes = {"num_generations": 3, "per_device_train_batch_size": 3, "num_base_trajectories": 1}
    config = FR3EConfig("output", **CPU | DEFAULTS | sizes | {"value_prior_strength": 4} | settings)
    examples = {i: {} for i in range(len(trees))}
    rows = rows_of(trees, RowSharding(3 * len(trees)), examples, [None] * len(trees))
    credit_rows(rows, trees, replace(config.plan, **plan or {}))
    return rows


def other_tree(reward=0.2):
    return make_tree((reward,) * 3)


def assert_stretches(rows, expected):
    """Of each row: how many tokens, the weight of each, and its advantage."""
    for row, stretches in zip(rows, expected, strict=False):
        assert [value for stretch in row.rollout.credit for value in stretch] == pytest.approx(sum(stretches, ()))
        assert row.in_loss


def test_a_tree_by_hand():
    # kappa = 4, beta = .2 by the other prompt. 0-2: T = {0, 1, 0}: 3 (1/3 - .2) = .4. 3-6: T = {0, 0}, U = {1}:
    # 2 (0 - 1.8/5) = -.72. From 7: U = {1, 0}: -1.8/6 = -.3. First branch: 1 - .8/6. Second: -1.8/6
    trees = [make_tree(), other_tree()]
    rows = credited(trees)
    assert_stretches(rows, [[(3, 3, 0.4), (4, 2, -0.72), (3, 1, -0.3)], [(5, 1, 1 - 0.8 / 6)], [(5, 1, -0.3)]])
    assert rows[0].advantage == pytest.approx((3 * 0.4 - 4 * 0.72 - 3 * 0.3) / 10)
    own = token_credit(rows[1:2], 10)[:, 0]
    assert own.shape == (2, 10) and not own[:, :3].any() and not own[:, 8:].any()
    assert own[1, 3:8].tolist() == pytest.approx([1 - 0.8 / 6] * 5)
    # As text, for which the anchors' states come in order
    text = render_tree(trees[0], make_tokenizer())
    assert "  advantages: +0.40 before S1, -0.72 before S2, -0.30 to the end" in text
    # And elsewhere
    assert row_from(row_state(rows[0], with_tokens=False), None).rollout.credit == rows[0].rollout.credit
    halved = credited([make_tree(), other_tree()], negative_advantage_scale=0.5)
    assert halved[0].rollout.credit[1][2] == pytest.approx(-0.36) and halved[1].advantage == rows[1].advantage


def test_a_tree_by_length_by_hand():
    """As with GRPO's mean over rows. What each row earns is (r - .2) / L, of 10, 8 and 12 tokens."""
    earned = [-0.02, 0.1, -0.2 / 12]
    rows = credited([make_tree(), other_tree()], plan={"length_normalized": True})
    first, second = earned[1] / 5, (earned[1] + earned[2]) / 6
    expected = [
        [(3, 1 / 10 + 1 / 8 + 1 / 12, sum(earned)), (4, 1 / 10 + 1 / 12, earned[0] + earned[2] - 2 * first)],
        [(5, 1 / 8, earned[1] - (earned[0] + earned[2]) / 6)],
        [(5, 1 / 12, earned[2] - (earned[0] + earned[1]) / 6)],
    ]
    expected[0].append((3, 1 / 10, earned[0] - second))
    assert_stretches(rows, expected)
    # Of the row as a whole, in the unit of rewards: its one stretch by its length
    assert rows[1].advantage == pytest.approx(8 * expected[1][0][2])
    # Equal rewards teach nothing, however rounded
    equal = credited([other_tree(0.1), other_tree(0.1)], plan={"length_normalized": True})
    assert not any(row.in_loss for row in equal)
    # Scaled by the deviation of all rows, copies included: here of 0, 1, 0 and three times .2
    deviation = torch.tensor([0, 1, 0, 0.2, 0.2, 0.2]).std().item() + 1e-4
    plain, scaled = (credited([make_tree(), other_tree()], plan={"scale": scale}) for scale in ("none", "batch"))
    for one, other in zip(plain, scaled, strict=True):
        assert other.advantage == pytest.approx(one.advantage / deviation, rel=1e-6) and one.in_loss == other.in_loss
        assert [n for n, _, _ in other.rollout.credit] == [n for n, _, _ in one.rollout.credit]


def test_lengths_are_of_what_the_policy_wrote():
    """Tokens of tools, in a branch's prefix too, are none of a row's length."""
    trainer = factory.make_tool_trainer(num_generations=4, per_device_train_batch_size=8, max_steps=1)
    trainer.train()
    rollouts = [r for tree in trainer.trees for state in tree.states for r in state.rollouts]
    lengths = [sum(end - start for start, end in r.dialogue.turns) for r in rollouts]
    written = paths_of(trainer.trees).num_written
    own = [(length, n) for length, n, r in zip(lengths, written, rollouts, strict=True) if r.copy_of is None]
    assert all(length == n for length, n in own)
    prefixes = [(s.position, s.num_written) for tree in trainer.trees for s in tree.states]
    assert any(n < position for position, n in prefixes)


def test_rows_without_credit_leave_the_loss():
    rows = credited([other_tree(1.0), other_tree(1.0)])
    assert not any(row.in_loss for row in rows)
    trees = [make_tree((1.0, NAN, 1.0)), other_tree()]
    rows = credited(trees)
    assert [row.in_loss for row in rows[:3]] == [True, False, True]
    assert [state.rejected for state in trees[0].states] == [False, True, False]
    assert all(row.in_loss for row in credited([other_tree(1.0)] * 2, reject_degenerate_states=False))
    # Rows of older checkpoints have no credit of tokens, and a temperature that is not looked at
    state = {"holder": 1, "index": 0, "length": 3, "num_written": 3, "rewards": [1.0], "reward": 1.0, "credit": []}
    state |= {"temperature": 1.2, "advantage": 0.5, "in_loss": True, "is_left_over": True}
    row = row_from(state, [{"prompt": "1+1="}])
    assert row.rollout.credit == [(3, 1.0, 0.5)] and row.advantage == 0.5
    assert row_from(row_state(row, with_tokens=False), [{}]).rollout.credit == row.rollout.credit


class KeepsGradients(Recorder):
    gradients = None

    def _clip_grad_norm(self, model):
        self.gradients = [p.grad.clone() for p in model.parameters()]
        return super()._clip_grad_norm(model)


def test_every_loss_takes_advantages_of_tokens_at_grpos_scale_with_copies():
    """
    The logged loss is minus the counted advantages by what the loss divides by. A gradient times that is the sum of A
    grad log pi over tokens, as large as that of GRPO for as many rows. `dapo`, `bnpo` and `cispo` divide by the tokens
    of all rows' whole paths, copies counted, `dr_grpo` by the rows of the batch times the longest completion, and
    `luspo` by these rows.
    """
    gradients = {}
    for loss_type in TREE_LOSSES:
        settings = {"loss_type": loss_type, "max_steps": 3, "optim": "sgd", "learning_rate": 0.0}
        trainer = train(KeepsGradients, FakeSampler(), **settings)
        (batch, trees), (_, _, entry, _) = trainer.batches[-1], trainer.state.log_history
        rollouts = [rollout for tree in trees for state in tree.states for rollout in state.rollouts]
        taught = [r.credit for r in rollouts if r.copy_of is None and any(advantage for *_, advantage in r.credit)]
        assert len(batch["in_loss"]) == len(rollouts) > len(taught) == batch["in_loss"].sum()
        assert any(rollout.copy_of is not None for rollout in rollouts)
        num_counted = sum(n * weight for credit in taught for n, weight, _ in credit)
        divisor = {"dr_grpo": len(rollouts) * 10} | dict.fromkeys(("luspo", "grpo", "sapo"), len(rollouts))
        divisor = divisor.get(loss_type, num_counted)
        # 4 sigmoid(0) / temperature
        factors = {True: 2 / 1.0, False: 2 / 1.05} if loss_type == "sapo" else {True: 1, False: 1}
        total = sum(n * advantage * factors[advantage > 0] for credit in taught for n, _, advantage in credit)
        assert entry["grad_norm"] > 0
        if loss_type in ("cispo", "vespo"):  # of log-probabilities, which a ratio of 1 leaves in
            assert math.isfinite(entry["loss"])
        else:
            assert entry["loss"] == pytest.approx(-total / divisor, abs=1e-5)
        gradients[loss_type] = torch.cat([gradient.flatten() for gradient in trainer.gradients]) * divisor
    for loss_type in ("bnpo", "cispo", "dr_grpo", "luspo"):
        torch.testing.assert_close(gradients[loss_type], gradients["dapo"], atol=1e-3, rtol=1e-3)


def test_the_kl_term_is_a_mean_over_the_tokens_in_the_loss():
    class OtherReference(Recorder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ref_model.lm_head.weight.data.mul_(0.5)

    trainer = train(OtherReference, FakeSampler(), beta=0.5, max_steps=1)
    ((batch, _),) = trainer.batches
    mask = batch["completion_mask"] * batch["tool_mask"]
    policy = -(batch["advantages"] * mask).sum() / batch["num_items_in_batch"]
    (entry, _) = trainer.state.log_history
    assert entry["kl"] > 0.1
    assert entry["loss"] == pytest.approx(policy.item() + 0.5 * entry["kl"], abs=1e-5)


def test_the_off_policy_mask_is_about_the_advantages_of_tokens():
    """TRL's mask leaves out negative ones of rows that the policy has moved away from, and keeps all others."""
    all_masked, none_masked, without_negatives, plain, other = (
        factory.weights(train(num_iterations=3, max_steps=6, **settings))
        for settings in (
            *({"off_policy_mask_threshold": threshold} for threshold in (-1e9, 1e9)),
            *({"negative_advantage_scale": scale} for scale in (0.0, 1.0, 0.5)),
        )
    )
    torch.testing.assert_close(all_masked, without_negatives)
    torch.testing.assert_close(none_masked, plain)
    assert all((masked - other).abs().max() > 1e-3 for masked in (all_masked, none_masked))
