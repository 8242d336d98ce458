"""Tree credit as a setting: advantages of tokens from the trees to the loss, through `train()`."""

import math
from collections import defaultdict
from dataclasses import replace

import factory
import pytest
import torch
from factory import graded
from launches import launch
from models import CPU, make_dataset, make_tokenizer
from processes_train import FakeSampler
from recorder import Recorder
from test_processes import same, trees_of, weights_of
from transformers import set_seed
from trees import rollouts_of

import fr3e_trl.fr3e_trainer
from benchmarks.measures import MeasuredFR3ETrainer
from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.method.anchors import AboveThreshold, even_shares, next_threshold, uncertainty
from fr3e_trl.method.credit import credit_rows
from fr3e_trl.method.credit.tree import TREE_LOSSES, paths_of
from fr3e_trl.method.refill import row_from, state_of
from fr3e_trl.method.rows import Row, RowSharding, rows_of, token_credit
from fr3e_trl.method.sampling import Sample
from fr3e_trl.method.tree import Rollout, Score, Tree
from fr3e_trl.old_logps import score_leftovers
from fr3e_trl.tree_log.display import render_tree

NAN = math.nan
DEFAULTS = {
    "credit": "tree",
    "anchor_threshold": 0.3,
    "per_device_train_batch_size": 32,
    "max_completion_length": 10,
    "learning_rate": 1e-2,
}


def make_config(**settings):
    return FR3EConfig("output", **CPU | {"num_generations": 8} | DEFAULTS | settings)


def parity(prompts, completions, **kwargs):
    """Half of the prompts teach nothing."""
    hopeful = [sum(map(ord, prompt)) % 2 == 0 for prompt in prompts]
    return [
        float(sum(map(ord, text)) % 5) if is_hopeful else 0.0
        for is_hopeful, text in zip(hopeful, completions, strict=True)
    ]


def train(cls=Recorder, sampler=None, reward_func=graded, num_prompts=16, resume=None, model=None, **settings):
    trainer = factory.make_trainer(
        cls, model=model, reward_funcs=reward_func, dataset=make_dataset(num_prompts), **DEFAULTS | settings
    )
    if sampler is not None:
        trainer.sampler = sampler
    set_seed(1)
    trainer.train(resume)
    return trainer


# The definition, token by token


def shrunk(prior, values, strength):
    return (strength * prior + sum(values)) / (strength + len(values)) if values else prior


def naive_credit(trees, num_anchors, strength, num_rollouts=1):
    """For each row, (number of T, advantage) of each of its own tokens. Rows are lists of the tokens they pass."""
    of_prompts = []
    for tree in trees:
        groups = {}
        for state in tree.states:
            for k, rollout in enumerate(state.rollouts):
                if rollout.copy_of is not None:
                    continue
                base = k if state.base is None else state.base
                path = [("base", base, t) for t in range(state.position)]
                own = ("base", base) if state.base is None else ("branch", id(rollout))
                path += [(*own, t) for t in range(state.position, state.position + rollout.length)]
                groups.setdefault(base, []).append((path, rollout.score.reward))
        # Base trajectories come first in their groups, and stand for what could not branch
        for base, group in groups.items():
            planned = num_anchors // 2 + (base == 0) * (num_anchors % 2) if base < 2 else 0
            groups[base] = [group[0]] * (planned * num_rollouts + 1 - len(group)) + group
        of_prompts.append(list(groups.values()))

    def mean(values):
        values = [value for value in values if not math.isnan(value)]
        return sum(values) / len(values) if values else NAN

    values = [[mean(reward for _, reward in group) for group in groups] for groups in of_prompts]
    credit = []
    for i, (tree, groups) in enumerate(zip(trees, of_prompts, strict=True)):
        prior = mean(mean(of_groups) for k, of_groups in enumerate(values) if k != i)
        for state in tree.states:
            for k, rollout in enumerate(state.rollouts):
                if rollout.copy_of is not None:
                    credit.append((0, []))
                    continue
                g = k if state.base is None else state.base
                others = [value for h, value in enumerate(values[i]) if h != g and not math.isnan(value)]
                beta = shrunk(prior, others, strength)
                own = ("base", g) if state.base is None else ("branch", id(rollout))
                tokens = []
                for t in range(state.position, state.position + rollout.length):
                    scorable = [(path, reward) for path, reward in groups[g] if not math.isnan(reward)]
                    through = [reward for path, reward in scorable if (*own, t) in path]
                    left = [reward for path, reward in scorable if (*own, t) not in path]
                    advantage = sum(reward - shrunk(beta, left, strength) for reward in through)
                    tokens.append((len(through), advantage))
                credit.append((state.position, tokens))
    return credit


@pytest.mark.parametrize(
    ("reward_func", "num_anchors", "strength", "scale"),
    [(graded, 6, 4.0, 1.0), (graded, 6, 1.0, 0.5), (parity, 3, 0.0, 1.0)],
    ids=["graded", "scaled", "rejected"],
)
def test_the_batch_has_the_advantages_of_the_definition(reward_func, num_anchors, strength, scale):
    """Two base trajectories a prompt, short completions, unscorable rows."""
    trainer = train(
        sampler=FakeSampler(),
        reward_func=reward_func,
        num_base_trajectories=2,
        num_anchors=num_anchors,
        value_prior_strength=strength,
        negative_advantage_scale=scale,
    )
    num_short = num_unscorable = num_rejected = 0
    assert len(trainer.batches) == 2
    for batch, trees in trainer.batches:
        naive = naive_credit(trees, num_anchors, strength, num_rollouts=6 // num_anchors)
        expected = torch.zeros_like(batch["advantages"])  # but for the factor of what the loss is divided by
        assert batch["advantages"].shape == batch["completion_ids"].shape and len(naive) == 32
        for i, (position, tokens) in enumerate(naive):
            values = [advantage * (scale if advantage < 0 else 1) for _, advantage in tokens]
            expected[i, position : position + len(values)] = torch.tensor(values)
        in_loss = [row.abs().max().item() > 1e-6 for row in expected]
        assert batch["in_loss"].tolist() == in_loss
        in_loss = [tokens for (_, tokens), inside in zip(naive, in_loss, strict=True) if inside]
        counted = sum(n for tokens in in_loss for n, _ in tokens)
        assert batch["num_items_in_batch"] == sum(map(len, in_loss)) < counted
        expected *= sum(map(len, in_loss)) / counted
        torch.testing.assert_close(batch["advantages"], expected, atol=1e-5, rtol=1e-5)
        num_short += sum(len(tree.states[0].rollouts) > 2 for tree in trees)
        num_unscorable += sum(math.isnan(r.score.reward) for tree in trees for s in tree.states for r in s.rollouts)
        num_rejected += 32 - len(in_loss)
    assert num_short and (num_unscorable if reward_func is graded else num_rejected > 8)


def test_tables_and_metrics_have_the_means_of_rows():
    trainer = train(MeasuredFR3ETrainer, FakeSampler(), max_steps=1)
    means = [sum(a for _, a in tokens) / len(tokens) for _, tokens in naive_credit(trainer.trees, 6, 4)]
    assert list(trainer._logs["advantages"]) == pytest.approx(means, abs=1e-5)
    in_loss = torch.tensor([mean for mean in means if abs(mean) > 1e-6])
    entry = trainer.state.log_history[0]
    assert entry["fr3e/advantage/mean"] == pytest.approx(in_loss.mean().item(), abs=1e-5)
    assert entry["fr3e/advantage/std"] == pytest.approx(in_loss.std(correction=0).item(), abs=1e-5)
    assert trainer.batches[0]["advantage_mean"] == pytest.approx(sum(means) / 32, abs=1e-5)


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
    settings = {"value_prior_strength": 4} | settings
    config = make_config(num_generations=3, per_device_train_batch_size=3, num_base_trajectories=1, **settings)
    examples = {i: {} for i in range(len(trees))}
    rows = rows_of(trees, RowSharding(3 * len(trees)), examples, [None] * len(trees))
    credit_rows(rows, trees, replace(config.plan, **plan or {}))
    return rows


def other_tree(reward=0.2):
    """Worth `reward`, whatever its form."""
    return make_tree((reward,) * 3)


def test_a_tree_by_hand():
    # kappa = 4, beta = .2 by the other prompt. 0-2: T = {0, 1, 0}: 3 (1/3 - .2) = .4. 3-6: T = {0, 0}, U = {1}:
    # 2 (0 - 1.8/5) = -.72. From 7: U = {1, 0}: -1.8/6 = -.3. First branch: 1 - .8/6. Second: -1.8/6
    trees = [make_tree(), other_tree()]
    rows = credited(trees)
    expected = [
        [(3, 3, 0.4), (4, 2, -0.72), (3, 1, -0.3)],
        [(5, 1, 1 - 0.8 / 6)],
        [(5, 1, -0.3)],
    ]
    for row, stretches in zip(rows, expected, strict=False):
        assert [value for stretch in row.rollout.credit for value in stretch] == pytest.approx(sum(stretches, ()))
        assert row.in_loss
    assert rows[0].advantage == pytest.approx((3 * 0.4 - 4 * 0.72 - 3 * 0.3) / 10)
    own = token_credit(rows[1:2], 10)[:, 0]
    assert own.shape == (2, 10) and not own[:, :3].any() and not own[:, 8:].any()
    assert own[1, 3:8].tolist() == pytest.approx([1 - 0.8 / 6] * 5)
    # As text, for which the anchors' states come in order
    text = render_tree(trees[0], make_tokenizer())
    assert "  advantages: +0.40 before S1, -0.72 before S2, -0.30 to the end" in text
    # And elsewhere
    assert row_from(state_of(rows[0], with_tokens=False), None).rollout.credit == rows[0].rollout.credit
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
    for row, stretches in zip(rows, expected, strict=False):
        assert [value for stretch in row.rollout.credit for value in stretch] == pytest.approx(sum(stretches, ()))
    # Of the row as a whole, in the unit of rewards: its one stretch by its length
    assert rows[1].advantage == pytest.approx(8 * expected[1][0][2])
    # Equal rewards teach nothing, however rounded
    assert not any(
        row.in_loss for row in credited([other_tree(0.1), other_tree(0.1)], plan={"length_normalized": True})
    )


def test_a_batch_scaled_by_its_deviation():
    """As by GRPO, over all rows, copies included: here 0, 1, 0 and three times .2."""
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


def test_a_completion_too_short_for_its_anchors_stands_for_them():
    # kappa = 4, beta = .2. Two branches were planned, and one could leave, at 1: the base counts twice.
    # 0: T = {1, 1, 0}: 3 (2/3 - .2) = 1.4.  1: T = {1, 1}, U = {0}: 2 (1 - .8/5).  The branch: U = {1, 1}: -2.8/6
    tree = Tree([5, 6], budget=12)
    tree.bases = [Rollout([10, 1], score=Score([1.0], 1.0))]
    tree.branch(0, {1: 1.0})
    tree.states[0].rollouts = [*tree.bases, replace(tree.bases[0], copy_of=0)]
    tree.states[1].rollouts = [Rollout([12, 1], score=Score([0.0], 0.0))]
    base, copy, branch = credited([tree, other_tree()])[:3]
    assert tree.value == pytest.approx(2 / 3)
    assert [a for _, _, a in base.rollout.credit] == pytest.approx([1.4, 2 * (1 - 0.8 / 5)])
    assert [n for _, n, _ in base.rollout.credit] == [3, 2]
    assert branch.advantage == pytest.approx(-2.8 / 6)
    assert copy.advantage == 0 and not copy.in_loss


# Anchors


def first_anchors(entropies, eligible, threshold, num_anchors, min_gap=1):
    return AboveThreshold(threshold=threshold, min_gap=min_gap).choose(entropies, None, eligible, num_anchors)


def test_the_first_positions_above_a_threshold():
    entropies = torch.tensor([9.0, 0.2, 0.4, 0.3, 2.0, 0.5, 3.0])
    eligible = torch.tensor([False, True, True, True, True, True, True])
    assert first_anchors(entropies, eligible, 0.3, 3) == [2, 3, 4]  # the .3 itself, not the prompt's
    assert first_anchors(entropies, eligible, 0.35, 3, min_gap=2) == [2, 4, 6]
    assert first_anchors(entropies, eligible, 1.0, 3) == [4, 6]
    # What follows changes nothing of them
    assert first_anchors(entropies[:5], eligible[:5], 0.35, 2) == first_anchors(entropies, eligible, 0.35, 2) == [2, 4]


def test_the_threshold_follows_the_policy():
    """By hand: the second, and the third most uncertain position, the median, and the smoothing."""
    entropies = torch.tensor([9.0, 0.2, 0.4, NAN, 2.0, 0.5])
    eligible = torch.tensor([False, True, True, False, True, True])
    assert [uncertainty(entropies, eligible, k) for k in (1, 2, 4, 5)] == pytest.approx([2.0, 0.5, 0.2, 0.0])
    assert math.isnan(uncertainty(entropies, eligible, 0))
    # Beside the fourth position there are none: with a gap, the second is the one at 2, and there is no third
    assert [uncertainty(entropies, eligible, k, min_gap=2) for k in (1, 2, 3)] == pytest.approx([2.0, 0.4, 0.0])
    assert next_threshold(None, [0.5, 0.1, 0.3, NAN]) == pytest.approx(0.3)
    assert next_threshold(0.2, [0.4]) == pytest.approx(0.7 * 0.2 + 0.3 * 0.4)


def test_anchors_of_a_run_are_above_the_threshold_of_the_steps_before():
    """In the first step, which has none before it, they are the most uncertain positions."""
    trainer = train(sampler=FakeSampler(), anchor_threshold="auto", max_steps=4, num_base_trajectories=2)
    threshold = None
    logged = [entry["fr3e/anchor/threshold"] for entry in trainer.state.log_history if "fr3e/anchor/threshold" in entry]
    assert len(trainer.batches) == len(logged) == 4
    for (_, trees), next_one in zip(trainer.batches, logged, strict=True):
        found = []
        for tree in trees:
            for b in range(2):
                positions = [state.position for state in tree.states if state.base == b]
                entropies = tree.entropies[b].tolist()[1:]
                ranked = sorted(entropies, reverse=True)
                found.append(ranked[2] if len(ranked) > 2 else 0.0)
                if threshold is None:
                    assert sorted(entropies[t - 1] for t in positions) == sorted(ranked[:3])
                else:
                    assert positions == [t for t, h in enumerate(entropies, 1) if h > threshold][:3]
        median = sorted(found)[len(found) // 2 - 1 : len(found) // 2 + 1]
        now = sum(median) / 2
        threshold = now if threshold is None else 0.7 * threshold + 0.3 * now
        assert next_one == pytest.approx(threshold, rel=1e-5)


def test_a_base_trajectory_without_anchors_stands_for_their_rollouts():
    """Nothing is generated or learned for those, and the batch has a row for each."""
    trainer = train(sampler=FakeSampler(), anchor_threshold=2.0)
    num_copies = 0
    for batch, trees in trainer.batches:
        rollouts = [rollout for tree in trees for state in tree.states for rollout in state.rollouts]
        assert len(rollouts) == len(batch["in_loss"]) == 32
        copies = [i for i, rollout in enumerate(rollouts) if rollout.copy_of is not None]
        assert not batch["in_loss"][copies].any() and not batch["advantages"][copies].any()
        for tree in trees:
            for rollout in tree.states[0].rollouts:
                if rollout.copy_of is not None:
                    base = tree.bases[rollout.copy_of]
                    assert rollout.token_ids is base.token_ids and rollout.num_written == 0
                    assert repr(rollout.score) == repr(base.score)  # which may be NaN
        num_copies += len(copies)
    assert num_copies > 4
    logs = [entry for entry in trainer.state.log_history if "fr3e/rows/copied" in entry]
    assert sum(entry["fr3e/rows/copied"] for entry in logs) * 32 == pytest.approx(num_copies)


def test_shares_are_even():
    assert even_shares(7, 3) == [3, 2, 2] and even_shares(1, 2) == [1, 0]


@pytest.mark.parametrize("credit", ["rollout", "tree"])
def test_anchors_of_a_run_are_the_first_above_the_threshold(credit):
    trainer = train(sampler=FakeSampler(), credit=credit, anchor_threshold=1.0)
    counts = set()
    for _, trees in trainer.batches:
        for tree in trees:
            for b in range(2):
                uncertain = [t for t, h in enumerate(tree.entropies[b].tolist()) if t > 0 and h > 1]
                positions = [state.position for state in tree.states if state.base == b]
                assert positions == uncertain[: len(positions)]
                # An even share, whatever the other can use
                assert len(positions) == min(len(uncertain), 3)
                counts.add(len(positions))
    assert len(counts) > 1


# The loss


def rows_of_trees(trees):
    """The rows of a batch, without what a trainer's process knows of them."""
    return [Row(rollout, 0, prefix_ids=state.prefix_ids) for _, state, rollout in rollouts_of(trees)]


class KeepsGradients(Recorder):
    """Keeps the gradient of each step."""

    gradients = None

    def _clip_grad_norm(self, model):
        self.gradients = [p.grad.clone() for p in model.parameters()]
        return super()._clip_grad_norm(model)


@pytest.mark.parametrize("loss_type", TREE_LOSSES)
def test_every_loss_takes_advantages_of_tokens(loss_type):
    """The logged loss is minus the counted advantages by what the loss divides by, and micro-batches change nothing."""
    whole = train(KeepsGradients, FakeSampler(), loss_type=loss_type, max_steps=1, optim="sgd", learning_rate=1.0)
    (batch, _) = whole.batches[0]
    mask = batch["completion_mask"] * batch["tool_mask"]
    credit, num_rows = torch.from_numpy(token_credit(rows_of_trees(whole.trees), mask.size(1))), len(batch["in_loss"])
    weights, advantages = credit * mask
    counted = {"dr_grpo": num_rows * 10, "luspo": num_rows, "grpo": num_rows, "sapo": num_rows}
    if loss_type == "sapo":  # 4 sigmoid(0) / temperature
        advantages = torch.where(advantages > 0, advantages * 2 / 1.0, advantages * 2 / 1.05)
    expected = -(advantages.sum() / counted.get(loss_type, weights.sum())).item()
    if loss_type in ("cispo", "vespo"):  # of log-probabilities, which a ratio of 1 leaves in
        assert math.isfinite(whole.state.log_history[0]["loss"])
    else:
        assert whole.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert whole.state.log_history[0]["grad_norm"] > 0
    if loss_type == "bnpo":  # a mean over the tokens of each micro-batch: another loss
        return
    split = train(
        KeepsGradients,
        FakeSampler(),
        loss_type=loss_type,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
    )
    torch.testing.assert_close(split.gradients, whole.gradients, atol=1e-6, rtol=1e-3)


class LongSampler(FakeSampler):
    """All of its completions are as long as they may be, so that no branch is missing."""

    def draw(self, request, i):
        token_ids = super().draw(request, i).token_ids
        return Sample([*token_ids, *[7] * (request.max_new_tokens - len(token_ids))])


@pytest.mark.parametrize("sampler", [FakeSampler, LongSampler], ids=["copies", "no copies"])
def test_every_loss_has_grpos_scale_with_copies_and_without(sampler):
    """
    A gradient times what its loss divides by is the sum of A grad log pi over tokens, the same for all, and as large as
    that of GRPO for as many rows. `dapo`, `bnpo` and `cispo` divide by the tokens of all rows' whole paths, copies
    counted, `dr_grpo` by the rows of the batch times the longest completion, and `luspo` by these rows.
    """
    sums = {}
    for loss_type in ("dapo", "bnpo", "cispo", "dr_grpo", "luspo"):
        settings = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.0, "reject_degenerate_states": False}
        if loss_type == "cispo":  # it is the most that a ratio counts there
            settings["epsilon_high"] = 5.0
        trainer = train(KeepsGradients, sampler(), loss_type=loss_type, **settings)
        batch, trees = trainer.batches[-1]
        rollouts = [(state, r) for tree in trees for state in tree.states for r in state.rollouts]
        num_copies = sum(rollout.copy_of is not None for _, rollout in rollouts)
        assert (num_copies > 0) == (sampler is FakeSampler)
        num_counted = sum(n * weight for _, r in rollouts for n, weight, _ in r.credit if r.copy_of is None)
        assert batch["in_loss"].sum() == len(rollouts) - num_copies
        divisor = {"dr_grpo": len(rollouts) * 10, "luspo": len(rollouts)}.get(loss_type, num_counted)
        sums[loss_type] = torch.cat([gradient.flatten() for gradient in trainer.gradients]) * divisor
    for of_loss in sums.values():
        torch.testing.assert_close(of_loss, sums["dapo"], atol=1e-3, rtol=1e-3)


def test_the_kl_term_is_a_mean_over_the_tokens_in_the_loss():
    """Each of which it counts once."""

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


def test_several_updates_and_a_reference_model_and_a_bonus():
    trainer = train(num_iterations=2, steps_per_generation=2, per_device_train_batch_size=16, entropy_coef=0.01)
    assert trainer.state.log_history[-2]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("threshold", "alike"),
    [(-1e9, {"negative_advantage_scale": 0.0}), (1e9, {})],
    ids=["all rows have moved too far", "none has"],
)
def test_the_off_policy_mask_is_about_the_advantages_of_tokens(threshold, alike):
    """TRL's mask leaves out negative ones of rows that the policy has moved away from, and keeps all others."""
    updates = {"num_iterations": 3, "max_steps": 6}
    masked, expected, other = (
        torch.cat([weight.flatten() for weight in train(**updates | settings).model.parameters()])
        for settings in ({"off_policy_mask_threshold": threshold}, alike, {"negative_advantage_scale": 0.5})
    )
    torch.testing.assert_close(masked, expected)
    assert (masked - other).abs().max() > 1e-3


# Refill, resuming, processes


REFILL = {"max_refills": 3, "max_steps": 4, "num_prompts": 64, "reward_func": parity}
REFILL |= {"value_prior_strength": 0.0, "num_base_trajectories": 2, "num_anchors": 3}


def is_proportional(credit, expected):
    """But for the factor of what the loss of a batch is divided by."""
    factor = credit.abs().max() / expected.abs().max()
    return torch.allclose(credit, factor * expected.to(credit), atol=1e-5)


def test_left_over_rows_keep_their_credit(monkeypatch):
    kept = []

    def keep(trainer, leftovers, *rest):
        """The advantages of each step's left-over rows, by their prompts and completions."""
        score_leftovers(trainer, leftovers, *rest)
        kept.append(defaultdict(list))
        for row in leftovers:  # of which two may be alike, token by token, and not in what is theirs of it
            tokens = (*row.prompt_ids, *row.completion_ids)
            kept[-1][tokens].append(token_credit([row], len(row.completion_ids))[1, 0].tolist())

    monkeypatch.setattr(fr3e_trl.fr3e_trainer, "score_leftovers", keep)
    trainer = train(**REFILL)
    num_reused = sum(entry.get("fr3e/refill/reused", 0) for entry in trainer.state.log_history)
    found = 0
    for left_over, (batch, trees) in zip(kept, trainer.batches[1:], strict=False):
        prompts = {tuple(tree.prompt_ids) for tree in trees}
        for i, mask in enumerate(batch["completion_mask"].bool()):
            prompt = tuple(batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist())
            if prompt not in prompts:
                of_rows = left_over[(*prompt, *batch["completion_ids"][i][mask].tolist())]
                assert any(is_proportional(batch["advantages"][i][mask], torch.tensor(row)) for row in of_rows)
                found += 1
    assert found == num_reused > 0


def test_rows_of_older_checkpoints_have_no_credit_of_their_tokens():
    """And a temperature of their own, which is not looked at."""
    state = {"holder": 1, "index": 0, "length": 3, "num_written": 3, "rewards": [1.0], "reward": 1.0, "credit": []}
    state |= {"temperature": 1.2, "advantage": 0.5, "in_loss": True, "is_left_over": True}
    row = row_from(state, [{"prompt": "1+1="}])
    assert row.rollout.credit == [(3, 1.0, 0.5)] and row.advantage == 0.5
    assert row_from(state_of(row, with_tokens=False), [{}]).rollout.credit == row.rollout.credit


@pytest.mark.parametrize("threshold", [0.3, "auto"])
def test_resuming_is_exact(threshold):
    """Within a generated batch, and with left-over rows."""
    settings = REFILL | {
        "anchor_threshold": threshold,
        "save_strategy": "steps",
        "save_steps": 1,
        "num_iterations": 2,
        "max_steps": 6,
    }
    whole = train(FR3ETrainer, **settings)
    assert any(entry.get("fr3e/refill/reused", 0) for entry in whole.state.log_history)
    for step in (1, 2):
        resumed = train(FR3ETrainer, resume=f"output/checkpoint-{step}", **settings, output_dir="resumed")
        for mine, theirs in zip(resumed.state.log_history, whole.state.log_history, strict=True):
            assert all(mine[name] == theirs[name] for name in ("loss", "grad_norm") if name in theirs)
        assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


@pytest.mark.parametrize(
    "settings", [{}, {"max_refills": 2}, {"anchor_threshold": "auto"}], ids=["fixed", "refill", "auto"]
)
def test_two_processes_are_one(settings, tmp_path):
    """A group of three straddles them."""
    tree = {"credit": "tree", "anchor_threshold": 0.3, "num_generations": 8, "optim": "sgd", "num_rewards": 3}
    settings = tree | settings
    results = []
    for num_processes in (1, 2):
        output = tmp_path / str(num_processes)
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6 // num_processes}
        results.append((launch(output, num_processes, settings | sizes, "fake"), weights_of(output)))
    (alone, theirs), (together, ours) = results
    assert same(trees_of(together), trees_of(alone))
    for mine, their in zip(together[0]["logs"], alone[0]["logs"], strict=True):
        names = {"loss", "grad_norm", "fr3e/advantage/mean", "fr3e/advantage/std", "fr3e/anchor/threshold"}
        for name in names & their.keys():
            assert math.isclose(mine[name], their[name], rel_tol=1e-4, abs_tol=1e-6), name
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"credit": "branch"}, "credit='branch' is not allowed: it must be one of 'rollout', 'tree'"),
        ({"importance_sampling_level": "sequence"}, "it must be 'token' with credit='tree'"),
        ({"scale_rewards": "group"}, "scale_rewards='group' is not allowed: it must be 'none' or 'batch'"),
        ({"reuse_base": False}, "reuse_base=False"),
        ({"base_selection": "mixed"}, "base_selection='mixed'"),
        ({"modulation": "exp"}, "modulation='exp'"),
        ({"num_anchors": 0, "anchor_threshold": None}, "num_anchors=0 is not allowed: it must be above 0"),
        ({"anchor_threshold": -0.1}, "anchor_threshold=-0.1 is not allowed: it must be 'auto', None, or a finite"),
        ({"anchor_threshold": math.inf}, "anchor_threshold=inf"),
        ({"anchor_threshold": "high"}, "anchor_threshold='high' is not allowed: it must be 'auto', None, or a finite"),
        ({"anchor_score": "random"}, "it must be 'auto' or None unless anchor_score='entropy'"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


@pytest.mark.parametrize(
    ("settings", "credit", "threshold"),
    [
        ({}, "tree", "auto"),
        ({"num_generations": 4}, "tree", "auto"),
        ({"anchor_threshold": "0.3"}, "tree", 0.3),  # as from a command line
        ({"anchor_threshold": "none"}, "tree", None),
        ({"anchor_threshold": None}, "tree", None),
        ({"anchor_score": "surprisal"}, "tree", None),
        ({"credit": "rollout"}, "rollout", None),
        ({"scale_rewards": "group"}, "rollout", None),
        ({"modulation": "exp"}, "rollout", None),
        ({"num_anchors": 0}, "rollout", None),
    ],
    ids=str,
)
def test_what_the_defaults_are_where_nothing_else_is_said(settings, credit, threshold):
    config = FR3EConfig("unused", **CPU | settings).resolve()
    assert (config.credit, config.anchor_threshold) == (credit, threshold)


def test_the_paper_states_its_own():
    config = FR3EConfig.paper(output_dir="unused", **CPU).resolve()
    assert config.credit == "rollout" and config.anchor_threshold is None
