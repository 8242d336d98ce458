"""Settings of FR3E, on top of those of GRPO."""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, get_args

from trl import GRPOConfig

from .method.plan import Plan
from .method.shape import Shape, default_num_anchors, share_rows

logger = logging.getLogger(__name__)

# The choices of the paper (arXiv 2507.07017), whatever the defaults have become
PAPER: dict[str, Any] = {
    "num_generations": 16,
    "anchor_score": "entropy",
    "anchor_quantile": None,
    "anchor_threshold": None,
    "anchor_positions": "any",
    "anchor_min_gap": 1,
    "anchor_min_budget": 1,
    "base_selection": "mixed",
    "reuse_base": True,
    "explore_temperature_scale": 1.0,
    "modulation": "exp",
    "credit": "rollout",
    "reject_degenerate_states": True,
    "value_prior_strength": 0.0,
    "value_tracker": False,
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

# What won where nothing was chosen, see docs/results.md: the prior's weight
PRIOR_STRENGTH = 4.0

# The paper's choice of GRPO's settings, where nothing was chosen and there are anchors
PAPER_CLIPPING = 0.28
PAPER_SCALING = "none"

# What GRPO finds wrong only when it computes advantages or a loss, after a batch was explored
GRPO_CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("none", "group", "batch"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}

# Losses for advantages of tokens. "grpo" and "sapo" take the mean over a row's own tokens, in which those of a short
# branch weigh more than those of the prefix that it left
TREE_LOSSES = ("dapo", "bnpo", "dr_grpo", "cispo", "luspo", "vespo")

# What goes with advantages of tokens, taken over trees of completions of one policy
TREE_CHOICES: dict[str, Sequence[Any]] = {
    "loss_type": TREE_LOSSES,
    "importance_sampling_level": ("token",),
    "scale_rewards": ("none",),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "reuse_base": (True,),
    "base_selection": ("all",),
    "modulation": ("none",),
    "explore_temperature_scale": (1,),
}

# What errors call the types of settings
TYPE_NAMES = {int: "an integer", float: "a finite number", str: "a text", bool: "True or False", type(None): "None"}


@dataclass
class FR3EConfig(GRPOConfig):
    r"""
    Configuration of [`FR3ETrainer`]: every parameter of [`~trl.GRPOConfig`], and those of FR3E.

    `num_generations` keeps its meaning, the training rows of a prompt. Of these G rows, `num_base_trajectories` are
    sampled from the prompt, and `num_rollouts` from each of `num_anchors` positions at which these branch. The defaults
    are what won at equal generated tokens; [`~FR3EConfig.paper`] has those of the paper. With `num_anchors=0` they are
    those of [`~trl.GRPOConfig`].

    What each parameter does in full, and what `None` stands for, is its field's `help`: the command line's `--help`
    prints it.

    Parameters:
        > Parameters that control where to explore

        num_anchors (`int`, *optional*):
            Anchors per prompt: the positions from which new rollouts branch.
        anchor_score (`str`, *optional*, defaults to `"entropy"`):
            What makes an anchor: `"entropy"`, `"surprisal"` or `"random"`.
        anchor_quantile (`float`, *optional*):
            Quantile of a trajectory's entropies that anchors are above.
        anchor_threshold (`float` or `"auto"`, *optional*, defaults to `"auto"`):
            Entropy, in nats, that makes the first positions above it anchors; `None` for the highest of a trajectory.
        anchor_positions (`str`, *optional*, defaults to `"any"`):
            Where anchors may be: at `"any"` token that the policy wrote, or at those that begin its `"turns"`.
        anchor_min_gap (`int`, *optional*, defaults to `1`):
            Least distance of two anchors of a trajectory, in tokens.
        anchor_min_budget (`int`, *optional*, defaults to `1`):
            Least budget of an anchor's rollouts, in tokens.
        base_selection (`str`, *optional*, defaults to `"all"`):
            Base trajectories to explore: `"all"`, `"mixed"`, `"best"`, `"worst"` or `"random"`.

        > Parameters that control the rollouts

        reuse_base (`bool`, *optional*, defaults to `True`):
            Whether base trajectories are rollouts of the prompt.
        num_base_trajectories (`int`, *optional*):
            Base trajectories per prompt.
        explore_temperature_scale (`float`, *optional*, defaults to `1.0`):
            Factor on `temperature` at anchors.

        > Parameters that control the advantages

        credit (`str`, *optional*):
            What a token learns from: `"rollout"` or `"tree"`.
        modulation (`str`, *optional*, defaults to `"none"`):
            Factor on the advantages of a state: `"none"`, `"exp"` or `"sharpened"`.
        modulation_clip (`float`, *optional*, defaults to `5.0`):
            Bound on the exponent of `"exp"`.
        reject_degenerate_states (`bool`, *optional*):
            Whether states that teach nothing leave the loss.
        value_prior_strength (`float`, *optional*):
            Weight of the prior in the baseline of each row, in rollouts.
        value_tracker (`bool`, *optional*, defaults to `False`):
            Whether the prior of a prompt remembers the steps before.
        negative_advantage_scale (`float`, *optional*, defaults to `1.0`):
            Factor on negative advantages.

        > Parameters that control the refill of a batch ("dynamic sampling")

        max_refills (`int`, *optional*, defaults to `0`):
            How many times in a step further prompts are drawn.

        > Parameters that control the update

        share_prefixes (`bool`, *optional*):
            Whether what rows have in common is forwarded once.

        > Parameters that control vLLM, beside those of `GRPOConfig`

        vllm_adapter_sync (`bool`, *optional*):
            Whether a server gets the LoRA adapter alone.
        vllm_adapter_dir (`str`, *optional*):
            Directory for that.
        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds for a server's answer.

        > Parameters for tools and environments

        tool_timeout (`float`, *optional*):
            Seconds for a tool's answer.
        replay_mismatch (`str`, *optional*, defaults to `"raise"`):
            What follows when an environment answers otherwise when it is asked again: `"raise"` or `"skip"`.

        > Parameters that control what is logged

        log_trees (`int`, *optional*):
            Steps from one whose trees are logged to the next.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`] while exploring:
    > - `epsilon_high`: Defaults to `0.28` instead of `epsilon`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`.
    """

    # Where to explore

    num_anchors: int | None = field(
        default=None,
        metadata={
            "help": "Anchors per prompt: the positions from which new rollouts branch. If `None`, as many as there are "
            "rows beside the base trajectories: a single rollout for each. Without a prior (`value_prior_strength=0`) "
            "a state needs more than one to compare: then the largest up to 4 that leaves every state, the prompt too, "
            "4 rollouts, else the largest that leaves 2. `0` turns exploration off: the trainer is then `GRPOTrainer`."
        },
    )
    anchor_score: str = field(
        default="entropy",
        metadata={
            "help": "What makes a position an anchor: the 'entropy' of the policy's next-token distribution; the "
            "'surprisal', minus the log-probability of the token that was sampled; 'random', a control.",
            "choices": ["entropy", "surprisal", "random"],
        },
    )
    anchor_quantile: float | None = field(
        default=None,
        metadata={
            "help": "Only positions whose entropy is above this quantile of their trajectory's entropies may be "
            "anchors, for example 0.75. If `None`, all may."
        },
    )
    anchor_threshold: float | str | None = field(
        default="auto",
        metadata={
            "help": "The first positions of a trajectory whose entropy is above this many nats become anchors, as many "
            "as it gets, for example 0.3. A stopping rule, which does not look at what follows: with it "
            "`credit='tree'` is unbiased, and branches are generated while their base trajectory is. With 'auto' it "
            "is the threshold at which half of the last steps' base trajectories have all their anchors; where "
            "something else than the entropy of any position decides, or with `credit='rollout'`, it is `None`. If "
            "`None` ('none' on a command line), the positions with the highest scores are anchors."
        },
    )
    anchor_positions: str = field(
        default="any",
        metadata={
            "choices": ["any", "turns"],
            "help": "Where anchors may be: 'any' token that the policy wrote, or the first token of each of its "
            "'turns' but the first, after the answers of tools. 'turns' needs tools or environments.",
        },
    )
    anchor_min_gap: int = field(
        default=1,
        metadata={
            "help": "Least distance in tokens between two anchors of a trajectory. With 1 any two positions may be "
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
            "help": "Which base trajectories are explored: 'all', with the anchors shared out evenly, the odd ones to "
            "the first; 'mixed', one of the best-scored and one of the worst-scored when the scores differ and "
            "one at random when they do not; 'best'; 'worst'; 'random'.",
            "choices": ["all", "mixed", "best", "worst", "random"],
        },
    )

    # The rollouts

    reuse_base: bool = field(
        default=True,
        metadata={
            "help": "Whether the base trajectories are also the rollouts of the prompt. They are samples of the same "
            "distribution; `False` throws them away after the anchors were found and samples the prompt again."
        },
    )
    num_base_trajectories: int | None = field(
        default=None,
        metadata={
            "help": "Base trajectories per prompt. If `None` and `num_anchors` is chosen too, one for every 4 rows; if "
            "`None` and `num_anchors` is set, or without a prior, as many as each anchor has rollouts, "
            "`num_generations / (num_anchors + 1)`. With `reuse_base=False`, 4 if `None`."
        },
    )
    explore_temperature_scale: float = field(
        default=1.0,
        metadata={
            "help": "Factor on `temperature` when sampling from anchors. Where it is not 1, the importance ratio is "
            "taken against the distribution that was sampled from."
        },
    )

    # The advantages

    credit: str | None = field(
        default=None,
        metadata={
            "help": "What a token learns from: 'rollout', the outcome of the rollout that sampled it, as in the paper; "
            "'tree', the outcomes of all rollouts that pass through it. 'tree' takes the losses 'dapo', 'bnpo', "
            "'dr_grpo', 'cispo', 'luspo' and 'vespo', `importance_sampling_level='token'`, `reuse_base=True`, "
            "`base_selection='all'`, `modulation='none'`, `explore_temperature_scale=1`, `scale_rewards='none'` and "
            "`multi_objective_aggregation='sum_then_normalize'`; a base trajectory with fewer anchors than it may have "
            "then stands for the rollouts that it lacks, and nothing is sampled in their place. If `None`, 'tree' "
            "where all of this is so, and 'rollout' otherwise.",
            "choices": ["rollout", "tree"],
        },
    )
    modulation: str = field(
        default="none",
        metadata={
            "help": "How the advantages of a state are scaled by the move of its value against the state before it: "
            "'none'; 'exp', the paper's, by exp(-(V(S_j) - V(S_{j-1}))); 'sharpened', the form of the authors' "
            "released code.",
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
            "help": "Whether the rows of a state that teaches nothing leave the loss, numerator and denominator both: "
            "without a prior, of one whose rewards are all equal. If `None`, `True` when exploring and `False` when "
            "`num_anchors=0`; setting `True` there gives GRPO with rejection."
        },
    )
    value_prior_strength: float | None = field(
        default=None,
        metadata={
            "help": "Weight, in rollouts, of a prior in the baseline of each row: the value of the state before it, "
            "and for the prompt the mean over the batch's other prompts, or where rewards are normalised over each "
            "prompt's rows, 0. 0 uses the plain mean of the state's rewards, as the paper does. If `None`, 4 when "
            "exploring, and 0 when `num_anchors=0`, or with `scale_rewards='group'` if the rows can be shared out to "
            "states of several; with `value_tracker`, what past steps say is best."
        },
    )
    value_tracker: bool = field(
        default=False,
        metadata={
            "help": "Whether the prior of a prompt remembers the steps before: the mean value of their prompts, beside "
            "the batch's other prompts, and what the prompt itself was worth when it came before. With few prompts a "
            "batch, or a training set of which the run makes several epochs, it says more of a prompt than the batch "
            "does. The memory is in the checkpoint, and takes 16 bytes for each prompt of the training set."
        },
    )
    negative_advantage_scale: float = field(
        default=1.0,
        metadata={
            "help": "Factor on negative advantages. Below 1, what failed is pushed down less than what succeeded is "
            "pushed up. With rewards of 0 and 1 a state's expected gradient keeps its direction; with graded rewards "
            "it does not, and risky answers win over better ones."
        },
    )

    # The refill of a batch

    max_refills: int = field(
        default=0,
        metadata={
            "help": "How many times in a step further prompts are drawn from the training set, as many as a batch has "
            "at most, to replace rejected rows. Informative rows that a batch has no place for replace rejected ones "
            "of the next step. An epoch then is still one pass over the training set, which takes fewer steps than "
            "the data loader counts; the number of steps stays."
        },
    )

    # The update

    share_prefixes: bool | None = field(
        default=None,
        metadata={
            "help": "Whether tokens that rows of a micro-batch have in common, prompts and the prefixes of branches, "
            "are forwarded once, in the loss and wherever log-probs are computed. They are what they were but for "
            "rounding. Rows of a prompt are then kept together in micro-batches. It needs the attention "
            "implementation 'sdpa' or 'eager', and is off, with a warning, where a model cannot have it. If `None`, "
            "`True` when exploring and `False` when `num_anchors=0`; setting `True` there gives it to GRPO."
        },
    )

    # vLLM

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

    # Tools and environments

    tool_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that a tool, or a method of an environment, may take. The policy then reads of an error "
            "in place of an answer. If `None`, any time. A tool that is no coroutine cannot be stopped, and goes on "
            "in its thread; an environment with such a method is not used again."
        },
    )
    replay_mismatch: str = field(
        default="raise",
        metadata={
            "choices": ["raise", "skip"],
            "help": "A rollout that branches off a later turn needs an environment in the state of its prefix, and "
            "one without a method `fork` gets there by the same actions after a reset. What follows if it answers "
            "otherwise: 'raise' an error, or 'skip' the rollout, which then leaves the loss.",
        },
    )

    # What is logged

    log_trees: int | None = field(
        default=None,
        metadata={
            "help": "Steps from one whose trees are logged to the next: into `trees` in `output_dir`, with a page that "
            "shows them, `trees.html`, which is made at each save and in the end, and logged to Weights & Biases or "
            "trackio too where `report_to` names them. `fr3e tree` makes it at any time. If `None`, none are logged."
        },
    )

    # GRPO's own, where the paper has others

    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "Upper-bound epsilon value for clipping. If `None`, 0.28 when exploring, as in the paper, which "
            "clips asymmetrically ('Clip-Higher'), and the same as `epsilon` when `num_anchors=0`. To clip "
            "symmetrically when exploring, set it to the value of `epsilon`."
        },
    )
    scale_rewards: str | None = field(
        default=None,
        metadata={
            "help": "Scaling of the advantages: 'none'; 'group' to divide by the standard deviation of the state's "
            "rewards, or with a prior to normalise rewards over the prompt's rows before they are compared; or 'batch' "
            "to divide by that of the whole batch's. `True` is 'group', `False` is 'none'. If `None`, 'none' with "
            "anchors or a prior, as in the paper, and 'group', as in GRPO, without."
        },
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={
            "help": "How several rewards become one: 'sum_then_normalize', their weighted sum; 'normalize_then_sum', "
            "the weighted sum of each one's distance from its mean over the prompt's rows, in standard deviations, "
            "divided by the standard deviation over the batch, as in GDPO. The rows of a prompt are all of its tree's, "
            "branches too, and what they give takes the reward's place in values, modulation and advantages: 0 is then "
            "the mean of a prompt's rows, and its prior. `scale_rewards` is not looked at, as in TRL.",
            "choices": ["sum_then_normalize", "normalize_then_sum"],
        },
    )

    def __post_init__(self):
        self._resolve()
        if self.epsilon_high is None and self.num_anchors:
            self.epsilon_high = PAPER_CLIPPING
        super().__post_init__()
        self._check_combinations()

    @property
    def num_states(self) -> int:
        """States per prompt, K + 1: the prompt itself, and its anchors."""
        return self._shape.num_anchors + 1

    @property
    def num_rollouts(self) -> int:
        """Rollouts per anchor, M: G / (K + 1), or of the rows that base trajectories leave."""
        return self._shape.num_rollouts

    @property
    def plan(self) -> Plan:
        """The settings as the method takes them."""
        normalization = "none"
        if self.normalizes_rewards:
            normalization = "sum" if self.multi_objective_aggregation == "sum_then_normalize" else "each"
        return Plan(
            num_rows=self.num_generations,
            shape=self._shape,
            temperature=self.temperature,
            credit=self.credit or "rollout",
            anchor_score=self.anchor_score,
            anchor_threshold=self.anchor_threshold,
            anchor_min_gap=self.anchor_min_gap,
            base_selection=self.base_selection,
            reuse_base=self.reuse_base,
            prior_strength=self.value_prior_strength,
            modulation=self.modulation,
            scale="none" if self.normalizes_rewards else self.scale_rewards or "none",
            normalization=normalization,
            reward_weights=self.reward_weights,
            reject=bool(self.reject_degenerate_states),
            negative_scale=self.negative_advantage_scale,
        )

    @property
    def num_bases(self) -> int:
        """Base trajectories per prompt."""
        return self._shape.num_bases

    @property
    def _shape(self) -> Shape:
        return share_rows(
            self.num_generations,
            self.num_anchors,
            self.num_base_trajectories,
            self.reuse_base,
            has_prior=self.has_prior,
        )

    @property
    def has_prior(self) -> bool:
        """Whether baselines are shrunk towards a prior. With a memory its weight may be left to that, as `None`."""
        return self.value_prior_strength != 0

    @property
    def normalizes_rewards(self) -> bool:
        """Whether rewards are compared as normalised over each prompt's rows, whose mean is then the prompt's prior."""
        by_group = self.scale_rewards in ("group", True) and self.has_prior
        return self.multi_objective_aggregation == "normalize_then_sum" or by_group

    @property
    def is_plain_grpo(self) -> bool:
        """Whether nothing of FR3E is on, so that training is left to `GRPOTrainer` altogether."""
        return (
            self.num_anchors == 0
            and not self.reject_degenerate_states
            and not self.has_prior
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
    def from_grpo(cls, args: GRPOConfig) -> Self:
        """
        A `GRPOConfig` with FR3E's settings added, at their defaults.

        No setting of GRPO is changed, since one that was set to its default cannot be told from one that was not set.
        A log line says what was added, and in what an `FR3EConfig` would differ. With `scale_rewards="group"`,
        `GRPOConfig`'s default, there is no prior where the rows can be shared out without one.
        """
        # Not built anew from the fields: `GRPOConfig.__post_init__` refuses the values that it has itself filled in.
        config = copy.copy(args)
        config.__class__ = cls
        for name in _own_fields():
            setattr(config, name, cls.__dataclass_fields__[name].default)
        config._resolve()
        config._check_combinations()
        logger.warning(
            "Added to the GRPOConfig: %s. Kept of it: epsilon_high=%r and scale_rewards=%r, for which FR3EConfig has "
            "%r and %r when exploring%s. Use FR3EConfig to set them.",
            ", ".join(f"{name}={getattr(config, name)!r}" for name in _own_fields()),
            config.epsilon_high,
            config.scale_rewards,
            PAPER_CLIPPING,
            PAPER_SCALING,
            _lost_by_scaling(config),
        )
        return config

    def _resolve(self) -> None:
        """Check each of FR3E's fields, and fill in those that were left to be chosen."""
        for name in _own_fields():
            field_of = self.__dataclass_fields__[name]
            choices = field_of.metadata.get("choices")
            if choices is not None and (getattr(self, name), field_of.default) != (None, None):
                _require_choice(self, name, choices)
        _require_type(self, "num_generations", int, "for example 8")
        for name in _own_fields():
            default = self.__dataclass_fields__[name].default
            # Not its field's type, which `HfArgumentParser` changes
            _require_type(self, name, FR3EConfig.__annotations__[name], f"by default {default!r}")
        _require(self, "anchor_min_gap", self.anchor_min_gap >= 1, "at least 1")
        _require(self, "anchor_min_budget", self.anchor_min_budget >= 1, "at least 1")
        _require(
            self,
            "anchor_quantile",
            self.anchor_quantile is None or 0 <= self.anchor_quantile < 1,
            "None or at least 0 and below 1, for example 0.75",
        )
        takes_threshold = self.anchor_score == "entropy" and self.anchor_quantile is None
        if isinstance(self.anchor_threshold, str):
            self.anchor_threshold = _threshold_of(self.anchor_threshold)
        _require(
            self,
            "anchor_threshold",
            self.anchor_threshold in (None, "auto")
            or (isinstance(self.anchor_threshold, int | float) and self.anchor_threshold >= 0 and takes_threshold),
            "'auto', None, or 0 or more with anchor_score='entropy' and anchor_quantile=None (they are "
            f"{self.anchor_score!r} and {self.anchor_quantile}), for example 0.3",
        )
        _require(self, "explore_temperature_scale", self.explore_temperature_scale > 0, "above 0, for example 1.0")
        _require(self, "modulation_clip", self.modulation_clip > 0, "above 0, for example 5.0")
        _require(self, "negative_advantage_scale", self.negative_advantage_scale >= 0, "0 or more, for example 1.0")
        _require(self, "max_refills", self.max_refills >= 0, "0 or more, for example 2")
        _require(
            self, "tool_timeout", self.tool_timeout is None or self.tool_timeout > 0, "None or above 0, for example 60"
        )
        _require(self, "log_trees", self.log_trees is None or self.log_trees >= 1, "None or at least 1, for example 10")
        _require(self, "vllm_request_timeout", self.vllm_request_timeout > 0, "above 0, for example 1800")
        if self.value_prior_strength is None and not self.value_tracker:
            self.value_prior_strength = PRIOR_STRENGTH if self.num_anchors != 0 and self._takes_prior() else 0.0
        strength = self.value_prior_strength
        _require(self, "value_prior_strength", strength is None or strength >= 0, "0 or more, for example 4.0")
        _require(
            self,
            "value_tracker",
            self.has_prior or not self.value_tracker,
            "False with value_prior_strength=0, which takes no prior; leave value_prior_strength unset",
        )
        _require(
            self,
            "value_tracker",
            not (self.value_tracker and self.normalizes_rewards),
            "False with multi_objective_aggregation='normalize_then_sum' or scale_rewards='group', by which a prompt's "
            "rewards have the mean 0 in every step, and nothing is left to remember",
        )
        self.num_base_trajectories, self.num_anchors, _ = self._shape
        if self.scale_rewards is None:
            self.scale_rewards = PAPER_SCALING if self.num_anchors or self.has_prior else "group"
        if self.reject_degenerate_states is None:
            self.reject_degenerate_states = self.num_anchors != 0
        if self.share_prefixes is None:
            self.share_prefixes = self.num_anchors != 0
        if self.credit is None:
            takes_tree = all(getattr(self, name) in choices for name, choices in TREE_CHOICES.items())
            self.credit = "tree" if self.num_anchors != 0 and takes_tree else "rollout"
        if self.anchor_threshold == "auto" and not (
            self.credit == "tree" and takes_threshold and self.anchor_positions == "any"
        ):
            self.anchor_threshold = None
        _require(
            self,
            "max_refills",
            self.max_refills == 0 or self.reject_degenerate_states,
            "0 with reject_degenerate_states=False, which leaves nothing to refill; set reject_degenerate_states=True",
        )

    def _takes_prior(self) -> bool:
        """Whether exploration has a prior where nothing was chosen."""
        scales_states = self.scale_rewards in ("group", True)
        return (
            not scales_states
            or self.multi_objective_aggregation == "normalize_then_sum"
            or (self.num_anchors is None and default_num_anchors(self.num_generations) is None)
        )

    def _check_combinations(self) -> None:
        """Check what FR3E takes of GRPO's fields, once these have their final values."""
        if self.credit == "tree":
            self._check_tree_credit()
        if self.is_plain_grpo:
            return
        _require_type(self, "max_completion_length", int, "for example 512")
        if self.max_completion_length < self.anchor_min_budget:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} is the budget that anchors and their rollouts "
                f"share: it must be at least anchor_min_budget={self.anchor_min_budget}, for example 512."
            )
        for name, choices in GRPO_CHOICES.items():
            _require_choice(self, name, choices)
        _require(self, "temperature", 0 < self.temperature < math.inf, "above 0 and finite, for example 1.0")
        _require(self, "top_p", 0 < self.top_p <= 1, "above 0 and at most 1, for example 1.0, which cuts nothing off")
        _require(
            self,
            "reward_weights",
            all(map(math.isfinite, self.reward_weights or [])),
            "None or finite numbers, one for each reward function, for example 1.0",
        )

    def _check_tree_credit(self) -> None:
        """Refuse what does not go with it."""
        remedy = ", or set credit='rollout'"
        _require(self, "num_anchors", self.num_anchors != 0, "above 0 with credit='tree', for example None" + remedy)
        for name, choices in TREE_CHOICES.items():
            allowed = f"{' or '.join(map(repr, choices))} with credit='tree'"
            _require(self, name, getattr(self, name) in choices, allowed + remedy)


def _own_fields() -> list[str]:
    return [name for name in FR3EConfig.__dataclass_fields__ if name not in GRPOConfig.__dataclass_fields__]


def _require(config: FR3EConfig, name: str, condition: bool, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name}={getattr(config, name)!r} is not allowed: it must be {allowed}.")


def _require_choice(config: FR3EConfig, name: str, choices: Sequence[str]) -> None:
    _require(config, name, getattr(config, name) in choices, f"one of {', '.join(map(repr, choices))}")


def _require_type(config: FR3EConfig, name: str, annotation: Any, example: str) -> None:
    """Raise a `ValueError` unless a setting is what it is annotated with: no fraction for a count, nothing infinite."""
    value = getattr(config, name)
    types = get_args(annotation) or (annotation,)
    is_of_type = isinstance(value, (*types, int) if float in types else types)
    is_bool = isinstance(value, bool)  # which Python takes for an integer
    is_finite = not isinstance(value, float) or math.isfinite(value)
    allowed = f"{' or '.join(TYPE_NAMES[t] for t in types)}, {example}"
    _require(config, name, is_of_type and is_finite and (bool in types or not is_bool), allowed)


def _threshold_of(text: str) -> float | str | None:
    """A threshold as a command line gives it."""
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _lost_by_scaling(config: FR3EConfig) -> str:
    """What comes of GRPO's scaling, for a sentence's end."""
    return ", and with that a prior (value_prior_strength)" if not config.has_prior else ""


def _sized(settings: dict[str, Any]) -> dict[str, Any]:
    """Accumulate gradients until the generation batch holds whole groups, unless the batch is already sized."""
    if not {"gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"} & settings.keys():
        group, step = settings["num_generations"], settings.get("per_device_train_batch_size", 8)
        settings["gradient_accumulation_steps"] = group // math.gcd(group, step)
    return settings
