"""
The peer's guard: what TRL's own tests of `GRPOTrainer` go through, with FR3E's trainer in its place.

Each case trains for a step or two, exploring, by groups of 3 as they do, and moves the weights. Tools, environments and
images have tests of their own.
"""

import asyncio
import atexit
import functools
import json
import logging
import math
import shutil
import tempfile
from pathlib import Path

import factory
import pytest
import torch
import transformers
from datasets import DatasetDict, IterableDatasetDict
from factory import letters
from models import CPU, TINY, make_dataset, make_model, make_tokenizer, model_on_disk
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3ForSequenceClassification,
    set_seed,
)
from transformers.utils import is_liger_kernel_available
from trl import GRPOConfig

from fr3e_trl import FR3EConfig, FR3ETrainer

SIZES = {"num_generations": 3, "per_device_train_batch_size": 6, "max_completion_length": 8, "max_steps": 2}

# Reward functions of each kind


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
    return [
        float(abs(len(set(completion)) - value)) for completion, value in zip(completions, some_values, strict=True)
    ]


def by_step(completions, trainer_state, **kwargs):
    assert trainer_state.global_step in (0, 1)
    return [(1 + trainer_state.global_step) * reward for reward in letters(completions)]


@functools.cache
def reward_model_on_disk(cls=Qwen3ForSequenceClassification) -> str:
    """Directory of a tiny reward model, of the policy's family or another."""
    directory = tempfile.mkdtemp(prefix="fr3e-trl-test-")
    atexit.register(shutil.rmtree, directory)
    config = make_model().config.to_dict() | {"num_labels": 1}
    if cls is LlamaForSequenceClassification:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        config = LlamaConfig(**{name: config[name] for name in names}, num_labels=1)
    else:
        config = cls.config_class(**config)
    cls(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


# Training


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
        assert any("fr3e/anchor/count" in entry and entry["fr3e/anchor/count"] > 0 for entry in logs(trainer))
    return trainer


def logs(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


ACCUMULATED = {"gradient_accumulation_steps": 2}
BATCH_OF_12 = {"per_device_train_batch_size": 12}
CASES = {
    **{f"loss {name}": {"loss_type": name} | ACCUMULATED for name in ("bnpo", "dr_grpo", "dapo", "cispo")},
    **{f"loss {name}": {"loss_type": name} | ACCUMULATED for name in ("sapo", "vespo", "grpo")},
    "loss luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"} | ACCUMULATED,
    "one prompt a batch": {"per_device_train_batch_size": 3, "max_steps": 4},
    "conversational": {"dataset": make_dataset(conversational=True)},
    "iterable": {"dataset": make_dataset().to_iterable_dataset()},
    "chat_template_kwargs": {
        "dataset": make_dataset(conversational=True),
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "evaluation": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": make_dataset(3),
        "per_device_eval_batch_size": 3,
    },
    "one evaluated completion": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": make_dataset(3),
        "per_device_eval_batch_size": 3,
        "num_generations_eval": 1,
    },
    "evaluation on start": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "eval_dataset": make_dataset(3),
        "per_device_eval_batch_size": 3,
        "loss_type": "grpo",
    },
    "sequence level": {"num_iterations": 2, "max_steps": 4, "importance_sampling_level": "sequence"},
    "more generations than a micro-batch": {"num_generations": 6, "per_device_train_batch_size": 3} | ACCUMULATED,
    "bias correction": {"beta": 0.1, "use_bias_correction_kl": True},
    "delta": {"delta": 2.0},
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
    "entropy filter": {"top_entropy_quantile": 0.2},
    "entropy bonus": {"entropy_coef": 0.1},
    "generation settings": {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1},
    "generation kwargs": {"generation_kwargs": {"do_sample": True, "top_k": 50, "length_penalty": -0.1}},
    "workers": {"dataloader_num_workers": 2},
    "not shuffled": {"shuffle_dataset": False, "log_completions": True, "log_unique_prompts": True},
    "several rewards": {"reward_funcs": [letters, distinct]},
    "weighted": {"reward_funcs": [letters, distinct], "reward_weights": [0.7, 0.3]},
    "sync and async": {"reward_funcs": [letters, ones, later]},
    "None": {"reward_funcs": [letters, none]},
    "a reward model": {"reward_funcs": reward_model_on_disk()},
    "mixed": {"reward_funcs": [letters, reward_model_on_disk()]},
    "another reward model": {
        "reward_funcs": AutoModelForSequenceClassification.from_pretrained(
            reward_model_on_disk(LlamaForSequenceClassification)
        ),
        "reward_processing_classes": make_tokenizer(),
    },
    "a column": {"reward_funcs": near_value, "dataset": make_dataset().add_column("some_values", list(range(16)))},
    "the trainer's state": {"reward_funcs": by_step},
    "normalize_then_sum": {
        "reward_funcs": [letters, distinct],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "normalize_then_sum, None": {
        "reward_funcs": [letters, none],
        "multi_objective_aggregation": "normalize_then_sum",
        "reward_weights": [0.5, 2.0],
    },
}


# With an FR3EConfig, these are among the modes of test_trainer.py
OF_A_GRPO_CONFIG = {
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "beta": {"beta": 0.1},
    "scale group": {"scale_rewards": "group"},
    "scale batch": {"scale_rewards": "batch"},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_every_setting_trains(settings):
    train(**settings)


@pytest.mark.parametrize(
    "name",
    [
        *OF_A_GRPO_CONFIG,
        *("loss dapo", "loss grpo", "conversational", "None", "weighted", "sync and async", "normalize_then_sum"),
        "more generations than a micro-batch",
    ],
)
def test_a_grpo_config_trains(name):
    trainer = train(config=GRPOConfig, **(CASES | OF_A_GRPO_CONFIG)[name])
    assert isinstance(trainer.args, FR3EConfig) and trainer.args.num_anchors > 0


# Models

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "Qwen2": {},
    "Cohere2": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "GptOss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": EXPERTS | {"num_experts": 4},
    "Glm4Moe": EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "NemotronH": EXPERTS
    | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1}
    | {"ssm_state_size": 8, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32},
}


def make_family(family):
    """A tiny model of a family, with sharpened logits."""
    set_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**TINY | MODELS[family])
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    return model


@pytest.mark.parametrize("family", MODELS)
def test_models_train(family):
    trainer = train(model=make_family(family))
    if trainer.aux_loss_enabled:
        assert all(math.isfinite(entry["aux_loss"]) for entry in logs(trainer))


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_the_head_is_cast(family):
    model = make_family(family) if family in MODELS else make_model()
    trainer = train(model=model.to(torch.bfloat16), cast_lm_head_to_fp32=True)
    assert trainer.model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"beta": 0.1}], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_train(settings, wrapped):
    model = {"model": get_peft_model(make_model(), LORA)} if wrapped else {"peft_config": LORA}
    trainer = train(**model, **settings)
    assert all("lora" in name for name in weights(trainer))


def test_adapters_of_experts_train():
    adapter = LoraConfig(target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"])
    train(model=get_peft_model(make_family("GptOss"), adapter), beta=0.1)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_learned_prompts_train(kind):
    trainer = train(peft_config=kind(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8), gradient_checkpointing=False)
    assert all("prompt_encoder" in name for name in weights(trainer)) and not trainer.shares_prefixes


def test_an_adapter_of_the_head_is_refused_by_trl():
    with pytest.raises(ValueError, match="lm_head"):
        make_trainer(peft_config=LoraConfig(target_modules=["q_proj", "lm_head"]))
    train(peft_config=LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))


MODELING = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class RemoteConfig(Qwen3Config):
    model_type = "remote"


class RemoteForCausalLM(Qwen3ForCausalLM):
    config_class = RemoteConfig
"""


def test_remote_code(tmp_path):
    make_model().save_pretrained(tmp_path / "remote")
    make_tokenizer().save_pretrained(tmp_path / "remote")
    path = tmp_path / "remote" / "config.json"
    remote = {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {"AutoConfig": "modeling.RemoteConfig", "AutoModelForCausalLM": "modeling.RemoteForCausalLM"},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | remote))
    (tmp_path / "remote" / "modeling.py").write_text(MODELING)
    with pytest.raises(ValueError, match="custom code"):
        make_trainer(model=str(tmp_path / "remote"))
    trainer = train(model=str(tmp_path / "remote"), trust_remote_code=True)
    assert type(trainer.model).__name__ == "RemoteForCausalLM"


def test_liger():
    if is_liger_kernel_available():
        train(use_liger_kernel=True)
    else:
        with pytest.raises(ImportError, match="liger"):
            make_trainer(use_liger_kernel=True).train()


# Data


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("kind", ["dataset", "mapping", "DatasetDict"])
def test_datasets_of_evaluation(kind, iterable):
    dataset = make_dataset(3).to_iterable_dataset() if iterable else make_dataset(3)
    if kind != "dataset":
        dataset = {"one": dataset, "two": dataset}
    if kind == "DatasetDict":
        dataset = (IterableDatasetDict if iterable else DatasetDict)(dataset)
    trainer = make_trainer(eval_dataset=dataset, per_device_eval_batch_size=3)
    names = ["eval_loss"] if kind == "dataset" else ["eval_one_loss", "eval_two_loss"]
    assert all(math.isfinite(trainer.evaluate()[name]) for name in names)
    metrics = make_trainer(per_device_eval_batch_size=3).evaluate(eval_dataset=dataset)
    assert all(math.isfinite(metrics[name]) for name in names)


def test_iterable_datasets_and_workers():
    iterable = make_dataset().to_iterable_dataset()
    with pytest.raises(ValueError, match="dispatch_batches=False"):
        make_trainer(dataset=iterable, accelerator_config={"dispatch_batches": True})
    trainer = make_trainer(dataset=iterable, dataloader_num_workers=2)
    assert trainer.args.accelerator_config.dispatch_batches is False and trainer.args.dataloader_num_workers == 0
    trainer = make_trainer(eval_dataset=iterable, dataloader_num_workers=4, per_device_eval_batch_size=3)
    assert trainer.get_train_dataloader().num_workers == 4 and trainer.get_eval_dataloader().num_workers == 0


def test_examples_come_as_often_as_by_grpo():
    """Each generation batch of 6 prompts, 4 rows of each, is handed over for every step that uses it."""
    trainer = make_trainer(
        num_generations=4,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=3,
        steps_per_generation=4,
        num_iterations=2,
        shuffle_dataset=False,
        max_steps=-1,
        num_train_epochs=1,
        dataset=make_dataset(12),
    )
    seen, training_step = [], trainer.training_step
    trainer.training_step = lambda model, inputs, *args: seen.append(inputs) or training_step(model, inputs, *args)
    trainer.train()
    prompts = [{"prompt": prompt} for prompt in make_dataset(12)["prompt"]]
    batches = [[example for example in part for _ in range(4)] for part in (prompts[:6], prompts[6:])]
    assert seen == [batch for batch in batches for _ in range(8)]


# Rewards


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_the_logged_reward_is_weighted(aggregation):
    def zeros(completions, **kwargs):
        return [0.0] * len(completions)

    settings = {"reward_funcs": [ones, zeros], "reward_weights": [0.7, 0.3]}
    trainer = train(moves=False, multi_objective_aggregation=aggregation, weight_decay=0.0, **settings)
    assert [entry["reward"] for entry in logs(trainer)] == pytest.approx([0.7, 0.7])
    assert {f"rewards/{name}/{kind}" for name in ("ones", "zeros") for kind in ("mean", "std")} <= logs(trainer)[
        0
    ].keys()


def test_what_reward_functions_log():
    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("start", [completion[:5] for completion in completions])
        log_metric("custom_accuracy", 0.75)
        return letters(completions)

    trainer = train(reward_funcs=reward, log_completions=True)
    assert len(trainer._logs["extra"]["start"]) == len(trainer._logs["completion"])
    assert [entry["custom_accuracy"] for entry in logs(trainer)] == [0.75, 0.75]


def test_rewards_that_are_all_none(caplog):
    with caplog.at_level("WARNING", logger="trl.trainer.grpo_trainer"):
        train(moves=False, reward_funcs=none, weight_decay=0.0)
    assert "All reward functions returned None" in caplog.text


def test_reward_processing_classes():
    models, tokenizer = [reward_model_on_disk(), reward_model_on_disk(LlamaForSequenceClassification)], make_tokenizer()
    with pytest.raises(ValueError, match="must match"):
        make_trainer(reward_funcs=models, reward_processing_classes=tokenizer)
    trainer = train(reward_funcs=models, reward_processing_classes=[tokenizer, make_tokenizer()])
    assert len(trainer.reward_processing_classes) == 2
    trainer = make_trainer(reward_funcs=models[0], reward_processing_classes=tokenizer)
    assert trainer.reward_processing_classes == [tokenizer]


def test_without_rewards_or_data():
    with pytest.raises(ValueError, match="No reward source"):
        make_trainer(reward_funcs=None)
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        FR3ETrainer(make_model(), letters, FR3EConfig("unused", **CPU), processing_class=make_tokenizer())


# The loss


def test_truncated_completions_are_masked():
    never = {"generation_kwargs": {"suppress_tokens": [0, 1]}, "weight_decay": 0.0}
    trainer = train(moves=False, mask_truncated_completions=True, loss_type="dapo", **never)
    assert [entry["completions/clipped_ratio"] for entry in logs(trainer)] == [1, 1]
    # Sums of digits end early now and then: those that do are learned from
    some = train(mask_truncated_completions=True, num_generations=12, **BATCH_OF_12)
    assert any(0 < entry["completions/clipped_ratio"] < 1 for entry in logs(some))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_sequence_level_with_a_loss_of_tokens_is_warned_of(loss_type, caplog):
    with caplog.at_level(logging.WARNING, logger="trl.trainer.grpo_trainer"):
        make_trainer(importance_sampling_level="sequence", loss_type=loss_type)
    assert ("weights each sequence by its completion length" in caplog.text) == (loss_type != "grpo")


@pytest.mark.parametrize("settings", [{}, ACCUMULATED], ids=str)
def test_the_entropy_bonus_adapts(settings):
    adaptive = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_coef_delta": 0.005}
    trainer = train(entropy_target=15.0, **adaptive, **settings)
    assert trainer.entropy_coef == pytest.approx(0.01 + 0.005 * trainer.state.global_step)


@pytest.mark.parametrize("settings", [{}, ACCUMULATED], ids=str)
def test_the_entropy_bonus_stays_where_no_row_is_in_the_loss(settings):
    """TRL takes the entropy of an update without tokens for 0, which is below any target."""
    adaptive = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_coef_delta": 0.005, "entropy_target": 0.01}
    trainer = train(False, reward_funcs=lambda completions, **_: [1.0] * len(completions), **adaptive, **settings)
    assert trainer.entropy_coef == 0.01
    assert {entry["entropy_coef"] for entry in logs(trainer)} == {0.01}


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "luspo"])
def test_the_entropy_bonus_has_its_scale(loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    trainer = train(loss_type=loss_type, importance_sampling_level=level, entropy_coef=0.5)
    for entry in logs(trainer):
        entropy = entry.get("entropy", 0.0)  # a step without a row in the loss has none
        assert entry["policy_loss"] - entry["loss"] == pytest.approx(0.5 * entropy, rel=0.3)


def test_the_entropy_bonus_has_a_gradient():
    trainer = make_trainer(entropy_coef=0.1)
    input_ids = torch.arange(8).unsqueeze(0)
    arguments = trainer.model, input_ids, torch.ones_like(input_ids)
    _, entropies, _ = trainer._get_per_token_logps_and_entropies(*arguments, logits_to_keep=4, compute_entropy=True)
    assert trainer.shares_prefixes and entropies.requires_grad


# Generation


def test_beams_are_no_samples():
    """Refused while exploring, wherever they are asked for; and as by GRPO without."""
    beams = {"generation_kwargs": {"do_sample": True, "top_k": 50, "num_beams": 2, "length_penalty": -0.1}}
    with pytest.raises(ValueError, match=r"'num_beams': 2.*independent samples.*num_anchors=0"):
        make_trainer(**beams)
    train(**beams, num_anchors=0)
    model = make_model()
    model.generation_config.num_beams = 2
    with pytest.raises(ValueError, match=r"num_beams=2.*generation_kwargs={'num_beams': 1}.*num_anchors=0"):
        make_trainer(model=model)
    train(model=model, generation_kwargs={"num_beams": 1})


def test_a_rollout_func():
    """As TRL defines it without exploration; with it, the error says what takes its place."""

    def rollout_func(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        completion_ids = [[5 + i % 7, 6, 1] for i in range(len(prompts))]
        return {
            "prompt_ids": ids,
            "completion_ids": completion_ids,
            "logprobs": [[0.0] * 3] * len(prompts),
            "env_mask": [[1, 0, 1]] * len(prompts),
            "difficulty": [0.5] * len(prompts),
        }

    def reward(completions, difficulty, **kwargs):
        assert difficulty == [0.5] * len(completions)
        return letters(completions)

    trainer = train(rollout_func=rollout_func, reward_funcs=reward, num_anchors=0)
    assert [entry["completions/mean_length"] for entry in logs(trainer)] == [2.0, 2.0]  # of what is not masked
    with pytest.raises(ValueError, match="rollout_func must return keys"):
        train(rollout_func=lambda prompts, trainer: {"prompt_ids": [], "completion_ids": []}, num_anchors=0)
    with pytest.raises(NotImplementedError, match=r"rollout_func.*sampler="):
        make_trainer(rollout_func=rollout_func)


def test_names_in_place_of_everything(monkeypatch):
    """Paths of a policy and of a reward model, no configuration, no tokenizer."""
    monkeypatch.setattr(FR3EConfig, "_validate_args", lambda self: None)  # TRL's default of bf16 asks for a GPU
    trainer = FR3ETrainer(model_on_disk(), reward_model_on_disk(), train_dataset=make_dataset())
    assert Path(trainer.args.output_dir).name.endswith("-FR3E") and trainer.args.num_anchors == 6
