"""
Rollout credit: each rollout is compared with the others of its state, and its tokens learn from its outcome alone.

This is the paper's rule, with its modulation: advantages are scaled by how the value changed along the trajectory.

Functions take tensors and plain values. Each row names its state, and each state the one before it in its chain, so
that nothing depends on the order of rows or on the number of rows per state.

Notation used for tensor shapes:
    - R: rows of the batch, the completions that are trained on
    - S: states of the batch, over all prompts
    - P: prompts
    - F: reward functions

Arguments that functions share:
    - rewards, of shape (R,): NaN where unscorable
    - states, of shape (R,): index of each row's state
    - parents, a list of length S: index of the previous state in the chain, smaller than the state's own; `None` for an
      S_0
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..plan import Plan
from ..tree import Tree, chains_of
from .prior import NO_PRIOR, Prior, state_values
from .rule import Credit, CreditRule, RowCredit, StateCredit, batch_std

# Bound on the exponent of the paper's modulation
MODULATION_CLIP = 5.0


class RolloutCredit(CreditRule):
    """Each row is one stretch of weight 1, and the loss uses one advantage per row."""

    by_token = False

    def credit(self, trees: Sequence[Tree], plan: Plan, prior: Prior) -> Credit:
        states, parents = chains_of(trees)
        rollouts = [rollout for state in states for rollout in state.rollouts]
        row_states = torch.tensor([i for i, state in enumerate(states) for _ in state.rollouts])
        result = compute_advantages(
            compared_rewards(trees, plan),
            row_states,
            parents,
            prior,
            modulation=plan.modulation if plan.shape.num_anchors else "none",
            scale=plan.scale,
            reject=plan.reject,
            negative_scale=plan.negative_scale,
        )
        rows = zip(rollouts, result.advantages.tolist(), (~result.rejected[row_states]).tolist(), strict=True)
        return Credit(
            rows=[RowCredit([(rollout.length, 1.0, a)], a, in_loss) for rollout, a, in_loss in rows],
            states=list(map(StateCredit, result.values.tolist(), result.factors.tolist(), result.rejected.tolist())),
            values=result.values[_are_roots(parents)],
        )


def compared_rewards(trees: Sequence[Tree], plan: Plan) -> torch.Tensor:
    """
    The rewards by which the rows of `trees` are compared, (R,), in order: normalized if the plan says so.

    If the rewards of each function are normalized, their weighted sum is divided by the standard deviation over the
    batch, as in GRPO with `multi_objective_aggregation="normalize_then_sum"`.
    """
    rollouts = [rollout for tree in trees for rollout in tree.rollouts]
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    if plan.normalization == "none":
        return rewards
    prompts = torch.tensor([i for i, tree in enumerate(trees) for _ in tree.rollouts])
    if plan.normalization == "sum":
        return normalized_rewards(rewards.unsqueeze(1), prompts, len(trees)).squeeze(1)
    per_func = torch.tensor([rollout.score.rewards for rollout in rollouts], dtype=torch.float64)
    weights = torch.ones(per_func.size(1), dtype=torch.float64)  # 1 for an environment's own reward
    weights[: len(plan.reward_weights or [])] = torch.tensor(plan.reward_weights or [], dtype=torch.float64)
    rewards = weighted_rewards(normalized_rewards(per_func, prompts, len(trees)), weights)
    return rewards / batch_std(rewards)


@dataclass(frozen=True)
class Advantages:
    """
    Values and advantages of a batch.

    Args:
        values (`torch.Tensor` of shape (S,)): V of each state, NaN without a scorable row.
        factors (`torch.Tensor` of shape (S,)): α of each state.
        rejected (`torch.Tensor` of shape (S,)): Whether each state is left out of the loss.
        advantages (`torch.Tensor` of shape (R,)): A' of each row, modulated, and scaled if negative.
    """

    values: torch.Tensor
    factors: torch.Tensor
    rejected: torch.Tensor
    advantages: torch.Tensor


def compute_advantages(
    rewards: torch.Tensor,
    states: torch.Tensor,
    parents: list[int | None],
    prior: Prior = NO_PRIOR,
    modulation: str = "exp",
    scale: str = "none",
    reject: bool = True,
    negative_scale: float = 1.0,
) -> Advantages:
    """
    Values, modulation, advantages and rejection of a batch.

    Values, and with them the modulation, are computed before any state is rejected, so that a rejected neighbour still
    has its value. With `reject`, states whose advantages are all 0 are left out of the loss; without a prior these are
    the degenerate ones. Negative advantages are multiplied by `negative_scale`. For `prior`, `modulation` and `scale`
    see [`row_baselines`], [`modulation_factors`] and [`row_advantages`].
    """
    num_states = len(parents)
    values = state_values(rewards, states, num_states)
    factors = modulation_factors(values, parents, modulation)
    baselines = row_baselines(rewards, states, parents, prior)
    advantages = row_advantages(rewards, states, baselines, num_states, scale)
    if prior.strength == 0:
        uninformative = degenerate_states(rewards, states, num_states)
        advantages = advantages.masked_fill(uninformative[states], 0)  # the mean may be rounded
    else:
        rounding = 1000 * torch.finfo(rewards.dtype).eps * rewards.abs().nan_to_num(0)
        advantages = advantages.masked_fill(advantages.abs() <= rounding, 0)
        uninformative = _state_sums(advantages.abs(), states, num_states) == 0
    advantages = torch.where(advantages < 0, negative_scale * advantages, advantages) * factors[states]
    return Advantages(values, factors, uninformative & reject, advantages)


def weighted_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Weighted sum of the reward functions, as in GRPO.

    Args:
        rewards_per_func (`torch.Tensor` of shape (R, F)): Rewards, NaN where a function returned none.
        weights (`torch.Tensor` of shape (F,)): Weight of each function.

    Returns:
        `torch.Tensor` of shape (R,): Rewards, NaN for unscorable rows, for which no function returned a reward.
    """
    rewards = (rewards_per_func * weights).nansum(dim=1)
    return rewards.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def normalized_rewards(rewards_per_func: torch.Tensor, prompts: torch.Tensor, num_prompts: int) -> torch.Tensor:
    """
    Each reward's distance from its mean over the prompt's rows, in standard deviations.

    A prompt's rows are those of all its states. Rows of an anchor share their prefix, so that mean and deviation are
    those of the explored tree, not of the policy. They only serve to make prompts comparable.

    Args:
        rewards_per_func (`torch.Tensor` of shape (R, F)): Rewards, NaN where a function returned none.
        prompts (`torch.Tensor` of shape (R,)): Prompt of each row, as an index below `num_prompts`.

    Returns:
        `torch.Tensor` of shape (R, F): (r - mean) / (std + 1e-4), as in GRPO, NaN where a function returned none, and
        exactly 0 where its rewards for a prompt are all equal.
    """
    columns = []
    for rewards in rewards_per_func.T:
        means = state_values(rewards, prompts, num_prompts)[prompts]
        distances = row_advantages(rewards, prompts, means, num_prompts, "group")
        distances = distances.masked_fill(degenerate_states(rewards, prompts, num_prompts)[prompts], 0)
        columns.append(distances.masked_fill(rewards.isnan(), torch.nan))
    return torch.stack(columns, dim=1)


def modulation_factors(values: torch.Tensor, parents: list[int | None], modulation: str) -> torch.Tensor:
    """
    α_j, the factor on the advantages of a state, from the change of value since the state before it in its chain.

    With `"exp"`, the paper's form, α_j = exp(-(V(S_j) - V(S_{j-1}))), its exponent clamped, and α_0 = 1. With
    `"sharpened"`, the form of the authors' released code, δ_0 = 1 - V(S_0), δ_j = V(S_j) - V(S_{j-1}) and
    α_j = exp(-sign(δ_j) |δ_j|^1.5 / Σ_i |δ_i|^1.5), the sum over the states of the chain; an S_0 that starts two chains
    gets the mean of its two exponents. With `"none"` it is 1. Differences with an unknown value count as 0.

    Args:
        values (`torch.Tensor` of shape (S,)): V of each state, NaN if unknown.

    Returns:
        `torch.Tensor` of shape (S,): Factors.

    Source: arXiv 2507.07017.
    """
    if modulation == "none":
        return torch.ones_like(values)
    if modulation == "exp":
        before = values[[state if parent is None else parent for state, parent in enumerate(parents)]]
        return torch.exp(-(values - before).nan_to_num(0).clamp(-MODULATION_CLIP, MODULATION_CLIP))
    moves = [
        1 - values[state] if parent is None else values[state] - values[parent] for state, parent in enumerate(parents)
    ]
    deltas = torch.stack(moves).nan_to_num(0)
    members, chains = torch.tensor(list(_chain_members(parents))).T
    powers = deltas[members].abs() ** 1.5
    shares = deltas[members].sign() * powers / powers.new_zeros(len(parents)).index_add(0, chains, powers)[chains]
    exponents = _state_sums(shares.nan_to_num(0), members, len(parents))
    return torch.exp(-exponents / _state_sums(torch.ones_like(shares), members, len(parents)))


def _chain_members(parents: list[int | None]) -> Iterator[tuple[int, int]]:
    """Pairs (state, chain). A chain goes from an S_0 to a state without a successor."""
    last_states = set(range(len(parents))) - set(parents)
    for chain, last in enumerate(sorted(last_states)):
        state: int | None = last
        while state is not None:
            yield state, chain
            state = parents[state]


def row_baselines(
    rewards: torch.Tensor, states: torch.Tensor, parents: list[int | None], prior: Prior = NO_PRIOR
) -> torch.Tensor:
    """
    The baseline that each row's reward is compared with, (R,), NaN if there is none.

    Without a prior this is V of its state. With a prior of strength κ > 0 the baseline of a row is shrunk towards it,
    and leaves the row itself out: (κ prior + Σ of the state's other rewards) / (κ + n - 1), for n scorable rows. The
    prior is the shrunk value of the previous state in the chain, (κ prior + Σ rewards) / (κ + n), and for S_0 the
    prior of its prompt, given V(S_0) of all: rollouts of anchors start from selected prefixes, and say less about the
    difficulty of a prompt. If there is no prior, because the batch has one prompt, κ counts as 0.
    """
    if prior.strength == 0:
        return state_values(rewards, states, len(parents))[states]
    sizes = _state_sizes(rewards, states, len(parents))
    sums = _state_sums(rewards.nan_to_num(0), states, len(parents))
    root_priors = iter(prior.of((sums / sizes)[_are_roots(parents)]).tolist())
    shrunk: list[float] = []
    strengths: list[float] = []
    pulls: list[float] = []
    for parent, total, size in zip(parents, sums.tolist(), sizes.tolist(), strict=True):
        expected = next(root_priors) if parent is None else shrunk[parent]
        strength = 0.0 if math.isnan(expected) else prior.strength
        pull = strength * expected if strength else 0.0
        shrunk.append((pull + total) / (strength + size) if strength + size > 0 else math.nan)
        strengths.append(strength)
        pulls.append(pull)
    baselines = rewards.new_tensor(pulls)[states] + sums[states] - rewards
    return baselines / (rewards.new_tensor(strengths) + sizes - 1)[states]


def row_advantages(
    rewards: torch.Tensor, states: torch.Tensor, baselines: torch.Tensor, num_states: int, scale: str = "none"
) -> torch.Tensor:
    """
    A: each row's reward minus its baseline in `baselines` (R,), before modulation; 0 for unscorable rows.

    With `scale="group"` it is divided by the standard deviation of the state's rewards, with `"batch"` by that of all
    rewards (with Bessel's correction, plus 1e-4, as in GRPO).
    """
    advantages = (rewards - baselines).nan_to_num(0)
    if scale == "group":
        deviations = rewards - state_values(rewards, states, num_states)[states]
        sizes = _state_sizes(rewards, states, num_states)
        variances = _state_sums(deviations.nan_to_num(0) ** 2, states, num_states) / (sizes - 1).clamp(min=1)
        advantages = advantages / (variances.sqrt()[states] + 1e-4)
    elif scale == "batch":
        advantages = advantages / batch_std(rewards)
    return advantages


def degenerate_states(rewards: torch.Tensor, states: torch.Tensor, num_states: int) -> torch.Tensor:
    """States that teach nothing, a mask (S,): their scorable rewards are all exactly equal, or fewer than two."""
    lowest = rewards.new_full((num_states,), math.inf)
    lowest = lowest.scatter_reduce(0, states, rewards.nan_to_num(math.inf), "amin")
    highest = rewards.new_full((num_states,), -math.inf)
    highest = highest.scatter_reduce(0, states, rewards.nan_to_num(-math.inf), "amax")
    return ~(lowest < highest)


def _are_roots(parents: list[int | None]) -> torch.Tensor:
    """Whether each state is an S_0, (S,)."""
    return torch.tensor([parent is None for parent in parents])


def _state_sums(x: torch.Tensor, states: torch.Tensor, num_states: int) -> torch.Tensor:
    return x.new_zeros(num_states).index_add(0, states, x)


def _state_sizes(rewards: torch.Tensor, states: torch.Tensor, num_states: int) -> torch.Tensor:
    """Scorable rows of each state, (S,)."""
    return _state_sums((~rewards.isnan()).to(rewards.dtype), states, num_states)
