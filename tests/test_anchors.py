"""Which trajectories are explored, and from where. Positions count from 0: the paper's a_j is position + 1."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fr3e_trl.method import anchors as rules
from fr3e_trl.method.anchors import AboveThreshold, eligible_positions, rank_anchors, share_anchors, uncertainty
from fr3e_trl.method.plan import Plan
from fr3e_trl.method.shape import Shape

pytestmark = pytest.mark.fast

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "selection", "allowed"),
    [
        ([0.0, 1.0, 0.5], "mixed", [[1, 0]]),  # the better first
        ([0.0, NAN, 0.5], "all", [[0, 1, 2]]),
        ([1.0, 1.0, 1.0], "mixed", [[0], [1], [2]]),  # one at random when the scores do not differ
        ([1.0, 0.0, 1.0], "mixed", [[0, 1], [2, 1]]),
        ([NAN, 0.0, 1.0], "mixed", [[2, 1]]),  # unscorable ones are not chosen
        ([NAN, NAN, 0.0], "mixed", [[2]]),
        ([NAN, NAN], "mixed", [[0], [1]]),  # unless none is scorable
        ([0.0], "mixed", [[0]]),
    ],
)
def test_select_bases(rewards, selection, allowed):
    chosen = [rules.select_bases(rewards, selection, str(seed)) for seed in range(50)]
    assert all(choice in allowed for choice in chosen)
    assert all(choice in chosen for choice in allowed)  # each possibility comes up


def test_scores_and_eligible_positions():
    entropies, logprobs = torch.tensor([0.5, 2.0]), torch.tensor([-3.0, -0.1])
    assert rules.by_entropy(entropies, logprobs, "0").tolist() == [0.5, 2.0]
    torch.testing.assert_close(rules.by_surprisal(entropies, logprobs, "0"), torch.tensor([3.0, 0.1]))
    drawn = rules.at_random(entropies, logprobs, "0")
    assert drawn.shape == (2,) and drawn.tolist() == rules.at_random(entropies, logprobs, "0").tolist()
    # The first position is never eligible, and the last is. Tokens of tools and positions past the budget are not
    for entropies, budget, eligible in (
        (torch.ones(4), 4, [False, True, True, True]),
        (torch.ones(1), 4, [False]),
        (torch.tensor([1.0, NAN, 1.0, 1.0]), 3, [False, False, True, False]),
    ):
        assert eligible_positions(entropies, budget).tolist() == eligible


class EveryThird(rules.StoppingRule):
    def is_uncertain(self, entropies, positions):
        return positions % 3 == 0


def test_the_rule_of_a_plan(monkeypatch):
    plan = Plan(num_rows=8, shape=Shape(2, 6, 1), anchor_threshold="auto", anchor_min_gap=2)
    assert rules.anchor_rule(plan, None) == rules.Ranking(rules.by_entropy, 2)  # nothing is known of the first step
    assert rules.anchor_rule(plan, 0.3) == AboveThreshold(threshold=0.3, min_gap=2)
    assert rules.anchor_rule(replace(plan, anchor_threshold=0.5), 0.3) == AboveThreshold(threshold=0.5, min_gap=2)
    assert rules.anchor_rule(replace(plan, anchor_threshold=None, anchor_score="surprisal"), 0.3) == rules.Ranking(
        rules.by_surprisal, 2
    )
    monkeypatch.setitem(rules.ANCHOR_RULES, "third", lambda threshold, min_gap: EveryThird(min_gap=min_gap))
    rule = rules.anchor_rule(replace(plan, anchor_threshold=None, anchor_score="third", anchor_min_gap=4))
    eligible = eligible_positions(torch.ones(20), budget=20)
    assert rule.choose(torch.ones(20), None, eligible, 3) == [3, 9, 15]


@given(st.data())
def test_a_stopping_rule_decides_the_same_part_by_part(data):
    entropies = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9]), min_size=1, max_size=30)))
    rule = AboveThreshold(threshold=0.5, min_gap=data.draw(st.integers(1, 5)))
    num_anchors = data.draw(st.integers(0, 6))
    anchors, begin = [], 0
    while begin < len(entropies):
        end = begin + data.draw(st.integers(1, 8))
        anchors += rule.new_anchors(entropies[begin:end], begin, num_anchors, anchors)
        begin = end
    assert anchors == rule.choose(entropies, None, eligible_positions(entropies, 99), num_anchors)


def test_rank_takes_the_highest_and_ties_go_to_the_earlier():
    scores = torch.tensor([9.0, 1.0, 3.0, 3.0, 2.0])
    eligible = torch.tensor([False, True, True, True, True])
    assert rank_anchors(scores, eligible, 3) == [2, 3, 4]
    assert rank_anchors(scores, eligible, 9) == [2, 3, 4, 1]
    # It keeps a gap to better anchors: 3 is 1 from 2, 5 is 3 from it; 1 and 4 are closer than 3 to one of them
    scores = torch.tensor([0.0, 5.0, 9.0, 8.0, 1.0, 7.0])
    assert rank_anchors(scores, torch.ones(6, dtype=torch.bool), 6, min_gap=3) == [2, 5]


@pytest.mark.parametrize(
    ("ranked", "num_anchors", "shared"),
    [
        ([[7, 2, 5]], 2, [[2, 7]]),
        ([[7, 2, 5], [6, 1, 3]], 3, [[2, 7], [6]]),  # the odd one to the better
        ([[7, 2, 5], [6, 1, 3]], 4, [[2, 7], [1, 6]]),
        ([[7], [6, 1, 3]], 4, [[7], [1, 3, 6]]),  # what one cannot use goes to the other
        ([[7, 2, 5], []], 3, [[2, 5, 7], []]),
        ([[7, 2, 5], [6]], 1, [[7], []]),
        ([[], []], 2, [[], []]),
        ([[7, 2, 5], [6, 1, 3], [4, 8]], 7, [[2, 5, 7], [1, 6], [4, 8]]),  # of many: as evenly as they allow
        ([[7], [6, 1, 3], [4, 8, 9]], 5, [[7], [1, 6], [4, 8]]),
    ],
)
def test_share_anchors(ranked, num_anchors, shared):
    assert share_anchors(ranked, num_anchors) == shared


@given(st.data())
def test_anchors_are_eligible_distinct_and_apart(data):
    length = data.draw(st.integers(1, 30))
    scores = torch.tensor(data.draw(st.lists(st.floats(0, 5), min_size=length, max_size=length)))
    budget = data.draw(st.integers(length, 40))
    min_gap, num_anchors = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    eligible = eligible_positions(scores, budget)
    ranked = rank_anchors(scores, eligible, num_anchors, min_gap)
    threshold = data.draw(st.floats(0, 5))
    first = AboveThreshold(threshold=threshold, min_gap=min_gap).choose(scores, None, eligible, num_anchors)
    for anchors in (ranked, first):
        assert len(set(anchors)) == len(anchors) <= num_anchors
        assert all(0 < position < length for position in anchors)
        assert all(abs(a - b) >= min_gap for a in anchors for b in anchors if a != b)
    assert all(scores[a] >= scores[b] for a, b in itertools.pairwise(ranked))
    assert first == sorted(first) and all(scores[position] >= threshold for position in first)


def test_the_first_positions_above_a_threshold():
    entropies = torch.tensor([9.0, 0.2, 0.4, 0.3, 2.0, 0.5, 3.0])
    eligible = eligible_positions(entropies, budget=7)
    for threshold, min_gap, expected in ((0.3, 1, [2, 3, 4]), (0.35, 2, [2, 4, 6]), (1.0, 1, [4, 6])):
        rule = AboveThreshold(threshold=threshold, min_gap=min_gap)  # the .3 itself, not the prompt's
        assert rule.choose(entropies, None, eligible, 3) == expected
    # The threshold that follows the policy, by hand: most uncertain positions, the median, smoothing
    entropies = torch.tensor([9.0, 0.2, 0.4, NAN, 2.0, 0.5])
    eligible = torch.tensor([False, True, True, False, True, True])
    assert [uncertainty(entropies, eligible, k) for k in (1, 2, 4, 5)] == pytest.approx([2.0, 0.5, 0.2, 0.0])
    assert math.isnan(uncertainty(entropies, eligible, 0))
    # Beside the fourth position there are none: with a gap, the second is the one at 2, and there is no third
    assert [uncertainty(entropies, eligible, k, min_gap=2) for k in (1, 2, 3)] == pytest.approx([2.0, 0.4, 0.0])
    assert rules.next_threshold(None, [0.5, 0.1, 0.3, NAN]) == pytest.approx(0.3)
    assert rules.next_threshold(0.2, [0.4]) == pytest.approx(0.7 * 0.2 + 0.3 * 0.4)
    # Where all entropies are alike, the threshold that follows them has anchors, unless they are 0
    entropies = np.full(8, 0.7)
    eligible = eligible_positions(entropies, 8)
    threshold = rules.next_threshold(None, [uncertainty(entropies, eligible, 3)] * 4)
    assert threshold == 0.7
    assert AboveThreshold(threshold=threshold).choose(entropies, None, eligible, 3) == [1, 2, 3]
    assert AboveThreshold(threshold=0.0).choose(np.zeros(8), None, eligible, 3) == []
