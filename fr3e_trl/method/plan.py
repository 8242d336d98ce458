"""The plan: the settings that the method needs, in plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

from .shape import Shape


@dataclass(frozen=True)
class Plan:
    """
    How the prompts of a step are explored, and how their rows are credited.

    Args:
        num_rows (`int`): G, number of rows of a prompt.
        shape ([`Shape`]): How these are divided.
        temperature (`float`): Sampling temperature of all rollouts.
        credit (`str`): Credit rule, by its name in `CREDIT_RULES`.
        anchor_score (`str`): What makes a position an anchor, by its name in `ANCHOR_RULES`.
        anchor_threshold (`float` or `"auto"`, *optional*):
            Minimum entropy of anchors, in nats. The first such positions become anchors. `"auto"` changes at each step.
            With `None`, the positions with the highest scores become anchors.
        anchor_min_gap (`int`): Minimum distance between two anchors of a trajectory, in tokens.
        base_selection (`str`):
            Base trajectories to explore: `"all"`, or `"mixed"` for one of the best and one of the worst.
        reuse_base (`bool`): Whether base trajectories are rows.
        prior_strength (`float`, *optional*):
            κ, the weight of the prior in a baseline, in rollouts. If `None`, the value tracker estimates it.
        modulation (`str`): Factor on the advantages of a state: `"none"`, `"exp"` or `"sharpened"`.
        scale (`str`):
            What advantages are divided by: `"none"`, or the standard deviation of the rewards of a state (`"group"`) or
            of the `"batch"`.
        length_normalized (`bool`):
            Whether tree credit divides a row's reward by its number of tokens, like GRPO's mean over rows
            (`loss_type="grpo"`, `"sapo"`). See [`~fr3e_trl.method.credit.tree`].
        normalization (`str`):
            How rewards are normalized over the rows of each prompt: `"none"`, their weighted `"sum"`, or `"each"`
            function's rewards before they are summed.
        reward_weights (`Sequence[float]`, *optional*): Weight of each reward function. If `None`, 1 for each.
        reject (`bool`): Whether rows that teach nothing are left out of the loss.
        negative_scale (`float`): Factor on negative advantages.
    """

    num_rows: int
    shape: Shape
    temperature: float = 1.0
    credit: str = "tree"
    anchor_score: str = "entropy"
    anchor_threshold: float | str | None = None
    anchor_min_gap: int = 1
    base_selection: str = "all"
    reuse_base: bool = True
    prior_strength: float | None = 4.0
    modulation: str = "none"
    scale: str = "none"
    length_normalized: bool = False
    normalization: str = "none"
    reward_weights: Sequence[float] | None = None
    reject: bool = True
    negative_scale: float = 1.0
