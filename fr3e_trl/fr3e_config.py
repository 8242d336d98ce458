"""Settings of FR3E on top of those of GRPO: the default, help and allowed values of each."""

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, cast, get_args

from trl import GRPOConfig

from .method.anchors import ANCHOR_RULES
from .method.credit import CREDIT_RULES
from .method.plan import Plan
from .method.shape import Shape, default_num_anchors, share_rows

logger = logging.getLogger(__name__)

# Settings of the paper (arXiv 2507.07017)
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

# Settings of the authors' released run, without the mistakes of its code
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

# Values of a recipe's key `preset`
PRESETS = {"paper": PAPER, "released": RELEASED}

# Default weight of the prior, which won at equal generated tokens, see benchmarks/results/results.md
PRIOR_STRENGTH = 4.0

# CISPO clips importance weights at `epsilon_high` itself, not at 1 + `epsilon_high`. ScaleRL's value (arXiv 2510.13786)
CISPO_CLIPPING = 5.0

# The default credit rule is the first of these that the other settings allow
CREDIT_DEFAULTS = ("tree", "rollout")


# Allowed values


class Kind(NamedTuple):
    """A kind of values: a test for membership, how an error describes it, and an example."""

    holds: Callable[[Any], bool]
    name: str
    example: str = ""


def number(
    least: float = -math.inf, above: float = -math.inf, most: float = math.inf, example: str = "", kind: Any = Real
) -> Kind:
    """Finite numbers within bounds. Booleans are excluded, although Python counts them as integers."""
    bounds = [
        *([f" of at least {least}"] if least > -math.inf else []),
        *([f" above {above}"] if above > -math.inf else []),
        *([f" and at most {most}"] if most < math.inf else []),
    ]
    return Kind(
        lambda value: (
            isinstance(value, kind)
            and not isinstance(value, bool)
            and least <= value <= most
            and above < value < math.inf  # so it is not NaN
        ),
        "".join(["an integer" if kind is Integral else "a finite number", *bounds]),
        example,
    )


integer = functools.partial(number, kind=Integral)


def instance(kind: type, name: str, example: str = "") -> Kind:
    return Kind(lambda value: isinstance(value, kind), name, example)


def one_of(*choices: str) -> Kind:
    return Kind(lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(map(repr, choices))}")


def or_none(kind: Kind) -> Kind:
    return Kind(lambda value: value is None or kind.holds(value), f"{kind.name} or None", kind.example)


def numbers(each: Kind, name: str) -> Kind:
    """A list of numbers, one for each reward function."""
    name = f"a list of {name}, one for each reward function,"
    return Kind(lambda value: isinstance(value, list | tuple) and all(map(each.holds, value)), name, "[1.0, 0.5]")


def either(values: Iterable[Any]) -> str:
    return " or ".join(map(repr, values))


BOOLEAN = instance(bool, "True or False")
KWARGS = or_none(instance(dict, "a dict", "{'top_k': 20}"))
THRESHOLD = Kind(
    lambda value: value is None or value == "auto" or number(least=0).holds(value),
    "'auto', None, or a finite number of at least 0",
    "0.3",
)


def setting(default: Any, help: str, choices: list[str] | None = None) -> Any:
    """A field of [`FR3EConfig`]. Unless it is boolean or has `choices`, its annotation has the allowed values."""
    return field(default=default, metadata={"help": help} | ({} if choices is None else {"choices": choices}))


@dataclass
class FR3EConfig(GRPOConfig):
    r"""
    Configuration of [`FR3ETrainer`]: every parameter of [`~trl.GRPOConfig`], and those of FR3E.

    `num_generations` keeps its meaning, the number of training rows per prompt. Of these, `num_base_trajectories` are
    sampled from the prompt, and the others branch from `num_anchors` uncertain tokens. The defaults differ from the
    paper, whose settings are in [`~FR3EConfig.paper`]. With `num_anchors=0` they are those of [`~trl.GRPOConfig`].

    A setting that is `None` is chosen from the others. `fr3e train --help-all` prints how.

    Parameters:
        > How rows are shared out

        num_anchors (`int`, *optional*): number of anchors per prompt. `0` turns exploration off.
        num_base_trajectories (`int`, *optional*): number of completions sampled from the prompt itself.

        > Where branches leave

        anchor_threshold (`float` or `"auto"`, *optional*, defaults to `"auto"`): minimum entropy of an anchor, in nats.
        anchor_min_gap (`int`, *optional*, defaults to `1`): minimum distance between two anchors, in tokens.

        > Advantages

        credit (`str`, *optional*): which rollouts a token learns from, `"tree"` or `"rollout"`.
        value_prior_strength (`float`, *optional*): weight of the prior in a baseline, as a number of rollouts.
        value_tracker (`bool`, *optional*): whether the prior uses rewards of earlier steps.
        negative_advantage_scale (`float`, *optional*, defaults to `1.0`): factor applied to negative advantages.
        reject_degenerate_states (`bool`, *optional*): whether rows that teach nothing are left out of the loss.
        max_refills (`int`, *optional*, defaults to `0`): how often a step may sample prompts to replace rejected rows.

        > Update

        share_prefixes (`bool`, *optional*): whether tokens that rows share are forwarded once.

        > vLLM

        vllm_adapter_sync (`bool`, *optional*): whether only the LoRA adapter is sent to a vLLM server.
        vllm_adapter_dir (`str`, *optional*): directory through which the adapter is sent.
        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`): seconds for a server's answer.
        max_staleness (`int`, *optional*, defaults to `0`): updates that a server's rollouts may be old.

        > Tools and environments

        tool_timeout (`float`, *optional*): seconds to wait for a tool's answer.
        replay_mismatch (`str`, *optional*, defaults to `"raise"`): what to do if a replay differs.

        > Logs

        log_trees (`int`, *optional*): number of steps between logs of trees.

        > Only the presets need these

        anchor_score (`str`, *optional*, defaults to `"entropy"`): what makes a token an anchor.
        base_selection (`str`, *optional*, defaults to `"all"`): which base trajectories get anchors.
        reuse_base (`bool`, *optional*, defaults to `True`): whether base trajectories are training rows.
        modulation (`str`, *optional*, defaults to `"none"`): factor applied to the advantages of a state.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`] while exploring:
    > - `epsilon_high`: Defaults to `0.28` instead of `epsilon`, and with `loss_type="cispo"` to `5.0`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`.
    """

    # How rows are shared out

    num_anchors: Annotated[int | None, or_none(integer(example="3"))] = setting(
        default=None,
        help="Number of anchors per prompt, the tokens from which new rollouts branch. `None`: one for each row that "
        "is not a base trajectory. Without a prior, the largest number up to 4 with which each anchor and the prompt "
        "have several rollouts. `0` turns exploration off, and the trainer is `GRPOTrainer`.",
    )
    num_base_trajectories: Annotated[int | None, or_none(integer(example="2"))] = setting(
        default=None,
        help="Number of base trajectories per prompt, completions sampled from the prompt itself. `None`: one for "
        "every 4 rows. If `num_anchors` is set or there is no prior, `num_generations / (num_anchors + 1)`. With "
        "`reuse_base=False`, 4.",
    )

    # Where branches leave

    anchor_threshold: Annotated[float | str | None, THRESHOLD] = setting(
        default="auto",
        help="Entropy in nats from which a token becomes an anchor, for example 0.3. A trajectory takes the first such "
        "tokens, up to its number of anchors. 'auto' adapts the threshold so that about half of the base trajectories "
        "reach that number. It needs `credit='tree'` and `anchor_score='entropy'`, and becomes `None` without them. "
        "`None` ('none' on a command line) takes the tokens with the highest scores.",
    )
    anchor_min_gap: Annotated[int, integer(least=1, example="1")] = setting(
        default=1,
        help="Minimum distance between two anchors of a trajectory, in tokens. 1 allows any two tokens.",
    )

    # Advantages

    credit: str | None = setting(
        default=None,
        help="Which rollouts a token learns from. 'tree': all rollouts that pass through the token. 'rollout' "
        "(preset): only the rollout that sampled it, as in the paper. `None`: 'tree' if the other settings allow it, "
        "otherwise 'rollout'. 'tree' needs anchors, `scale_rewards` 'none' or 'batch', and the defaults of "
        "`importance_sampling_level`, `multi_objective_aggregation`, `reuse_base`, `base_selection` and `modulation`.",
        choices=sorted(CREDIT_RULES),
    )
    value_prior_strength: Annotated[float | None, or_none(number(least=0, example="4.0"))] = setting(
        default=None,
        help="Weight of the prior in each row's baseline, as a number of rollouts. The prior of an anchor is the value "
        "of the state before it, and that of a prompt is the mean over other prompts. `0` turns the prior off, so that "
        "the baseline is the state's mean reward, as in the paper. `None`: the `value_tracker` estimates it. Without "
        "one it is 4 while exploring, and 0 with `num_anchors=0`, or with `scale_rewards='group'` if every state can "
        "have several rollouts.",
    )
    value_tracker: bool | None = setting(
        default=None,
        help="Whether a prompt's prior uses earlier steps: the mean of their prompts, and the prompt's own value from "
        "earlier epochs. The weight of the prior is then estimated. `None`: `True` with `credit='tree'`, unless "
        "`value_prior_strength` is set.",
    )
    negative_advantage_scale: Annotated[float, number(least=0, example="1.0")] = setting(
        default=1.0,
        help="Factor applied to negative advantages. Below 1, failures are pushed down less than successes are pushed "
        "up. With graded rewards this favours risky answers over better ones.",
    )
    reject_degenerate_states: bool | None = setting(
        default=None,
        help="Whether rows that teach nothing are left out of the loss, in numerator and denominator. Without a prior "
        "these are the rows of a state whose rewards are all equal. `None`: `True` while exploring. `True` with "
        "`num_anchors=0` is GRPO with rejection.",
    )
    max_refills: Annotated[int, integer(least=0, example="2")] = setting(
        default=0,
        help="How many times a step may sample further prompts to replace rejected rows ('dynamic sampling'). "
        "Informative rows that do not fit replace rejected rows of the next step.",
    )

    # Update

    share_prefixes: bool | None = setting(
        default=None,
        help="Whether tokens that rows of a micro-batch share, prompts and the prefixes of branches, are forwarded "
        "once. Log-probs change only by rounding. For models that cannot share prefixes it is turned off, with a "
        "warning. `None`: `True` while exploring. `True` also works for plain GRPO.",
    )

    # vLLM

    vllm_adapter_sync: bool | None = setting(
        default=None,
        help="Whether only the LoRA adapter is sent to a vLLM server at each step, through a directory, instead of the "
        "whole model with the adapter merged. `None`: for a LoRA policy, if the server was started with "
        "`--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.",
    )
    vllm_adapter_dir: Annotated[str | None, or_none(instance(str, "a string", "'outputs/adapter'"))] = setting(
        default=None,
        help="Directory through which the adapter is sent. Trainer and server must both see it, and no other run may "
        "use it. `None`: `_vllm_adapter` in `output_dir`.",
    )
    vllm_request_timeout: Annotated[float, number(above=0, example="1800")] = setting(
        default=1800.0,
        help="Seconds that a vLLM server may take to answer a request before it is sent again.",
    )
    max_staleness: Annotated[int, integer(least=0, example="1")] = setting(
        default=0,
        help="How many optimizer updates old rollouts may be, up to those of a batch. Above 0, a vLLM server draws "
        "the next batch's rollouts during the last `max_staleness` updates of this one. 0: generation and training "
        "take turns.",
    )

    # Tools and environments

    tool_timeout: Annotated[float | None, or_none(number(above=0, example="60"))] = setting(
        default=None,
        help="Seconds that a tool, or a method of an environment, may take. After that the policy reads an error "
        "instead of an answer. `None`: no limit. A function cannot be stopped and continues in its thread.",
    )
    replay_mismatch: str = setting(
        default="raise",
        help="What to do if a replayed environment answers differently. In an environment that cannot be copied, a "
        "branch repeats the actions of its prefix. If an answer differs, 'raise' ends the run with an error, and "
        "'skip' drops the rollout from the loss.",
        choices=["raise", "skip"],
    )

    # Logs

    log_trees: Annotated[int | None, or_none(integer(least=1, example="10"))] = setting(
        default=None,
        help="Number of steps between logs of trees. They are written to `trees` in `output_dir`, with a page "
        "`trees.html` that shows them. `None`: no logs.",
    )

    # Only the presets need these: `paper()`, `released()`, and controls of experiments

    anchor_score: str = setting(
        default="entropy",
        help="(preset) What makes a token an anchor. 'entropy': the entropy of the policy's next-token distribution. "
        "'surprisal' (released run): minus the log-probability of the sampled token. 'random': a control for "
        "experiments.",
        choices=list(ANCHOR_RULES),
    )
    base_selection: str = setting(
        default="all",
        help="(preset) Which base trajectories get anchors. 'all': all of them, the same number each, and odd anchors "
        "go to the first. 'mixed' (paper): one of the best-scored and one of the worst-scored.",
        choices=["all", "mixed"],
    )
    reuse_base: bool = setting(
        default=True,
        help="(preset) Whether base trajectories are training rows. `False` (released run) samples the prompt again "
        "after the anchors are found, and drops the base trajectories.",
    )
    modulation: str = setting(
        default="none",
        help="(preset) Factor applied to a state's advantages, from the change of value since the state before it. "
        "'exp' (paper): exp(-(V(S_j) - V(S_{j-1}))). 'sharpened' (released run): the form of the authors' code. "
        "'none': 1.",
        choices=["none", "exp", "sharpened"],
    )

    # GRPO's own, with other defaults

    epsilon_high: float | None = setting(
        default=None,
        help="Upper clipping range. `None`: 0.28 while exploring, as in the paper, and 5.0 with "
        "`loss_type='cispo'`. With `num_anchors=0` it is `epsilon`. To clip symmetrically, set it to the value of "
        "`epsilon`.",
    )
    scale_rewards: str | None = setting(  # type: ignore[assignment]
        default=None,
        help="What advantages are divided by: 'none' for nothing, 'batch' for the standard deviation of the batch's "
        "rewards, or 'group' for that of the state's. With a prior, 'group' normalises rewards over the prompt's rows "
        "instead. `None`: 'none' with anchors or a prior, else 'group' as in GRPO.",
    )
    multi_objective_aggregation: str = setting(
        default="sum_then_normalize",
        help="How several rewards become one. 'sum_then_normalize': their weighted sum. 'normalize_then_sum' "
        "(GDPO): each is normalised over the prompt's rows, and the weighted sum is divided by its deviation over "
        "the batch. `scale_rewards` then has no effect, as in TRL.",
        choices=["sum_then_normalize", "normalize_then_sum"],
    )

    if TYPE_CHECKING:  # never `None` once a `GRPOConfig` is made
        output_dir: str = ""
        num_generations: int = 8
        steps_per_generation: int = 1
        generation_batch_size: int = 8
        max_completion_length: int = 256
        # Strings are parsed as JSON
        generation_kwargs: dict[str, Any] | None = None
        chat_template_kwargs: dict[str, Any] | None = None
        model_init_kwargs: dict[str, Any] | None = None

    # The class of the `GRPOConfig` that this configuration was made from, if any
    _grpo_class = cast("type[GRPOConfig] | None", None)  # without an annotation, which would make it a field

    def __post_init__(self) -> None:
        self._parse()
        _check(self._draft(), "given")
        super().__post_init__()
        copy.copy(self).resolve()  # to raise its errors early

    def resolve(self) -> Self:
        """
        Derive a value for each setting that is `None` from the current values of the others, and check all settings.

        The constructor of [`FR3ETrainer`] does this, so settings may be changed until then.

        Returns:
            [`FR3EConfig`]: The configuration itself.

        Raises:
            ValueError: A setting is not allowed.
        """
        self._parse()
        draft = self._draft()
        _check(draft, "given")
        _choose(draft)
        _check(draft, "resolved")
        if not draft.is_plain_grpo:
            _check(draft, "active")
        self.__dict__["_resolved"] = {name: draft.__dict__[name] for name in OPEN}
        return self

    def _parse(self) -> None:
        """Convert a threshold from a command line, and booleans that TRL allows for `scale_rewards`."""
        threshold = self.__dict__["anchor_threshold"]
        if isinstance(threshold, str):
            self.__dict__["anchor_threshold"] = _parse_threshold(threshold)
        scaling = self.__dict__["scale_rewards"]
        if isinstance(scaling, bool):
            self.__dict__["scale_rewards"] = "group" if scaling else "none"

    def _draft(self) -> Self:
        """A copy with the values that the user set and `None` elsewhere, in which open settings can be filled in."""
        draft = copy.copy(self)
        draft.__dict__["_resolved"] = {}
        if self._grpo_class is not None:  # TRL's own defaults count as left open
            for name in ("scale_rewards", "epsilon_high"):
                if getattr(draft, name) == GRPOConfig.__dataclass_fields__[name].default:
                    setattr(draft, name, None)
        return draft

    @property
    def _values(self) -> Self:
        return self if "_resolved" in self.__dict__ else copy.copy(self).resolve()

    @property
    def num_states(self) -> int:
        """States per prompt, K + 1: the prompt itself, and its anchors."""
        return self._shape.num_anchors + 1

    @property
    def num_rollouts(self) -> int:
        """Rollouts per anchor, M: G / (K + 1), or (G - B) / K with B base trajectories."""
        return self._shape.num_rollouts

    @property
    def num_bases(self) -> int:
        """Base trajectories per prompt."""
        return self._shape.num_bases

    @property
    def _shape(self) -> Shape:
        config = self._values
        return share_rows(
            config.num_generations,
            config.num_anchors,
            config.num_base_trajectories,
            config.reuse_base,
            has_prior=config.has_prior,
        )

    @property
    def has_prior(self) -> bool:
        """Whether baselines are shrunk towards a prior. A weight of `None` is estimated by the value tracker."""
        return self._values.value_prior_strength != 0

    @property
    def normalizes_rewards(self) -> bool:
        """Whether rewards are normalised over each prompt's rows. A prompt's prior is then their mean, 0."""
        by_group = self._values.scale_rewards == "group" and self.has_prior
        return self.multi_objective_aggregation == "normalize_then_sum" or by_group

    @property
    def is_plain_grpo(self) -> bool:
        """Whether every part of FR3E is off, so that `GRPOTrainer` does all of the training."""
        config = self._values
        return (
            config.num_anchors == 0
            and not config.reject_degenerate_states
            and not config.has_prior
            and config.negative_advantage_scale == 1
            and config.max_staleness == 0
        )

    @property
    def updates_per_batch(self) -> float:
        """Number of optimizer updates per batch of rollouts."""
        return self.steps_per_generation * self.num_iterations / self.gradient_accumulation_steps

    @property
    def plan(self) -> Plan:
        """The settings in the form that the method uses."""
        config = self._values
        normalization = "none"
        if config.normalizes_rewards:
            normalization = "sum" if config.multi_objective_aggregation == "sum_then_normalize" else "each"
        return Plan(
            num_rows=config.num_generations,
            shape=config._shape,
            temperature=config.temperature,
            credit=config.credit or "rollout",
            anchor_score=config.anchor_score,
            anchor_threshold=config.anchor_threshold,
            anchor_min_gap=config.anchor_min_gap,
            base_selection=config.base_selection,
            reuse_base=config.reuse_base,
            prior_strength=config.value_prior_strength,
            modulation=config.modulation,
            scale="none" if config.normalizes_rewards else config.scale_rewards or "none",
            length_normalized=config.loss_type in ("grpo", "sapo"),
            normalization=normalization,
            reward_weights=config.reward_weights,
            reject=bool(config.reject_degenerate_states),
            negative_scale=config.negative_advantage_scale,
        )

    def parts_off(self) -> list[str]:
        """
        Which main parts of the method are off and why, one line for each reason. An empty list means that all are on.

        The parts are exploration, tree credit, the value tracker, and anchors by threshold.
        """
        config, given = self._values, self.__dict__
        if config.num_anchors == 0:
            return ["exploration is off because num_anchors=0. Leave num_anchors unset to turn it on."]
        # For each part, the settings that turn it off: their values, and values that turn it on
        tree_obstacles = _obstacles(config, "tree")
        if given["credit"] is not None:
            tree_obstacles = {"credit": (given["credit"], "tree")} | tree_obstacles
        tracker_obstacles = {
            name: (given[name], remedy)
            for name, remedy in (("value_tracker", True), ("value_prior_strength", None))
            if given[name] not in (None, remedy)
        }
        threshold_obstacles: dict[str, tuple[Any, Any]] = {}
        if given["anchor_threshold"] is None:
            threshold_obstacles["anchor_threshold"] = (None, "auto" if config.credit == "tree" else 0.3)
        if config.anchor_score != "entropy":
            threshold_obstacles["anchor_score"] = (config.anchor_score, "entropy")
        parts = (
            ("tree credit", config.credit != "tree", tree_obstacles),
            ("value tracker", not config.value_tracker, tracker_obstacles or tree_obstacles),
            ("anchors by threshold", config.anchor_threshold is None, threshold_obstacles or tree_obstacles),
        )
        reasons: dict[tuple[Any, ...], list[str]] = {}
        for part, is_off, obstacles in parts:
            if is_off:
                reasons.setdefault(tuple(obstacles.items()), []).append(part)
        return [_reason_off(parts_off, dict(obstacles)) for obstacles, parts_off in reasons.items()]

    def warn(self) -> None:
        """Log consequences of the settings that a user may not expect. The trainer calls this once."""
        if self.process_index != 0:
            return
        config = self._values
        if self._grpo_class is not None:
            replaced = [
                f"{name}={getattr(config, name)!r}"
                for name in ("scale_rewards", "epsilon_high")
                if getattr(config, name) != self.__dict__[name]
            ]
            if replaced:
                logger.warning(
                    "%s: %s in place of GRPO's defaults. Use FR3EConfig to set them.",
                    self._grpo_class.__name__,
                    " and ".join(replaced),
                )
        for line in config.parts_off():
            logger.warning(line)
        if config.loss_type == "cispo" and config.epsilon_high is not None and config.epsilon_high < 1:
            logger.warning(
                "epsilon_high=%r cuts all importance weights below 1, because with loss_type='cispo' it is the largest "
                "weight itself. TRL and ScaleRL use 5.0.",
                config.epsilon_high,
            )

    @classmethod
    def paper(cls, **overrides: Any) -> Self:
        """
        The settings of the paper: 16 rollouts per prompt, entropy anchors, clipping at 0.2 and 0.28, and a learning
        rate of 1e-6. Arguments override them.

        The batch size is yours to choose; the paper has 512 prompts. If you set none, gradients are accumulated until
        a batch holds whole groups.
        """
        return cls(**_sized(PAPER | overrides))

    @classmethod
    def released(cls, **overrides: Any) -> Self:
        """
        The settings of the authors' released run: 4 base trajectories that are not reused, 4 surprisal anchors with 16
        rollouts each, sharpened modulation, clipping at 0.2 and 0.3, and a learning rate of 2e-6. Arguments override
        them.

        If you set no batch size, gradients are accumulated until a batch holds whole groups.
        """
        return cls(**_sized(RELEASED | overrides))

    @classmethod
    def from_grpo(cls, args: GRPOConfig) -> Self:
        """
        A `GRPOConfig` with FR3E's settings added, at their defaults.

        Values that the user set are kept. `scale_rewards` and `epsilon_high` at TRL's defaults count as not set, and
        get FR3E's. The two configurations share their settings: later changes to `args` apply here too, but `args`
        does not show derived values. The class inherits from both, so that methods of a derived class keep working.

        Raises:
            TypeError: `args` is not a `GRPOConfig`.
            ValueError: A setting is not allowed.
        """
        if not isinstance(args, GRPOConfig):
            raise TypeError(
                f"args is a {type(args).__name__}, which is not allowed: it must be an FR3EConfig or a GRPOConfig, for "
                "example FR3EConfig(output_dir='outputs', num_generations=8)."
            )
        config = _of_both(cls, type(args))
        config.__dict__ = args.__dict__
        for name in _own_fields():
            args.__dict__.setdefault(name, cls.__dataclass_fields__[name].default)
        return config.resolve()


def _of_both(cls: Any, grpo_class: Any) -> Any:
    """A configuration without values, with FR3E's settings and the fields and methods of `grpo_class`."""
    combined = _combined_class(cls, grpo_class)
    return combined.__new__(combined)


@functools.cache
def _combined_class(cls: Any, grpo_class: Any) -> Any:
    # training_args.bin of a checkpoint refers to `_of_both` by its name
    bases = (cls,) if issubclass(cls, grpo_class) else (cls, grpo_class)
    reduce = lambda config: (_of_both, (cls, grpo_class), config.__dict__)  # noqa: E731
    return dataclass(type(grpo_class.__name__, bases, {"_grpo_class": grpo_class, "__reduce__": reduce}))


# Settings that `None` leaves open


class _Open:
    """
    A setting that may be left open.

    The value that the user set stays in the configuration's `__dict__`, so that `dataclasses.replace` and a saved file
    have `None` where nothing was set. [`FR3EConfig.resolve`] stores derived values separately, and reading the setting
    returns them. Setting it again replaces both.
    """

    def __init__(self, name: str):
        self.name = name

    def __get__(self, config: "FR3EConfig | None", owner: type) -> Any:
        if config is None:
            return FR3EConfig.__dataclass_fields__[self.name].default
        settings = config.__dict__
        return settings.get("_resolved", {}).get(self.name, settings[self.name])

    def __set__(self, config: "FR3EConfig", value: Any) -> None:
        settings = config.__dict__
        settings[self.name] = value
        if "_resolved" in settings:
            derived = settings["_resolved"]  # replaced, not changed, because copies share it
            settings["_resolved"] = {name: derived[name] for name in derived if name != self.name}


OPEN = (
    *("num_anchors", "num_base_trajectories", "anchor_threshold", "credit", "value_prior_strength", "value_tracker"),
    *("reject_degenerate_states", "share_prefixes", "epsilon_high", "scale_rewards"),
)
for _name in OPEN:  # not in the class body, where `dataclass` would use them as defaults
    setattr(FR3EConfig, _name, _Open(_name))


def _obstacles(config: FR3EConfig, credit: str) -> dict[str, tuple[Any, Any]]:
    """Settings that a credit rule does not allow: their values, and values that it allows."""
    requires = CREDIT_RULES[credit].requires
    return {
        name: (getattr(config, name), values[0])
        for name, values in requires.items()
        if getattr(config, name) not in values
    }


def _choose(config: FR3EConfig) -> None:
    """Choose a value for each open setting of a draft. Each paragraph uses the choices of those before it."""
    # The prior: on while exploring, unless scaling by the group compares several rollouts of each state. It comes first
    # because with a prior one rollout per anchor is enough
    if config.value_prior_strength is None and not config.value_tracker:
        has_several = config.num_anchors is not None or default_num_anchors(config.num_generations) is not None
        by_group = config.scale_rewards == "group" and config.multi_objective_aggregation != "normalize_then_sum"
        if config.num_anchors == 0 or (by_group and has_several):
            config.value_prior_strength = 0.0

    # The shape. From here on, `num_anchors` decides whether exploration is on
    config.num_base_trajectories, config.num_anchors, _ = config._shape
    explores = config.num_anchors != 0

    # Scaling and clipping: the paper's settings while exploring
    if config.scale_rewards is None:
        config.scale_rewards = PAPER["scale_rewards"] if explores or config.has_prior else "group"
    if config.epsilon_high is None and explores:
        config.epsilon_high = CISPO_CLIPPING if config.loss_type == "cispo" else PAPER["epsilon_high"]
    if config.reject_degenerate_states is None:
        config.reject_degenerate_states = explores
    if config.share_prefixes is None:
        config.share_prefixes = explores

    # Credit: the first rule that the settings allow
    if config.credit is None:
        config.credit = next(
            name
            for name in CREDIT_DEFAULTS
            if (explores or not CREDIT_RULES[name].needs_anchors) and not _obstacles(config, name)
        )

    # The prior's weight: estimated by a value tracker under tree credit, where that won
    is_open = config.value_prior_strength is None
    if config.value_tracker is None:
        config.value_tracker = is_open and config.credit == "tree"
    if is_open and not config.value_tracker:
        config.value_prior_strength = PRIOR_STRENGTH

    # "auto" needs a credit rule that wants a stopping rule. Without one, the highest scores become anchors
    wants_auto = CREDIT_RULES[config.credit].wants_stopping_rule and config.anchor_score == "entropy"
    if config.anchor_threshold == "auto" and not wants_auto:
        config.anchor_threshold = None


# Checks of combinations of settings


class Check(NamedTuple):
    """The name of a setting, a condition on all settings, and what an error says that the setting must be."""

    name: str
    holds: Callable[[FR3EConfig], bool]
    allowed: str


REAL, WHOLE = instance(Real, "a number"), instance(Integral, "an integer")

# GRPO's settings: what must hold always, and what must hold only if a part of FR3E is on, because plain GRPO accepts
# whatever TRL does. TRL checks some of them only after a batch was explored
GRPO: dict[str, tuple[Kind | None, Kind]] = {
    "num_generations": (integer(least=2, example="8"), integer(least=2, example="8")),
    "max_completion_length": (None, integer(least=1, example="512")),
    "per_device_train_batch_size": (None, integer(least=1, example="8")),
    "gradient_accumulation_steps": (None, integer(least=1, example="8")),
    "learning_rate": (None, number(least=0, example="1e-6")),
    "max_steps": (None, integer(example="100, or -1 to count epochs")),
    "seed": (None, integer(least=0, most=2**32 - 1, example="42")),
    "loss_type": (None, one_of("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")),
    "importance_sampling_level": (None, one_of("token", "sequence")),
    "scale_rewards": (None, one_of("none", "group", "batch")),
    "multi_objective_aggregation": (None, one_of("sum_then_normalize", "normalize_then_sum")),
    "temperature": (REAL, number(above=0, example="1.0")),
    "top_p": (REAL, number(above=0, most=1, example="1.0, which cuts nothing off")),
    "top_k": (or_none(WHOLE), or_none(integer(least=-1, example="0"))),
    "min_p": (or_none(REAL), or_none(number(least=0, most=1, example="0.1"))),
    "repetition_penalty": (None, number(above=0, example="1.0")),
    "epsilon": (REAL, number(above=0, example="0.2")),
    "epsilon_high": (or_none(REAL), or_none(number(above=0, example="0.28"))),
    "beta": (REAL, number(least=0, example="0.0")),
    "num_iterations": (WHOLE, integer(least=1, example="1")),
    "reward_weights": (or_none(numbers(REAL, "numbers")), or_none(numbers(number(), "finite numbers"))),
}

# Checked before open settings are chosen
CHECKS_GIVEN = (
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
        "False with multi_objective_aggregation='normalize_then_sum' or scale_rewards='group', which make the mean of "
        "a prompt's rewards 0 in every step, so that there is nothing to track",
    ),
)

# Checked once all settings have a value
CHECKS_RESOLVED = (
    Check(
        "max_refills",
        lambda config: config.max_refills == 0 or bool(config.reject_degenerate_states),
        "0 with reject_degenerate_states=False, which leaves nothing to refill; or set reject_degenerate_states=True",
    ),
    Check(
        "max_staleness",
        lambda config: config.max_staleness == 0 or (config.use_vllm and config.vllm_mode == "server"),
        "0 unless use_vllm=True and vllm_mode='server', because other backends generate on the devices that train",
    ),
    Check(
        "max_staleness",
        lambda config: config.max_staleness == 0 or config.max_staleness <= config.updates_per_batch,
        "at most steps_per_generation * num_iterations / gradient_accumulation_steps, a batch's number of updates",
    ),
    Check(
        "max_staleness",
        lambda config: config.max_staleness == 0 or config.updates_per_batch % 1 == 0,
        "0 unless gradient_accumulation_steps divides steps_per_generation * num_iterations",
    ),
    Check(
        "max_staleness",
        lambda config: config.max_staleness == 0 or config.vllm_importance_sampling_correction,
        "0 with vllm_importance_sampling_correction=False, because only that correction accounts for old rollouts",
    ),
    Check(
        "max_staleness",
        lambda config: config.max_staleness == 0 or config.base_selection == "all",
        "0 unless base_selection='all', because which base trajectories are explored depends on their rewards",
    ),
)

# Checked then too, if a part of FR3E is on
CHECKS_ACTIVE = (
    Check(
        "top_k",
        lambda config: config.top_k is None or config.top_k >= (-1 if config.use_vllm else 0),
        "at least 0, which keeps all tokens (with vLLM, -1 does too)",
    ),
    Check(
        "num_generations",
        lambda config: config.generation_batch_size % config.num_generations == 0,
        "a divisor of generation_batch_size, which must hold whole groups. It was set when the configuration was made",
    ),
)


def _is(name: str, kind: Kind) -> Check:
    """The check that a setting is of a kind."""
    works = f", for example {kind.example}" if kind.example else ""
    return Check(name, lambda config: kind.holds(getattr(config, name)), kind.name + works)


def _own_checks() -> Iterator[Check]:
    """The checks in the fields of FR3E's settings."""
    for name in _own_fields():
        annotation, metadata = FR3EConfig.__annotations__[name], FR3EConfig.__dataclass_fields__[name].metadata
        is_optional = type(None) in get_args(annotation)
        if hasattr(annotation, "__metadata__"):
            yield _is(name, annotation.__metadata__[0])
        else:
            kind = one_of(*metadata["choices"]) if "choices" in metadata else BOOLEAN
            yield _is(name, or_none(kind) if is_optional else kind)


def _credit_checks() -> Iterator[Check]:
    """The requirements of each credit rule."""
    for credit, rule in CREDIT_RULES.items():
        remedy = f"with credit={credit!r}, or set credit='rollout'"
        if rule.needs_anchors:
            yield Check("num_anchors", functools.partial(_has_anchors, credit), f"above 0, for example None, {remedy}")
        for name, values in rule.requires.items():
            yield Check(name, functools.partial(_allows, credit, name), f"{either(values)} {remedy}")


def _has_anchors(credit: str, config: FR3EConfig) -> bool:
    return config.credit != credit or config.num_anchors != 0


def _allows(credit: str, name: str, config: FR3EConfig) -> bool:
    return config.credit != credit or name not in _obstacles(config, credit)


def _own_fields() -> list[str]:
    return [field.name for field in fields(FR3EConfig) if field.name not in GRPOConfig.__dataclass_fields__]


# Checks by the time at which they apply. "given": before open settings are chosen. "resolved": once all settings have a
# value. "active": then too, if a part of FR3E is on
CHECKS: dict[str, tuple[Check, ...]] = {
    "given": (
        *(_is(name, kind._replace(example=active.example)) for name, (kind, active) in GRPO.items() if kind),
        *_own_checks(),
        *CHECKS_GIVEN,
    ),
    "resolved": (_is("generation_kwargs", KWARGS), *CHECKS_RESOLVED, *_credit_checks()),
    "active": (*CHECKS_ACTIVE, *(_is(name, active) for name, (_, active) in GRPO.items())),
}


def _check(config: FR3EConfig, when: str) -> None:
    """Raise a `ValueError` for the first check that fails, with the setting, its value, and what is allowed."""
    for name, holds, allowed in CHECKS[when]:
        if not holds(config):
            raise ValueError(f"{name}={getattr(config, name)!r} is not allowed: it must be {allowed}.")


def _reason_off(parts: list[str], obstacles: dict[str, tuple[Any, Any]]) -> str:
    """Why parts are off, and how to turn them on."""
    verb, pronoun = ("is", "it") if len(parts) == 1 and not parts[0].startswith("anchors") else ("are", "them")
    values = _and([f"{name}={value!r}" for name, (value, _) in obstacles.items()])
    remedies = _and([f"{name}={remedy!r}" for name, (_, remedy) in obstacles.items()])
    return f"{_and(parts)} {verb} off because {values}. Set {remedies} to turn {pronoun} on."


def _and(texts: list[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def _parse_threshold(value: str) -> Any:
    """A threshold from a command line."""
    if value.lower() == "none":
        return None
    try:
        return float(value)
    except ValueError:
        return value


def with_preset(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe, which override those of the preset named by its key `preset`."""
    settings = dict(settings)
    preset = settings.pop("preset", None)
    if preset not in (None, *PRESETS):
        raise ValueError(f"preset={preset!r} is not allowed: it must be {either(PRESETS)}.")
    return PRESETS.get(preset, {}) | settings


def _sized(settings: dict[str, Any]) -> dict[str, Any]:
    """Accumulate gradients until the generation batch holds whole groups, unless the batch is already sized."""
    if not {"gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"} & settings.keys():
        group, step = settings["num_generations"], settings.get("per_device_train_batch_size", 8)
        settings["gradient_accumulation_steps"] = group // math.gcd(group, step)
    return settings
