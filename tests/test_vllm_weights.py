"""The policy's weights on their way to vLLM, without vLLM: what is sent, and what stays as it was."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from factory import make_trainer
from models import CPU, TINY
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.generation import vllm_weights
from fr3e_trl.generation.vllm_server import VLLMServer, VLLMServerError
from fr3e_trl.generation.vllm_weights import FR3EVLLMGeneration


def sent_by(cls, trainer):
    """The weights that a generation sends, which is made as far as it takes that."""
    generation = object.__new__(cls)
    generation.model, generation._dist = trainer.model, trainer._dist
    return {name: weights.clone() for name, weights in generation._iter_named_params()}


def test_vllm_is_set_up_with_what_trl_sets_it_up_with(monkeypatch):
    made = []

    def make(**arguments):
        made.append(arguments)
        raise StopIteration

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", make)
    monkeypatch.setattr(vllm_weights, "FR3EVLLMGeneration", make)
    settings = {"vllm_max_model_length": 50, "vllm_model_impl": "auto", "vllm_gpu_memory_utilization": 0.7}
    settings |= {"vllm_server_port": 8001, "vllm_group_port": 2, "vllm_enable_sleep_mode": True}
    settings |= {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "temperature": 2.0, "repetition_penalty": 1.1}
    settings |= {"generation_kwargs": {"min_tokens": 2}, "per_device_train_batch_size": 8, "steps_per_generation": 3}
    args = FR3EConfig("output", num_anchors=0, use_vllm=True, max_completion_length=9, **CPU, **settings)
    for cls in (GRPOTrainer, FR3ETrainer):
        with pytest.raises(StopIteration):
            make_trainer(cls, config=lambda **unused: args)
        assert args.use_vllm
    trls, ours = made
    assert ours.pop("fr3e_args") is args
    for name in ("model", "accelerator", "processing_class"):
        assert isinstance(ours.pop(name), type(trls.pop(name)))
    assert ours == trls and len(ours) > 15


def test_what_is_refused():
    """As by TRL, whose constructor checks it only where it sets up vLLM by itself."""
    with pytest.raises(ValueError, match="vllm_importance_sampling_mode='sequence_mask' must be 'token_truncate' or"):
        make_trainer(use_vllm=True, loss_type="vespo", num_anchors=0)
    # A quantized model is not merged for a colocated engine
    generation = object.__new__(FR3EVLLMGeneration)
    generation.mode, generation.model = "colocate", SimpleNamespace(is_loaded_in_4bit=True)
    with pytest.raises(ValueError, match=r"vllm_mode='colocate' is not possible with a quantized model.*'server'"):
        generation._init_vllm()


def make_policy(model=None, **lora):
    trainer = make_trainer(model=model, peft_config=LoraConfig(**{"target_modules": "all-linear"} | lora))
    trainer.model.to(torch.bfloat16)
    torch.manual_seed(0)
    for name, param in trainer.model.named_parameters():
        if "lora_" in name:
            param.data = torch.randn_like(param) * 0.1
    return trainer


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_syncs_leave_the_base_model_as_it_is(lora):
    trainer = make_policy(**lora)
    before = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    ours = [sent_by(FR3EVLLMGeneration, trainer) for _ in range(3)]
    assert all(param.equal(before[name]) for name, param in trainer.model.named_parameters())
    assert all(weights.equal(ours[0][name]) for sync in ours[1:] for name, weights in sync.items())
    # What is sent is what TRL sends, whose merges move the base model
    theirs = sent_by(VLLMGeneration, trainer)
    assert ours[0].keys() == theirs.keys()
    assert all(weights.equal(theirs[name]) for name, weights in ours[0].items())
    assert not all(param.equal(before[name]) for name, param in trainer.model.named_parameters())


def test_biases_with_an_adapter_of_their_own_are_sent_as_by_trl():
    policy = Qwen2ForCausalLM(Qwen2Config(**TINY))  # has biases
    trainer = make_policy(model=policy, target_modules=["q_proj", "v_proj"], lora_bias=True)
    ours, theirs = sent_by(FR3EVLLMGeneration, trainer), sent_by(VLLMGeneration, trainer)
    biases = [name for name in theirs if name.endswith("q_proj.bias")]
    assert biases and all(torch.allclose(ours[name], theirs[name], atol=0.02) for name in biases)


@pytest.mark.parametrize(
    ("lora", "obstacle"),
    [
        ({}, None),
        ({"rank_pattern": {"q_proj": 4}}, "vLLM does not support rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "vLLM does not support rank_pattern or alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' changes"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga' changes"),
        ({"r": 64}, "the adapter's rank is 64"),
    ],
    ids=str,
)
def test_an_adapter_that_a_server_would_compute_otherwise_is_not_sent_alone(lora, obstacle):
    trainer = make_trainer(peft_config=LoraConfig(**{"target_modules": ["q_proj"]} | lora))
    generation = object.__new__(FR3EVLLMGeneration)
    generation.model, generation.processing_class = trainer.model, trainer.processing_class
    generation.fr3e_args = trainer.args
    config = {"lora_config": {"max_lora_rank": 32}, "parallel_config": {"data_parallel_size": 1}}
    answers = {"config": config, "environment": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True}}
    server = SimpleNamespace(**answers, base_url="http://localhost:8000", start_command="vllm serve")
    told = generation._obstacle_to_adapter_sync(server)
    assert told is None if obstacle is None else obstacle in told


def test_an_adapter_that_the_server_refuses_is_asked_for_no_more(monkeypatch):
    """The policy may be merged and sent in its place, as with DoRA."""

    def refuse(self):
        raise VLLMServerError("vLLM does not yet support DoRA")

    monkeypatch.setattr(VLLMServer, "_load_adapter", refuse)
    monkeypatch.setattr(VLLMServer, "_retry", lambda self, call: call())
    server = object.__new__(VLLMServer)
    server.adapter_name, server.base_model = None, "policy"
    with pytest.raises(VLLMServerError, match="DoRA"):
        server.load_adapter("fr3e-1", Path("adapter"))
    assert server.model == "policy"
