"""Settings of FR3E, on top of those of GRPO."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

from trl import GRPOConfig

from .method.anchors import ANCHOR_RULES
from .method.credit import CREDIT_RULES
from .method.plan import Plan
from .method.shape import Shape, default_num_anchors, share_rows

logger = logging.getLogger(__name__)

# The choices of the paper (arXiv 2507.07017), whatever the defaults have become
PAPER: dict[str, Any] = {
    "num_generations": 16,
    "anchor_score": "entropy",
    "anchor_threshold": None,
    "anchor_min_gap": 1,
    "base_selection": "mixed",
    "reuse_base": True,
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

# A recipe takes one of these by the key `preset`
PRESETS = {"paper": PAPER, "released": RELEASED}

# The default weight of the prior. It won at equal generated tokens, see docs/results.md
PRIOR_STRENGTH = 4.0

# CISPO cuts importance weights at `epsilon_high` itself, not at 1 more. ScaleRL's choice (arXiv 2510.13786), and TRL's
CISPO_CLIPPING = 5.0

# GRPO looks at these only when it computes advantages or a loss, after a batch was explored
GRPO_CHOICES = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("none", "group", "batch"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}

# The default credit rule is the first of these whose needs the other settings meet
CREDIT_DEFAULTS = ("tree", "rollout")


@dataclass
class FR3EConfig(GRPOConfig):
    r"""
    Configuration of [`FR3ETrainer`]: every parameter of [`~trl.GRPOConfig`], and those of FR3E.

    `num_generations` keeps its meaning, the training rows of a prompt. Of these G rows, `num_base_trajectories` are
    sampled from the prompt. The others branch from `num_anchors` positions. The defaults won at equal generated tokens.
    [`~FR3EConfig.paper`] has those of the paper. With `num_anchors=0` the defaults are those of [`~trl.GRPOConfig`].

    Each field's `help`, which `--help` prints, says what it does and what `None` stands for.

    Parameters:
        > How rows are shared out

        num_anchors (`int`, *optional*): anchors per prompt.
        num_base_trajectories (`int`, *optional*): base trajectories per prompt.

        > Where branches leave

        anchor_threshold (`float` or `"auto"`, *optional*, defaults to `"auto"`): least entropy of an anchor, in nats.
        anchor_min_gap (`int`, *optional*, defaults to `1`): least distance of two anchors, in tokens.

        > Advantages

        credit (`str`, *optional*): the rollouts that a token learns from, `"tree"` or `"rollout"`.
        value_prior_strength (`float`, *optional*): weight of the prior in a baseline, in rollouts.
        value_tracker (`bool`, *optional*): whether the prior remembers past steps.
        negative_advantage_scale (`float`, *optional*, defaults to `1.0`): factor on negative advantages.
        reject_degenerate_states (`bool`, *optional*): whether states that teach nothing leave the loss.
        max_refills (`int`, *optional*, defaults to `0`): times that a step draws prompts to replace rejected rows.

        > Update

        share_prefixes (`bool`, *optional*): whether common prefixes are forwarded once.

        > vLLM

        vllm_adapter_sync (`bool`, *optional*): whether a server gets the LoRA adapter alone.
        vllm_adapter_dir (`str`, *optional*): directory for the adapter.
        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`): seconds for a server's answer.

        > Tools and environments

        tool_timeout (`float`, *optional*): seconds for a tool's answer.
        replay_mismatch (`str`, *optional*, defaults to `"raise"`): what happens when a replay differs.

        > Logs

        log_trees (`int`, *optional*): steps from one log of trees to the next.

        > Only the presets need these

        anchor_score (`str`, *optional*, defaults to `"entropy"`): what ranks positions.
        base_selection (`str`, *optional*, defaults to `"all"`): base trajectories that get anchors.
        reuse_base (`bool`, *optional*, defaults to `True`): whether base trajectories are training rows.
        modulation (`str`, *optional*, defaults to `"none"`): factor on the advantages of a state.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`] while exploring:
    > - `epsilon_high`: Defaults to `0.28` instead of `epsilon`, and with `loss_type="cispo"` to `5.0`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`.
    """

    # How rows are shared out

    num_anchors: int | None = field(
        default=None,
        metadata={
            "help": "Anchors per prompt: the positions from which new rollouts branch. `None`: one for each row that "
            "is not a base trajectory. Without a prior (`value_prior_strength=0`) an anchor needs several rollouts to "
            "compare. `None` is then the largest number up to 4 that leaves 4 rollouts to each anchor and the prompt. "
            "If there is none, it is the largest that leaves 2. `0` turns exploration off: the trainer is then "
            "`GRPOTrainer`."
        },
    )
    num_base_trajectories: int | None = field(
        default=None,
        metadata={
            "help": "Base trajectories per prompt: completions that are sampled from the prompt itself. `None`: one "
            "for every 4 rows. If you set `num_anchors`, or there is no prior, `None` is "
            "`num_generations / (num_anchors + 1)`. With `reuse_base=False` it is 4."
        },
    )

    # Where branches leave

    anchor_threshold: float | str | None = field(
        default="auto",
        metadata={
            "help": "Tokens whose entropy reaches this many nats become anchors, for example 0.3. The first ones "
            "count, until the trajectory has its number. The choice does not look at later tokens, so "
            "`credit='tree'` is unbiased. Branches are then generated together with their base trajectory. 'auto' "
            "adapts the threshold: "
            "half of the last steps' base trajectories have all their anchors above it. 'auto' needs "
            "`credit='tree'` and `anchor_score='entropy'`, and is `None` without them. `None` ('none' on a command "
            "line) takes the positions with the highest scores."
        },
    )
    anchor_min_gap: int = field(
        default=1,
        metadata={"help": "Least distance between two anchors of a trajectory, in tokens. 1 allows any two positions."},
    )
    # Advantages

    credit: str | None = field(
        default=None,
        metadata={
            "help": "The rollouts that a token learns from. 'tree': all rollouts that pass through the token. "
            "'rollout' (preset): the one rollout that sampled it, as in the paper. 'tree' needs anchors, "
            "`loss_type` 'dapo', 'bnpo', 'dr_grpo', 'cispo', 'luspo' or 'vespo', and these values: "
            "`importance_sampling_level='token'`, `scale_rewards='none'`, "
            "`multi_objective_aggregation='sum_then_normalize'`, `reuse_base=True`, `base_selection='all'` and "
            "`modulation='none'`. With 'tree', a base trajectory that lacks anchors is copied into the empty rows. "
            "Nothing is generated for the copies. `None`: 'tree' where the other settings allow it, else 'rollout'.",
            "choices": sorted(CREDIT_RULES),
        },
    )
    value_prior_strength: float | None = field(
        default=None,
        metadata={
            "help": "Weight of the prior in the baseline of each row, in rollouts. The prior of an anchor is the value "
            "of the state before it. The prior of a prompt is the mean over the batch's other prompts. Where rewards "
            "are normalised over each prompt's rows, it is 0. `0` turns the prior off: the baseline is the state's "
            "mean reward, as in the paper. `None`: past steps decide it where there is a `value_tracker`. Else it is 4 "
            "while exploring, and 0 with `num_anchors=0`. It is also 0 with `scale_rewards='group'` if every state can "
            "have several rollouts."
        },
    )
    value_tracker: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the prior of a prompt remembers earlier steps. It then knows the mean of their prompts, "
            "and the prompt's own value from earlier epochs. How much it weighs is estimated, so that it weighs little "
            "where prompts differ in difficulty. The checkpoint holds it: 16 bytes for each prompt of the training "
            "set. `None`: `True` with `credit='tree'`, unless `value_prior_strength` is set."
        },
    )
    negative_advantage_scale: float = field(
        default=1.0,
        metadata={
            "help": "Factor on negative advantages. Below 1, failures are pushed down less than successes are pushed "
            "up. With rewards of 0 and 1, a state's expected gradient keeps its direction. With graded rewards it "
            "does not: risky answers win over better ones."
        },
    )
    reject_degenerate_states: bool | None = field(
        default=None,
        metadata={
            "help": "Whether rows that teach nothing leave the loss, numerator and denominator. Without a prior these "
            "are the rows of a state whose rewards are all equal. `None`: `True` while exploring, `False` with "
            "`num_anchors=0`. `True` with `num_anchors=0` is GRPO with rejection."
        },
    )
    max_refills: int = field(
        default=0,
        metadata={
            "help": "How many times a step draws further prompts to replace rejected rows ('dynamic sampling'). One "
            "draw takes at most as many prompts as a batch has. Informative rows that do not fit replace rejected "
            "rows of the next step. The number of steps stays, but an epoch takes fewer steps than the data loader "
            "counts."
        },
    )

    # Update

    share_prefixes: bool | None = field(
        default=None,
        metadata={
            "help": "Whether tokens that rows of a micro-batch have in common are forwarded once. These are prompts "
            "and the prefixes of branches. Log-probs change by rounding alone. Rows of a prompt stay together in "
            "micro-batches. It needs the attention implementation 'sdpa', 'eager', 'flex_attention' or one of "
            "FlashAttention. Models that cannot share "
            "prefixes turn it off, with a warning. `None`: `True` while exploring, `False` with `num_anchors=0`. "
            "`True` also works for plain GRPO."
        },
    )

    # vLLM

    vllm_adapter_sync: bool | None = field(
        default=None,
        metadata={
            "help": "Whether a vLLM server gets the LoRA adapter alone at each step, through a directory. Otherwise it "
            "gets the whole model with the adapter merged. `None`: for a LoRA policy, if the server was started with "
            "`--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`."
        },
    )
    vllm_adapter_dir: str | None = field(
        default=None,
        metadata={
            "help": "Directory for the adapter. Trainer and server must both see it, and no other run may use it. "
            "`None`: `_vllm_adapter` in `output_dir`."
        },
    )
    vllm_request_timeout: float = field(
        default=1800.0,
        metadata={"help": "Seconds that a vLLM server may take to answer a request. Then the request is sent again."},
    )

    # Tools and environments

    tool_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that a tool, or a method of an environment, may take. After that the policy reads an "
            "error instead of an answer. `None`: no limit. A tool that is no coroutine cannot be stopped and goes on "
            "in its thread. An environment with such a method is not used again."
        },
    )
    replay_mismatch: str = field(
        default="raise",
        metadata={
            "help": "What happens when an environment answers differently in a replay. A branch off a later turn "
            "needs the environment in the state of its prefix. Without a method `_fork`, the environment is reset and "
            "repeats the prefix's actions. If an answer differs, 'raise' ends with an error. 'skip' drops the rollout "
            "from the loss.",
            "choices": ["raise", "skip"],
        },
    )

    # Logs

    log_trees: int | None = field(
        default=None,
        metadata={
            "help": "Steps from one log of trees to the next. Logs go into `trees` in `output_dir`. Each save writes "
            "the page `trees.html`, which shows them. The page also goes to Weights & Biases or trackio if "
            "`report_to` names them. `fr3e tree` makes it at any time. `None`: no logs."
        },
    )

    # Only the presets need these: `paper()`, `released()`, and controls of experiments

    anchor_score: str = field(
        default="entropy",
        metadata={
            "help": "(preset) What makes a position an anchor. 'entropy': that of the policy's next-token "
            "distribution. 'surprisal' (released run): minus the log-probability of the sampled token. 'random': a "
            "control for experiments.",
            "choices": list(ANCHOR_RULES),
        },
    )
    base_selection: str = field(
        default="all",
        metadata={
            "help": "(preset) The base trajectories that get anchors. 'all': every one, with the same number; odd "
            "anchors go to the first. 'mixed' (paper): one of the best-scored and one of the worst-scored. If all "
            "scores are equal, 'mixed' takes one at random.",
            "choices": ["all", "mixed"],
        },
    )
    reuse_base: bool = field(
        default=True,
        metadata={
            "help": "(preset) Whether base trajectories are training rows. `False` (released run) samples the prompt "
            "again after the anchors are found, and drops the base trajectories."
        },
    )
    modulation: str = field(
        default="none",
        metadata={
            "help": "(preset) Factor on the advantages of a state. It follows the change of value from the state "
            "before it. 'exp' (paper): exp(-(V(S_j) - V(S_{j-1}))). 'sharpened' (released run): the form of the "
            "authors' code. 'none': 1.",
            "choices": ["none", "exp", "sharpened"],
        },
    )

    # GRPO's own, with other defaults

    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "Upper epsilon of the clipping. `None`: 0.28 while exploring, as in the paper ('Clip-Higher'). "
            "With `num_anchors=0` it is `epsilon`. To clip symmetrically, set it to the value of `epsilon`."
        },
    )
    scale_rewards: str | None = field(
        default=None,
        metadata={
            "help": "Scaling of the advantages. 'none': no scaling. 'group' divides by the standard deviation of the "
            "state's rewards. With a prior, 'group' normalises rewards over the prompt's rows instead. 'batch' divides "
            "by the standard deviation of the whole batch. `True` is 'group', `False` is 'none'. `None`: 'none' with "
            "anchors or a prior, else 'group' as in GRPO."
        },
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={
            "help": "How several rewards become one. 'sum_then_normalize': their weighted sum. 'normalize_then_sum' "
            "(GDPO): each reward is normalised over the prompt's rows, branches too. The weighted sum is divided by "
            "its standard deviation over the batch. It then takes the reward's place in values, modulation and "
            "advantages. A prompt's prior is then 0, the mean of its rows. `scale_rewards` has no effect, as in TRL.",
            "choices": ["sum_then_normalize", "normalize_then_sum"],
        },
    )

    def __post_init__(self):
        self._settle()
        super().__post_init__()
        self._check_settled()

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
        """Whether baselines are shrunk towards a prior. `None` is a weight that the value tracker estimates."""
        return self.value_prior_strength != 0

    @property
    def normalizes_rewards(self) -> bool:
        """Whether rewards are normalised over each prompt's rows. Their mean, 0, is then the prompt's prior."""
        by_group = self.scale_rewards == "group" and self.has_prior
        return self.multi_objective_aggregation == "normalize_then_sum" or by_group

    @property
    def is_plain_grpo(self) -> bool:
        """Whether nothing of FR3E is on. `GRPOTrainer` then does all of the training."""
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

        No setting of GRPO changes: a default that was set looks like one that was not. A log line says what was added,
        and where an `FR3EConfig` would differ. With `scale_rewards="group"`, the default of `GRPOConfig`, there is no
        prior if every state can have several rollouts.

        Raises:
            TypeError: `args` is no `GRPOConfig`.
            ValueError: A setting is not allowed.
        """
        if not isinstance(args, GRPOConfig):
            raise TypeError(
                f"args is a {type(args).__name__}, which is not allowed: it must be an FR3EConfig or a GRPOConfig, for "
                "example FR3EConfig(output_dir='outputs', num_generations=8)."
            )
        # Not built anew from the fields: `GRPOConfig.__post_init__` refuses the values that it has itself filled in.
        config = copy.copy(args)
        config.__class__ = cls
        for name in _own_fields():
            setattr(config, name, cls.__dataclass_fields__[name].default)
        config._settle()
        config.epsilon_high = args.epsilon_high  # `None` may have been set
        config._check_settled()
        logger.warning(
            "Added to the GRPOConfig: %s. Kept from it: epsilon_high=%r and scale_rewards=%r. An FR3EConfig explores "
            "with %r and %r%s. Use FR3EConfig to set them.",
            ", ".join(f"{name}={getattr(config, name)!r}" for name in _own_fields()),
            config.epsilon_high,
            config.scale_rewards,
            PAPER["epsilon_high"],
            PAPER["scale_rewards"],
            "" if config.has_prior else ", and with that a prior (value_prior_strength)",
        )
        if type(args) is not GRPOConfig:
            logger.warning(
                "The %s is a plain FR3EConfig in the trainer: its attributes stay, and its methods do not. Derive it "
                "from FR3EConfig to keep them.",
                type(args).__name__,
            )
        return config

    def _settle(self) -> None:
        """Check the settings as given, and choose those that were left open."""
        self.anchor_threshold = _read_threshold(self.anchor_threshold)
        if isinstance(self.scale_rewards, bool):  # TRL names them only after what is chosen here
            self.scale_rewards = "group" if self.scale_rewards else "none"
        _check(self, "given")
        for choose in STEPS:
            choose(self)

    def _check_settled(self) -> None:
        """Check how the settings go together, once GRPO's have their final values too."""
        _check(self, "settled")
        if not self.is_plain_grpo:
            _check(self, "active")
        if self.loss_type == "cispo" and self.epsilon_high is not None and self.epsilon_high < 1:
            logger.warning(
                "epsilon_high=%r cuts all importance weights below 1: with loss_type='cispo' it is the greatest weight "
                "itself. TRL and ScaleRL take 5.0.",
                self.epsilon_high,
            )


# Defaults that depend on other settings: one step for each, in the order of STEPS


def choose_prior(config: FR3EConfig) -> None:
    """One while exploring, but none where scaling by the group compares the several rollouts of a state."""
    if config.value_prior_strength is not None or config.value_tracker:
        return
    has_several = config.num_anchors is not None or default_num_anchors(config.num_generations) is not None
    by_group = config.scale_rewards == "group" and config.multi_objective_aggregation != "normalize_then_sum"
    if config.num_anchors == 0 or (by_group and has_several):
        config.value_prior_strength = 0.0


def choose_shape(config: FR3EConfig) -> None:
    """Base trajectories and anchors: see [`share_rows`]."""
    config.num_base_trajectories, config.num_anchors, _ = config._shape


def choose_scaling(config: FR3EConfig) -> None:
    """While exploring, the paper's."""
    if config.scale_rewards is None:
        config.scale_rewards = PAPER["scale_rewards"] if config.num_anchors or config.has_prior else "group"


def choose_clipping(config: FR3EConfig) -> None:
    """While exploring, the paper's."""
    if config.epsilon_high is None and config.num_anchors:
        config.epsilon_high = CISPO_CLIPPING if config.loss_type == "cispo" else PAPER["epsilon_high"]


def choose_rejection(config: FR3EConfig) -> None:
    if config.reject_degenerate_states is None:
        config.reject_degenerate_states = config.num_anchors != 0


def choose_prefix_sharing(config: FR3EConfig) -> None:
    if config.share_prefixes is None:
        config.share_prefixes = config.num_anchors != 0


def choose_credit(config: FR3EConfig) -> None:
    """The first rule that fits."""
    if config.credit is None:
        config.credit = next(name for name in CREDIT_DEFAULTS if _fits(config, name))


def _fits(config: FR3EConfig, credit: str) -> bool:
    rule = CREDIT_RULES[credit]
    has_anchors = config.num_anchors != 0 or not rule.needs_anchors
    return has_anchors and all(getattr(config, name) in values for name, values in rule.requires.items())


def choose_prior_strength(config: FR3EConfig) -> None:
    """A value tracker estimates it under tree credit, where that won. Elsewhere it is 4."""
    is_open = config.value_prior_strength is None
    if config.value_tracker is None:
        config.value_tracker = is_open and config.credit == "tree"
    if is_open and not config.value_tracker:
        config.value_prior_strength = PRIOR_STRENGTH


def choose_threshold(config: FR3EConfig) -> None:
    """`"auto"` stays where the credit rule wants it. Elsewhere the highest scores become anchors."""
    wants_auto = CREDIT_RULES[config.credit or "rollout"].wants_stopping_rule and config.anchor_score == "entropy"
    if config.anchor_threshold == "auto" and not wants_auto:
        config.anchor_threshold = None


# Each step reads what the steps before it chose
STEPS: tuple[Callable[[FR3EConfig], None], ...] = (
    choose_prior,  # first: with a prior an anchor can do with a single rollout
    choose_shape,  # needs the prior. From here on, `num_anchors` says whether there is exploration
    choose_scaling,  # needs the anchors and the prior
    choose_clipping,  # needs the anchors, as the next two do
    choose_rejection,
    choose_prefix_sharing,
    choose_credit,  # needs the anchors and the scaling
    choose_prior_strength,  # needs the credit rule, as the last does
    choose_threshold,
)


# What is allowed


class Kind(NamedTuple):
    """Values that are alike: a test of a value, and what an error calls them."""

    holds: Callable[[Any], bool]
    name: str


class Check(NamedTuple):
    """A line of the table: the setting, what must hold of the settings, what is allowed, and an example that works."""

    name: str
    holds: Callable[[FR3EConfig], bool]
    allowed: str
    example: str = ""


def integer(least: int | None = None, most: float = math.inf) -> Kind:
    """Whole numbers. `True` and `False` are none, though Python takes them for integers."""
    return Kind(
        lambda value: (
            isinstance(value, Integral)
            and not isinstance(value, bool)
            and (least is None or int(value) >= least)
            and int(value) <= most
        ),
        "an integer" + (f" of at least {least}" * (least is not None)) + (f" and at most {most}" * (most < math.inf)),
    )


def number(least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> Kind:
    """Finite numbers within bounds."""
    bounds = [
        *([f"of at least {least:g}"] if least > -math.inf else []),
        *([f"above {above:g}"] if above > -math.inf else []),
        *([f"and at most {most:g}"] if most < math.inf else []),
    ]
    return Kind(
        lambda value: (
            isinstance(value, Real)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and least <= float(value) <= most
            and float(value) > above
        ),
        " ".join(["a finite number", *bounds]),
    )


def one_of(*choices: str) -> Kind:
    return Kind(lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(map(repr, choices))}")


def or_none(kind: Kind) -> Kind:
    return Kind(lambda value: value is None or kind.holds(value), f"{kind.name} or None")


def numbers(each: Kind, name: str) -> Kind:
    """A list of numbers, one for each reward function."""
    return Kind(lambda value: isinstance(value, list | tuple) and all(map(each.holds, value)), name)


BOOLEAN = Kind(lambda value: isinstance(value, bool), "True or False")
TEXT = Kind(lambda value: isinstance(value, str), "a text")
THRESHOLD = Kind(
    lambda value: value is None or value == "auto" or number(least=0).holds(value),
    "'auto', None, or a finite number of at least 0",
)
# GRPO's numbers, of any size: plain GRPO is left what it takes
REAL = Kind(lambda value: isinstance(value, Real), "a number")
WHOLE = Kind(lambda value: isinstance(value, Integral), "an integer")


def _is(name: str, kind: Kind, example: str = "") -> Check:
    """The check of a setting by itself."""
    return Check(name, lambda config: kind.holds(getattr(config, name)), kind.name, example)


def _choices(name: str) -> Kind:
    """The choices that the setting's `help` names."""
    return one_of(*FR3EConfig.__dataclass_fields__[name].metadata["choices"])


def _credit_checks() -> Iterator[Check]:
    """What each credit rule needs."""
    for credit, rule in CREDIT_RULES.items():
        remedy = "or set credit='rollout'"
        if rule.needs_anchors:
            allowed = f"above 0 with credit={credit!r}, for example None, {remedy}"
            yield Check("num_anchors", partial(_has_anchors, credit), allowed)
        for name, values in rule.requires.items():
            allowed = f"{' or '.join(map(repr, values))} with credit={credit!r}, {remedy}"
            yield Check(name, partial(_takes, credit, name, values), allowed)


def _has_anchors(credit: str, config: FR3EConfig) -> bool:
    return config.credit != credit or config.num_anchors != 0


def _takes(credit: str, name: str, values: Sequence[Any], config: FR3EConfig) -> bool:
    return config.credit != credit or getattr(config, name) in values


# When a check applies, and the checks. "given": before anything is chosen. "settled": once all settings have their
# values. "active": then too, unless nothing of FR3E is on
CHECKS: dict[str, tuple[Check, ...]] = {
    "given": (
        _is("num_generations", integer(least=2), "8"),
        _is("num_anchors", or_none(integer()), "3"),  # `share_rows` says which numbers fit
        _is("num_base_trajectories", or_none(integer()), "2"),
        _is("anchor_threshold", THRESHOLD, "0.3"),
        _is("anchor_min_gap", integer(least=1), "1"),
        _is("credit", or_none(_choices("credit"))),
        _is("value_prior_strength", or_none(number(least=0)), "4.0"),
        _is("value_tracker", or_none(BOOLEAN)),
        _is("negative_advantage_scale", number(least=0), "1.0"),
        _is("reject_degenerate_states", or_none(BOOLEAN)),
        _is("max_refills", integer(least=0), "2"),
        _is("share_prefixes", or_none(BOOLEAN)),
        _is("vllm_adapter_sync", or_none(BOOLEAN)),
        _is("vllm_adapter_dir", or_none(TEXT), "'outputs/adapter'"),
        _is("vllm_request_timeout", number(above=0), "1800"),
        _is("tool_timeout", or_none(number(above=0)), "60"),
        _is("replay_mismatch", _choices("replay_mismatch")),
        _is("log_trees", or_none(integer(least=1)), "10"),
        _is("anchor_score", _choices("anchor_score")),
        _is("base_selection", _choices("base_selection")),
        _is("reuse_base", BOOLEAN),
        _is("modulation", _choices("modulation")),
        # GRPO's
        _is("temperature", REAL, "1.0"),
        _is("top_p", REAL, "1.0"),
        _is("top_k", or_none(WHOLE), "0"),
        _is("min_p", or_none(REAL), "0.1"),
        _is("epsilon", REAL, "0.2"),
        _is("epsilon_high", or_none(REAL), "0.28"),
        _is("beta", REAL, "0.0"),
        _is("num_iterations", WHOLE, "1"),
        _is("reward_weights", or_none(numbers(REAL, "a list of numbers, one for each reward function,")), "[1.0, 0.5]"),
        # How they go together
        Check(
            "anchor_threshold",
            lambda config: config.anchor_threshold in (None, "auto") or config.anchor_score == "entropy",
            "'auto' or None unless anchor_score='entropy'",
        ),
        Check(
            "value_tracker",
            lambda config: config.has_prior or not config.value_tracker,
            "False with value_prior_strength=0, which turns the prior off; or leave value_prior_strength unset",
        ),
        Check(
            "value_tracker",
            lambda config: not (config.value_tracker and config.normalizes_rewards),
            "False with multi_objective_aggregation='normalize_then_sum' or scale_rewards='group'. A prompt's rewards "
            "then have the mean 0 in every step, and nothing is left to remember",
        ),
    ),
    "settled": (
        _is("generation_kwargs", or_none(Kind(lambda value: isinstance(value, dict), "a dict")), "{'top_k': 20}"),
        Check(
            "max_refills",
            lambda config: config.max_refills == 0 or bool(config.reject_degenerate_states),
            "0 with reject_degenerate_states=False, which leaves nothing to refill; or set "
            "reject_degenerate_states=True",
        ),
        *_credit_checks(),
    ),
    "active": (
        _is("max_completion_length", integer(least=1), "512"),
        _is("per_device_train_batch_size", integer(least=1), "8"),
        _is("gradient_accumulation_steps", integer(least=1), "8"),
        _is("learning_rate", number(least=0), "1e-6"),
        _is("max_steps", integer(), "100, or -1 to count epochs"),
        _is("seed", integer(least=0, most=2**32 - 1), "42"),
        *(_is(name, one_of(*choices)) for name, choices in GRPO_CHOICES.items()),
        _is("temperature", number(above=0), "1.0"),
        _is("top_p", number(above=0, most=1), "1.0, which cuts nothing off"),
        _is("min_p", or_none(number(least=0, most=1)), "0.1"),
        Check(
            "top_k",
            lambda config: config.top_k is None or config.top_k >= (-1 if config.use_vllm else 0),
            "at least 0, which leaves all tokens (with vLLM -1 does too)",
        ),
        _is("repetition_penalty", number(above=0), "1.0"),
        _is("epsilon", number(above=0), "0.2"),
        _is("epsilon_high", or_none(number(above=0)), "0.28"),
        _is("beta", number(least=0), "0.0"),
        _is("num_iterations", integer(least=1), "1"),
        _is(
            "reward_weights",
            or_none(numbers(number(), "a list of finite numbers, one for each reward function,")),
            "[1.0, 0.5]",
        ),
    ),
}


def _check(config: FR3EConfig, when: str) -> None:
    """Raise a `ValueError` for the first check that fails. It names the setting, its value, and what works."""
    for name, holds, allowed, example in CHECKS[when]:
        if not holds(config):
            works = f", for example {example}" if example else ""
            raise ValueError(f"{name}={getattr(config, name)!r} is not allowed: it must be {allowed}{works}.")


def _own_fields() -> list[str]:
    return [field.name for field in fields(FR3EConfig) if field.name not in GRPOConfig.__dataclass_fields__]


def _read_threshold(value: Any) -> Any:
    """A threshold, which a command line gives as text."""
    if not isinstance(value, str):
        return value
    if value.lower() == "none":
        return None
    try:
        return float(value)
    except ValueError:
        return value


def with_preset(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe, over those of the preset that its key `preset` names."""
    settings = dict(settings)
    preset = settings.pop("preset", None)
    if preset not in (None, *PRESETS):
        raise ValueError(f"preset={preset!r} is not allowed: it must be one of {', '.join(map(repr, PRESETS))}.")
    return PRESETS.get(preset, {}) | settings


def _sized(settings: dict[str, Any]) -> dict[str, Any]:
    """Accumulate gradients until the generation batch holds whole groups, unless the batch is already sized."""
    if not {"gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"} & settings.keys():
        group, step = settings["num_generations"], settings.get("per_device_train_batch_size", 8)
        settings["gradient_accumulation_steps"] = group // math.gcd(group, step)
    return settings
