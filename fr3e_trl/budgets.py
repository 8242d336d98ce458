"""How many rollouts each state of a prompt gets."""

import heapq
import math


def allocate(rewards: list[list[float]], num_rollouts: int) -> list[int]:
    """
    Share further rollouts out among the states of a prompt: each to the state whose value it makes most certain.

    The variance of a value that is the mean of n rewards is σ²/n, and one rollout more takes σ²/(n (n + 1)) off it. σ²
    is that of the state's rewards and, half a rollout each, the lowest and the highest of the prompt's rewards, without
    which a state with two equal rewards would pass for certain. For rewards of 0 and 1 this is Jeffreys's prior.

    Args:
        rewards (`list[list[float]]`):
            For each state the rewards of its first rollouts, NaN where unscorable.
        num_rollouts (`int`):
            How many to share out.

    Returns:
        `list[int]`: How many each state gets. Where all rewards are equal, as even a share as can be.
    """
    scorable = [[reward for reward in of_state if not math.isnan(reward)] for of_state in rewards]
    seen = [reward for of_state in scorable for reward in of_state] or [0.0]
    variances = [_variance(of_state, min(seen), max(seen)) for of_state in scorable]
    counts = [len(of_state) for of_state in rewards]

    def order(state: int) -> tuple[float, int, int]:
        size = max(counts[state], 1)
        return -variances[state] / (size * (size + 1)), counts[state], state

    queue = [order(state) for state in range(len(rewards))]
    heapq.heapify(queue)
    for _ in range(num_rollouts):
        state = heapq.heappop(queue)[-1]
        counts[state] += 1
        heapq.heappush(queue, order(state))
    return [count - len(of_state) for count, of_state in zip(counts, rewards, strict=True)]


def _variance(rewards: list[float], lowest: float, highest: float) -> float:
    weighted = [(1.0, reward) for reward in rewards] + [(0.5, lowest), (0.5, highest)]
    size = len(rewards) + 1
    mean = sum(weight * reward for weight, reward in weighted) / size
    return sum(weight * (reward - mean) ** 2 for weight, reward in weighted) / size
