"""What TRL's own tests of `GRPOTrainer` go through, by groups of 3 as there, with FR3E's trainer in its place."""

import asyncio
import functools
import math
from pathlib import Path

import factory
import pytest
import torch
from factory import letters, steps_of
from models import TINY, make_dataset, make_model, make_tokenizer, model_on_disk, on_disk
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from test_matrix import make_family
from transformers import LlamaForSequenceClassification, Qwen3ForSequenceClassification, set_seed
from trl import GRPOConfig

from fr3e_trl import FR3EConfig, FR3ETrainer

SIZES = {"num_generations": 3, "per_device_train_batch_size": 6, "max_completion_length": 8, "max_steps": 2}


def distinct(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


def ones(completions, **kwargs):
    return [1 for _ in completions]


def none(completions, **kwargs):
    return [None] * len(completions)


async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return distinct(completions)


def near_value(completions, some_values, **kwargs):
    return [float(abs(len(set(text)) - value)) for text, value in zip(completions, some_values, strict=True)]


def by_step(completions, trainer_state, **kwargs):
    assert trainer_state.global_step in (0, 1)
    return [(1 + trainer_state.global_step) * reward for reward in letters(completions)]


@functools.cache
def reward_model_on_disk(cls=Qwen3ForSequenceClassification) -> str:
    return on_disk(cls(cls.config_class(**TINY, num_labels=1)), make_tokenizer())


make_trainer = functools.partial(factory.make_trainer, FR3ETrainer, reward_funcs=letters, learning_rate=0.01, **SIZES)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def train(moves=True, **kwargs):
    """Train, exploring, and check that what is to be trained has moved."""
    trainer = make_trainer(**kwargs)
    before = weights(trainer)
    frozen = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    set_seed(1)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    after = weights(trainer)
    assert all(p.isfinite().all() for p in after.values())
    moved = [name for name in after if not after[name].equal(before[name])]
    assert bool(moved) == moves
    assert all(trainer.model.get_parameter(name).equal(p) for name, p in frozen.items())
    if not trainer.args.is_plain_grpo:
        assert trainer.trees and all(tree.states[0].rollouts for tree in trainer.trees)
        assert any("fr3e/anchor/count" in entry and entry["fr3e/anchor/count"] > 0 for entry in steps_of(trainer))
    return trainer


ACCUMULATED = {"gradient_accumulation_steps": 2}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": make_dataset(3)}
EVALUATION |= {"per_device_eval_batch_size": 3, "num_generations_eval": 1}
CONVERSATIONAL = {"dataset": make_dataset(conversational=True)}
AGGREGATED = {"multi_objective_aggregation": "normalize_then_sum"}
# With an FR3EConfig, some of these are among the modes of test_trainer.py, and all losses
OF_A_GRPO_CONFIG = {
    **{loss_type: {"loss_type": loss_type} | ACCUMULATED for loss_type in ("dapo", "grpo")},
    "conversational": CONVERSATIONAL,
    "None": {"reward_funcs": [letters, none]},
    "sync and async": {"reward_funcs": [letters, ones, later], "reward_weights": [0.7, 0.3, 0.5]},
    "normalize_then_sum": {"reward_funcs": [letters, distinct]} | AGGREGATED,
    "more generations than a micro-batch": {"num_generations": 6, "per_device_train_batch_size": 3} | ACCUMULATED,
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "beta": {"beta": 0.1},
    **{f"scale {scaling}": {"scale_rewards": scaling} for scaling in ("group", "batch")},
}
MODEL = make_model()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
CASES = {
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"} | ACCUMULATED,
    "one prompt a batch": {"per_device_train_batch_size": 3, "max_steps": 4},
    "chat_template_kwargs": CONVERSATIONAL | {"chat_template_kwargs": {"enable_thinking": False}},
    "one evaluated completion": EVALUATION,
    "evaluation on start": EVALUATION | {"eval_on_start": True, "num_generations_eval": 3, "loss_type": "grpo"},
    "sequence level": {"num_iterations": 2, "max_steps": 4, "importance_sampling_level": "sequence"},
    "more generations than a micro-batch": OF_A_GRPO_CONFIG["more generations than a micro-batch"],
    "bias correction": {"beta": 0.1, "use_bias_correction_kl": True},
    "delta": {"delta": 2.0, "pad_to_multiple_of": 8},
    "masks": {"off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.2},
    "generation settings": {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    | {"generation_kwargs": {"do_sample": True, "top_k": 50, "length_penalty": -0.1}},
    "a head beside an adapter": {"peft_config": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])},
    "beams": {"generation_kwargs": {"do_sample": True, "num_beams": 2, "length_penalty": -0.1}, "num_anchors": 0},
    "optimizers": {"model": MODEL, "optimizers": (SGD, torch.optim.lr_scheduler.ConstantLR(SGD))},
    "workers": {"dataloader_num_workers": 2},
    "not shuffled": {"shuffle_dataset": False, "log_completions": True, "log_unique_prompts": True},
    "a reward model": {"reward_funcs": [letters, reward_model_on_disk()]},
    "two reward models": {
        "reward_funcs": [reward_model_on_disk(), reward_model_on_disk(LlamaForSequenceClassification)],
        "reward_processing_classes": [make_tokenizer(), make_tokenizer()],
    },
    "a column": {"reward_funcs": near_value, "dataset": make_dataset().add_column("some_values", list(range(16)))},
    "the trainer's state": {"reward_funcs": by_step},
    "normalize_then_sum, None": {"reward_funcs": [letters, none], "reward_weights": [0.5, 2.0]} | AGGREGATED,
}


CASES |= {f"GRPOConfig, {name}": {"config": GRPOConfig} | settings for name, settings in OF_A_GRPO_CONFIG.items()}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_every_setting_trains(settings):
    trainer = train(**settings)
    assert isinstance(trainer.args, FR3EConfig) and trainer.args.is_plain_grpo == ("num_anchors" in settings)


# Models

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("family", ["Gemma2", "GptOss", "Glm4Moe", "NemotronH"])
def test_models_train(family):
    trainer = train(model=make_family(family)[0])
    if trainer.aux_loss_enabled:
        assert all(math.isfinite(entry["aux_loss"]) for entry in steps_of(trainer))


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_the_head_is_cast(family):
    trainer = train(model=make_family(family)[0].to(torch.bfloat16), cast_lm_head_to_fp32=True)
    assert trainer.model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"beta": 0.1}], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_train(settings, wrapped):
    model = {"model": get_peft_model(make_model(), LORA)} if wrapped else {"peft_config": LORA}
    trainer = train(**model, **settings)
    assert all("lora" in name for name in weights(trainer))


def test_adapters_of_experts_train():
    adapter = LoraConfig(target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"])
    train(model=get_peft_model(make_family("GptOss")[0], adapter), beta=0.1)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_learned_prompts_train(kind):
    trainer = train(peft_config=kind(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8), gradient_checkpointing=False)
    assert all("prompt_encoder" in name for name in weights(trainer)) and not trainer.shares_prefixes


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_the_logged_reward_is_weighted(aggregation):
    def zeros(completions, **kwargs):
        return [0.0] * len(completions)

    settings = {"reward_funcs": [ones, zeros], "reward_weights": [0.7, 0.3]}
    trainer = train(moves=False, multi_objective_aggregation=aggregation, weight_decay=0.0, **settings)
    assert [entry["reward"] for entry in steps_of(trainer)] == pytest.approx([0.7, 0.7])
    (first, _), names = steps_of(trainer), ("ones", "zeros")
    assert {f"rewards/{name}/{kind}" for name in names for kind in ("mean", "std")} <= first.keys()


def test_rewards_that_are_all_none(caplog):
    with caplog.at_level("WARNING", logger="trl.trainer.grpo_trainer"):
        train(moves=False, reward_funcs=none, weight_decay=0.0)
    assert "All reward functions returned None" in caplog.text


def test_truncated_completions_are_masked():
    never = {"generation_kwargs": {"suppress_tokens": [0, 1]}, "weight_decay": 0.0}
    trainer = train(moves=False, mask_truncated_completions=True, loss_type="dapo", **never)
    assert [entry["completions/clipped_ratio"] for entry in steps_of(trainer)] == [1, 1]
    # Sums of digits end early now and then: those that do are learned from
    some = train(mask_truncated_completions=True, num_generations=12, per_device_train_batch_size=12)
    assert any(0 < entry["completions/clipped_ratio"] < 1 for entry in steps_of(some))


@pytest.mark.parametrize("settings", [{}, ACCUMULATED], ids=str)
def test_the_entropy_bonus_adapts(settings):
    settings = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_coef_delta": 0.005} | settings
    trainer = train(entropy_target=15.0, **settings)
    assert trainer.entropy_coef == pytest.approx(0.01 + 0.005 * trainer.state.global_step)
    trainer = train(moves=False, reward_funcs=ones, entropy_target=0.01, **settings)
    assert {trainer.entropy_coef, *(entry["entropy_coef"] for entry in steps_of(trainer))} == {0.01}


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "luspo"])
def test_the_entropy_bonus_has_its_scale(loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    trainer = train(loss_type=loss_type, importance_sampling_level=level, entropy_coef=0.5)
    for entry in steps_of(trainer):
        entropy = entry.get("entropy", 0.0)  # a step without a row in the loss has none
        assert entry["policy_loss"] - entry["loss"] == pytest.approx(0.5 * entropy, rel=0.3)


def test_a_rollout_func():

    def rollout_func(prompts, trainer):
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        columns = {"prompt_ids": prompt_ids, "completion_ids": [[5 + i % 7, 6, 1] for i in range(len(prompts))]}
        same = {"logprobs": [0.0] * 3, "env_mask": [1, 0, 1], "difficulty": 0.5}
        return columns | {name: [value] * len(prompts) for name, value in same.items()}

    def reward(completions, difficulty, **kwargs):
        assert difficulty == [0.5] * len(completions)
        return letters(completions)

    trainer = train(rollout_func=rollout_func, reward_funcs=reward, num_anchors=0)
    assert [entry["completions/mean_length"] for entry in steps_of(trainer)] == [2.0, 2.0]  # of what is not masked
    with pytest.raises(ValueError, match="rollout_func must return keys"):
        train(rollout_func=lambda prompts, trainer: {"prompt_ids": [], "completion_ids": []}, num_anchors=0)
    with pytest.raises(NotImplementedError, match=r"rollout_func.*sampler="):
        make_trainer(rollout_func=rollout_func)


def test_names_in_place_of_everything(monkeypatch):
    monkeypatch.setattr(FR3EConfig, "_validate_args", lambda self: None)  # TRL's default of bf16 asks for a GPU
    trainer = FR3ETrainer(model_on_disk(), reward_model_on_disk(), train_dataset=make_dataset())
    assert Path(trainer.args.output_dir).name.endswith("-FR3E") and trainer.args.num_anchors == 6
