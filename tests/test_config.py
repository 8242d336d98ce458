"""FR3EConfig: what is chosen, what is refused, and what a GRPOConfig becomes."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import HfArgumentParser, TrainingArguments
from trl import GRPOConfig

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.config import CHECKS

pytestmark = pytest.mark.fast

CPU = {"bf16": False, "use_cpu": True, "report_to": []}
NO_PRIOR = {"value_prior_strength": 0}


def make_config(**settings) -> FR3EConfig:
    # One group a batch, unless the test says otherwise
    size = settings.get("num_generations", 8)
    return FR3EConfig(**{"output_dir": "unused", "per_device_train_batch_size": size} | CPU | settings)


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


def test_help_is_in_short_sentences():
    for f in fields(FR3EConfig):
        if f.name in FR3EConfig.__annotations__:
            for sentence in re.split(r"[.;?] ", f.metadata["help"]):
                assert len(sentence.split()) <= 25, (f.name, sentence)


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
    assert make_config(loss_type="cispo").epsilon_high == 5.0
    assert "epsilon_high" not in caplog.text
    assert make_config(loss_type="cispo", epsilon_high=0.28).epsilon_high == 0.28
    assert "epsilon_high=0.28 cuts all importance weights below 1" in caplog.text


def test_clipping_and_scaling_may_be_set():
    for num_anchors in (0, 3):
        config = make_config(num_anchors=num_anchors, epsilon_high=0.2, scale_rewards="batch")
        assert (config.epsilon_high, config.scale_rewards) == (0.2, "batch")


def test_presets():
    paper = FR3EConfig.paper(output_dir="unused", **CPU)
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


def make_grpo(num_generations: int = 8, **settings) -> GRPOConfig:
    return GRPOConfig(
        "unused", num_generations=num_generations, per_device_train_batch_size=num_generations, **CPU | settings
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Without a prior, since GRPO scales by the group
        ({}, (4, 1, 4)),
        ({"scale_rewards": "group", "num_generations": 16}, (4, 3, 4)),
        # With one
        ({"scale_rewards": "group", "num_generations": 3}, (1, 2, 1)),
        ({"multi_objective_aggregation": "normalize_then_sum"}, (2, 6, 1)),
        ({"scale_rewards": "none"}, (2, 6, 1)),
        ({"scale_rewards": False, "num_generations": 3}, (1, 2, 1)),
        ({"scale_rewards": "batch", "epsilon_high": 0.25, "beta": 0.04}, (2, 6, 1)),
    ],
)
def test_from_grpo_changes_nothing_of_grpo(settings, expected, caplog):
    grpo = make_grpo(**settings)
    config = FR3EConfig.from_grpo(grpo)
    assert isinstance(config, FR3EConfig) and type(grpo) is GRPOConfig
    assert {f.name: getattr(config, f.name) for f in fields(GRPOConfig)} == {
        f.name: getattr(grpo, f.name) for f in fields(GRPOConfig)
    }
    assert shares(config) == expected
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"num_anchors={config.num_anchors}" in line and "negative_advantage_scale=1.0" in line
    assert f"epsilon_high={grpo.epsilon_high!r} and scale_rewards={grpo.scale_rewards!r}" in line and "'none'" in line


@pytest.mark.parametrize(("given", "name"), [(True, "group"), (False, "none")])
def test_a_scaling_may_be_given_as_a_boolean(given, name):
    """As TRL takes it."""
    configs = [make_config(scale_rewards=scaling).to_dict() for scaling in (given, name)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("num_generations", range(2, 24))
def test_from_grpo_takes_every_number_of_rows(num_generations, caplog):
    config = FR3EConfig.from_grpo(make_grpo(num_generations))
    splits = any(num_generations % num_states == 0 for num_states in (2, 3, 4, 5) if num_generations > num_states)
    assert config.num_anchors > 0 and config.has_prior != splits
    assert ("and with that a prior" in caplog.text) == splits
    assert FR3EConfig.from_grpo(make_grpo(num_generations, scale_rewards="none")).num_anchors > 0


def test_from_grpo_tells_what_a_derived_class_loses(caplog):
    class Derived(GRPOConfig):
        note = "of the class"

    args = Derived("unused", num_generations=4, **CPU)
    args.mark = "of the instance"
    config = FR3EConfig.from_grpo(args)
    assert type(config) is FR3EConfig and config.mark == "of the instance" and not hasattr(config, "note")
    assert "The Derived is a plain FR3EConfig" in caplog.text


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
