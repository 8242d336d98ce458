"""Settings of FR3E, on top of those of GRPO."""

import copy
import math
from dataclasses import dataclass, field, fields
from typing import Any, Self

from trl import GRPOConfig

# The choices of the paper (arXiv 2507.07017), whatever the defaults have become
PAPER: dict[str, Any] = {
    "num_generations": 16,
    "anchor_score": "entropy",
    "anchor_quantile": None,
    "anchor_min_gap": 1,
    "anchor_min_budget": 1,
    "base_selection": "mixed",
    "reuse_base": True,
    "explore_temperature_scale": 1.0,
    "modulation": "exp",
    "reject_degenerate_states": True,
    "value_prior_strength": 0.0,
    "negative_advantage_scale": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "loss_type": "dapo",
    "scale_rewards": "none",
    "beta": 0.0,
    "learning_rate": 1e-6,
}

# The choices of the authors' released run, without the mistakes of its code
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

# What won where nothing was chosen, see docs/results.md: the prior's weight, the factor on negative advantages, and the
# anchors of a base trajectory
PRIOR_STRENGTH = 4.0
NEGATIVE_SCALE = 0.5
ANCHORS_PER_BASE = 3


@dataclass
class FR3EConfig(GRPOConfig):
    r"""
    Configuration of [`FR3ETrainer`]: every parameter of [`~trl.GRPOConfig`], and those of FR3E.

    `num_generations` keeps its meaning, the training rows of a prompt. Of these G rows, `num_base_trajectories` are
    sampled from the prompt, and `num_rollouts` from each of `num_anchors` positions at which these branch. The defaults
    are what won at equal generated tokens; [`~FR3EConfig.paper`] has those of the paper.

    Parameters:
        > Parameters that control where to explore

        num_anchors (`int`, *optional*):
            Anchors per prompt: the positions from which new rollouts branch. If `None`, as many as there are rows
            beside the base trajectories: a single rollout for each. Without a prior (`value_prior_strength=0`) a state
            needs more than one to compare: then the largest up to 4 that leaves every state, the prompt too, 4
            rollouts, else the largest that leaves 2. `0` turns exploration off: the trainer is then
            [`~trl.GRPOTrainer`].
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
        base_selection (`str`, *optional*, defaults to `"all"`):
            Which base trajectories are explored: `"all"`, with the anchors shared out evenly, the odd ones to the
            better-scored; `"mixed"`, one of the best-scored and one of the worst-scored when the scores differ and one
            at random when they do not; `"best"`; `"worst"`; `"random"`.

        > Parameters that control the rollouts

        reuse_base (`bool`, *optional*, defaults to `True`):
            Whether the base trajectories are also the rollouts of the prompt. They are samples of the same
            distribution; `False` throws them away after the anchors were found and samples the prompt again.
        num_base_trajectories (`int`, *optional*):
            Base trajectories per prompt. If `None` and `num_anchors` is chosen too, one for every 4 rows; if `None`
            and `num_anchors` is set, or without a prior, as many as each anchor has rollouts, G / (num_anchors + 1).
            With `reuse_base=False`, 4 if `None`.
        explore_temperature_scale (`float`, *optional*, defaults to `1.0`):
            Factor on `temperature` when sampling from anchors. Where it is not 1, the importance ratio is taken
            against the distribution that was sampled from.

        > Parameters that control the advantages

        modulation (`str`, *optional*, defaults to `"none"`):
            How the advantages of a state are scaled by the move of its value against the state before it:
            `"none"`; `"exp"`, the paper's, by exp(-(V(S_j) - V(S_{j-1}))); `"sharpened"`, the form of the authors'
            released code.
        modulation_clip (`float`, *optional*, defaults to `5.0`):
            Bound on the absolute value of the exponent in `modulation="exp"`.
        reject_degenerate_states (`bool`, *optional*):
            Whether the rows of a state whose rewards are all equal leave the loss, numerator and denominator both.
            If `None`, `True` when exploring and `False` when `num_anchors=0`; setting `True` there gives GRPO with
            rejection.
        value_prior_strength (`float`, *optional*):
            Weight κ, in rollouts, of a prior in the baseline of each row: the value of the state before it, and for
            the prompt the mean over the batch's other prompts. `0` uses the plain mean of the state's rewards, as the
            paper does. If `None`, `4.0` when exploring, and `0` when `num_anchors=0` or `scale_rewards="group"`.
        negative_advantage_scale (`float`, *optional*):
            Factor on negative advantages. Below 1, what failed is pushed down less than what succeeded is pushed up.
            With rewards of 0 and 1 a state's expected gradient keeps its direction. If `None`, `0.5` when exploring,
            and `1` when `num_anchors=0`.

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
            "help": "Anchors per prompt: the positions from which new rollouts branch. If `None`, as many as there "
            "are rows beside the base trajectories; with `value_prior_strength=0`, the largest up to 4 that leaves "
            "every state 4 rollouts, else the largest that leaves 2. `0` turns exploration off: the trainer is then "
            "`GRPOTrainer`."
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
        default="all",
        metadata={
            "help": "Which base trajectories are explored: all, one of the best-scored and one of the worst-scored "
            "('mixed'), one of the best, one of the worst, or one at random.",
            "choices": ["all", "mixed", "best", "worst", "random"],
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
            "help": "Base trajectories per prompt. If `None` and `num_anchors` is chosen too, one for every 4 rows; "
            "else as many as each anchor has rollouts, and 4 with `reuse_base=False`."
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
        default="none",
        metadata={
            "help": "How the advantages of a state are scaled by the move of its value against the state before it: "
            "not at all, exp(-(V(S_j) - V(S_{j-1}))) ('exp'), or the form of the authors' released code ('sharpened').",
            "choices": ["none", "exp", "sharpened"],
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
    value_prior_strength: float | None = field(
        default=None,
        metadata={
            "help": "Weight, in rollouts, of a prior in the baseline of each row: the value of the state before it, "
            "and for the prompt the mean over the batch's other prompts. `0` uses the plain mean of the state's "
            "rewards. If `None`, 4 when exploring, and 0 when `num_anchors=0` or `scale_rewards='group'`."
        },
    )
    negative_advantage_scale: float | None = field(
        default=None,
        metadata={
            "help": "Factor on negative advantages. Below 1, what failed is pushed down less than what succeeded is "
            "pushed up. If `None`, 0.5 when exploring, and 1 when `num_anchors=0`."
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
        """Rollouts per anchor, M: G / (K + 1), or of the rows that base trajectories leave."""
        if not self.num_anchors or not self.reuse_base or self.num_base_trajectories is None:
            return self.num_generations // self.num_states
        return (self.num_generations - self.num_base_trajectories) // self.num_anchors

    @property
    def num_bases(self) -> int:
        """Base trajectories per prompt."""
        return self.num_rollouts if self.num_base_trajectories is None else self.num_base_trajectories

    @property
    def is_plain_grpo(self) -> bool:
        """Whether nothing of FR3E is on, so that training is left to `GRPOTrainer` altogether."""
        return (
            self.num_anchors == 0
            and not self.reject_degenerate_states
            and self.value_prior_strength == 0
            and self.negative_advantage_scale == 1
        )

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
        for name in ("anchor_score", "base_selection", "modulation", "refill_leftovers"):
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
        if self.negative_advantage_scale is None:
            self.negative_advantage_scale = 1.0 if self.num_anchors == 0 else NEGATIVE_SCALE
        _require(self, "negative_advantage_scale", self.negative_advantage_scale >= 0, "0 or more, for example 0.5")
        _require(self, "max_refills", self.max_refills >= 0, "0 or more, for example 2")
        _require(self, "vllm_request_timeout", self.vllm_request_timeout > 0, "above 0, for example 1800")
        if self.value_prior_strength is None:
            has_prior = self.num_anchors != 0 and self.scale_rewards not in ("group", True)
            self.value_prior_strength = PRIOR_STRENGTH if has_prior else 0.0
        _require(self, "value_prior_strength", self.value_prior_strength >= 0, "0 or more, for example 4.0")
        self._share_out_rows()
        if self.reject_degenerate_states is None:
            self.reject_degenerate_states = self.num_anchors != 0
        _require(
            self,
            "max_refills",
            self.max_refills == 0 or self.reject_degenerate_states,
            "0 with reject_degenerate_states=False, which leaves nothing to refill; set reject_degenerate_states=True",
        )

    def _share_out_rows(self) -> None:
        """Find how many base trajectories and anchors a prompt has, and check that they fit its rows."""
        # A single rollout has no baseline of its own: it takes a prior to learn anything from it
        min_rollouts = 1 if self.value_prior_strength else 2
        if not self.reuse_base and self.num_base_trajectories is None:
            self.num_base_trajectories = 4
        num_bases = self.num_base_trajectories
        highest = self.num_generations - 1 if self.reuse_base and self.num_anchors != 0 else math.inf
        _require(
            self,
            "num_base_trajectories",
            num_bases is None or 1 <= num_bases <= highest,
            f"None, or at least 1 and below num_generations={self.num_generations}, which leaves rows to branch",
        )
        if self.reuse_base and self.num_anchors is None and self.value_prior_strength:
            if num_bases is None:
                num_bases = self.num_base_trajectories = math.ceil(self.num_generations / (ANCHORS_PER_BASE + 1))
            self.num_anchors = self.num_generations - num_bases
        if self.num_anchors is None:
            self.num_anchors = _default_num_anchors(self.num_generations)
        if self.num_anchors != 0:
            fixed = num_bases if self.reuse_base else None
            _require_whole_states(self.num_generations, self.num_anchors, fixed, min_rollouts)

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
        if self.scale_rewards == "group" and self.value_prior_strength:
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


def _require_whole_states(num_generations: int, num_anchors: int, num_bases: int | None, min_rollouts: int) -> None:
    """Raise a `ValueError` unless all anchors get as many rollouts, the prompt too if `num_bases` is `None`."""

    def fits(rows: int, anchors: int) -> bool:
        states, rest = (anchors + 1, rows) if num_bases is None else (anchors, rows - num_bases)
        return anchors > 0 and rest % states == 0 and rest // states >= min_rollouts

    if fits(num_generations, num_anchors):
        return
    working = [str(anchors) for anchors in range(1, num_generations) if fits(num_generations, anchors)]
    among = "num_anchors + 1 states" if num_bases is None else "num_anchors states beside num_base_trajectories"
    given = "" if num_bases is None else f" and num_base_trajectories={num_bases}"
    message = (
        f"num_anchors={num_anchors} does not fit num_generations={num_generations}{given}: the rows of a prompt must "
        f"divide evenly into {among} of at least {min_rollouts} rollouts. With num_generations={num_generations}"
        f"{given}, num_anchors can be {', '.join(['0 (plain GRPO)', *working])}."
    )
    if num_anchors > 0:
        sizes = [str(rows) for rows in range(1, num_generations + 8 * num_anchors + 8) if fits(rows, num_anchors)]
        message += f" With num_anchors={num_anchors}, num_generations can be {', '.join(sizes[:4])} and so on."
    raise ValueError(message)


def _sized(settings: dict[str, Any]) -> dict[str, Any]:
    """Accumulate gradients until the generation batch holds whole groups, unless the batch is already sized."""
    if not {"gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"} & settings.keys():
        group, step = settings["num_generations"], settings.get("per_device_train_batch_size", 8)
        settings["gradient_accumulation_steps"] = group // math.gcd(group, step)
    return settings
