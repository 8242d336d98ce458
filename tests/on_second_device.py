"""What is on the wrong device fails as on a GPU. `test_device.py` runs this in a process of its own."""

import math
from contextlib import contextmanager

import pytest
import second_device
import torch
from factory import assert_same_run
from peft import LoraConfig
from test_old_logps import ERROR, Engine
from test_resume import REFILLED, make_trainer
from transformers import set_seed

second_device.register()


@contextmanager
def trainer_on(device, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", device)  # accelerate's own way to be told, which transformers heeds too
        trainer = make_trainer(**{"output_dir": device, "max_steps": 3, "use_cpu": False} | settings)
        assert {param.device.type for param in trainer.model.parameters()} == {device}
        set_seed(1)
        yield trainer


def train(device, resume=None, **settings):
    with trainer_on(device, **settings) as trainer:
        trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        {"num_anchors": 0, "num_iterations": 2},
        {"num_iterations": 2, "beta": 0.1},
        {"max_steps": 5} | REFILLED,
        {"steps_per_generation": 2, "loss_type": "grpo", "peft_config": LoraConfig(target_modules="all-linear")},
    ],
    ids=["grpo", "old_logprobs", "refill", "lora"],
)
def test_a_second_device_trains_and_resumes_as_the_cpu_does(settings):
    """In the middle of a batch, and between two. The devices may round differently, a run and its rest may not."""
    whole = train("second", **settings)
    assert "max_refills" not in settings or sum(log.get("fr3e/refill/reused", 0) for log in whole.state.log_history) > 0
    for mine, theirs in zip(whole.state.log_history, train("cpu", **settings).state.log_history, strict=True):
        for name in ("loss", "grad_norm", "entropy", "reward", "num_tokens"):
            assert name not in theirs or math.isclose(mine[name], theirs[name], rel_tol=1e-3, abs_tol=1e-5), name
    for step in (1, 2):
        resumed = train("second", resume=f"second/checkpoint-{step}", **settings | {"output_dir": "resumed"})
        assert_same_run(resumed, whole)


def test_vllms_log_probs_are_corrected():
    """By the ratio that the engine's error makes, whatever samples were cut off at and heated to."""
    with trainer_on("second", top_k=10, vllm_importance_sampling_mode="token_truncate") as trainer:
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
        trainer.vllm_generation = trainer.sampler = Engine(trainer)
        trainer.train()
    for entry in trainer.state.log_history[:-1]:
        for bound in ("min", "max"):
            assert math.isclose(entry[f"sampling/importance_sampling_ratio/{bound}"], math.exp(-ERROR), rel_tol=1e-3)


def test_weights_that_are_elsewhere(monkeypatch):
    """`model.device` is of the first weight, and this one may be offloaded: generation is where accelerate says."""
    with trainer_on("second") as trainer:
        monkeypatch.setattr(type(trainer.model), "device", torch.device("meta"))
        trainer.train()
