"""
What training costs and what its batches teach, measured the same way for every trainer.

Notation used for tensor shapes:
    - R: rows of a batch
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer

from ..trainer import FR3ETrainer
from ..tree import Tree


@dataclass
class Costs:
    """
    What a run has spent so far. All tokens are counted without padding.

    Args:
        batches (`int`):
            Generation batches.
        generated_tokens (`int`):
            Tokens sampled. Base trajectories that are thrown away count; a prefix that a rollout starts from does not,
            since another rollout has sampled it.
        training_rows (`int`):
            Completions in the batches, those included that teach nothing.
        forward_tokens (`int`):
            Tokens that went through the policy without gradients: those that generation reads (a prompt or prefix for
            each sample of it) or samples, and those whose entropies or old log-probs were computed.
        forward_backward_tokens (`int`):
            Tokens that went through the policy in the loss, prompts and prefixes included, as often as they did.
        seconds (`float`):
            CPU time of the process, or wall-clock time with a GPU, without that of evaluation.
    """

    batches: int = 0
    generated_tokens: int = 0
    training_rows: int = 0
    forward_tokens: int = 0
    forward_backward_tokens: int = 0
    seconds: float = 0.0


class MeasuredMixin:
    """
    Measures a [`~trl.GRPOTrainer`] as it trains, and changes nothing.

    Attributes:
        costs ([`Costs`]):
            What it has spent, but for the time.
        batches (`list[dict[str, float]]`):
            What [`batch_signal`] says of each generation batch.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.costs = Costs()
        self.batches: list[dict[str, float]] = []

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self.model.training:
            trees = getattr(self, "trees", [])
            sampled, read = _tree_tokens(trees) if trees else _row_tokens(self, batch)
            self.costs.batches += 1
            self.costs.generated_tokens += sampled
            self.costs.forward_tokens += read + sampled
            self.costs.training_rows += len(batch["advantages"])
            in_loss = batch.get("in_loss", torch.ones_like(batch["advantages"])).bool()
            self.batches.append(
                batch_signal(_last_rewards(self), _row_states(self, trees), batch["advantages"], in_loss)
            )
        return batch

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        num_tokens = int(attention_mask.sum())
        if torch.is_grad_enabled():
            self.costs.forward_backward_tokens += num_tokens
        else:
            self.costs.forward_tokens += num_tokens
        return super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
            model, input_ids, attention_mask, *args, **kwargs
        )


class MeasuredGRPOTrainer(MeasuredMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`], measured."""


class MeasuredFR3ETrainer(MeasuredMixin, FR3ETrainer):
    """[`FR3ETrainer`], measured."""


def batch_signal(
    rewards: torch.Tensor, states: torch.Tensor, advantages: torch.Tensor, in_loss: torch.Tensor
) -> dict[str, float]:
    """
    What a batch has to teach.

    A state is what rows are compared within: the group of a prompt in GRPO, a prompt or an anchor in FR3E.

    Args:
        rewards (`torch.Tensor` of shape (R,)):
            Rewards; above 0 is right.
        states (`torch.Tensor` of shape (R,)):
            State of each row, as an index.
        advantages (`torch.Tensor` of shape (R,)):
            Advantages.
        in_loss (`torch.Tensor` of shape (R,)):
            Whether each row is in the loss.

    Returns:
        `dict[str, float]`: Shares of states that are all right and all wrong; of rows with a signal, which are in the
        loss with an advantage other than 0, and of rows left out of the loss; mean and standard deviation of the
        advantages over all rows, those left out counted as 0; mean reward.
    """
    right = (rewards > 0).float()
    sizes = torch.zeros(int(states.max()) + 1).index_add(0, states, torch.ones_like(right))
    num_right = torch.zeros_like(sizes).index_add(0, states, right)
    counted = advantages.float().cpu() * in_loss.cpu()
    return {
        "all_right": (num_right == sizes).float().mean().item(),
        "all_wrong": (num_right == 0).float().mean().item(),
        "signal": (counted != 0).float().mean().item(),
        "rejected": (~in_loss).float().mean().item(),
        "advantage_mean": counted.mean().item(),
        "advantage_std": counted.std(correction=0).item(),
        "reward": rewards.mean().item(),
    }


def now(device: torch.device) -> float:
    """A clock: CPU seconds of this process, or wall-clock seconds with all of a GPU's work done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _tree_tokens(trees: list[Tree]) -> tuple[int, int]:
    """Tokens sampled for `trees`, and tokens of the prompts and prefixes that each of the samples continues."""
    sampled = read = 0
    for tree in trees:
        kept = {id(rollout) for state in tree.states for rollout in state.rollouts}
        thrown_away = [base for base in tree.bases if id(base) not in kept]
        for prefix_ids, rollouts in [
            ([], thrown_away),
            *((state.prefix_ids, state.rollouts) for state in tree.states),
        ]:
            sampled += sum(len(rollout.token_ids) for rollout in rollouts)
            read += (len(tree.prompt_ids) + len(prefix_ids)) * len(rollouts)
    return sampled, read


def _row_tokens(trainer: Any, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The same where every row is sampled from its prompt."""
    # Not from the completions' mask, which leaves out what is masked for being truncated
    mean_length = trainer._metrics["train"]["completions/mean_length"][-1]
    return round(mean_length * len(batch["completion_ids"])), int(batch["prompt_mask"].sum())


def _last_rewards(trainer: Any) -> torch.Tensor:
    """Rewards of the rows of the last batch, (R,), by the trainer's one reward function."""
    (rewards,) = trainer._logs["rewards"].values()
    return torch.tensor(list(rewards))


def _row_states(trainer: Any, trees: list[Tree]) -> torch.Tensor:
    """State of each row of the last batch, (R,)."""
    if not trees:
        return torch.arange(trainer.args.generation_batch_size) // trainer.num_generations
    states = [state for tree in trees for state in tree.states]
    return torch.tensor([i for i, state in enumerate(states) for _ in state.rollouts])
