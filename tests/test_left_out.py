"""Rows that are left out of credit, or counted for others: copies, truncated rows, rewards that are no numbers."""

import math

import factory
import pytest
import torch
from factory import logged

from fr3e_trl.method.anchors import eligible_positions, next_threshold, uncertainty


def test_copies_are_scored_with_their_group_and_logged_means_are_over_rollouts():
    scored = []

    def letters(completions, **kwargs):
        scored.append(factory.letters(completions))
        return scored[-1]

    trainer = factory.train(reward_funcs=letters, max_steps=4, num_generations=4)
    sampled = []
    for (_, trees), rewards in zip(trainer.batches, scored, strict=True):
        rollouts = [rollout for tree in trees for state in tree.states for rollout in state.rollouts]
        assert len(rewards) == len(rollouts)  # whole groups, of which a copy's reward is dropped
        sampled.append([r for r, rollout in zip(rewards, rollouts, strict=True) if rollout.copy_of is None])
    assert sum(map(len, sampled)) < sum(map(len, scored))
    names = ("reward", "reward_std", "rewards/letters/mean")
    for rewards, of_step in zip(sampled, logged(trainer, *names), strict=True):
        mean, std = torch.tensor(rewards).mean().item(), torch.tensor(rewards).std().item()
        assert of_step == pytest.approx((mean, std, mean), abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"loss_type": "bnpo"}, {"steps_per_generation": 2, "max_refills": 1}])
def test_truncated_base_trajectories_keep_the_tokens_that_finished_branches_pass_through(settings):
    sizes = {"max_completion_length": 16, "max_steps": 4, "num_generations": 4, "anchor_threshold": 1.2}
    sizes |= {"gradient_accumulation_steps": settings.get("steps_per_generation", 1)}
    trainer = factory.train(reward_funcs=factory.letters, mask_truncated_completions=True, **sizes, **settings)
    kept = 0
    for batch, trees in trainer.batches:
        if "max_refills" in settings:  # rows of several steps
            assert batch["advantages"].isfinite().all()
            continue
        masks = (batch["completion_mask"] * batch["tool_mask"]).bool()
        rows = [(tree, state, rollout) for tree in trees for state in tree.states for rollout in state.rollouts]
        for (tree, state, rollout), in_loss, advantages in zip(rows, masks, batch["advantages"], strict=True):
            if rollout.copy_of is not None:
                assert not in_loss.any()
            elif rollout.score.is_masked:
                finished = [s for s in tree.states[1:] if not all(branch.score.is_masked for branch in s.rollouts)]
                last = max((s.position for s in finished if state.base is None), default=0)
                kept += last > 0
                assert int(in_loss.sum()) in (0, last) and not in_loss[last:].any()
                assert in_loss.any() or not advantages[:last].any()
    assert kept > 0 or "max_refills" in settings
    assert all(math.isfinite(loss) for (loss,) in logged(trainer, "loss"))


def test_a_reward_that_is_not_a_number_is_none():

    def train(nothing):
        def letters(completions, **kwargs):
            rewards = factory.letters(completions)
            return [nothing if len(text) % 3 == 0 else r for text, r in zip(completions, rewards, strict=True)]

        trainer = factory.train(reward_funcs=letters, max_steps=3)
        return logged(trainer, "loss", "reward", "grad_norm"), factory.weights(trainer)

    (losses, weights), (expected, expected_weights) = train(math.nan), train(None)
    assert losses == expected and torch.equal(weights, expected_weights)
    assert all(math.isfinite(value) for of_step in losses for value in of_step)


def test_refills_move_the_threshold_once_a_step():
    def rarely(completions, **kwargs):
        return [float(len(text) % 5 == 0) for text in completions]

    trainer = factory.train(reward_funcs=rarely, max_refills=3, num_generations=4, max_steps=3)
    assert sum(count for (count,) in logged(trainer, "fr3e/refill/rounds")) > 0
    expected = None
    for (_, trees), (logged_threshold,) in zip(trainer.batches, logged(trainer, "fr3e/anchor/threshold"), strict=True):
        entropies = [tree.entropies[0].numpy() for tree in trees]
        expected = next_threshold(expected, [uncertainty(e, eligible_positions(e, 12), 3) for e in entropies])
        assert logged_threshold == pytest.approx(expected, rel=1e-6)
