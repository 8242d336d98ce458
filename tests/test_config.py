"""FR3EConfig: what is chosen, what is refused, and what a GRPOConfig becomes."""

import ast
import copy
import json
import math
import pickle
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
from factory import make_trainer
from models import model_on_disk
from transformers import HfArgumentParser, TrainingArguments
from trl import GRPOConfig

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands import cli
from fr3e_trl.fr3e_config import CHECKS, OPEN
from fr3e_trl.method.credit import CREDIT_RULES

pytestmark = pytest.mark.fast

CPU = {"bf16": False, "use_cpu": True, "report_to": []}
NO_PRIOR = {"value_prior_strength": 0}


def make_config(**settings) -> FR3EConfig:
    """With every value derived. One group a batch, unless the test says otherwise."""
    size = settings.get("num_generations", 8)
    return FR3EConfig(**{"output_dir": "unused", "per_device_train_batch_size": size} | CPU | settings).resolve()


def make_grpo(num_generations: int = 8, **settings) -> GRPOConfig:
    return GRPOConfig(
        "unused", num_generations=num_generations, per_device_train_batch_size=num_generations, **CPU | settings
    )


def shares(config: FR3EConfig) -> tuple[int, int, int]:
    """B base trajectories, K anchors, and M rollouts for each of these."""
    return config.num_bases, config.num_anchors, config.num_rollouts


# Settings, and the values of `RESOLVED` that must come of them. Recorded when one method chose them all
CASES = json.loads((Path(__file__).parent / "resolved_settings.json").read_text())
RESOLVED = (
    *("num_bases", "num_anchors", "num_rollouts", "value_prior_strength", "scale_rewards", "epsilon_high"),
    *("reject_degenerate_states", "share_prefixes", "credit", "anchor_threshold"),
)


@pytest.mark.parametrize(("settings", "expected"), CASES["FR3EConfig"], ids=str)
def test_what_the_steps_choose(settings, expected):
    config = make_config(**settings)
    assert [getattr(config, name) for name in RESOLVED] == expected


@pytest.mark.parametrize(("settings", "expected"), CASES["from_grpo"], ids=str)
def test_what_the_steps_choose_beside_a_grpo_config(settings, expected):
    config = FR3EConfig.from_grpo(make_grpo(**settings))
    assert [getattr(config, name) for name in RESOLVED] == expected


@pytest.mark.parametrize(
    ("num_generations", "expected"),
    [(2, (1, 1, 1)), (3, (1, 2, 1)), (4, (1, 3, 1)), (5, (2, 3, 1)), (7, (2, 5, 1)), (8, (2, 6, 1)), (16, (4, 12, 1))],
)
def test_one_row_in_four_is_a_base_trajectory_and_each_anchor_has_one(num_generations, expected):
    assert shares(make_config(num_generations=num_generations)) == expected


@pytest.mark.parametrize(
    ("num_generations", "num_anchors", "num_rollouts"),
    [(4, 1, 2), (6, 2, 2), (8, 1, 4), (10, 1, 5), (12, 2, 4), (16, 3, 4), (20, 4, 4), (40, 4, 8), (80, 4, 16)],
)
def test_without_a_prior_states_have_more_rollouts(num_generations, num_anchors, num_rollouts):
    config = make_config(num_generations=num_generations, value_prior_strength=0)
    assert shares(config) == (num_rollouts, num_anchors, num_rollouts)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_anchors": 3}, (2, 3, 2)),
        ({"num_anchors": 7}, (1, 7, 1)),
        ({"num_base_trajectories": 1}, (1, 7, 1)),
        ({"num_base_trajectories": 2, "num_anchors": 3}, (2, 3, 2)),
        ({"num_base_trajectories": 4, "num_anchors": 1}, (4, 1, 4)),
        ({"num_base_trajectories": 4, "num_anchors": 2, "value_prior_strength": 0}, (4, 2, 2)),
        ({"reuse_base": False}, (4, 1, 4)),
        ({"reuse_base": False, "num_base_trajectories": 3, "num_anchors": 3}, (3, 3, 2)),
    ],
)
def test_how_rows_are_shared_out_may_be_set(settings, expected):
    assert shares(make_config(num_generations=8, **settings)) == expected


def test_there_is_a_prior_where_it_fits():
    assert make_config().value_tracker and make_config().value_prior_strength is None
    assert make_config(value_tracker=False).value_prior_strength == 4
    assert not make_config(value_prior_strength=4).value_tracker
    # Under rollout credit a fixed one
    rollout = make_config(credit="rollout")
    assert (rollout.value_tracker, rollout.value_prior_strength) == (False, 4)
    assert make_config(num_anchors=0).value_prior_strength == 0
    assert make_config(scale_rewards="group").value_prior_strength == 0
    assert make_config(scale_rewards=True).value_prior_strength == 0
    # Rows that cannot be shared out without one
    assert make_config(scale_rewards="group", num_generations=3).value_prior_strength == 4
    assert make_config(scale_rewards="group", multi_objective_aggregation="normalize_then_sum").has_prior


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (NO_PRIOR | {"num_generations": 7}, ["num_generations=7", "num_generations=8", "num_anchors=0"]),
        (NO_PRIOR | {"num_generations": 2}, ["num_generations=2", "num_generations=8"]),
        (
            NO_PRIOR | {"num_generations": 16, "num_anchors": 4},
            ["num_anchors=4", "can be 0 (plain GRPO), 1, 3, 7.", "10, 15, 20"],
        ),
        (NO_PRIOR | {"num_generations": 8, "num_anchors": 7}, ["num_anchors=7", "0 (plain GRPO), 1, 3.", "16, 24"]),
        ({"num_generations": 8, "num_anchors": 4}, ["num_anchors=4", "0 (plain GRPO), 1, 3, 7.", "5, 10, 15, 20"]),
        (
            {"num_generations": 8, "num_anchors": 4, "num_base_trajectories": 3},
            ["num_anchors=4 does not fit num_generations=8 and num_base_trajectories=3", "1, 5.", "7, 11, 15, 19"],
        ),
        (NO_PRIOR | {"num_anchors": 2, "num_base_trajectories": 6}, ["num_base_trajectories=6", "GRPO), 1.", "10, 12"]),
        ({"num_base_trajectories": 8}, ["num_base_trajectories=8", "below num_generations=8"]),
        ({"num_generations": 8, "num_anchors": -1}, ["num_anchors=-1", "0 (plain GRPO), 1, 3"]),
        ({"anchor_score": "entropi"}, ["anchor_score='entropi'", "'entropy', 'surprisal', 'random'"]),
        ({"base_selection": "mix"}, ["base_selection='mix'", "'all', 'mixed'"]),
        ({"modulation": None}, ["modulation=None", "'none', 'exp', 'sharpened'"]),
        ({"anchor_min_gap": 0}, ["anchor_min_gap=0", "at least 1"]),
        ({"max_refills": -1}, ["max_refills=-1", "at least 0", "2"]),
        ({"max_refills": 1, "num_anchors": 0}, ["max_refills=1", "reject_degenerate_states=True"]),
        ({"value_prior_strength": -1.0}, ["value_prior_strength=-1.0", "at least 0"]),
        ({"negative_advantage_scale": -0.5}, ["negative_advantage_scale=-0.5", "at least 0"]),
        ({"num_base_trajectories": 0}, ["num_base_trajectories=0", "at least 1"]),
        ({"max_completion_length": -5}, ["max_completion_length=-5", "512"]),
        ({"max_completion_length": None}, ["max_completion_length=None", "512"]),
        ({"multi_objective_aggregation": "normalise"}, ["'normalise'", "'normalize_then_sum'"]),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "value_tracker": True},
            ["value_tracker=True", "False with multi_objective_aggregation='normalize_then_sum'"],
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "credit": "tree"},
            ["multi_objective_aggregation='normalize_then_sum'", "'sum_then_normalize' with credit='tree'"],
        ),
        ({"scale_rewards": "std"}, ["'std'", "'group'"]),
        ({"scale_rewards": "group", "value_tracker": True}, ["value_tracker=True", "scale_rewards='group'"]),
        *(
            ({name: value}, [f"{name}={value!r}", "a finite number"])
            for name in (*("value_prior_strength", "negative_advantage_scale", "vllm_request_timeout", "tool_timeout"),)
            for value in (math.inf, math.nan, "0.5", True)
        ),
        *(
            ({"anchor_threshold": value}, ["anchor_threshold=", "'auto', None, or a finite number", "0.3"])
            for value in (math.inf, math.nan, "inf", "nan", "-inf", -0.1, "-0.1", "high", True, [0.3])
        ),
        *(
            ({"anchor_threshold": 0.3, "anchor_score": score}, ["anchor_threshold=0.3", "anchor_score='entropy'"])
            for score in ("surprisal", "random")
        ),
        *(
            ({name: value}, [f"{name}={value!r}", "an integer"])
            for name in (
                *("num_anchors", "num_base_trajectories", "anchor_min_gap", "max_refills", "log_trees"),
                *("max_completion_length",),
            )
            for value in (1.5, True, "3")
        ),
        ({"num_generations": 0}, ["num_generations=0", "at least 2", "8"]),
        ({"num_generations": 0, "num_anchors": 0}, ["num_generations=0", "at least 2", "8"]),
        ({"num_generations": 1}, ["at least 2"]),
        *(
            ({name: value}, [f"{name}={value!r}", "above 0"])
            for name in ("epsilon", "epsilon_high", "temperature")
            for value in (0, -0.5, math.inf, math.nan)
        ),
        *(({"beta": value}, [f"beta={value!r}", "at least 0"]) for value in (-1, math.inf, math.nan)),
        *(
            ({"learning_rate": value}, [f"learning_rate={value!r}", "at least 0", "1e-6"])
            for value in (-1, math.inf, math.nan, None, [1e-6], "1e-6")
        ),
        ({"max_steps": 2.5}, ["max_steps=2.5", "an integer, for example 100"]),
        *(({"seed": value}, [f"seed={value!r}", "at least 0 and at most 4294967295"]) for value in (-1, 2**32, 1.5)),
        *(({"num_iterations": value}, [f"num_iterations={value}", "at least 1"]) for value in (0, -2)),
        *(({"top_p": value}, [f"top_p={value!r}", "above 0 and at most 1"]) for value in (1.5, math.nan)),
        ({"reward_weights": [1.0, math.inf]}, ["reward_weights=[1.0, inf]", "finite numbers", "[1.0, 0.5]"]),
        ({"num_generations": 8.0}, ["num_generations=8.0", "an integer", "8"]),
        ({"reuse_base": "no"}, ["reuse_base='no'", "True or False"]),
        ({"reward_weights": [1.0, math.nan]}, ["reward_weights=[1.0, nan]", "finite numbers"]),
        ({"temperature": 0.0}, ["temperature=0.0", "above 0", "1.0"]),
        ({"top_p": 0.0}, ["top_p=0.0", "above 0", "1.0"]),
        ({"min_p": 2.0}, ["min_p=2.0", "at least 0 and at most 1"]),
        ({"top_k": -1}, ["top_k=-1", "at least 0, which leaves all"]),
        ({"repetition_penalty": 0}, ["repetition_penalty=0", "above 0"]),
        ({"loss_type": "dappo"}, ["loss_type='dappo'", "'dapo'"]),
        ({"importance_sampling_level": "word"}, ["importance_sampling_level='word'", "'token', 'sequence'"]),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, named):
    with pytest.raises(ValueError) as error:
        make_config(**settings)
    assert all(words in str(error.value) for words in named), str(error.value)


@pytest.mark.parametrize("num_anchors", [0, 3])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(
            ({name: value}, [f"{name}={value!r}", "a number", works])
            for name, works in (
                *(("temperature", "1.0"), ("top_p", "1.0"), ("min_p", "0.1")),
                *(("epsilon", "0.2"), ("epsilon_high", "0.28"), ("beta", "0.0")),
            )
            for value in ("1", "x", [1.0])
        ),
        ({"top_k": "10"}, ["top_k='10'", "an integer or None", "0"]),
        ({"top_k": 1.5}, ["top_k=1.5", "an integer or None"]),
        ({"num_iterations": "2"}, ["num_iterations='2'", "an integer", "1"]),
        ({"reward_weights": 1.0}, ["reward_weights=1.0", "a list of numbers", "[1.0, 0.5]"]),
        ({"reward_weights": ["1"]}, ["reward_weights=['1']", "a list of numbers"]),
        ({"generation_kwargs": 5}, ["generation_kwargs=5", "a dict or None", "{'top_k': 20}"]),
        ({"generation_kwargs": "top_k"}, ["generation_kwargs='top_k'", "a dict or None"]),
    ],
)
def test_impossible_types_are_refused_with_and_without_anchors(settings, named, num_anchors):
    with pytest.raises(ValueError) as error:
        make_config(num_anchors=num_anchors, **settings)
    assert all(words in str(error.value) for words in named), str(error.value)
    with pytest.raises(ValueError) as error:
        FR3EConfig.from_grpo(make_grpo(**settings))
    assert all(words in str(error.value) for words in named), str(error.value)


def test_plain_grpo_takes_what_grpo_takes():
    settings = {"epsilon": -1, "epsilon_high": math.nan, "beta": -1, "num_iterations": 0, "temperature": 0, "top_p": 2}
    settings |= {"top_k": None, "reward_weights": (math.inf,), "loss_type": "mine", "generation_kwargs": '{"top_k": 5}'}
    settings |= {"learning_rate": None, "max_steps": 2.5, "seed": -1}
    config, grpo = make_config(num_anchors=0, **settings), make_grpo(**settings)
    assert config.is_plain_grpo and config.generation_kwargs == {"top_k": 5}
    assert all(str(getattr(config, name)) == str(getattr(grpo, name)) for name in settings)


@pytest.mark.parametrize("args", [{}, "outputs", TrainingArguments("unused", use_cpu=True)], ids=["{}", "text", "HF"])
def test_arguments_of_another_type_are_refused(args):
    with pytest.raises(TypeError, match=r"args is a \w+, .* FR3EConfig or a GRPOConfig, for example FR3EConfig\("):
        FR3ETrainer("unused", len, args=args)


def test_every_setting_has_a_line_in_the_table():
    own = [f.name for f in fields(FR3EConfig) if f.name not in GRPOConfig.__dataclass_fields__]
    assert set(own) <= {check.name for check in CHECKS["given"]}


def test_defaults():
    config = make_config()
    assert (config.epsilon, config.epsilon_high, config.loss_type) == (0.2, 0.28, "dapo")
    assert (config.scale_rewards, config.beta) == ("none", 0.0)
    assert (config.modulation, config.anchor_score, config.base_selection) == ("none", "entropy", "all")
    assert config.reuse_base and config.reject_degenerate_states and config.negative_advantage_scale == 1


def test_without_anchors_the_defaults_are_grpos():
    ours, theirs = make_config(num_anchors=0), GRPOConfig("unused", per_device_train_batch_size=8, **CPU)
    assert ours.is_plain_grpo
    names = [f.name for f in fields(GRPOConfig) if f.name != "logging_dir"]
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    with_prior = make_config(num_anchors=0, value_prior_strength=4.0)
    assert (with_prior.scale_rewards, with_prior.epsilon_high) == ("none", None)


def test_cispo_takes_the_greatest_weight(caplog):
    config = make_config(loss_type="cispo")
    config.warn()
    assert config.epsilon_high == 5.0 and "epsilon_high" not in caplog.text
    config = make_config(loss_type="cispo", epsilon_high=0.28)
    config.warn()
    assert config.epsilon_high == 0.28
    assert "epsilon_high=0.28 cuts all importance weights below 1" in caplog.text


def test_clipping_and_scaling_may_be_set():
    for num_anchors in (0, 3):
        config = make_config(num_anchors=num_anchors, epsilon_high=0.2, scale_rewards="batch")
        assert (config.epsilon_high, config.scale_rewards) == (0.2, "batch")


def test_presets():
    paper = FR3EConfig.paper(output_dir="unused", **CPU).resolve()
    assert (paper.num_generations, *shares(paper), paper.learning_rate) == (16, 4, 3, 4, 1e-6)
    assert (paper.modulation, paper.base_selection, paper.value_prior_strength) == ("exp", "mixed", 0)
    released = FR3EConfig.released(output_dir="unused", learning_rate=1e-5, **CPU)
    assert (released.num_anchors, released.num_rollouts, released.num_bases) == (4, 16, 4)
    assert (released.anchor_score, released.modulation) == ("surprisal", "sharpened")
    assert (released.epsilon, released.epsilon_high, released.learning_rate) == (0.2, 0.3, 1e-5)


def test_rejection_follows_exploration_unless_set():
    assert not make_config(num_anchors=0).reject_degenerate_states
    assert make_config(num_anchors=0).is_plain_grpo
    assert not make_config(num_anchors=0, reject_degenerate_states=True).is_plain_grpo
    assert not make_config(num_anchors=0, negative_advantage_scale=0.5).is_plain_grpo
    assert not make_config(reject_degenerate_states=False).reject_degenerate_states


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "scale_rewards='none' and epsilon_high=0.28"),
        ({"scale_rewards": "group"}, "scale_rewards='none' and epsilon_high=0.28"),
        ({"scale_rewards": True, "epsilon_high": 0.25}, "scale_rewards='none'"),
        ({"scale_rewards": "none", "beta": 0.04}, "epsilon_high=0.28"),
        ({"scale_rewards": "batch", "loss_type": "cispo"}, "epsilon_high=5.0"),
        ({"scale_rewards": False, "epsilon_high": 0.2}, None),
    ],
)
def test_what_stands_at_grpos_defaults_takes_fr3es_values(settings, told, caplog):
    grpo = make_grpo(**settings)
    config = FR3EConfig.from_grpo(grpo)
    assert isinstance(config, FR3EConfig) and type(grpo) is GRPOConfig
    chosen = {name for name in ("scale_rewards", "epsilon_high") if f"{name}=" not in (told or "")}
    names = [f.name for f in fields(GRPOConfig) if f.name not in {"scale_rewards", "epsilon_high"} - chosen]
    assert all(getattr(config, name) == getattr(grpo, name) for name in names)
    config.warn()
    lines = [record.getMessage() for record in caplog.records if "GRPOConfig" in record.getMessage()]
    expected = f"GRPOConfig: {told} in place of GRPO's defaults. Use FR3EConfig to set them."
    assert lines == [expected] * (told is not None)


def test_a_grpo_config_is_left_as_it_is_and_shares_what_is_changed_later():
    grpo = make_grpo()
    config = FR3EConfig.from_grpo(grpo)
    assert (grpo.scale_rewards, grpo.epsilon_high) == ("group", None)
    grpo.learning_rate, config.logging_steps = 3e-4, 7
    assert (config.learning_rate, grpo.logging_steps) == (3e-4, 7)
    grpo.num_generations, grpo.epsilon_high = 4, 0.3
    assert (config.resolve().num_anchors, config.epsilon_high) == (3, 0.3)
    # A GRPOTrainer that is given it later is GRPO's
    assert grpo.scale_rewards == "group"


@dataclass
class Derived(GRPOConfig):
    """As scripts have them: with a setting and a method of its own, and another default."""

    curriculum: str = field(default="short", metadata={"help": "Which prompts come first."})
    epsilon_high: float | None = 0.3

    def length_at(self, step: int) -> int:
        return min(self.max_completion_length, 4 * step)


def test_the_class_of_a_derived_grpo_config_stays(caplog):
    args = Derived("unused", num_generations=4, per_device_train_batch_size=4, curriculum="long", **CPU)
    args.mark = "of the instance"
    config = FR3EConfig.from_grpo(args)
    assert isinstance(config, Derived) and isinstance(config, FR3EConfig)
    assert (config.curriculum, config.mark, config.length_at(3)) == ("long", "of the instance", 12)
    assert (config.epsilon_high, config.scale_rewards, config.num_anchors) == (0.3, "none", 3)
    assert config.to_dict()["curriculum"] == "long" and "curriculum='long'" in repr(config)
    config.warn()
    assert "Derived: scale_rewards='none' in place of GRPO's defaults." in caplog.text


@pytest.mark.parametrize("args", [make_grpo(), Derived("unused", **CPU), FR3EConfig("unused", **CPU)], ids=type)
def test_a_resolved_configuration_is_saved_and_copied(args):
    config = (args if isinstance(args, FR3EConfig) else FR3EConfig.from_grpo(args)).resolve()
    for made in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert type(made) is type(config) and made.to_dict() == config.to_dict() and made.plan == config.plan
        made.num_generations = 4
        assert made.resolve().num_anchors == 3 and config.num_anchors == 6


@pytest.mark.parametrize(("given", "name"), [(True, "group"), (False, "none")])
def test_a_scaling_may_be_given_as_a_boolean(given, name):
    """As TRL takes it."""
    configs = [make_config(scale_rewards=scaling).to_dict() for scaling in (given, name)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("num_generations", range(2, 24))
def test_every_number_of_rows_is_taken(num_generations):
    for scaling in ("none", "group", "batch"):
        assert make_config(num_generations=num_generations, scale_rewards=scaling).num_anchors > 0
    assert FR3EConfig.from_grpo(make_grpo(num_generations)).num_anchors > 0


def test_from_grpo_is_checked_too():
    with pytest.raises(ValueError, match="multi_objective_aggregation='normalise'"):
        FR3EConfig.from_grpo(GRPOConfig("unused", multi_objective_aggregation="normalise", **CPU))


def test_every_field_has_help_and_is_documented():
    for f in fields(FR3EConfig):
        if f.name not in GRPOConfig.__dataclass_fields__:
            assert f.metadata.get("help"), f.name
            assert FR3EConfig.__doc__.count(f"        {f.name} (`") == 1, f.name


def test_the_command_line_sets_every_field():
    (config,) = HfArgumentParser(FR3EConfig).parse_args_into_dataclasses(
        "--output_dir unused --bf16 false --use_cpu true --report_to none --num_generations 8 --num_anchors 3 "
        "--anchor_score surprisal --anchor_threshold none --anchor_min_gap 3 --base_selection mixed "
        "--reuse_base false --num_base_trajectories 2 --modulation sharpened --reject_degenerate_states false "
        "--epsilon_high 0.3 --scale_rewards batch".split()
    )
    assert (config.num_anchors, config.num_bases, config.modulation) == (3, 2, "sharpened")
    assert config.reject_degenerate_states is False


# Open settings, and what is changed later


def test_what_was_not_set_is_none_until_a_trainer_is_made():
    config = FR3EConfig("unused", **CPU)
    assert all(getattr(config, name) is None for name in OPEN if name != "anchor_threshold")
    assert (config.num_states, config.num_bases, config.has_prior, config.is_plain_grpo) == (7, 2, True, False)
    assert config.plan.credit == "tree" and config.num_anchors is None
    assert config.resolve() is config and (config.num_anchors, config.credit) == (6, "tree")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_generations": 4}, {"num_anchors": 3, "num_base_trajectories": 1}),
        ({"num_anchors": 0}, {"credit": "rollout", "value_tracker": False, "scale_rewards": "group"}),
        ({"scale_rewards": "group"}, {"credit": "rollout", "value_prior_strength": 0.0, "num_anchors": 1}),
        ({"loss_type": "cispo"}, {"epsilon_high": 5.0}),
        ({"importance_sampling_level": "sequence"}, {"credit": "rollout", "anchor_threshold": None}),
        ({"value_prior_strength": 2.0}, {"value_tracker": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_resolved", [False, True])
def test_what_was_not_set_follows_what_is_changed_later(changes, expected, is_resolved):
    config = FR3EConfig("unused", **CPU)
    if is_resolved:
        config.resolve()
    for name, value in changes.items():
        setattr(config, name, value)
        assert getattr(config, name) == value
    config.resolve()
    assert {name: getattr(config, name) for name in expected} == expected
    again = FR3EConfig("unused", **CPU | changes).resolve()
    assert config.to_dict() == again.to_dict()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"num_anchors": 5}, "num_anchors=5"),
        ({"credit": "tree", "scale_rewards": "group"}, "scale_rewards='group'"),
        ({"num_generations": 3}, "num_generations=3 is not allowed: it must be a divisor of generation_batch_size"),
        ({"max_refills": -1}, "max_refills=-1"),
    ],
    ids=str,
)
def test_what_is_changed_later_is_checked(changes, named):
    config = FR3EConfig("unused", **CPU)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=re.escape(named)):
        config.resolve()


def test_a_replaced_or_saved_configuration_has_nothing_set_that_was_not():
    config = FR3EConfig("unused", num_iterations=2, **CPU)
    fewer = replace(config, num_generations=4, generation_batch_size=None)  # TRL has it beside steps_per_generation
    assert (fewer.num_iterations, fewer.resolve().num_anchors) == (2, 3)
    assert "num_anchors=None" in repr(config)
    saved = json.loads(json.dumps(config.to_dict()))
    again = FR3EConfig(**{name: value for name, value in saved.items() if name != "generation_batch_size"})
    assert again.to_dict() == config.to_dict() and again.resolve().plan == config.plan


# What is off, and why


def tree_takes(name, value):
    return value in CREDIT_RULES["tree"].requires[name]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({}, []),
        ({"loss_type": "dr_grpo", "num_generations": 2, "beta": 0.04}, []),
        ({"anchor_threshold": 0.3}, []),
        ({"num_anchors": 0}, ["exploration is off because num_anchors=0. Leave num_anchors unset to turn it on."]),
        (
            {"scale_rewards": "group"},
            [
                "tree credit, value tracker and anchors by threshold are off because scale_rewards='group'. Set "
                "scale_rewards='none' to turn them on."
            ],
        ),
        (
            {"importance_sampling_level": "sequence", "multi_objective_aggregation": "normalize_then_sum"},
            [
                "tree credit, value tracker and anchors by threshold are off because "
                "importance_sampling_level='sequence' and multi_objective_aggregation='normalize_then_sum'. Set "
                "importance_sampling_level='token' and multi_objective_aggregation='sum_then_normalize' to turn them "
                "on."
            ],
        ),
        (
            {"value_tracker": False},
            ["value tracker is off because value_tracker=False. Set value_tracker=True to turn it on."],
        ),
        (
            {"value_prior_strength": 4.0, "anchor_threshold": None},
            [
                "value tracker is off because value_prior_strength=4.0. Set value_prior_strength=None to turn it on.",
                "anchors by threshold are off because anchor_threshold=None. Set anchor_threshold='auto' to turn them "
                "on.",
            ],
        ),
        (
            {"credit": "rollout"},
            [
                "tree credit, value tracker and anchors by threshold are off because credit='rollout'. Set "
                "credit='tree' to turn them on."
            ],
        ),
        (
            {"anchor_score": "surprisal"},
            [
                "anchors by threshold are off because anchor_score='surprisal'. Set anchor_score='entropy' to turn "
                "them on."
            ],
        ),
    ],
    ids=str,
)
def test_what_is_off_is_told(settings, lines, caplog):
    config = FR3EConfig("unused", **CPU | settings)
    assert config.parts_off() == lines
    config.warn()
    assert caplog.messages == lines


@pytest.mark.parametrize("preset", [FR3EConfig.paper, FR3EConfig.released])
def test_a_preset_tells_what_it_leaves_out(preset):
    lines = preset(output_dir="unused", **CPU).parts_off()
    assert [line.partition(" because ")[0] for line in lines] == [
        "tree credit is off",
        "value tracker is off",
        "anchors by threshold are off",
    ]


@pytest.mark.parametrize(("name", "value"), [("loss_type", "grpo"), ("loss_type", "sapo"), ("scale_rewards", "batch")])
def test_a_line_is_told_just_where_a_part_is_off(name, value):
    config = FR3EConfig("unused", **CPU | {name: value})
    lines, has_tree = config.parts_off(), tree_takes(name, value)
    assert (lines == []) == has_tree and all(f"{name}={value!r}" in line for line in lines)
    plan = config.plan
    assert plan.credit == ("tree" if has_tree else "rollout")
    assert (plan.length_normalized, plan.scale) == (name == "loss_type", "batch" if value == "batch" else "none")


@pytest.mark.parametrize("settings", [{}, {"scale_rewards": "group"}, {"credit": "rollout"}], ids=str)
def test_the_remedies_turn_everything_on(settings):
    config = FR3EConfig("unused", **CPU | settings)
    for line in config.parts_off():
        for name, value in re.findall(r"(\w+)=(\S+)", line.partition("Set ")[2]):
            setattr(config, name, ast.literal_eval(value))
    assert config.resolve().parts_off() == []


def test_the_trainer_its_card_and_the_dry_run_say_what_is_off(tmp_path, capsys, caplog):
    line = "anchors by threshold are off because scale_rewards='group'. Set scale_rewards='none' to turn them on."
    trainer = make_trainer(FR3ETrainer, scale_rewards="group", output_dir=str(tmp_path / "out"))
    assert len([message for message in caplog.messages if line in message]) == 1
    trainer.create_model_card("a name")
    assert line in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n' * 16)
    options = {"model_name_or_path": model_on_disk(), "dataset_name": tmp_path / "data.jsonl", "bf16": False}
    options |= {"output_dir": tmp_path / "run", "use_cpu": True, "scale_rewards": "group"}
    cli.main(["train", "--dry_run", *(f"--{name}={value}" for name, value in options.items())])
    assert line in " ".join(capsys.readouterr().out.split())
