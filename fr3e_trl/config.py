"""Settings of FR3E, on top of those of GRPO."""

import copy
import math
from dataclasses import dataclass, field, fields
from typing import Any, Self

from trl import GRPOConfig

# The choices of the paper (arXiv 2507.07017), whatever the defaults have become.
PAPER: dict[str, Any] = {
    "num_generations": 16,
    "anchor_score": "entropy",
    "anchor_quantile": None,
    "anchor_min_gap": 1,
    "anchor_min_budget": 1,
    "anchor_budget": "uniform",
    "base_selection": "mixed",
    "reuse_base": True,
    "explore_temperature_scale": 1.0,
    "modulation": "exp",
    "reject_degenerate_states": True,
    "value_prior_strength": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "loss_type": "dapo",
    "scale_rewards": "none",
    "beta": 0.0,
    "learning_rate": 1e-6,
}

# The choices of the authors' released run, without the mistakes of its code.
RELEASED: dict[str, Any] = PAPER | {
    "num_generations": 80,
    "num_anchors": 4,
    "anchor_score": "surprisal",
    "reuse_base": False,
    "num_base_trajectories": 4,
    "modulation": "sharpened",
    "epsilon_high": 0.3,
    "learning_rate": 2e-6,
    "max_completion_length": 3072,
}

# What won at equal generated tokens, see docs/results.md
RECOMMENDED: dict[str, Any] = {
    "num_generations": 2,
    "num_anchors": 1,
    "modulation": "none",
    "value_prior_strength": 4.0,
}


@dataclass
class FR3EConfig(GRPOConfig):
    r"""
    Configuration of [`FR3ETrainer`]: every parameter of [`~trl.GRPOConfig`], and those of FR3E.

    `num_generations` keeps its meaning, the training rows of a prompt. FR3E divides these G rows among
    `num_anchors + 1` states of `num_rollouts` = G / (num_anchors + 1) rollouts each: the prompt itself, and each
    position at which it branches.

    Parameters:
        > Parameters that control where to explore

        num_anchors (`int`, *optional*):
            Anchors per prompt: the positions from which new rollouts branch. If `None`, chosen from `num_generations`:
            the largest up to 4 that leaves every state 4 rollouts, else the largest that leaves 2. `0` turns
            exploration off: the trainer is then [`~trl.GRPOTrainer`].
        anchor_score (`str`, *optional*, defaults to `"entropy"`):
            What makes a position an anchor: `"entropy"` of the policy's next-token distribution; `"surprisal"`, minus
            the log-probability of the token that was sampled; `"random"`, a control.
        anchor_quantile (`float`, *optional*):
            Only positions whose entropy is above this quantile of their trajectory's entropies may be anchors, for
            example `0.75`. If `None`, all may.
        anchor_min_gap (`int`, *optional*, defaults to `1`):
            Least distance in tokens between two anchors of a trajectory. With `1` any two positions may be anchors.
        anchor_min_budget (`int`, *optional*, defaults to `1`):
            Least number of tokens, out of `max_completion_length`, that an anchor must leave to its rollouts.
        base_selection (`str`, *optional*, defaults to `"mixed"`):
            Which base trajectories are explored: `"mixed"`, one of the best-scored and one of the worst-scored when
            the scores differ and one at random when they do not; `"best"`; `"worst"`; `"random"`.

        > Parameters that control the rollouts

        reuse_base (`bool`, *optional*, defaults to `True`):
            Whether the base trajectories are also the rollouts of the prompt. They are samples of the same
            distribution; `False` throws them away after the anchors were found and samples the prompt again.
        num_base_trajectories (`int`, *optional*):
            Base trajectories per prompt when `reuse_base=False`, `4` if `None`. Otherwise the prompt's rollouts are
            the base trajectories, and it must stay `None`.
        anchor_budget (`str`, *optional*, defaults to `"uniform"`):
            How a prompt's rollouts are shared out among its states: `"uniform"`, `num_rollouts` for each;
            `"adaptive"`, half as many at first, and the rest where the rewards of these leave the value most
            uncertain. The first half's rewards are then compared with one another alone, and those of the rest with
            all others, so that no row's baseline depends on its own reward.
        explore_temperature_scale (`float`, *optional*, defaults to `1.0`):
            Factor on `temperature` when sampling from anchors. Where it is not 1, the importance ratio is taken
            against the distribution that was sampled from.

        > Parameters that control the advantages

        modulation (`str`, *optional*, defaults to `"exp"`):
            How the advantages of a state are scaled by the move of its value against the state before it:
            `"exp"`, by exp(-(V(S_j) - V(S_{j-1}))); `"sharpened"`, the form of the authors' released code; `"none"`.
        modulation_clip (`float`, *optional*, defaults to `5.0`):
            Bound on the absolute value of the exponent in `modulation="exp"`.
        reject_degenerate_states (`bool`, *optional*):
            Whether the rows of a state whose rewards are all equal leave the loss, numerator and denominator both.
            If `None`, `True` when exploring and `False` when `num_anchors=0`; setting `True` there gives GRPO with
            rejection.
        value_prior_strength (`float`, *optional*, defaults to `0.0`):
            Weight κ, in rollouts, of a prior in the baseline of each row: the value of the state before it, and for
            the prompt the mean over the batch's other prompts. `0` uses the plain mean of the state's rewards.

        > Parameters that control the refill of a batch ("dynamic sampling")

        max_refills (`int`, *optional*, defaults to `0`):
            How many times in a step further prompts are drawn from the training set, as many as a batch has at most,
            to replace rejected rows. An epoch then is still one pass over the training set, which takes fewer steps
            than the data loader counts; the number of steps stays.
        refill_leftovers (`str`, *optional*, defaults to `"next"`):
            What becomes of rows to learn from that a refilled batch has no place for: `"next"` keeps them for the
            next step, where they replace rejected rows before further prompts are drawn; `"drop"`.

        > Parameters that control vLLM, beside those of `GRPOConfig`

        vllm_adapter_sync (`bool`, *optional*):
            Whether a vLLM server gets the LoRA adapter alone at each step, through a directory, in place of the whole
            model with the adapter merged. If `None`, it does where it can: for a LoRA policy, when the server was
            started with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
        vllm_adapter_dir (`str`, *optional*):
            Directory for that, which trainer and server must both see and no other run uses. If `None`,
            `_vllm_adapter` in `output_dir`.
        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds that a vLLM server may take to answer a request before it is sent again.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]:
    > - `epsilon_high`: Defaults to `0.28` instead of `None`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`.
    """

    num_anchors: int | None = field(
        default=None,
        metadata={
            "help": "Anchors per prompt: the positions from which new rollouts branch. If `None`, chosen from "
            "`num_generations`: the largest up to 4 that leaves every state 4 rollouts, else the largest that leaves "
            "2. `0` turns exploration off: the trainer is then `GRPOTrainer`."
        },
    )
    anchor_score: str = field(
        default="entropy",
        metadata={
            "help": "What makes a position an anchor: the entropy of the policy there, the surprisal of the sampled "
            "token, or chance (a control).",
            "choices": ["entropy", "surprisal", "random"],
        },
    )
    anchor_quantile: float | None = field(
        default=None,
        metadata={
            "help": "Only positions whose entropy is above this quantile of their trajectory's entropies may be "
            "anchors. If `None`, all may."
        },
    )
    anchor_min_gap: int = field(
        default=1,
        metadata={
            "help": "Least distance in tokens between two anchors of a trajectory. With `1` any two positions may be "
            "anchors."
        },
    )
    anchor_min_budget: int = field(
        default=1,
        metadata={
            "help": "Least number of tokens, out of `max_completion_length`, that an anchor must leave to its rollouts."
        },
    )
    base_selection: str = field(
        default="mixed",
        metadata={
            "help": "Which base trajectories are explored: one of the best-scored and one of the worst-scored "
            "('mixed'), or one of the best, one of the worst, or one at random.",
            "choices": ["mixed", "best", "worst", "random"],
        },
    )
    reuse_base: bool = field(
        default=True,
        metadata={
            "help": "Whether the base trajectories are also the rollouts of the prompt. `False` throws them away "
            "after the anchors were found and samples the prompt again."
        },
    )
    num_base_trajectories: int | None = field(
        default=None,
        metadata={
            "help": "Base trajectories per prompt when `reuse_base=False`, 4 if `None`. Otherwise the prompt's "
            "rollouts are the base trajectories, and it must stay `None`."
        },
    )
    anchor_budget: str = field(
        default="uniform",
        metadata={
            "help": "How a prompt's rollouts are shared out among its states: evenly ('uniform'), or half of them "
            "evenly, and the rest where the rewards of these leave the value most uncertain ('adaptive').",
            "choices": ["uniform", "adaptive"],
        },
    )
    explore_temperature_scale: float = field(
        default=1.0,
        metadata={
            "help": "Factor on `temperature` when sampling from anchors. Where it is not 1, the importance ratio is "
            "taken against the distribution that was sampled from."
        },
    )
    modulation: str = field(
        default="exp",
        metadata={
            "help": "How the advantages of a state are scaled by the move of its value against the state before it: "
            "exp(-(V(S_j) - V(S_{j-1}))) ('exp'), the form of the authors' released code ('sharpened'), or not at all.",
            "choices": ["exp", "sharpened", "none"],
        },
    )
    modulation_clip: float = field(
        default=5.0,
        metadata={"help": "Bound on the absolute value of the exponent in `modulation='exp'`."},
    )
    reject_degenerate_states: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the rows of a state whose rewards are all equal leave the loss, numerator and "
            "denominator both. If `None`, `True` when exploring and `False` when `num_anchors=0`; setting `True` "
            "there gives GRPO with rejection."
        },
    )
    value_prior_strength: float = field(
        default=0.0,
        metadata={
            "help": "Weight, in rollouts, of a prior in the baseline of each row: the value of the state before it, "
            "and for the prompt the mean over the batch's other prompts. `0` uses the plain mean of the state's "
            "rewards."
        },
    )

    max_refills: int = field(
        default=0,
        metadata={
            "help": "How many times in a step further prompts are drawn from the training set, as many as a batch has "
            "at most, to replace rejected rows."
        },
    )
    refill_leftovers: str = field(
        default="next",
        metadata={
            "help": "What becomes of rows to learn from that a refilled batch has no place for: kept for the next step "
            "('next'), or dropped ('drop').",
            "choices": ["next", "drop"],
        },
    )

    vllm_adapter_sync: bool | None = field(
        default=None,
        metadata={
            "help": "Whether a vLLM server gets the LoRA adapter alone at each step, through a directory, in place of "
            "the whole model with the adapter merged. If `None`, it does where it can: for a LoRA policy, when the "
            "server was started with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`."
        },
    )
    vllm_adapter_dir: str | None = field(
        default=None,
        metadata={
            "help": "Directory for that, which trainer and server must both see and no other run uses. If `None`, "
            "`_vllm_adapter` in `output_dir`."
        },
    )
    vllm_request_timeout: float = field(
        default=1800.0,
        metadata={"help": "Seconds that a vLLM server may take to answer a request before it is sent again."},
    )

    # Overridden defaults: the paper's, in TRL's names
    epsilon_high: float | None = field(
        default=0.28,
        metadata={
            "help": "Upper-bound epsilon value for clipping. The paper clips asymmetrically ('Clip-Higher'), with "
            "0.2 below and 0.28 above. If `None`, the same as `epsilon`."
        },
    )
    scale_rewards: str = field(
        default="none",
        metadata={
            "help": "Scaling of the advantages: 'none' (the paper's), 'group' to divide by the standard deviation of "
            "the state's rewards, or 'batch' to divide by that of the whole batch's. `True` is 'group', `False` is "
            "'none'."
        },
    )

    def __post_init__(self):
        self._resolve()
        super().__post_init__()
        self._check_combinations()

    @property
    def num_states(self) -> int:
        """States per prompt, K + 1: the prompt itself, and its anchors."""
        return (self.num_anchors or 0) + 1

    @property
    def num_rollouts(self) -> int:
        """Rollouts per state, M = G / (K + 1)."""
        return self.num_generations // self.num_states

    @property
    def is_adaptive(self) -> bool:
        """Whether the rollouts of a prompt go where they are needed."""
        return self.anchor_budget == "adaptive" and bool(self.num_anchors)

    @property
    def first_share(self) -> int:
        """Rollouts of each state that do not depend on what others scored."""
        return max(self.num_rollouts // 2, 2) if self.is_adaptive else self.num_rollouts

    @property
    def num_bases(self) -> int:
        """Base trajectories per prompt."""
        return self.first_share if self.num_base_trajectories is None else self.num_base_trajectories

    @property
    def is_plain_grpo(self) -> bool:
        """Whether nothing of FR3E is on, so that training is left to `GRPOTrainer` altogether."""
        return self.num_anchors == 0 and not self.reject_degenerate_states and self.value_prior_strength == 0

    @classmethod
    def paper(cls, **overrides: Any) -> Self:
        """
        The settings of the paper: 16 rollouts a prompt, entropy anchors, clipping at 0.2 and 0.28, learning rate 1e-6.

        The paper's batch of 512 prompts is left to you. Unless `overrides` sizes the batch, gradients are accumulated
        until it holds whole groups.
        """
        return cls(**_sized(PAPER | overrides))

    @classmethod
    def released(cls, **overrides: Any) -> Self:
        """
        The settings of the authors' released run: 4 base trajectories that are not reused, 4 surprisal anchors with 16
        rollouts each, sharpened modulation, clipping at 0.2 and 0.3, learning rate 2e-6.

        Unless `overrides` sizes the batch, gradients are accumulated until it holds whole groups.
        """
        return cls(**_sized(RELEASED | overrides))

    @classmethod
    def recommended(cls, **overrides: Any) -> Self:
        """
        What won at equal generated tokens: of each prompt one completion and one branch from its most uncertain
        position, many prompts, baselines shrunk towards the mean of the others, no modulation.

        A batch has as many rows as before, of more prompts: what has to be compared is no longer within a prompt. See
        `docs/results.md` for by how much it won, and where.
        """
        return cls(**RECOMMENDED | overrides)

    @classmethod
    def from_grpo(cls, args: GRPOConfig) -> tuple[Self, dict[str, Any]]:
        """
        A `GRPOConfig` with FR3E's settings added.

        What the user set is kept. A field that still has `GRPOConfig`'s default counts as not set, and takes FR3E's
        where that differs (`epsilon_high`, `scale_rewards`).

        Returns:
            `tuple[FR3EConfig, dict[str, Any]]`: The configuration, and the settings that were added to `args`.
        """
        # Not built anew from the fields: `GRPOConfig.__post_init__` refuses the values that it has itself filled in.
        config = copy.copy(args)
        config.__class__ = cls
        grpo_defaults = {f.name: f.default for f in fields(GRPOConfig)}
        added = []
        for f in fields(cls):
            if f.name not in grpo_defaults or (
                f.default != grpo_defaults[f.name] and getattr(args, f.name) == grpo_defaults[f.name]
            ):
                setattr(config, f.name, f.default)
                added.append(f.name)
        config._resolve()
        config._check_combinations()
        return config, {name: getattr(config, name) for name in added}

    def _resolve(self) -> None:
        """Check each of FR3E's fields, and fill in those that were left to be chosen."""
        for name in ("anchor_score", "anchor_budget", "base_selection", "modulation", "refill_leftovers"):
            _require_choice(self, name)
        _require(self, "anchor_min_gap", self.anchor_min_gap >= 1, "at least 1")
        _require(self, "anchor_min_budget", self.anchor_min_budget >= 1, "at least 1")
        _require(
            self,
            "anchor_quantile",
            self.anchor_quantile is None or 0 <= self.anchor_quantile < 1,
            "None or at least 0 and below 1, for example 0.75",
        )
        _require(self, "explore_temperature_scale", self.explore_temperature_scale > 0, "above 0, for example 1.0")
        _require(self, "modulation_clip", self.modulation_clip > 0, "above 0, for example 5.0")
        _require(self, "value_prior_strength", self.value_prior_strength >= 0, "0 or more, for example 2.0")
        _require(self, "max_refills", self.max_refills >= 0, "0 or more, for example 2")
        _require(self, "vllm_request_timeout", self.vllm_request_timeout > 0, "above 0, for example 1800")
        if self.reuse_base:
            _require(
                self,
                "num_base_trajectories",
                self.num_base_trajectories is None,
                "None with reuse_base=True, where the prompt's rollouts are the base trajectories; "
                "set reuse_base=False to draw others",
            )
        else:
            if self.num_base_trajectories is None:
                self.num_base_trajectories = 4
            _require(self, "num_base_trajectories", self.num_base_trajectories >= 1, "at least 1")
        # A single rollout has no baseline of its own: it takes a prior to learn anything from it.
        min_rollouts = 1 if self.value_prior_strength > 0 else 2
        if self.num_anchors is None:
            self.num_anchors = _default_num_anchors(self.num_generations)
        else:
            _require_whole_states(self.num_generations, self.num_anchors, min_rollouts)
        _require(
            self,
            "anchor_budget",
            not self.is_adaptive or self.num_rollouts >= 3,
            f"'uniform' with num_generations={self.num_generations} and num_anchors={self.num_anchors}, where a state "
            f"has {self.num_rollouts} rollouts and two of them are its first share; set num_generations="
            f"{4 * self.num_states} or more",
        )
        if self.reject_degenerate_states is None:
            self.reject_degenerate_states = self.num_anchors > 0
        _require(
            self,
            "max_refills",
            self.max_refills == 0 or self.reject_degenerate_states,
            "0 with reject_degenerate_states=False, which leaves nothing to refill; set reject_degenerate_states=True",
        )

    def _check_combinations(self) -> None:
        """Check FR3E's fields against those of GRPO, once these have their final values."""
        if self.is_plain_grpo:
            return
        if self.max_completion_length is None or self.max_completion_length < self.anchor_min_budget:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} is the budget that anchors and their rollouts "
                f"share: it must be at least anchor_min_budget={self.anchor_min_budget}, for example 512."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} has no state values to modulate "
                "by: FR3E takes the weighted sum of the rewards. Use 'sum_then_normalize'."
            )
        if self.scale_rewards not in ("none", "group", "batch"):
            raise ValueError(f"scale_rewards={self.scale_rewards!r} must be one of 'none', 'group', 'batch'.")
        if self.scale_rewards == "group" and self.value_prior_strength > 0:
            raise ValueError(
                f"scale_rewards='group' divides by the spread of a state's rewards, which is 0 in states that "
                f"value_prior_strength={self.value_prior_strength} keeps. Use scale_rewards='none' or 'batch', or "
                "value_prior_strength=0."
            )


def _require(config: FR3EConfig, name: str, condition: bool, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name}={getattr(config, name)!r} is not allowed: it must be {allowed}.")


def _require_choice(config: FR3EConfig, name: str) -> None:
    choices = config.__dataclass_fields__[name].metadata["choices"]
    _require(config, name, getattr(config, name) in choices, f"one of {', '.join(map(repr, choices))}")


def _default_num_anchors(num_generations: int) -> int:
    """The largest K up to 4 that leaves M >= 4 rollouts a state, else the largest that leaves M >= 2."""
    for min_rollouts in (4, 2):
        for num_anchors in (4, 3, 2, 1):
            rollouts, rest = divmod(num_generations, num_anchors + 1)
            if rest == 0 and rollouts >= min_rollouts:
                return num_anchors
    raise ValueError(
        f"num_generations={num_generations} cannot be split into states of at least 2 rollouts with 1 to 4 anchors. "
        "Use for example num_generations=8 (1 anchor, 4 rollouts a state) or 16 (3 anchors), set num_anchors "
        "yourself, or set num_anchors=0 for plain GRPO."
    )


def _require_whole_states(num_generations: int, num_anchors: int, min_rollouts: int) -> None:
    states = num_anchors + 1
    if num_anchors == 0 or (
        num_anchors > 0 and num_generations % states == 0 and num_generations // states >= min_rollouts
    ):
        return
    working = [
        str(k)
        for k in range(1, num_generations // min_rollouts)
        if num_generations % (k + 1) == 0 and num_generations // (k + 1) >= min_rollouts
    ]
    message = (
        f"num_anchors={num_anchors} does not fit num_generations={num_generations}: the rows of a prompt must divide "
        f"evenly into num_anchors + 1 states of at least {min_rollouts} rollouts. With "
        f"num_generations={num_generations}, num_anchors can be {', '.join(['0 (plain GRPO)', *working])}."
    )
    if num_anchors > 0:
        first = [str(states * m) for m in range(min_rollouts, min_rollouts + 4)]
        message += f" With num_anchors={num_anchors}, num_generations can be {', '.join(first)} and so on."
    raise ValueError(message)


def _sized(settings: dict[str, Any]) -> dict[str, Any]:
    """Accumulate gradients until the generation batch holds whole groups, unless the batch is already sized."""
    if not {"gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"} & settings.keys():
        group, step = settings["num_generations"], settings.get("per_device_train_batch_size", 8)
        settings["gradient_accumulation_steps"] = group // math.gcd(group, step)
    return settings
