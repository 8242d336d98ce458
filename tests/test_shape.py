"""How the rows of a prompt are shared out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fr3e_trl.method.shape import share_rows

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # (G, K, B, reuse_base, has_prior): (B, K, M). Chosen with a prior: a row of four is a base trajectory
        ((8, None, None, True, True), (2, 6, 1)),
        ((3, None, None, True, True), (1, 2, 1)),
        ((8, None, 3, True, True), (3, 5, 1)),
        # Chosen without: 12 = (2 + 1) * 4 rather than (3 + 1) * 3
        ((12, None, None, True, False), (4, 2, 4)),
        ((6, None, None, True, False), (2, 2, 2)),
        # 16 = (3 + 1) * 4, and 16 = 4 + 6 * 2
        ((16, 3, None, True, False), (4, 3, 4)),
        ((16, 6, 4, True, False), (4, 6, 2)),
        # Thrown away, the base trajectories are no rows: 16 = (3 + 1) * 4 whatever B
        ((16, 3, None, False, False), (4, 3, 4)),
        ((16, 3, 9, False, True), (9, 3, 4)),
        ((16, None, None, False, True), (4, 3, 4)),
        # No exploration: all rows are the prompt's
        ((7, 0, None, True, False), (7, 0, 7)),
        ((7, 0, None, False, True), (4, 0, 7)),
    ],
)
def test_rows_are_shared_out(arguments, expected):
    assert share_rows(*arguments) == expected


SHARES = st.none() | st.integers(-1, 16)


@given(st.integers(1, 64), SHARES, SHARES, st.booleans(), st.booleans())
def test_every_row_has_a_place_and_a_shape_stays_what_it_is(num_rows, num_anchors, num_bases, reuse_base, has_prior):
    try:
        shape = share_rows(num_rows, num_anchors, num_bases, reuse_base, has_prior)
    except ValueError:
        return
    assert share_rows(num_rows, shape.num_anchors, shape.num_bases, reuse_base, has_prior) == shape
    if shape.num_anchors == 0:
        assert shape.num_rollouts == num_rows
        return
    rows_of_prompt = shape.num_bases if reuse_base else shape.num_rollouts
    assert rows_of_prompt + shape.num_anchors * shape.num_rollouts == num_rows
    assert shape.num_rollouts >= (1 if has_prior else 2)


def test_what_an_error_says_will_work_works():
    with pytest.raises(ValueError, match=r"num_anchors can be 0 \(plain GRPO\), 1, 2, 3, 5\. .* can be 10, 15, 20, 25"):
        share_rows(12, 4, None, True, False)
    for num_rows, num_anchors in [*((12, n) for n in (0, 1, 2, 3, 5)), *((n, 4) for n in (10, 15, 20, 25))]:
        share_rows(num_rows, num_anchors, None, True, False)
