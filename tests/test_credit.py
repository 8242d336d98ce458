"""Tree credit: worked out by hand, against its definition token by token, and against the exact gradient."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from enumeration import Policy, at_random, first_uncertain, fixed, grow, most_uncertain, of_trees, several
from hypothesis import given
from hypothesis import strategies as st

from fr3e_trl.method.credit.prior import Prior, state_values
from fr3e_trl.method.credit.tree import Paths, Stretches, path_std, root_baselines, tree_credit, tree_values

pytestmark = pytest.mark.fast

NAN = math.nan
# A row: its reward, the row that it branched off, the position there, its length
Row = tuple[float, int | None, int, int]


def paths(rows: list[Row], prompts: list[int] | None = None, copies: list[int] | None = None) -> Paths:
    rewards, parents, positions, lengths = map(list, zip(*rows, strict=True))
    prompts, copies = prompts or [0] * len(rows), copies or [1] * len(rows)
    rewards = torch.tensor(rewards, dtype=torch.float64)
    return Paths(rewards, parents, positions, lengths, torch.tensor(prompts), copies, lengths)


def one_tree(rows: list[Row], baseline: float, prior_strength: float, copies: list[int] | None = None) -> Stretches:
    """Credit of rows of one prompt, whose trees all have the same β."""
    baselines = torch.full((len(rows),), baseline, dtype=torch.float64)
    return tree_credit(paths(rows, copies=copies), baselines, prior_strength)


def by_crowd(of_rows: Paths, prior_strength: float) -> Stretches:
    """Credit of rows of several prompts, which are each other's prior."""
    values, prompts = tree_values(of_rows), of_rows.prompts
    priors = Prior().of(state_values(values, prompts, int(prompts.max()) + 1))
    return tree_credit(of_rows, root_baselines(values, prompts, priors, prior_strength), prior_strength)


def assert_credit(credit: Stretches, expected: list[tuple[int, int, int, float]]) -> None:
    """Expected: row, start, end, advantage."""
    actual = zip(credit.rows.tolist(), credit.starts.tolist(), credit.ends.tolist(), strict=True)
    assert list(actual) == [stretch[:3] for stretch in expected]
    advantages = torch.tensor([stretch[3] for stretch in expected], dtype=torch.float64)
    torch.testing.assert_close(credit.advantages, advantages, atol=1e-12, rtol=0)


def test_branches_of_branches():
    # kappa = 4, beta = .25, so kappa beta = 1. Row 1 leaves the base at 2, row 2 leaves row 1 at 5, row 3 the base at 4
    # Base. 0-1: T = {0, 1, 0, 1}: .5 - .25, four times. 2-3: T = {0, 1}, U = {1, 0}: .5 - 2/6, twice.
    # 4-7: T = {0}, U = {1, 0, 1}: 0 - 3/7
    # Row 1. 2-4: T = {1, 0}, U = {0, 1}: .5 - 2/6, twice. 5-8: T = {1}, U = {0, 0, 1}: 1 - 2/7
    # Row 2: U = {0, 1, 1}: 0 - 3/7. Row 3: U = {0, 1, 0}: 1 - 2/7
    rows = [(0, None, 0, 8), (1, 0, 2, 9), (0, 1, 5, 7), (1, 0, 4, 6)]
    base = [(0, 0, 2, 1), (0, 2, 4, 1 / 3), (0, 4, 8, -3 / 7)]
    expected = [*base, (1, 2, 5, 1 / 3), (1, 5, 9, 5 / 7), (2, 5, 7, -3 / 7), (3, 4, 6, 5 / 7)]
    assert_credit(one_tree(rows, 0.25, 4), expected)


def test_copies():
    # kappa = 4, beta = .5. The base stands for itself and a branch that did not fit.
    # 0-1: T = {0, 0, 1}: 1/3 - .5, three times. 2-3: T = {0, 0}, U = {1}: 0 - 3/5, twice. Branch: 1 - 2/6
    rows = [(0, None, 0, 4), (1, 0, 2, 5)]
    expected = [(0, 0, 2, -0.5), (0, 2, 4, -1.2), (1, 2, 5, 2 / 3)]
    assert_credit(one_tree(rows, 0.5, 4, copies=[2, 1]), expected)
    # The same as a branch that left at its end, and has no token of its own
    assert_credit(one_tree([*rows, (0, 0, 4, 4)], 0.5, 4), expected)
    # The standard deviation of a batch counts them
    rows = paths([(1, None, 0, 4), (0, 0, 2, 5), (NAN, None, 0, 3)], copies=[2, 1, 1])
    assert path_std(rows).item() == pytest.approx((1 / 3) ** 0.5 + 1e-4)  # of 1, 1, 0
    assert path_std(paths([(1, None, 0, 4), (NAN, None, 0, 3)])) == 1


def test_equal_rewards_teach_nothing_though_means_are_rounded():
    of_first = [(0.1, None, 0, 9), (0.1, 0, 2, 5), (0.1, 0, 4, 6), (0.1, 1, 3, 6), (0.1, None, 0, 2)]
    of_rows = paths([*of_first, *[(0.1, None, 0, 1)] * 7], [0] * 5 + [1] * 3 + [2] * 4)
    for dtype in (torch.float32, torch.float64):
        credit = by_crowd(of_rows._replace(rewards=of_rows.rewards.to(dtype)), 3)
        assert not credit.advantages.any()


def test_rewards_by_length():
    # beta = .2, kappa = 4. The policy wrote 2, 5 and 8 tokens of 4, 5 and 8, which earn (1 - .2)/2 = .4, (0 - .2)/5 =
    # -.04 and (1 - .2)/8 = .1. 0-1: T all: .46.  2: T = {.4, .1}, U = {-.04}: .5 - 2 * -.04/5.  3: .4 - (.1 - .04)/6
    # First branch: -.04 - (.4 + .1)/6.  Second: .1 - (.4 - .04)/6. Each token counts for the sum of 1/L of its T
    of_rows = paths([(1, None, 0, 4), (0, 0, 2, 5), (1, 0, 3, 8)])._replace(num_written=[2, 5, 8])
    credit = tree_credit(of_rows, torch.full((3,), 0.2, dtype=torch.float64), 4.0, length_normalized=True)
    base = [(0, 0, 2, 0.46), (0, 2, 3, 0.516), (0, 3, 4, 0.39)]
    assert_credit(credit, [*base, (1, 2, 5, -0.04 - 0.5 / 6), (2, 3, 8, 0.1 - 0.36 / 6)])
    assert credit.weights.tolist() == pytest.approx([1 / 2 + 1 / 5 + 1 / 8, 1 / 2 + 1 / 8, 1 / 2, 1 / 5, 1 / 8])
    # No prior and no other tree: about .5, rows of 4 and 5 tokens earn .125 and -.1. 0-1: nothing to compare with
    of_rows = paths([(1, None, 0, 4), (0, 0, 2, 5)])
    credit = tree_credit(of_rows, torch.full((2,), NAN), 4.0, length_normalized=True)
    assert_credit(credit, [(0, 0, 2, 0), (0, 2, 4, 0.225), (1, 2, 5, -0.225)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, None, 0, 3), (0, 0, 4, 5)], "Row 1, of 5 tokens, has position 4; it can be 0 to 3"),
        ([(0, None, 0, 9), (0, 0, 4, 5), (0, 1, 3, 9)], "Row 2, of 9 tokens, has position 3; it can be 4 to 5"),
        ([(0, None, 0, 9), (0, 0, 4, 3)], "Row 1, of 3 tokens, has position 4; it can be 0 to 3"),
        ([(0, None, 1, 9)], "Row 0, of 9 tokens, has position 1; it can be 0 to 0"),
    ],
)
def test_rows_that_are_no_trees(rows, message):
    with pytest.raises(ValueError, match=message):
        one_tree(rows, 0, 1)


@st.composite
def batches(draw):
    rows, prompts, rewards = [], [], (0.0, 1.0, -0.5, 0.1, 100.0, NAN)
    for prompt in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 3))):
            base = len(rows)
            rows.append((draw(st.sampled_from(rewards)), None, 0, draw(st.integers(1, 12))))
            for _ in range(draw(st.integers(0, 6))):
                parent = draw(st.integers(base, len(rows) - 1))
                position = draw(st.integers(rows[parent][2], rows[parent][3]))
                rows.append((draw(st.sampled_from(rewards)), parent, position, draw(st.integers(position, 14))))
            prompts += [prompt] * (len(rows) - base)
    return rows, prompts


def dense(credit: Stretches, num_rows: int) -> torch.Tensor:
    """Advantages of all tokens, 0 for those that are another row's, and past a row's end."""
    advantages = torch.zeros(num_rows, 14, dtype=torch.float64)
    for row, start, end, advantage in zip(credit.rows, credit.starts, credit.ends, credit.advantages, strict=True):
        advantages[row, start:end] = advantage
    return advantages


def passes_through(rows: list[Row], row: int, other: int, position: int) -> bool:
    """Whether a row's path has the token that another sampled at a position of its own."""
    leaves = rows[row][3]
    while row != other:
        leaves, row = rows[row][2], rows[row][1]
        if row is None:
            return False
    return leaves > position


def base_of(rows: list[Row], row: int) -> int:
    return row if rows[row][1] is None else base_of(rows, rows[row][1])


def by_definition(rows: list[Row], prompts: list[int], strength: float, num_columns: int) -> tuple[torch.Tensor, ...]:
    """Of each token that a row sampled itself (R, T): its advantage, and how many scorable rows pass through it."""
    rewards = [row[0] for row in rows]
    bases = [base_of(rows, i) for i in range(len(rows))]

    def mean(values):
        values = [value for value in values if not math.isnan(value)]
        return sum(values) / len(values) if values else NAN

    def shrink(prior, values):
        values = [value for value in values if not math.isnan(value)]
        if not values or math.isnan(prior):
            return mean(values) if values else prior
        return (strength * prior + sum(values)) / (strength + len(values))

    value_of = {base: mean([r for r, b in zip(rewards, bases, strict=True) if b == base]) for base in set(bases)}
    prompt_value = [mean([value_of[b] for b in value_of if prompts[b] == p]) for p in range(max(prompts) + 1)]
    advantages, numbers = torch.zeros(2, len(rows), num_columns, dtype=torch.float64)
    for row, (_, _, position, length) in enumerate(rows):
        base, prompt = bases[row], prompts[row]
        prior = mean([value for p, value in enumerate(prompt_value) if p != prompt])
        beta = shrink(prior, [value_of[b] for b in value_of if prompts[b] == prompt and b != base])
        for t in range(position, length):
            tree = [i for i in range(len(rows)) if bases[i] == base]
            passing = [i for i in tree if passes_through(rows, i, row, t)]
            left = [rewards[i] for i in tree if i not in passing]
            passing = [rewards[i] for i in passing if not math.isnan(rewards[i])]
            advantage = mean(passing) - shrink(beta, left)
            advantages[row, t] = 0 if math.isnan(advantage) else advantage * len(passing)
            numbers[row, t] = len(passing)
    return advantages, numbers


@given(batches(), st.sampled_from([0.0, 0.5, 4.0]))
def test_the_definition_token_by_token(drawn, strength):
    rows, prompts = drawn
    expected, _ = by_definition(rows, prompts, strength, num_columns=14)
    credit = by_crowd(paths(rows, prompts), strength)
    torch.testing.assert_close(dense(credit, len(rows)), expected, atol=1e-9, rtol=0)
    # Weighted tokens are those of the paths
    num_counted = (credit.weights * (credit.ends - credit.starts)).sum()
    assert num_counted == sum(row[3] for row in rows if not math.isnan(row[0]))


POLICIES = [
    Policy(vocabulary=2, length=4, seed=1, rewards="graded"),
    Policy(vocabulary=3, length=3, seed=2),
    Policy(vocabulary=3, length=3, seed=6, eos=True),
    Policy(vocabulary=2, length=4, seed=4, rewards="graded", eos=True),
]
# GRPO's losses that are means over rows, `loss_type="grpo"` and `"sapo"`, and those that are not
BY_LENGTH = pytest.mark.parametrize("by_length", [False, True], ids=["by_tokens", "by_length"])


def with_gap(rule, gap):
    """As `rule`, but at least `gap` tokens apart."""

    def apart(policy, completion):
        ((_, positions),) = rule(policy, completion)
        kept = []
        for position in positions:
            if not kept or position - kept[-1] >= gap:
                kept.append(position)
        return [(1.0, tuple(kept))]

    return apart


# What does not look at what comes after a token, and how many branches that is
RULES = {
    "one anchor": (first_uncertain(0.6), 1),
    "two anchors": (first_uncertain(0.5, 2), 2),
    "two anchors apart": (with_gap(first_uncertain(0.3, 2), 2), 2),
    "at fixed positions": (fixed(1, 2), 2),
    "at random": (at_random, 1),
}
# Rows that do not count, by their completions. Those of policies with EOS whose budget is three tokens may have none
NOT_COUNTED = {
    "truncated": lambda completion: 0 not in completion,
    "unscorable": lambda completion: sum(completion) % 2 == 1,
}


def error(mean, expected):
    return float((mean - expected).norm() / expected.norm())


def gradient(policy, baseline=0.0, by_length=False, masked=lambda completion: False):
    """Where completions that are not `masked` earn their reward less the baseline, and others nothing."""
    counted = torch.tensor([not masked(completion) for completion in policy.completions])
    lengths = torch.tensor([len(completion) if by_length else 1 for completion in policy.completions])
    return policy.gradient_of(counted * (policy.rewards - baseline) / lengths)


@BY_LENGTH
@pytest.mark.parametrize("strength", [0.0, 4.0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", RULES)
def test_unbiased_if_where_to_branch_does_not_look_ahead(name, policy, strength, by_length):
    rule, num_branches = RULES[name]
    outcomes = grow(policy, rule, num_branches)
    assert sum(outcome.probability for outcome in outcomes) == pytest.approx(1, abs=1e-12)
    for baseline in (0.0, 0.3):
        mean = of_trees(policy, outcomes, baseline, strength, by_length)
        assert error(mean / (1 + num_branches), gradient(policy, baseline, by_length)) < 1e-10


@BY_LENGTH
def test_unbiased_with_two_trees(by_length):
    """β is a mean with the other tree: (4 * .3 + its value) / 5, or that value alone without a prior."""
    policy = POLICIES[2]
    outcomes, value = several(grow(policy, first_uncertain(0.6), 1), 2), float(policy.expected_reward)
    for prior, strength, baseline in ((0.3, 4.0, (4 * 0.3 + value) / 5), (NAN, 0.0, value)):
        mean = of_trees(policy, outcomes, prior, strength, by_length)
        assert error(mean / 4, gradient(policy, baseline, by_length)) < 1e-10


def test_unbiased_with_the_other_prompts_as_prior():
    policies = [Policy(vocabulary=2, length=3, seed=1), Policy(vocabulary=2, length=3, seed=2, rewards="graded")]
    gradients = [torch.zeros_like(policy.gradient) for policy in policies]
    for outcomes in itertools.product(*(grow(policy, first_uncertain(0.6), 1) for policy in policies)):
        both = outcomes[0] + outcomes[1]
        prompts = torch.tensor([0] * len(outcomes[0].parents) + [1] * len(outcomes[1].parents))
        rewards = torch.cat([policy.rewards[o.completions] for policy, o in zip(policies, outcomes, strict=True)])
        lengths = [3] * len(prompts)
        of_rows = Paths(rewards, both.parents, both.positions, lengths, prompts, both.counts, lengths)
        credit = by_crowd(of_rows, 4.0)
        stretches = zip(credit.rows, credit.starts, credit.ends, credit.advantages, strict=True)
        for row, start, end, advantage in stretches:
            scores = policies[prompts[row]].scores[both.completions[row]]
            gradients[prompts[row]] += both.probability * advantage * (scores[end] - scores[start])
    for found, policy in zip(gradients, policies, strict=True):
        assert error(found / 2, policy.gradient) < 1e-10


@BY_LENGTH
@pytest.mark.parametrize("masked", NOT_COUNTED)
@pytest.mark.parametrize("name", RULES)
def test_trees_of_which_only_some_rows_count(name, masked, by_length):
    """The objective is GRPO's with `mask_truncated_completions`: to finish is worth the reward less the baseline."""
    rule, num_anchors = RULES[name]
    policy = Policy(vocabulary=3, length=3, seed=5, rewards="graded", eos=True)
    assert 0.2 < sum(policy.probability(c) for c in policy.completions if not NOT_COUNTED[masked](c)) < 0.9
    expected = (1 + num_anchors) * gradient(policy, 0.3, by_length, NOT_COUNTED[masked])
    # A prior of such a weight is the baseline
    settings = {"masked": NOT_COUNTED[masked], "length_normalized": by_length}
    assert error(of_trees(policy, grow(policy, rule, num_anchors), 0.3, 1e13, **settings), expected) < 1e-9


def failing(policy, outcomes, chance):
    """As `policy` and `outcomes`, but that each row may fail to be scored. Completions from the middle on have."""
    failed = copy.copy(policy)
    failed.completions, failed.scores = 2 * policy.completions, torch.cat(2 * [policy.scores])
    failed.rewards = torch.cat([policy.rewards, torch.full_like(policy.rewards, NAN)])
    found = []
    for outcome in outcomes:
        for which in itertools.product([False, True], repeat=len(outcome.completions)):
            probability = outcome.probability * math.prod(chance if fails else 1 - chance for fails in which)
            rows = [i + fails * len(policy.completions) for i, fails in zip(outcome.completions, which, strict=True)]
            found.append(replace(outcome, probability=probability, completions=rows))
    return failed, found


@pytest.mark.parametrize("strength", [0.0, 4.0])
@pytest.mark.parametrize("name", ["one anchor", "two anchors"])
def test_trees_whose_scoring_fails_at_random_are_unbiased(name, strength):
    rule, num_anchors = RULES[name]
    policy = Policy(vocabulary=3, length=3, seed=5, rewards="graded", eos=True)
    estimate = of_trees(*failing(policy, grow(policy, rule, num_anchors), 0.25), 0.3, strength)
    assert error(estimate / (0.75 * (1 + num_anchors)), policy.gradient) < 1e-10


@pytest.mark.parametrize("masked", NOT_COUNTED)
def test_a_baseline_of_rows_that_left_changes_what_it_is_worth_to_count(masked):
    policy = Policy(vocabulary=3, length=3, seed=5, rewards="graded", eos=True)
    expected = 3 * gradient(policy, 0.3, masked=NOT_COUNTED[masked])
    mean = of_trees(policy, grow(policy, first_uncertain(0.5, 2), 2), 0.3, 4.0, masked=NOT_COUNTED[masked])
    bias = error(mean, expected)
    print(f"{masked}: {bias:.1%}")
    assert 0.005 < bias < 0.2


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_biased_if_where_to_branch_looks_ahead(policy):
    """How many rows pass through a token depends on it then, so that a prior that is far off is a bias."""
    outcomes, value = grow(policy, most_uncertain(), 1), float(policy.expected_reward)
    errors = [error(of_trees(policy, outcomes, prior) / 2, policy.gradient) for prior in (value, value + 1)]
    assert 0.01 < errors[0] < errors[1]
