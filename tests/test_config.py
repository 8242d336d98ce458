"""FR3EConfig: what is chosen, what is refused, and what a GRPOConfig becomes."""

import ast
import copy
import itertools
import json
import math
import pickle
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
from factory import make_trainer
from models import model_on_disk
from transformers import TrainingArguments
from trl import GRPOConfig

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands import cli
from fr3e_trl.fr3e_config import CHECKS, OPEN

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


# Settings, and the values of `RESOLVED` that must come of them. Recorded when one method chose them all
CASES = json.loads((Path(__file__).parent / "resolved_settings.json").read_text())
RESOLVED = (
    *("num_bases", "num_anchors", "num_rollouts", "value_prior_strength", "scale_rewards", "epsilon_high"),
    *("reject_degenerate_states", "share_prefixes", "credit", "anchor_threshold"),
)


@pytest.mark.parametrize(
    ("source", "settings", "expected"), [(source, *case) for source in CASES for case in CASES[source]], ids=str
)
def test_what_the_steps_choose(source, settings, expected):
    config = make_config(**settings) if source == "FR3EConfig" else FR3EConfig.from_grpo(make_grpo(**settings))
    assert [getattr(config, name) for name in RESOLVED] == expected


def test_defaults():
    config = make_config()
    assert (config.epsilon, config.loss_type, config.beta) == (0.2, "dapo", 0.0)
    assert (config.modulation, config.anchor_score, config.base_selection) == ("none", "entropy", "all")
    assert config.reuse_base and config.negative_advantage_scale == 1
    assert config.value_tracker and not make_config(value_prior_strength=4).value_tracker
    assert make_config(value_tracker=False).value_prior_strength == 4
    assert not make_config(credit="rollout").value_tracker  # the prior is a fixed one
    assert make_config(scale_rewards="group", multi_objective_aggregation="normalize_then_sum").has_prior
    # Every number of rows is taken
    for num_generations, scaling in itertools.product(range(2, 24), ("none", "group", "batch")):
        assert make_config(num_generations=num_generations, scale_rewards=scaling).num_anchors > 0


# By what the error says is allowed: values that a setting cannot have
IMPOSSIBLE = {
    "at least 0": {"max_refills": [-1], "value_prior_strength": [-1.0], "negative_advantage_scale": [-0.5]}
    | {"beta": [-1, math.nan], "learning_rate": [-1, math.inf, None, "1e-6"]},
    "at least 0 and at most 4294967295": {"seed": [-1, 2**32, 1.5]},
    "at least 0, which keeps all": {"top_k": [-1]},
    "at least 1": {"anchor_min_gap": [0], "num_base_trajectories": [0], "num_iterations": [0]},
    "at least 2": {"num_generations": [0, 1]},
    "above 0": {"epsilon": [0, math.inf], "epsilon_high": [-0.5], "temperature": [0.0, math.nan]}
    | {"repetition_penalty": [0], "tool_timeout": [0]},
    "above 0 and at most 1": {"top_p": [0.0, 1.5]},
    "at least 0 and at most 1": {"min_p": [2.0]},
    "a finite number": {"value_prior_strength": [math.inf, "0.5"], "vllm_request_timeout": [math.nan]}
    | {"tool_timeout": [True]},
    "an integer": {"num_anchors": [1.5, True, "3"], "log_trees": [1.5], "num_generations": [8.0]},
    "an integer, for example 100": {"max_steps": [2.5]},
    "512": {"max_completion_length": [-5, None]},
    "finite numbers": {"reward_weights": [[1.0, math.inf]]},
    "'auto', None, or a finite number": {"anchor_threshold": [math.inf, "nan", -0.1, "-0.1", "high", True, [0.3]]},
    "True or False": {"reuse_base": ["no"], "value_tracker": [1]},
    "'entropy', 'surprisal', 'random'": {"anchor_score": ["entropi"]},
    "'all', 'mixed'": {"base_selection": ["mix"]},
    "not allowed: it must be": {"replay_mismatch": ["ignore"]},
    "'none', 'exp', 'sharpened'": {"modulation": [None]},
    "'normalize_then_sum'": {"multi_objective_aggregation": ["normalise"]},
    "'group'": {"scale_rewards": ["std"]},
    "'dapo'": {"loss_type": ["dappo"]},
    "'token', 'sequence'": {"importance_sampling_level": ["word"]},
    "not allowed: it must be one of 'rollout', 'tree'": {"credit": ["branch"]},
}
# The same, with tree credit
NOT_WITH_TREES = [
    ("importance_sampling_level", "sequence", "it must be 'token' with credit='tree'"),
    ("scale_rewards", "group", "not allowed: it must be 'none' or 'batch'"),
    ("multi_objective_aggregation", "normalize_then_sum", "'sum_then_normalize' with credit='tree'"),
    ("reuse_base", False, ""),
    ("base_selection", "mixed", ""),
    ("modulation", "exp", ""),
    ("num_anchors", 0, "not allowed: it must be above 0"),
]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (NO_PRIOR | {"num_generations": 7}, ["num_generations=7", "num_generations=8", "num_anchors=0"]),
        (
            NO_PRIOR | {"num_generations": 16, "num_anchors": 4},
            ["num_anchors=4", "can be 0 (plain GRPO), 1, 3, 7.", "10, 15, 20"],
        ),
        ({"num_generations": 8, "num_anchors": 4}, ["num_anchors=4", "0 (plain GRPO), 1, 3, 7.", "5, 10, 15, 20"]),
        (
            {"num_generations": 8, "num_anchors": 4, "num_base_trajectories": 3},
            ["num_anchors=4 does not fit num_generations=8 and num_base_trajectories=3", "1, 5.", "7, 11, 15, 19"],
        ),
        (NO_PRIOR | {"num_anchors": 2, "num_base_trajectories": 6}, ["num_base_trajectories=6", "GRPO), 1.", "10, 12"]),
        ({"num_base_trajectories": 8}, ["num_base_trajectories=8", "below num_generations=8"]),
        ({"num_generations": 8, "num_anchors": -1}, ["num_anchors=-1", "0 (plain GRPO), 1, 3"]),
        ({"max_refills": 1, "num_anchors": 0}, ["max_refills=1", "reject_degenerate_states=True"]),
        ({"num_generations": 0, "num_anchors": 0}, ["num_generations=0", "at least 2", "8"]),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "value_tracker": True},
            ["value_tracker=True", "False with multi_objective_aggregation='normalize_then_sum'"],
        ),
        ({"scale_rewards": "group", "value_tracker": True}, ["value_tracker=True", "scale_rewards='group'"]),
        (NO_PRIOR | {"value_tracker": True}, ["value_tracker=True", "it must be False with value_prior_strength=0"]),
        *(({"credit": "tree", name: value}, [f"{name}={value!r}", words]) for name, value, words in NOT_WITH_TREES),
        ({"anchor_threshold": 0.3, "anchor_score": "random"}, ["anchor_threshold=0.3", "anchor_score='entropy'"]),
        *(
            ({name: value}, [f"{name}=", words])
            for words, of_words in IMPOSSIBLE.items()
            for name, values in of_words.items()
            for value in values
        ),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, named):
    with pytest.raises(ValueError) as error:
        make_config(**settings)
    assert all(words in str(error.value) for words in named), str(error.value)


NUMBERS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.1, "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}


@pytest.mark.parametrize("num_anchors", [0, 3])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(
            ({name: value}, [f"{name}={value!r}", "a number", str(works)])
            for name, works in NUMBERS.items()
            for value in ("1", [1.0])
        ),
        ({"top_k": "10"}, ["top_k='10'", "an integer or None", "0"]),
        ({"num_iterations": "2"}, ["num_iterations='2'", "an integer", "1"]),
        ({"reward_weights": 1.0}, ["reward_weights=1.0", "a list of numbers", "[1.0, 0.5]"]),
        ({"reward_weights": ["1"]}, ["reward_weights=['1']", "a list of numbers"]),
        ({"generation_kwargs": 5}, ["generation_kwargs=5", "a dict or None", "{'top_k': 20}"]),
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


def test_presets():
    paper = FR3EConfig.paper(output_dir="unused", **CPU).resolve()
    assert (paper.num_generations, paper.learning_rate) == (16, 1e-6)
    assert (paper.num_bases, paper.num_anchors, paper.num_rollouts) == (4, 3, 4)
    assert (paper.modulation, paper.base_selection, paper.value_prior_strength) == ("exp", "mixed", 0)
    released = FR3EConfig.released(output_dir="unused", learning_rate=1e-5, **CPU)
    assert (released.num_anchors, released.num_rollouts, released.num_bases) == (4, 16, 4)
    assert (released.anchor_score, released.modulation) == ("surprisal", "sharpened")
    assert (released.epsilon, released.epsilon_high, released.learning_rate) == (0.2, 0.3, 1e-5)
    # Losses and a scaling that trees take
    for settings in ({"loss_type": "grpo"}, {"loss_type": "sapo"}, {"scale_rewards": "batch"}):
        config = FR3EConfig("unused", **CPU | settings)
        plan = config.plan
        assert config.parts_off() == [] and plan.credit == "tree"
        assert (plan.length_normalized, plan.scale) == ("loss_type" in settings, settings.get("scale_rewards", "none"))


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


def test_every_field_has_help_and_a_check_and_is_documented():
    own = [f for f in fields(FR3EConfig) if f.name not in GRPOConfig.__dataclass_fields__]
    assert {f.name for f in own} <= {check.name for check in CHECKS["given"]}
    for f in own:
        assert f.metadata.get("help"), f.name
        assert FR3EConfig.__doc__.count(f"        {f.name} (`") == 1, f.name


def test_what_was_not_set_is_none_until_a_trainer_is_made():
    config = FR3EConfig("unused", **CPU)
    assert all(getattr(config, name) is None for name in OPEN if name != "anchor_threshold")
    assert (config.num_states, config.num_bases, config.has_prior, config.is_plain_grpo) == (7, 2, True, False)
    assert config.plan.credit == "tree" and config.num_anchors is None
    assert config.resolve() is config and (config.num_anchors, config.credit) == (6, "tree")
    # Nor has a copy, or what is loaded again, anything set
    config = FR3EConfig("unused", num_iterations=2, **CPU)
    fewer = replace(config, num_generations=4, generation_batch_size=None)  # TRL has it beside steps_per_generation
    assert (fewer.num_iterations, fewer.resolve().num_anchors) == (2, 3)
    assert "num_anchors=None" in repr(config)
    saved = json.loads(json.dumps(config.to_dict()))
    again = FR3EConfig(**{name: value for name, value in saved.items() if name != "generation_batch_size"})
    assert again.to_dict() == config.to_dict() and again.resolve().plan == config.plan


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_generations": 4}, {"num_anchors": 3, "num_base_trajectories": 1}),
        ({"num_anchors": 0}, {"credit": "rollout", "value_tracker": False, "scale_rewards": "group"}),
        ({"scale_rewards": "group"}, {"credit": "rollout", "value_prior_strength": 0.0, "num_anchors": 1}),
        ({"loss_type": "cispo"}, {"epsilon_high": 5.0}),
        ({"importance_sampling_level": "sequence"}, {"credit": "rollout", "anchor_threshold": None}),
        ({"value_prior_strength": 2.0}, {"value_tracker": False}),
        # Or what is refused
        ({"num_anchors": 5}, "num_anchors=5"),
        ({"credit": "tree", "scale_rewards": "group"}, "scale_rewards='group'"),
        ({"num_generations": 3}, "num_generations=3 is not allowed: it must be a divisor of generation_batch_size"),
        ({"max_refills": -1}, "max_refills=-1"),
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
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            config.resolve()
        return
    config.resolve()
    assert {name: getattr(config, name) for name in expected} == expected
    again = FR3EConfig("unused", **CPU | changes).resolve()
    assert config.to_dict() == again.to_dict()


BY_GROUP = "tree credit, value tracker and anchors by threshold are off because scale_rewards='group'. Set "
BY_PRIOR = "value tracker is off because value_prior_strength=4.0. Set value_prior_strength=None to turn it on."
BY_NONE = "anchors by threshold are off because anchor_threshold=None. Set anchor_threshold='auto' to turn them on."


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({}, []),
        ({"loss_type": "dr_grpo", "num_generations": 2, "beta": 0.04}, []),
        ({"anchor_threshold": 0.3}, []),
        ({"num_anchors": 0}, ["exploration is off because num_anchors=0. Leave num_anchors unset to turn it on."]),
        ({"scale_rewards": "group"}, [BY_GROUP + "scale_rewards='none' to turn them on."]),
        ({"value_prior_strength": 4.0, "anchor_threshold": None}, [BY_PRIOR, BY_NONE]),
    ],
    ids=str,
)
def test_what_is_off_is_told(settings, lines, caplog):
    config = FR3EConfig("unused", **CPU | settings)
    assert config.parts_off() == lines
    config.warn()
    assert caplog.messages == lines


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_rewards": "group"},
        {"credit": "rollout"},
        {"anchor_score": "surprisal"},
        {"importance_sampling_level": "sequence", "multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=str,
)
def test_the_remedies_turn_everything_on(settings):
    config = FR3EConfig("unused", **CPU | settings)
    assert config.parts_off()
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
