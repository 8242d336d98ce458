"""How the rows of a prompt are divided into base trajectories and rollouts of anchors."""

import functools
import math
from typing import NamedTuple

# Default number of anchors per base trajectory with a prior, which won at equal generated tokens
ANCHORS_PER_BASE = 3

# Number of base trajectories of the authors' released run, which does not reuse them
NUM_BASES_NOT_REUSED = 4


class Shape(NamedTuple):
    """
    The rows of a prompt.

    Args:
        num_bases (`int`): B, number of base trajectories.
        num_anchors (`int`): K, number of anchors.
        num_rollouts (`int`): M, number of rollouts of each anchor; without anchors, of the prompt.
    """

    num_bases: int
    num_anchors: int
    num_rollouts: int


@functools.lru_cache(typed=True)  # called for every row
def share_rows(
    num_rows: int, num_anchors: int | None, num_bases: int | None, reuse_base: bool, has_prior: bool
) -> Shape:
    """
    Divide the G rows of a prompt: G = B + K · M if base trajectories are rows (`reuse_base`), else G = (K + 1) · M.

    Args:
        num_rows (`int`): G.
        num_anchors (`int`, *optional*):
            K. If `None`, with a prior and reused base trajectories all other rows branch, one from each anchor;
            otherwise see [`default_num_anchors`].
        num_bases (`int`, *optional*):
            B. If `None`, one of every four rows if all others branch, 4 if they are not reused, and otherwise the
            number of rollouts of each anchor.
        has_prior (`bool`): Whether a prior allows states with a single row.

    Returns:
        `Shape`: B, K and M. The same call with these B and K returns the same shape.

    Raises:
        ValueError: The rows do not divide evenly. The error names values that work.
    """
    if num_bases is None and not reuse_base:
        num_bases = NUM_BASES_NOT_REUSED
    most = num_rows - 1 if reuse_base and num_anchors != 0 else math.inf
    if num_bases is not None and not 1 <= num_bases <= most:
        raise ValueError(
            f"num_base_trajectories={num_bases} is not allowed: it must be None, or at least 1 and below "
            f"num_generations={num_rows}, which leaves rows to branch."
        )
    if num_anchors is None and has_prior and reuse_base:
        num_bases = num_bases or math.ceil(num_rows / (ANCHORS_PER_BASE + 1))
        num_anchors = num_rows - num_bases
    if num_anchors is None:
        num_anchors = default_num_anchors(num_rows)
    if num_anchors is None:
        raise ValueError(
            f"num_generations={num_rows} cannot be split into states of at least 2 rollouts with 1 to 4 anchors. "
            "Use for example num_generations=8 (1 anchor, 4 rollouts a state) or 16 (3 anchors), set num_anchors "
            "yourself, or set num_anchors=0 for plain GRPO."
        )
    if num_anchors == 0:
        return Shape(num_bases or num_rows, 0, num_rows)
    num_rollouts = _whole_rollouts(
        num_rows, num_anchors, num_bases if reuse_base else None, min_rollouts=1 if has_prior else 2
    )
    return Shape(num_bases or num_rollouts, num_anchors, num_rollouts)


def default_num_anchors(num_rows: int) -> int | None:
    """
    Number of anchors if states need several rollouts: the largest K up to 4 with which each state, including the
    prompt, has M >= 4 rollouts, else the largest with M >= 2. `None` if there is none.
    """
    for min_rollouts in (4, 2):
        for num_anchors in (4, 3, 2, 1):
            rollouts, rest = divmod(num_rows, num_anchors + 1)
            if rest == 0 and rollouts >= min_rollouts:
                return num_anchors
    return None


def _whole_rollouts(num_rows: int, num_anchors: int, num_bases: int | None, min_rollouts: int) -> int:
    """Rollouts of each state if the rows divide evenly. The prompt is one of the states if `num_bases` is `None`."""
    others = (num_bases, min_rollouts)
    if num_rollouts := _rollouts_if_even(num_rows, num_anchors, *others):
        return num_rollouts
    working = [str(anchors) for anchors in range(1, num_rows) if _rollouts_if_even(num_rows, anchors, *others)]
    among = "num_anchors + 1 states" if num_bases is None else "num_anchors states besides num_base_trajectories"
    given = "" if num_bases is None else f" and num_base_trajectories={num_bases}"
    message = (
        f"num_anchors={num_anchors} does not fit num_generations={num_rows}{given}: the rows of a prompt must "
        f"divide evenly into {among} of at least {min_rollouts} rollouts. With num_generations={num_rows}"
        f"{given}, num_anchors can be {', '.join(['0 (plain GRPO)', *working])}."
    )
    if num_anchors > 0:
        larger = range(1, num_rows + 8 * num_anchors + 8)
        sizes = [str(rows) for rows in larger if _rollouts_if_even(rows, num_anchors, *others)]
        message += f" With num_anchors={num_anchors}, num_generations can be {', '.join(sizes[:4])} and so on."
    raise ValueError(message)


def _rollouts_if_even(num_rows: int, num_anchors: int, num_bases: int | None, min_rollouts: int) -> int:
    """Rollouts of each state; 0 if the rows do not divide evenly, or there are too few."""
    num_states, rest = (num_anchors + 1, num_rows) if num_bases is None else (num_anchors, num_rows - num_bases)
    fits = num_anchors > 0 and rest % num_states == 0 and rest // num_states >= min_rollouts
    return rest // num_states if fits else 0
