"""What `fr3e train --dry_run` tells, against formulas by hand and what training does and takes."""

import gc
import re
import sys

import pytest
import torch
from datasets import Dataset
from models import CPU, make_model, make_tokenizer, model_on_disk
from torch.profiler import ProfilerActivity, profile
from transformers import MambaConfig, MambaForCausalLM
from trl import ModelConfig, get_peft_config

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands import cli
from fr3e_trl.commands.dry_run import empty_model, memory, most_tokens, num_steps, settings, show, sizes
from fr3e_trl.commands.memory_estimate import (
    Decoder,
    MemoryEstimate,
    activation_bytes,
    cache_bytes,
    layer_bytes,
    logits_bytes,
    optimizer_bytes,
    quantized_bytes,
)

DECODER = Decoder(
    hidden_size=4, intermediate_size=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=100
)


def reward(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


# Formulas


def test_quantized_weights_by_hand():
    assert quantized_bytes(64, 4) == 64 / 2 + 4  # one block, with one float32
    assert quantized_bytes(1000, 4, nested=True) == pytest.approx(1000 * 4.127 / 8)
    assert quantized_bytes(1000, 8) == 1000


@pytest.mark.parametrize(
    ("optim", "expected"),
    [("adamw_torch_fused", 800), ("adamw_8bit", 200), ("paged_adamw_32bit", 800), ("lion_32bit", 400), ("sgd", 0)],
)
def test_optimizer_states_by_hand(optim, expected):
    assert optimizer_bytes(optim, num_trainable=100, bytes_each=4) == expected


def test_adamw_keeps_moments_in_the_type_of_the_parameters():
    assert optimizer_bytes("adamw_torch_fused", num_trainable=100, bytes_each=2) == 400


def test_activations_by_hand():
    # h = 4, i = 16, a = 2 * 2 = 4, k = 1 * 2 = 2. Norms 2 * 3 * 4 * 4 bytes = 96; the rest 4 * 4 + 3 * 2 + 4 * 16 = 86
    assert layer_bytes(DECODER, num_tokens=10, compute_bytes=4, weight_bytes=4) == 10 * (96 + 4 * 86)
    # In bf16 with weights in float32, the inputs of projections once more: 2 * 4 numbers of 2 bytes
    assert layer_bytes(DECODER, num_tokens=10, compute_bytes=2, weight_bytes=4) == 10 * (96 + 2 * 86 + 16)
    layer = layer_bytes(DECODER, 10, 4, 4)
    assert activation_bytes(DECODER, 10, 4, 4, checkpointing=False) == (3 * layer, 0)
    assert activation_bytes(DECODER, 10, 4, 4, checkpointing=True) == (3 * 10 * 4 * 4, layer)


def test_logits_and_cache_by_hand():
    assert logits_bytes(10_000, 150_000, compute_bytes=2, has_triton=True) == 4096 * 32768 * 2
    assert logits_bytes(10, 100, compute_bytes=4, has_triton=False) == 10 * 32768 * 4 + 7 * 10 * 100 * 4
    assert cache_bytes(DECODER, num_tokens=10, bytes_each=2) == 2 * 3 * 1 * 2 * 10 * 2


def test_the_peak_is_of_an_update_or_of_generation():
    parts = {"weights": 100, "reference": 10, "states": 200, "casts": 5, "activations": 7, "recomputed": 3}
    update = MemoryEstimate(**parts, gradients=100, logits=4, cache=50)
    assert update.peak == 310 + 100 + 5 + 7 + 4
    assert MemoryEstimate(**parts, gradients=100, logits=4, cache=200).peak == 310 + 200
    assert MemoryEstimate(**parts, gradients=100, logits=4, cache=200, keeps_gradients=True).peak == 310 + 300


# Against what training does


def args_of(tmp_path, **overrides):
    defaults = {"num_generations": 8, "per_device_train_batch_size": 8, "max_completion_length": 8}
    return FR3EConfig(tmp_path, **CPU | defaults | overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_train_epochs": 2},
        {"num_train_epochs": 1.5, "gradient_accumulation_steps": 3, "steps_per_generation": 2, "num_iterations": 2},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 1},
    ],
)
def test_steps_are_those_of_training(overrides, tmp_path):
    dataset = Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(7)]})
    args = args_of(tmp_path, value_tracker=True, **overrides)
    expected = num_steps(args, len(dataset))
    trainer = FR3ETrainer(make_model(), reward, args, dataset, processing_class=make_tokenizer())
    trainer.train()
    assert trainer.state.global_step == expected
    told = dict(sizes(args, len(dataset)))
    assert told["optimizer updates in all"] == str(expected)
    assert told["base trajectories a prompt"] == str(len(trainer.trees[0].bases))
    assert told["generation batch"] == f"{8 * len(trainer.trees)} rows of {len(trainer.trees)} prompts"


def test_a_run_of_no_step(tmp_path):
    """As transformers takes 0. Below it, epochs count."""
    assert [num_steps(args_of(tmp_path, max_steps=most), 7) for most in (0, -1)] == [0, 21]


def test_most_tokens_by_hand(tmp_path):
    # 4 prompts of 8 rows of 8 tokens
    four = {"gradient_accumulation_steps": 4, "value_tracker": True}
    assert most_tokens(args_of(tmp_path, **four)) == 4 * 8 * 8
    assert most_tokens(args_of(tmp_path, num_anchors=0, gradient_accumulation_steps=4)) == 4 * 8 * 8
    # 4 base trajectories that are not reused beside 8 rows
    assert most_tokens(args_of(tmp_path, reuse_base=False, num_anchors=1, **four)) == 4 * (4 + 8) * 8
    assert most_tokens(args_of(tmp_path, max_refills=2, **four)) == 3 * 4 * 8 * 8


def test_settings_are_those_that_differ(tmp_path):
    told = dict(settings(args_of(tmp_path, learning_rate=2e-6)))
    assert told["learning_rate"] == "2e-06" and told["num_anchors"] == "6"
    assert "beta" not in told and "bf16" not in told


def measured_peak(model_settings, dtype, args, model_args):
    """The most bytes of tensors on the CPU at a time, from making the model to the end of training."""
    gc.collect()  # what is freed below was made below
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        FR3ETrainer(
            model=make_model(**model_settings).to(getattr(torch, dtype)),
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["1+" * 52] * 4}),
            processing_class=make_tokenizer(),
            peft_config=get_peft_config(model_args),
        ).train()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("checkpointing", "use_peft", "bf16", "dtype"),
    [
        (False, False, False, "float32"),
        (True, False, True, "float32"),
        (False, True, True, "bfloat16"),
    ],
)
def test_memory_is_within_a_tenth_of_what_was_measured(checkpointing, use_peft, bf16, dtype, tmp_path):
    """A model of three million parameters, in which activations, logits and states all weigh."""
    model_settings = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "head_dim": 64}
    args = args_of(
        tmp_path,
        num_anchors=0,  # and no shared prefixes: every row is as long as it may be
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        bf16=bf16,
        max_completion_length=16,
        max_steps=2,
        generation_kwargs={"min_new_tokens": 16},
    )
    make_model(**model_settings).config.save_pretrained(tmp_path / "model")
    model_args = ModelConfig(
        model_name_or_path=str(tmp_path / "model"),
        use_peft=use_peft,
        lora_target_modules=["all-linear"],
        lora_dropout=0.0,
    )
    args.model_init_kwargs = {"dtype": dtype}
    estimate = memory(args, model_args, empty_model(args, model_args), prompt_length=104)
    assert estimate.peak == pytest.approx(measured_peak(model_settings, dtype, args, model_args), rel=0.1)


def test_quantized_model_is_counted_with_its_adapter(tmp_path):
    make_model(tie_word_embeddings=False).config.save_pretrained(tmp_path / "model")
    model_args = ModelConfig(
        model_name_or_path=str(tmp_path / "model"), use_peft=True, lora_target_modules=["all-linear"], load_in_4bit=True
    )
    args = args_of(tmp_path)
    model = empty_model(args, model_args)
    layers = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)  # q and o, k and v, gate, up and down
    adapter = 2 * 16 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    words = 2 * len(make_tokenizer()) * 32  # embeddings and the head
    norms = 2 * (2 * 32 + 2 * 8) + 32
    estimate = memory(args, model_args, model, prompt_length=10)
    assert estimate.weights == layers * 4.5 / 8 + 4 * (words + norms) + 2 * adapter
    assert estimate.gradients == 2 * adapter and estimate.states == 4 * adapter


# As a command


def command(tmp_path, *arguments):
    Dataset.from_dict({"prompt": ["12", "1234"] * 8, "solution": ["1"] * 16}).to_json(tmp_path / "data.jsonl")
    given = {"dataset_name": tmp_path / "data.jsonl", "output_dir": tmp_path / "out", "bf16": False, "use_cpu": True}
    return ["train", "--dry_run", *(f"--{name}={value}" for name, value in given.items()), *arguments]


def test_dry_run_needs_no_weights(tmp_path, capsys):
    """Nor writes any."""
    model = tmp_path / "model"
    make_model().config.save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    cli.main(command(tmp_path, f"--model_name_or_path={model}", "--gradient_accumulation_steps=2"))
    printed = capsys.readouterr().out
    for row in (
        "num_anchors 6",
        "rows a step 16 a device, 16 in all",
        "prompts a step 2",
        "optimizer updates in all 24",
    ):
        assert row in " ".join(printed.split()), row
    assert "most at a time" in printed
    assert not (tmp_path / "out").exists()


def test_a_narrow_terminal_shows_values_whole(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    show("Memory", [("update: activations of 8 rows, without gradient checkpointing", "1.50 GiB")])
    assert re.search(r"update: +1\.50 GiB", capsys.readouterr().out)


def test_dry_run_without_rich(tmp_path, capsys, monkeypatch):
    """Plain lines."""
    monkeypatch.setitem(sys.modules, "rich", None)
    cli.main(command(tmp_path, f"--model_name_or_path={model_on_disk()}"))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "rows a step 8 a device, 8 in all" in lines and "vllm_adapter_sync None" in lines
    assert sum("most at a time" in line for line in lines) == 1


def test_a_model_without_attention_is_planned_without_its_memory(tmp_path, capsys):
    set_up = MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(set_up).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    Dataset.from_dict({"prompt": ["1+1="] * 8, "solution": ["2"] * 8}).to_json(tmp_path / "data.jsonl")
    cli.main(
        [
            *("train", "--dry_run=true", "--use_cpu=true", "--bf16=false", "--reward_funcs=accuracy_reward"),
            *(f"--model_name_or_path={tmp_path / 'model'}", f"--dataset_name={tmp_path / 'data.jsonl'}"),
        ]
    )
    told = capsys.readouterr().out
    assert "rows a prompt" in told and "MambaConfig says nothing of attention heads" in " ".join(told.split())
