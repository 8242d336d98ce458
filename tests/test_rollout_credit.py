"""Values, modulation, advantages and rejection, worked out by hand, and what must not change them."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from enumeration import Policy, fixed, grow
from hypothesis import given
from hypothesis import strategies as st

from fr3e_trl.method.credit import rollout as credit
from fr3e_trl.method.credit.prior import Prior, state_values
from fr3e_trl.method.credit.rollout import compute_advantages, row_baselines
from fr3e_trl.method.tree import Rollout, Score, Tree

pytestmark = pytest.mark.fast

NAN = math.nan
CHAIN = [None, 0, 1]  # S_0 -> S_1 -> S_2
FORK = [None, 0, 1, 0]  # two trajectories: S_0 -> S_1 -> S_2, and S_0 -> S_3


def rows(*states: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([reward for state in states for reward in state], dtype=torch.float64)
    return rewards, torch.tensor([i for i, state in enumerate(states) for _ in state])


def assert_close(actual: torch.Tensor, expected: list[float], atol: float = 5e-5) -> None:
    expected = torch.tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0, equal_nan=True)


@pytest.mark.parametrize("given", [[0.5], [0.5, 1.0]])
def test_an_environments_own_reward_has_a_weight_of_one(given):
    """TRL adds it to `reward_weights`, and `get_reward` to the functions."""
    tree = Tree([1], 9)
    scores = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    tree.states[0].rollouts = [Rollout([1], None, Score(rewards, sum(rewards))) for rewards in scores]
    compared = credit.compared_rewards([tree], SimpleNamespace(normalization="each", reward_weights=given))
    # Each function's are ±.5 / .577 about their mean; weighed, -.25, .25, .75 and -.75 of that, of deviation .645
    assert_close(compared, [-0.3873, 0.3873, 1.1619, -1.1619], atol=1e-3)


def check(states, parents, settings=None, **expected):
    """Advantages and so on of rows that are given state by state; of some rows alone, by their index."""
    result = compute_advantages(*rows(*states), parents, **settings or {})
    for name, values in expected.items():
        found = getattr(result, name).double()
        if isinstance(values, dict):
            found, values = found[[*values]], values.values()
        assert_close(found, [*values])


def test_modulation():
    # V = 1/4, 3/4, 2/4. alpha = 1, exp(-0.5), exp(0.25)
    # Successes: 0.75 * 1; 0.25 * 0.6065; 0.5 * 1.2840. Failures: -0.25 * 1; -0.75 * 0.6065; -0.5 * 1.2840
    of_chain = [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]
    advantages = [0.75, *[-0.25] * 3, *[0.1516] * 3, -0.4549, 0.6420, 0.6420, -0.6420, -0.6420]
    exact = {"values": [0.25, 0.75, 0.5], "factors": [1, 0.6065, 1.2840], "rejected": [False] * 3}
    check(of_chain, CHAIN, advantages=advantages, **exact)
    # delta = 1 - 0.25, 0.5, -0.25; |delta|^1.5 = 0.649519, 0.353553, 0.125, of sum 1.128072
    # shares = 0.575778, 0.313414, -0.110809; alpha = exp(-share). Successes: 0.75 * 0.5623, 0.25 * 0.7309, 0.5 * 1.1172
    sharpened = {"factors": [0.5623, 0.7309, 1.1172], "advantages": {0: 0.4217, 4: 0.1827, 8: 0.5586}}
    check(of_chain, CHAIN, {"modulation": "sharpened"}, **sharpened)
    # S_3 is the first anchor of the second trajectory: it compares with S_0, not with S_2
    # V = 0.5, 0.75, 0.25, 0.25; alpha = 1, exp(-0.25), exp(0.5), exp(0.25)
    # 0.5 * 1; 0.25 * 0.7788; 0.75 * 1.6487; 0.75 * 1.2840
    of_fork = [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]
    advantages = {0: 0.5, 4: 0.1947, 8: 1.2365, 15: 0.9630}
    check(of_fork, FORK, factors=[1, 0.7788, 1.6487, 1.2840], advantages=advantages)
    # V = 300, 100, 700: differences -200 and 600 become exponents 5 and -5
    check(([200, 400], [0, 200], [600, 800]), CHAIN, factors=[1, math.exp(5), math.exp(-5)])
    # V = 0.5, 1, 0.5, 0. Chain 1: delta = 0.5, 0.5, -0.5, of equal size: shares 1/3, 1/3, -1/3.
    # Chain 2: delta = 0.5, -0.5: shares 1/2, -1/2. S_0 is in both: the mean, (1/3 + 1/2) / 2 = 5/12
    factors = credit.modulation_factors(torch.tensor([0.5, 1.0, 0.5, 0.0]), FORK, "sharpened")
    assert_close(factors, [math.exp(-5 / 12), math.exp(-1 / 3), math.exp(1 / 3), math.exp(1 / 2)])


def test_rows_and_states_that_do_not_count():
    # V leaves them out: (1 + 0) / 2, (1 + 1 + 0) / 3; alpha_1 = exp(-1/6) = 0.8465
    # 1/3 * 0.8465 = 0.2822, -2/3 * 0.8465 = -0.5643
    advantages = [0.5, -0.5, 0, 0.2822, 0, 0.2822, -0.5643]
    check(([1, 0, NAN], [1, NAN, 1, 0]), [None, 0], values=[1 / 2, 2 / 3], advantages=advantages)
    # S_1 has no value: it is degenerate, and neither it nor S_2, which follows it, is modulated
    without = {"values": [0.5, NAN, 0.5], "factors": [1, 1, 1], "advantages": [0.5, -0.5, 0, 0, -0.5, 0.5]}
    check(([1, 0], [NAN, NAN], [0, 1]), CHAIN, **without, rejected=[False, True, False])
    # S_1 is all right and rejected. S_2 compares with it, V 1, and not with S_0: alpha_2 = exp(0.5), not 1
    check(([1, 0], [1, 1], [1, 0]), CHAIN, factors=[1, 0.6065, 1.6487], rejected=[False, True, False])
    # With a prior. Every reward is the same, and so are the priors but for rounding: every advantage is 0
    alike = [0.1, 0.1, 0.1], [0.1], [0.1] * 6
    result = compute_advantages(*rows(*alike), [None, 0, None], Prior(2))
    assert result.rejected.all() and not result.advantages.any()
    # kappa = 1: S_0's prior is the other's V, 1. Its one scorable row has (1 * 1 + 0) / (1 + 1 - 1) = 1
    # The other: prior 0, (1 * 0 + 1) / (1 + 2 - 1) = 0.5
    check(([0, NAN], [1, 1]), [None, None], {"prior": Prior(1)}, advantages=[-1, 0, 0.5, 0.5])
    # Three times 0.1 has a mean that is not 0.1 in floating point; a hair's difference is a difference
    rewards, states = rows([0.1, 0.1, 0.1], [0.1, 0.1 + 1e-12, 0.1], [NAN, 7.0], [NAN, NAN], [0, 1])
    assert credit.degenerate_states(rewards, states, 5).tolist() == [True, False, True, True, False]
    result = compute_advantages(rewards, states, [None] * 5)
    assert result.advantages[:3].tolist() == [0, 0, 0]


def test_negative_advantages_are_scaled():
    # V = 0.25 and 0.5: A = 0.75, three times -0.25, and 0.5, -0.5, the negative ones halved. Rejection is as before
    states, halved = ([1, 0, 0, 0], [1, 0], [0, 0]), {"modulation": "none", "negative_scale": 0.5}
    advantages = [0.75, -0.125, -0.125, -0.125, 0.5, -0.25, 0, 0]
    check(states, [None, 0, 0], halved, advantages=advantages, rejected=[False, False, True])
    # alpha_1 = exp(-0.25) = 0.7788
    check(states, [None, 0, 0], {"negative_scale": 0}, advantages=[0.75, 0, 0, 0, 0.3894, 0, 0, 0])


def test_scale_by_group_and_batch():
    # S_0: mean 0.25, deviations 0.75 and three of -0.25, variance 0.75 / 3 = 0.25, standard deviation 0.5
    rewards, states = rows([1, 0, 0, 0], [3, 1])
    advantages = credit.row_advantages(rewards, states, row_baselines(rewards, states, [None, 0]), 2, "group")
    # S_1: mean 2, variance 2 / 1, standard deviation 1.41421
    expected = [0.75 / 0.5001, *[-0.25 / 0.5001] * 3, 1 / 1.41431, -1 / 1.41431]
    assert_close(advantages, expected)
    # By batch. All five scorable rewards 1 0 1 1 0: mean 0.6, variance (3 * 0.16 + 2 * 0.36) / 4 = 0.3, root 0.547723
    rewards, states = rows([1, 0, NAN], [1, 1, 0])
    advantages = credit.row_advantages(rewards, states, row_baselines(rewards, states, [None, 0]), 2, "batch")
    assert_close(advantages, [0.5 / 0.547823, -0.5 / 0.547823, 0, *[1 / 3 / 0.547823] * 2, -2 / 3 / 0.547823])


def test_prior():
    # kappa = 2. Two prompts: V(S_0) = 0.5 and 1.0, so each other's prior. S_1 follows the first.
    # shrunk(S_0) = (2 * 1.0 + 1) / (2 + 2) = 0.75, the prior of S_1
    # Baselines, leave-one-out. First S_0: (2 * 1 + 0) / 3 for the 1, (2 * 1 + 1) / 3 for the 0.
    # S_1: all right, (2 * 0.75 + 1) / 3. Second S_0: (2 * 0.5 + 1) / 3
    rewards, states = rows([1, 0], [1, 1], [1, 1])
    baselines = row_baselines(rewards, states, [None, 0, None], Prior(2))
    assert_close(baselines, [2 / 3, 1, 2.5 / 3, 2.5 / 3, 2 / 3, 2 / 3])
    # States whose rewards are all equal teach, and none is rejected
    result = compute_advantages(rewards, states, [None, 0, None], Prior(2))
    assert not result.rejected.any()
    # alpha_1 = exp(-0.5) is of V as it is: (1 - 2.5 / 3) * 0.6065 = 0.1011
    assert_close(result.advantages, [1 / 3, -1, 0.1011, 0.1011, 1 / 3, 1 / 3])
    # No other prompt: S_0 gets its plain leave-one-out mean, and S_1 is still pulled towards it
    # V(S_0) = 0.5. S_1: (1 * 0.5 + 1) / (1 + 1) for each
    assert_close(row_baselines(*rows([1, 0], [1, 1]), [None, 0], Prior(1)), [0, 1, 0.75, 0.75])


def test_normalized_and_weighted_rewards():
    # First prompt: by the first function (1, 3, 5), mean 3, deviation 2; by the second all equal
    # Second prompt: (2, 4), mean 3, deviation sqrt(2); and a single one
    rewards = torch.tensor([[1, 0.1], [2, NAN], [3, 0.1], [NAN, 5], [5, 0.1], [4, NAN]], dtype=torch.float64)
    prompts = torch.tensor([0, 1, 0, 1, 0, 1])
    a, b = 2 / 2.0001, 1 / (math.sqrt(2) + 1e-4)
    assert_close(credit.normalized_rewards(rewards, prompts, 2)[:, 0], [-a, -b, 0, NAN, a, b])
    assert credit.normalized_rewards(rewards, prompts, 2)[:, 1].nan_to_num(9).tolist() == [0, 9, 0, 0, 0, 9]
    rewards_per_func = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    assert_close(credit.weighted_rewards(rewards_per_func, torch.tensor([1.0, 0.5])), [2.0, 1.0, NAN])


@st.composite
def batches(draw):
    """Rewards (R,), states (R,), parents, of one to four prompts, each with up to two chains."""
    parents: list[int | None] = []
    for _ in range(draw(st.integers(1, 4))):
        root = len(parents)
        parents.append(None)
        for _ in range(draw(st.integers(0, 2))):
            before = root
            for _ in range(draw(st.integers(1, 3))):
                parents.append(before)
                before = len(parents) - 1
    rewards, states = [], []
    for state in range(len(parents)):
        size = draw(st.integers(2, 5))
        rewards += draw(st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.1, 100.0, NAN]), min_size=size, max_size=size))
        states += [state] * size
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(states), parents


@given(batches())
def test_unmodulated_advantages_sum_to_0_in_every_state(batch):
    rewards, states, parents = batch
    result = compute_advantages(rewards, states, parents, modulation="none", reject=False)
    sums = torch.zeros(len(parents), dtype=torch.float64).index_add(0, states, result.advantages)
    assert_close(sums, [0.0] * len(parents), atol=1e-10)


@given(batches(), st.sampled_from(["exp", "sharpened", "none"]), st.sampled_from([0.0, 2.0]), st.randoms())
def test_order_changes_nothing_and_advantages_are_finite(batch, modulation, prior_strength, random):
    rewards, states, parents = batch
    order = list(range(len(rewards)))
    random.shuffle(order)
    result = compute_advantages(rewards, states, parents, Prior(prior_strength), modulation)
    shuffled = compute_advantages(rewards[order], states[order], parents, Prior(prior_strength), modulation)
    assert_close(shuffled.advantages, result.advantages[order].tolist(), atol=1e-9)
    assert_close(shuffled.values, result.values.tolist(), atol=1e-9)
    assert shuffled.rejected.equal(result.rejected)
    assert result.advantages.isfinite().all() and result.factors.isfinite().all()
    assert not result.advantages[rewards.isnan()].any()
    assert not result.advantages[result.rejected[states]].any()
    assert state_values(rewards, states, len(parents)).isnan().equal(result.values.isnan())


@given(batches(), batches(), st.sampled_from(["exp", "sharpened", "none"]), st.sampled_from(["none", "group"]))
def test_what_shares_the_batch_changes_nothing(batch, other, modulation, scale):
    rewards, states, parents = batch
    others, other_states, other_parents = other
    shift = len(parents)
    all_rewards, all_states = torch.cat([rewards, others]), torch.cat([states, other_states + shift])
    all_parents = parents + [None if parent is None else parent + shift for parent in other_parents]
    together = compute_advantages(all_rewards, all_states, all_parents, modulation=modulation, scale=scale)
    alone = compute_advantages(rewards, states, parents, modulation=modulation, scale=scale)
    assert_close(together.advantages[: len(rewards)], alone.advantages.tolist(), atol=1e-9)
    assert together.rejected[:shift].equal(alone.rejected)


@given(batches(), st.data())
def test_with_a_prior_no_baseline_depends_on_its_own_reward(batch, data):
    rewards, states, parents = batch
    row = data.draw(st.integers(0, len(rewards) - 1))
    changed = rewards.clone()
    changed[row] += 1
    before = row_baselines(rewards, states, parents, Prior(4.0))
    after = row_baselines(changed, states, parents, Prior(4.0))
    torch.testing.assert_close(after[row], before[row], atol=1e-9, rtol=0, equal_nan=True)


def test_a_trajectory_and_one_branch_of_it_leave_the_gradient_unbiased():
    """
    By every outcome of two tokens, of which the second is drawn again by a branch. The first token is in the loss once,
    in the base trajectory, and the second twice. The one completion of the other prompt has a reward of 0 or 1.
    """
    policy, states, parents = Policy(2, 2, seed=0, rewards="graded"), torch.tensor([0, 1, 2]), [None, 0, None]
    gradient = torch.zeros_like(policy.gradient)
    for outcome, other in itertools.product(grow(policy, fixed(1), 1), (0.0, 1.0)):
        rewards = torch.tensor([*policy.rewards[outcome.completions], other], dtype=torch.float64)
        result = compute_advantages(rewards, states, parents, Prior(4.0), modulation="none")
        (of_base, of_branch, _), (base, branch) = result.advantages, policy.scores[outcome.completions]
        gradient += 0.5 * outcome.probability * (of_base * base[2] + of_branch * (branch[2] - branch[1]))
    expected = (policy.probabilities * policy.rewards) @ (2 * policy.scores[:, 2] - policy.scores[:, 1])
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
