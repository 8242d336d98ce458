"""Intervals over what was drawn, seeds and held-out prompts, and lines through the points of a curve."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from fr3e_trl.commands.statistics import Interval, score_interval

# What lies between 0 and 1, and differences of such
SHARE, DIFFERENCE_OF_SHARES, UNBOUNDED = (0.0, 1.0), (-1.0, 1.0), (-math.inf, math.inf)

Bounds = tuple[float, float]


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t distribution, for intervals that hold the truth in 95 of 100 cases."""
    return float(stats.t.ppf(0.975, degrees))


def mean_interval(values: Sequence[float], bounds: Bounds = UNBOUNDED) -> Interval:
    """
    Mean of independent values and its interval by Student's t, see [`within`]. One value alone has no interval.

    Args:
        values (`Sequence[float]`):
            The values.
        bounds (`tuple[float, float]`):
            What the values lie between.
    """
    mean, n = float(np.mean(values)), len(values)
    if n == 1:
        return Interval(mean, math.nan, math.nan)
    quantile = t_quantile(n - 1)
    return within(mean, quantile * float(stats.sem(values)), bounds, quantile**2 / n)


def crossed_interval(values: np.ndarray, bounds: Bounds = UNBOUNDED) -> Interval:
    """
    Mean of a measure of prompts by runs, and its interval where both were drawn: the runs' seeds, and the prompts.

    Each part of the chance has its own Student's t, and the squares of their half-widths are added. Such an interval
    holds the mean at least as often as it says (Banerjee, 1961, Sankhyā A 23, 359–378).

    Args:
        values (`np.ndarray` of shape (N, P)):
            The measure of each of P prompts in each of N runs. One run alone has no interval.
        bounds (`tuple[float, float]`):
            What the values lie between, see [`within`].
    """
    mean, num_prompts = float(values.mean()), values.shape[1]
    if num_prompts == 1:
        return mean_interval(values[:, 0].tolist(), bounds)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    half_width = math.hypot(*half_widths(values))
    return within(mean, half_width, bounds, t_quantile(num_prompts - 1) ** 2 / num_prompts)


def half_widths(values: np.ndarray) -> tuple[float, float]:
    """
    What the seeds alone, and the prompts alone, leave open of a mean: half-widths of its interval.

    The variance over prompts is that of their means over runs, without the noise of single values, which is in the
    variance over runs. Few runs may be alike by chance: they count for no less than that noise.

    Args:
        values (`np.ndarray` of shape (N, P)):
            The measure of each of P prompts in each of N runs, both at least 2.
    """
    n, num_prompts = values.shape
    run_means, prompt_means = values.mean(1), values.mean(0)
    rest = values - run_means[:, None] - prompt_means + values.mean()
    noise = float((rest**2).sum()) / ((n - 1) * (num_prompts - 1)) / (n * num_prompts)
    over_prompts = max(float(prompt_means.var(ddof=1)) / num_prompts - noise, 0.0)
    by_runs, by_prompts = t_quantile(n - 1), t_quantile(num_prompts - 1)
    seeds = max(by_runs * float(stats.sem(run_means)), by_prompts * math.sqrt(noise))
    return seeds, by_prompts * math.sqrt(over_prompts)


def within(mean: float, half_width: float, bounds: Bounds, least: float) -> Interval:
    """
    The interval `mean ± half_width`, made to stay in its bounds.

    Between two bounds it is Wilson's score interval, with the standard error as it was estimated: the variance of a
    mean m is taken to fall towards the bounds a and b as (m − a)(b − m) does. With one bound, it is cut off there.

    Args:
        mean (`float`), half_width (`float`):
            The symmetric interval.
        bounds (`tuple[float, float]`):
            The bounds, infinite where there are none.
        least (`float`):
            Squared half-width over (m − a)(b − m) where the mean is on a bound, and no value differs from another:
            t² / n for n values of which any could have been the other bound.
    """
    low, high = bounds
    if math.isinf(low) or math.isinf(high):
        return Interval(mean, max(mean - half_width, low), min(mean + half_width, high))
    at = (mean - low) / (high - low)
    room = at * (1 - at)
    wilson = score_interval(at, (half_width / (high - low)) ** 2 / room if room > 1e-12 else least)
    return Interval(mean, low + (high - low) * wilson.low, low + (high - low) * wilson.high)


def ratio_interval(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of `values` / `reference`, which belong together one by one, and its interval: mean, low, high."""
    logs = mean_interval((np.log(values) - np.log(reference)).tolist())
    return math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high)


def interpolate(x: Sequence[float], y: Sequence[Any], at: float) -> Any:
    """Value at `at` of the line through the points, NaN outside of them. `x` must not decrease; `y` may be arrays."""
    if not x[0] <= at <= x[-1]:
        return math.nan
    right = int(np.searchsorted(x, at))
    if right == 0:
        return y[0]
    width = x[right] - x[right - 1]
    share = (at - x[right - 1]) / width if width > 0 else 1.0
    return y[right - 1] + share * (y[right] - y[right - 1])


def mean_height(x: Sequence[float], y: Sequence[Any], end: float) -> Any:
    """Area under the line through the points up to `end`, divided by its length along `x`. `y` may be arrays."""
    number = int(np.searchsorted(x, end))  # of the points before the end
    heights = np.array([*y[:number], interpolate(x, y, end)])
    return np.trapezoid(heights, [*x[:number], end], axis=0) / (end - x[0])


def first_reached(x: Sequence[float], y: Sequence[float], level: float) -> float:
    """Where along `x` the line through the points first reaches `level`, infinity if nowhere."""
    if y[0] >= level:
        return x[0]
    for left, right, y_left, y_right in zip(x, x[1:], y, y[1:], strict=False):
        if y_right >= level:
            return left + (level - y_left) / (y_right - y_left) * (right - left)
    return math.inf
