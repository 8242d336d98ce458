"""Trees in plain values, to be compared: token ids as lists."""

from types import SimpleNamespace

import numpy as np


def plain(thing, seen=None):
    """A tree, a state or a rollout with lists for arrays, and so in what it holds. What was one thing stays one."""
    seen = {} if seen is None else seen
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, list):
        return [plain(item, seen) for item in thing]
    if type(thing).__name__ not in ("Tree", "State", "Rollout"):
        return thing
    if id(thing) not in seen:
        seen[id(thing)] = SimpleNamespace(**{name: plain(value, seen) for name, value in vars(thing).items()})
    return seen[id(thing)]


def rollouts_of(trees):
    """The rows of `trees`, in order, in plain values: tree, state and rollout of each."""
    return [(tree, state, rollout) for tree in plain(trees) for state in tree.states for rollout in state.rollouts]
