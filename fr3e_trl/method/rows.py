"""A rollout as a row of the batch, from the tree to the loss, and how the rows are dealt out to the processes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import FR3EConfig
from .anchors import even_shares
from .credit.prior import ValueTracker
from .credit.rollout import compute_advantages, normalized_rewards, state_values, weighted_rewards
from .credit.tree import Credit, compute_credit, informative_rows, prompt_values, tree_values
from .tree import Rollout, State, TokenIds, Tree, as_ids, chains_of


@dataclass(frozen=True)
class RowSharding:
    """
    Rows of a batch dealt out to processes, in order, as evenly as they divide, wherever that cuts a group.

    Args:
        num_rows (`int`):
            Rows of all processes.
        num_processes, process (`int`):
            How many processes there are, and which of them this is.
    """

    num_rows: int
    num_processes: int = 1
    process: int = 0

    @property
    def own(self) -> range:
        """The rows of this process."""
        start, end = (i * self.num_rows // self.num_processes for i in (self.process, self.process + 1))
        return range(start, end)

    def owner(self, row: int) -> int:
        """The process that a row is dealt to."""
        return ((row + 1) * self.num_processes - 1) // self.num_rows


@dataclass(eq=False)
class Row:
    """
    A rollout as a row of the batch.

    Args:
        rollout ([`Rollout`]):
            The continuation, which is what the row has in the loss.
        holder (`int`):
            The process that holds its tokens, its example and its log-probabilities.
        temperature (`float`):
            What it was sampled at.
        prompt_ids, prefix_ids (`TokenIds`):
            What it continues.
        example (`dict`):
            The dataset's example that it belongs to.
        index (`int`, *optional*):
            The example's place in the dataset, where the prompts come from a [`PromptStream`].
        advantage (`float`):
            Its modulated advantage; under tree credit, the mean over its own tokens.
        in_loss (`bool`):
            Whether it is learned from, or rejected.
        old_logprobs (`torch.Tensor` of shape (L,), *optional*):
            For a row left over from an earlier step, the log-probabilities of its whole completion under the policy
            that it was sampled from. If `None`, that policy is the one at the start of the step, or vLLM's correction
            takes care of the difference.
        is_left_over (`bool`):
            Whether it is a row left over from an earlier step.
    """

    rollout: Rollout
    holder: int
    temperature: float
    prompt_ids: TokenIds = field(default_factory=as_ids)
    prefix_ids: TokenIds = field(default_factory=as_ids)
    example: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    advantage: float = 0.0
    in_loss: bool = True
    old_logprobs: torch.Tensor | None = None
    is_left_over: bool = False

    @property
    def completion_ids(self) -> TokenIds:
        """Of shape (L,): the prefix and the continuation."""
        return np.concatenate([self.prefix_ids, self.rollout.token_ids])

    @property
    def loss_mask(self) -> list[int]:
        """Of length L: 1 for each token that was sampled, 0 for those of the prefix and of tools, which are context."""
        mask = self.rollout.mask
        own = [1] * self.rollout.length if mask is None else mask.astype(int).tolist()
        return [0] * len(self.prefix_ids) + own

    @property
    def path_mask(self) -> list[int]:
        """Of length L: 1 for each token of the prefix and the continuation that the policy wrote, 0 for tools'."""
        if self.rollout.dialogue is None:
            return [1] * len(self.prefix_ids) + self.loss_mask[len(self.prefix_ids) :]
        mask = np.zeros(len(self.prefix_ids) + self.rollout.length, int)
        for start, end in self.rollout.dialogue.turns:
            mask[start:end] = 1
        return mask.tolist()


def rows_of(
    trees: Sequence[Tree],
    sharding: RowSharding,
    temperature: float,
    explore_temperature: float,
    examples: dict[int, dict[str, Any]],
    indices: Sequence[int | None],
) -> list[Row]:
    """
    The rows of `trees`: the rollouts of their states, in order, those of S_0 first.

    Args:
        trees (`Sequence[Tree]`):
            Finished trees.
        sharding ([`RowSharding`]):
            Says which process has sampled which of their rows.
        temperature, explore_temperature (`float`):
            Sampling temperature of the rollouts of S_0, and of the other states.
        examples (`dict[int, dict]`):
            The dataset's example of each tree that has rows in this process, by the tree's index.
        indices (`Sequence[int | None]`):
            Their places in the dataset, for all trees.
    """
    rows: list[Row] = []
    for i, tree in enumerate(trees):
        for state in tree.states:
            for rollout in state.rollouts:
                holder = sharding.owner(len(rows))
                row = Row(
                    rollout, holder, temperature if state.parent is None else explore_temperature, index=indices[i]
                )
                if holder == sharding.process:
                    row.prompt_ids, row.prefix_ids, row.example = tree.prompt_ids, state.prefix_ids, examples[i]
                rows.append(row)
    return rows


def set_advantages(rows: list[Row], trees: list[Tree], args: FR3EConfig, memory: ValueTracker | None = None) -> None:
    """
    Give every state of `trees` its value, modulation and rejection, and every row its advantage.

    Args:
        rows (`list[Row]`):
            The rows of all of `trees`, in order.
        trees (`list[Tree]`):
            Finished trees.
        args (`FR3EConfig`):
            Settings.
        memory ([`ValueTracker`], *optional*):
            What prompts were worth in the steps before. It is asked, and not told.
    """
    prior_strength, priors = args.value_prior_strength, None
    if args.normalizes_rewards:
        priors = torch.zeros(len(trees), dtype=torch.float64)  # the mean of each prompt's rows
    if memory is not None:
        prior_strength = memory.prior_strength if prior_strength is None else prior_strength
        priors = memory.priors(_keys_of(trees), _values_of(trees, args))
    states, parents = chains_of(trees)
    row_states = torch.tensor([i for i, state in enumerate(states) for _ in state.rollouts])
    if args.credit == "tree":
        rewards, of_paths, positions, lengths, prompts, copies = _paths_of(trees, args)
        for state, value in zip(states, state_values(rewards, row_states, len(states)).tolist(), strict=True):
            state.value = value
        credit = compute_credit(
            rewards, of_paths, positions, lengths, prompts, prior_strength or 0.0, copies=copies, priors=priors
        )
        _set_tree_credit(rows, trees, args, credit)
        return
    result = compute_advantages(
        compared_rewards(trees, args),
        row_states,
        parents,
        modulation=args.modulation if args.num_anchors else "none",
        modulation_clip=args.modulation_clip,
        scale="none" if args.normalizes_rewards else args.scale_rewards or "none",
        prior_strength=prior_strength or 0.0,
        reject=bool(args.reject_degenerate_states),
        negative_scale=args.negative_advantage_scale,
        priors=priors,
    )
    for state, value, factor, rejected in zip(
        states, result.values.tolist(), result.factors.tolist(), result.rejected.tolist(), strict=True
    ):
        state.value, state.modulation, state.rejected = value, factor, rejected
    in_loss = ~result.rejected[row_states]
    for row, advantage, is_in_loss in zip(rows, result.advantages.tolist(), in_loss.tolist(), strict=True):
        row.advantage, row.in_loss = advantage, is_in_loss


def token_credit(rows: Sequence[Row], num_tokens: int) -> NDArray[np.float64]:
    """
    Credit of the tokens of rows that this process holds.

    Args:
        rows (`Sequence[Row]`):
            R rows.
        num_tokens (`int`):
            C, of their completions in the batch, padded.

    Returns:
        `np.ndarray` of shape (2, R, C): How many tokens each counts for, and its advantage; 0 for those of a prefix,
        and past a row's end.
    """
    stretches: list[tuple[int, float, float]] = []
    for row in rows:
        num_before = len(row.prefix_ids)
        stretches += [(num_before, 0, 0), *row.rollout.credit, (num_tokens - num_before - row.rollout.length, 0, 0)]
    lengths, weights, advantages = zip(*stretches, strict=True)
    return np.repeat(np.array([weights, advantages], float), lengths, axis=1).reshape(2, len(rows), num_tokens)


def compared_rewards(trees: list[Tree], args: FR3EConfig) -> torch.Tensor:
    """
    What the rows of `trees` are compared by, (R,), in order: their reward, or what normalising has made of it.

    With `multi_objective_aggregation="normalize_then_sum"` the rewards of each function are normalised over each
    prompt's rows, summed by their weights and divided by the standard deviation over the batch, as by GRPO. With
    `scale_rewards="group"` and a prior their weighted sum is normalised over each prompt's rows.
    """
    rollouts = [(r, i) for i, tree in enumerate(trees) for state in tree.states for r in state.rollouts]
    rewards = torch.tensor([rollout.reward for rollout, _ in rollouts], dtype=torch.float64)
    if not args.normalizes_rewards:
        return rewards
    prompts = torch.tensor([i for _, i in rollouts])
    if args.multi_objective_aggregation == "sum_then_normalize":
        return normalized_rewards(rewards.unsqueeze(1), prompts, len(trees)).squeeze(1)
    per_func = torch.tensor([rollout.score.rewards for rollout, _ in rollouts], dtype=torch.float64)
    weights = torch.tensor(args.reward_weights or [1.0] * per_func.size(1), dtype=torch.float64)
    rewards = weighted_rewards(normalized_rewards(per_func, prompts, len(trees)), weights)
    scorable = rewards[~rewards.isnan()]
    return rewards / (scorable.std() + 1e-4) if len(scorable) > 1 else rewards


def remember(trees: list[Tree], args: FR3EConfig, memory: ValueTracker) -> dict[str, float]:
    """Tell `memory` what the prompts of a step turned out to be worth, and return what to log."""
    keys = _keys_of(trees)
    strength = args.value_prior_strength
    metrics = {
        "fr3e/prior/strength": memory.prior_strength if strength is None else strength,
        "fr3e/prior/known": memory.num_known(keys) / len(keys),
    }
    memory.learn(keys, _values_of(trees, args), *_rewards_of([tree.states for tree in trees]))
    return metrics


def _keys_of(trees: list[Tree]) -> list[int]:
    return [tree.key for tree in trees if tree.key is not None]


def _values_of(trees: list[Tree], args: FR3EConfig) -> torch.Tensor:
    """What each prompt turned out to be worth, (P,): the mean over its trees, or V(S_0)."""
    if args.credit == "tree":
        rewards, parents, _, _, prompts, copies = _paths_of(trees, args)
        return prompt_values(tree_values(rewards, parents, copies), prompts, len(trees))
    rewards, prompts = _rewards_of([tree.states[:1] for tree in trees])
    return state_values(rewards, prompts, len(trees))


def _rewards_of(states: list[list[State]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward and prompt of the rollouts of each prompt's states, (R,) each."""
    of_rows = [(r.reward, i) for i, of_prompt in enumerate(states) for state in of_prompt for r in state.rollouts]
    rewards, prompts = zip(*of_rows, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(prompts)


def _set_tree_credit(rows: list[Row], trees: list[Tree], args: FR3EConfig, credit: Credit) -> None:
    """Credit the tokens of every row with all rows that pass through them, in the place of the row's own outcome."""
    informative = informative_rows(credit, len(rows)).tolist()
    scaled = torch.where(credit.advantages < 0, args.negative_advantage_scale * credit.advantages, credit.advantages)
    for row, is_informative in zip(rows, informative, strict=True):
        row.rollout.credit = []
        row.in_loss = is_informative or not (args.reject_degenerate_states or row.rollout.copy_of is not None)
    lengths = credit.ends - credit.starts
    of_stretches = (x.tolist() for x in (credit.rows, lengths, credit.weights, scaled))
    for i, length, weight, advantage in zip(*of_stretches, strict=True):
        rows[i].rollout.credit.append((length, weight, advantage))
    for row in rows:
        row.advantage = sum(n * advantage for n, _, advantage in row.rollout.credit) / row.rollout.length
    in_loss = {id(row.rollout) for row in rows if row.in_loss}
    for tree in trees:
        for state in tree.states:
            state.rejected = not any(id(rollout) in in_loss for rollout in state.rollouts)


def _paths_of(
    trees: list[Tree], args: FR3EConfig
) -> tuple[torch.Tensor, list[int | None], list[int], list[int], torch.Tensor, list[int]]:
    """
    The rows of `trees` as [`compute_credit`] takes them: rewards, parents, positions, lengths, prompts and copies.

    The base trajectories count for their copies, which are no rows of theirs.
    """
    shares, num_rollouts = even_shares(args.num_anchors or 0, args.num_bases), args.num_rollouts
    rewards: list[float] = []
    parents: list[int | None] = []
    positions, lengths, prompts, copies = [], [], [], []
    for i, tree in enumerate(trees):
        root, num_anchors = len(rewards), Counter(state.base for state in tree.states)
        # A base trajectory with fewer anchors stands for the rollouts that would have left at its end
        copies += [1 + (share - num_anchors[b]) * num_rollouts for b, share in enumerate(shares)]
        for state in tree.states:
            for rollout in state.rollouts:
                rewards.append(rollout.reward)
                parents.append(None if state.base is None else root + state.base)
                positions.append(state.position)
                lengths.append(state.position + rollout.length)
                prompts.append(i)
        copies += [1] * (len(rewards) - len(copies))
    return torch.tensor(rewards, dtype=torch.float64), parents, positions, lengths, torch.tensor(prompts), copies
