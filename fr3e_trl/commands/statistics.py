"""Estimates and their uncertainty, as functions of plain numbers."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# What lies between 0 and 1, and differences of such
SHARE, DIFFERENCE_OF_SHARES, UNBOUNDED = (0.0, 1.0), (-1.0, 1.0), (-math.inf, math.inf)

# Of Student's t, for intervals that hold what they estimate in 95 of 100 cases
QUANTILE = 0.975

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """
    A mean and its confidence interval.

    Args:
        mean (`float`):
            The mean.
        low (`float`), high (`float`):
            Ends of the interval, NaN where one value alone says nothing of it.
    """

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """
    Unbiased estimate of the expected highest reward of `k` samples, from those of n.

    Of C(n, k) choices, C(i, k − 1) have as their highest the reward that is above i others. With rewards of 0 and 1
    that is pass@k, 1 − C(n − c, k) / C(n, k) for c right ones (arXiv 2107.03374, equation 1).

    Raises:
        ValueError: There are fewer than `k` samples.
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples: it takes at least as many as k.")
    if k == 1:
        return sum(rewards) / n
    return sum(math.comb(i, k - 1) * reward for i, reward in enumerate(sorted(rewards))) / math.comb(n, k)


def majority_of_k(answers: Sequence[tuple[int, float]], num_without: int, k: int) -> float:
    """
    Unbiased estimate of the expected reward of the answer that most of k samples give, from those of n.

    It is the mean over all C(n, k) choices, counted and not drawn. Of answers that tie, each wins as often. Samples
    without an answer are chosen like the others, but have no vote; where nobody has, the reward is 0.

    Args:
        answers (`Sequence[tuple[int, float]]`):
            Of each different answer, how many samples gave it, and its reward.
        num_without (`int`):
            Samples without an answer.
        k (`int`):
            How many samples vote.

    Raises:
        ValueError: There are fewer than `k` samples.
    """
    n = sum(count for count, _ in answers) + num_without
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} cannot be estimated from {n} samples: it takes at least as many as k.")
    total = 0.0
    for i, (count, reward) in enumerate(answers):
        if reward == 0:
            continue
        others = [other for j, (other, _) in enumerate(answers) if j != i]
        for votes in range(1, min(count, k) + 1):
            for (used, tied), ways in _losing_choices(others, votes, k - votes).items():
                ways *= math.comb(count, votes) * math.comb(num_without, k - votes - used)
                total += reward * ways / (1 + tied)
    return total / math.comb(n, k)


def _losing_choices(counts: Sequence[int], most: int, k: int) -> dict[tuple[int, int], int]:
    """Choices of up to k samples, none of more than `most` of the same answer: by how many, and answers with `most`."""
    choices = {(0, 0): 1}
    for count in counts:
        extended: dict[tuple[int, int], int] = {}
        for (used, tied), ways in choices.items():
            for drawn in range(min(count, most, k - used) + 1):
                key = used + drawn, tied + (drawn == most)
                extended[key] = extended.get(key, 0) + ways * math.comb(count, drawn)
        choices = extended
    return choices


def mean_interval(values: Sequence[float], bounds: Bounds = UNBOUNDED) -> Interval:
    """
    Mean of independent values and its interval by Student's t, from their own standard deviation, see [`within`].

    Args:
        values (`Sequence[float]`):
            The values. One alone has no interval.
        bounds (`tuple[float, float]`):
            Between what the values lie.
    """
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    quantile = t_quantile(QUANTILE, n - 1)
    return within(mean, quantile * math.sqrt(variance / n), bounds, quantile**2 / n)


def crossed_interval(values: np.ndarray, bounds: Bounds = UNBOUNDED) -> Interval:
    """
    Mean of a measure of prompts by runs, and its interval where both were drawn: the runs' seeds, and the prompts.

    Either part of the chance has its own Student's t, and the squares of their half-widths are added. Such an interval
    holds the mean at least as often as it says (Banerjee, 1961, Sankhyā A 23, 359–378).

    Args:
        values (`np.ndarray` of shape (N, P)):
            The measure of each of P prompts in each of N runs. One run alone has no interval.
        bounds (`tuple[float, float]`):
            Between what the values lie, see [`within`].
    """
    mean, num_prompts = float(values.mean()), values.shape[1]
    if num_prompts == 1:
        return mean_interval(values[:, 0].tolist(), bounds)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    half_width = math.hypot(*half_widths(values))
    return within(mean, half_width, bounds, t_quantile(QUANTILE, num_prompts - 1) ** 2 / num_prompts)


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
    of_runs, of_prompts = values.mean(1), values.mean(0)
    rest = values - of_runs[:, None] - of_prompts + values.mean()
    noise = float((rest**2).sum()) / ((n - 1) * (num_prompts - 1)) / (n * num_prompts)
    over_runs = float(of_runs.var(ddof=1)) / n
    over_prompts = max(float(of_prompts.var(ddof=1)) / num_prompts - noise, 0.0)
    by_runs, by_prompts = (t_quantile(QUANTILE, count - 1) for count in (n, num_prompts))
    return max(by_runs * math.sqrt(over_runs), by_prompts * math.sqrt(noise)), by_prompts * math.sqrt(over_prompts)


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


def score_interval(share: float, ratio: float) -> Interval:
    """Wilson's interval of a share p, of which `ratio` is the squared half-width over p (1 − p): z² / n of n draws."""
    centre = (share + ratio / 2) / (1 + ratio)
    spread = math.sqrt(ratio * max(share * (1 - share), 0) + ratio**2 / 4) / (1 + ratio)
    return Interval(share, centre - spread, centre + spread)


def share_interval(values: Sequence[float]) -> Interval:
    """
    Mean of independent values between 0 and 1, at least two, and its interval.

    It is Wilson's, with the variance of the values and of a 0 and a 1 more: where almost all are alike, the few that
    differ and were not drawn would be overlooked.
    """
    mean, more = sum(values) / len(values), [*values, 0.0, 1.0]
    middle = sum(more) / len(more)
    variance = sum((value - middle) ** 2 for value in more) / (len(more) - 1) / len(more)
    return score_interval(mean, t_quantile(QUANTILE, len(more) - 1) ** 2 * variance / (middle * (1 - middle)))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Interval:
    """Mean of `values` − `reference`, which belong together one by one, and its interval."""
    return mean_interval([a - b for a, b in zip(values, reference, strict=True)])


def ratio_interval(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of `values` / `reference`, which belong together one by one, and its interval: mean, low, high."""
    logs = paired_difference([math.log(value) for value in values], [math.log(value) for value in reference])
    return math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high)


@functools.lru_cache(maxsize=1024)
def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution with a whole number of degrees of freedom, for a probability above 0.5."""
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return high


def _t_cdf(t: float, degrees: int) -> float:
    """
    Distribution function of Student's t, for t ≥ 0.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for i in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (i - 1) / i
    within = 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
    return (1 + within) / 2


def interpolate(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Value at `at` of the line through the points, NaN outside of them. `x` must not decrease."""
    for left, right, y_left, y_right in zip(x, x[1:], y, y[1:], strict=False):
        if left <= at <= right:
            share = (at - left) / (right - left) if right > left else 1.0
            return y_left + share * (y_right - y_left)
    return math.nan


def mean_height(x: Sequence[float], y: Sequence[float], end: float) -> float:
    """Area under the line through the points up to `end`, divided by its length along `x`."""
    before = [i for i, at in enumerate(x) if at < end]
    x, y = [*(x[i] for i in before), end], [*(y[i] for i in before), interpolate(x, y, end)]
    area = sum((x[i + 1] - x[i]) * (y[i] + y[i + 1]) / 2 for i in range(len(x) - 1))
    return area / (x[-1] - x[0])


def first_reached(x: Sequence[float], y: Sequence[float], level: float) -> float:
    """Where along `x` the line through the points first reaches `level`, infinity if nowhere."""
    if y[0] >= level:
        return x[0]
    for left, right, y_left, y_right in zip(x, x[1:], y, y[1:], strict=False):
        if y_right >= level:
            return left + (level - y_left) / (y_right - y_left) * (right - left)
    return math.inf
