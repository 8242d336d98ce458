"""
Sigmoids of reward against what was spent, as "The Art of Scaling Reinforcement Learning Compute for LLMs" fits them
(arXiv 2510.13786):

    R(C) = R_0 + (A − R_0) / (1 + (C_mid / C)^B)

R_0 is the reward before training, which is measured. A is the ceiling, C_mid what half of the way to it takes, and B
how steep it is. For given C_mid and B, the best A is linear least squares. So a grid over these two has the best fit.
"""

from dataclasses import dataclass

import numpy as np

LEAST_SEEDS, LEAST_POINTS = 3, 4  # with fewer, nothing says how sure a fit is
NUM_RESAMPLES = 200

# Where C_mid is looked for, as multiples of the budget, and B. A fit at an end of these is none
MIDPOINTS, EXPONENTS = (0.01, 10.0), (0.25, 8.0)
SIZE, ZOOMS = 48, 4  # points of the grid along each axis, and how often it is refined around the best

# Wider than this, an interval says that the curve does not determine the fit
MOST_OF_CEILING, MOST_OF_MIDPOINT = 0.2, 3.0


@dataclass(frozen=True)
class Fit:
    """
    The sigmoid of an arm.

    Args:
        ceiling, midpoint, exponent (`tuple[float, float, float]`):
            A, C_mid (in units of the cost) and B: the fit of the mean over seeds, and the ends of the interval that has
            95% of the fits of resampled seeds.
        undetermined (`str`):
            Why the curve does not determine the fit; empty if it does.
    """

    ceiling: tuple[float, float, float]
    midpoint: tuple[float, float, float]
    exponent: tuple[float, float, float]
    undetermined: str


def sigmoid(spent: np.ndarray, start: float, ceiling: float, midpoint: float, exponent: float) -> np.ndarray:
    """The reward when so much was spent, above 0."""
    return start + (ceiling - start) / (1 + (midpoint / spent) ** exponent)


def fit(spent: np.ndarray, rewards: np.ndarray, bound: float = np.inf) -> Fit | None:
    """
    Fit the sigmoid to an arm's curves, and see how sure it is by fits to seeds drawn with replacement.

    Args:
        spent (`np.ndarray`):
            Where the rewards were measured, (E,): first 0, and last the budget.
        rewards (`np.ndarray`):
            Held-out rewards of each run there, (N, E).
        bound (`float`):
            The highest reward that can be, which no ceiling is above.

    Returns:
        [`Fit`] or `None`: `None` if there are too few seeds or evaluations.
    """
    num_seeds, num_points = rewards.shape[0], rewards.shape[1] - 1
    if num_seeds < LEAST_SEEDS or num_points < LEAST_POINTS:
        return None
    drawn = np.random.default_rng(0).integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))
    curves = np.concatenate([rewards.mean(axis=0)[None], rewards[drawn].mean(axis=1)])
    fits = _least_squares(spent[1:] / spent[-1], curves[:, 1:], curves[:, 0], bound)  # (1 + resamples, 3)
    fits[:, 1] *= spent[-1]
    low, high = np.quantile(fits[1:], (0.025, 0.975), axis=0)
    ceiling, midpoint, exponent = (
        (float(fits[0, i]), float(min(low[i], fits[0, i])), float(max(high[i], fits[0, i]))) for i in range(3)
    )
    return Fit(ceiling, midpoint, exponent, _why_not(ceiling, midpoint, exponent, float(spent[-1])))


def _why_not(
    ceiling: tuple[float, float, float],
    midpoint: tuple[float, float, float],
    exponent: tuple[float, float, float],
    budget: float,
) -> str:
    if midpoint[2] > budget:
        return "half of the way may lie beyond the budget"
    if exponent[0] > 0.99 * EXPONENTS[1] or exponent[0] < 1.01 * EXPONENTS[0]:
        return "no exponent that is tried fits"
    if ceiling[2] - ceiling[1] > MOST_OF_CEILING:
        return "seeds disagree on the ceiling"
    if midpoint[2] / midpoint[1] > MOST_OF_MIDPOINT:
        return "seeds disagree on the midpoint"
    return ""


def _least_squares(spent: np.ndarray, curves: np.ndarray, starts: np.ndarray, bound: float) -> np.ndarray:
    """A, C_mid and B of each curve, (M, 3), from shares of the budget (E,), curves (M, E) and starts (M,)."""
    rise = curves - starts[:, None]
    most = bound - starts
    limits = np.log([MIDPOINTS, EXPONENTS])  # the axes of the grid are logarithms
    centers = np.broadcast_to(limits.mean(axis=1), (len(curves), 2))
    widths = limits[:, 1] - limits[:, 0]
    for _ in range(ZOOMS):
        offsets = np.linspace(-0.5, 0.5, SIZE)
        axes = [np.clip(centers[:, [i]] + widths[i] * offsets, *limits[i]) for i in (0, 1)]  # (M, SIZE) each
        log_midpoints = np.repeat(axes[0], SIZE, axis=1)
        exponents = np.exp(np.tile(axes[1], (1, SIZE)))
        shapes = 1 / (1 + np.exp(exponents[..., None] * (log_midpoints[..., None] - np.log(spent))))  # (M, SIZE², E)
        products, squares = np.einsum("mge,me->mg", shapes, rise), np.square(shapes).sum(axis=-1)
        heights = np.clip(products / squares, 0, most[:, None])
        errors = heights * (heights * squares - 2 * products)  # and the sum of the squares of `rise`
        best = errors.argmin(axis=1)
        rows = np.arange(len(curves))
        centers = np.stack([log_midpoints[rows, best], np.log(exponents[rows, best])], axis=1)
        found = np.stack([starts + heights[rows, best], *np.exp(centers).T], axis=1)
        widths = widths * 4 / SIZE  # two steps to each side
    return found
