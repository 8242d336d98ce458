"""Which trajectories are explored, and from where. Positions count from 0: the paper's a_j is position + 1."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fr3e_trl.method.anchors import anchor_scores, eligible_positions, rank_anchors, select_bases, share_anchors

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "selection", "allowed"),
    [
        ([0.0, 1.0, 0.5], "mixed", [[1, 0]]),  # the better first
        ([0.0, 1.0, 0.5], "best", [[1]]),
        ([0.0, 1.0, 0.5], "worst", [[0]]),
        ([0.0, 1.0, 0.5], "random", [[0], [1], [2]]),
        ([1.0, 1.0, 1.0], "mixed", [[0], [1], [2]]),  # one at random when the scores do not differ
        ([1.0, 0.0, 1.0], "mixed", [[0, 1], [2, 1]]),
        ([NAN, 0.0, 1.0], "mixed", [[2, 1]]),  # unscorable ones are not chosen
        ([NAN, NAN, 0.0], "worst", [[2]]),
        ([NAN, NAN], "mixed", [[0], [1]]),  # unless none is scorable
        ([0.0], "mixed", [[0]]),
    ],
)
def test_select_bases(rewards, selection, allowed):
    chosen = [select_bases(rewards, selection, str(seed)) for seed in range(50)]
    assert all(choice in allowed for choice in chosen)
    assert all(choice in chosen for choice in allowed)  # each possibility comes up


def test_scores():
    entropies, logprobs = torch.tensor([0.5, 2.0]), torch.tensor([-3.0, -0.1])
    assert anchor_scores("entropy", entropies, logprobs, "0").tolist() == [0.5, 2.0]
    torch.testing.assert_close(anchor_scores("surprisal", entropies, logprobs, "0"), torch.tensor([3.0, 0.1]))
    drawn = anchor_scores("random", entropies, logprobs, "0")
    assert drawn.shape == (2,) and drawn.tolist() == anchor_scores("random", entropies, logprobs, "0").tolist()


def test_the_first_position_is_never_eligible_and_the_last_is():
    assert eligible_positions(torch.ones(4), budget=4).tolist() == [False, True, True, True]
    assert eligible_positions(torch.ones(1), budget=4).tolist() == [False]


def test_positions_must_leave_a_budget():
    # Position p leaves 5 - p tokens: 4, 3, 2, 1
    assert eligible_positions(torch.ones(5), budget=5, min_budget=3).tolist() == [False, True, True, False, False]


def test_positions_must_be_above_the_quantile():
    # The 0.5 quantile of 0..4 is 2, and positions must be above it
    assert eligible_positions(torch.arange(5.0), 9, quantile=0.5).tolist() == [False, False, False, True, True]


def test_rank_takes_the_highest_and_ties_go_to_the_earlier():
    scores = torch.tensor([9.0, 1.0, 3.0, 3.0, 2.0])
    eligible = torch.tensor([False, True, True, True, True])
    assert rank_anchors(scores, eligible, 3) == [2, 3, 4]
    assert rank_anchors(scores, eligible, 9) == [2, 3, 4, 1]


def test_rank_keeps_a_gap_to_better_anchors():
    scores = torch.tensor([0.0, 5.0, 9.0, 8.0, 1.0, 7.0])
    # 3 is 1 from 2, 5 is 3 from it; 1 and 4 are closer than 3 to one of them
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
    min_budget, min_gap = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 5))
    num_anchors = data.draw(st.integers(1, 6))
    anchors = rank_anchors(scores, eligible_positions(scores, budget, min_budget), num_anchors, min_gap)
    assert len(set(anchors)) == len(anchors) <= num_anchors
    assert all(0 < position < length and budget - position >= min_budget for position in anchors)
    assert all(abs(a - b) >= min_gap for a in anchors for b in anchors if a != b)
    assert all(scores[a] >= scores[b] for a, b in itertools.pairwise(anchors))
