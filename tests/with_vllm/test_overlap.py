"""Rollouts that a real server draws while the policy is trained."""

import time
from zlib import crc32

import pytest
import requests
import torch
from factory import logged
from policies import logprobs_of_policy, loss_mask, make_trainer
from transformers import TrainerCallback, set_seed

# Two updates a batch
SETTINGS = {"num_generations": 4, "num_iterations": 2, "max_steps": 6, "max_staleness": 2}


def requests_on(server) -> float:
    """How many requests the server works on or has waiting."""
    lines = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def test_losses_are_those_without_overlap(server):
    """With a rate of 0, and in each request a seed that follows from its prefix."""
    runs = []
    for max_staleness in (0, 1, 2):
        trainer = make_trainer(server, **SETTINGS | {"learning_rate": 0.0, "max_staleness": max_staleness})
        params = trainer.sampler.sampling_params
        trainer.sampler.sampling_params = lambda r, params=params: params(r) | {"seed": crc32(r.prefix_ids.tobytes())}
        set_seed(1)
        trainer.train()
        runs.append(logged(trainer, "loss", "grad_norm"))
    for run in runs[1:]:
        assert run == [pytest.approx(step, rel=1e-3, abs=1e-5) for step in runs[0]]


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_rollouts_are_of_the_weights_that_were_sent(server, max_staleness):
    """The second batch's: those that the first batch began with, or those after its first update."""
    trainer = make_trainer(server, **SETTINGS | {"max_staleness": max_staleness})
    kept = {}

    class Keep(TrainerCallback):
        def on_step_begin(self, args, state, *_, **kwargs):
            weights = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
            kept[state.global_step] = {name: p.detach().clone() for name, p in weights.items()}

    trainer.add_callback(Keep())
    trainer.train()
    batch, trees = trainer.batches[1]
    sampled, mask = batch["sampling_per_token_logps"], loss_mask(batch)
    for step, weights in kept.items():
        trainer.model.load_state_dict(weights, strict=False)
        difference = (sampled - logprobs_of_policy(trainer, trees)[:, : sampled.size(1)])[mask].abs().max()
        assert (difference < 1e-3) == (step == 2 - max_staleness), (step, difference)
    differences = [entry.get("sampling/sampling_logp_difference/mean") for entry in trainer.state.log_history]
    assert differences[0] < 1e-4 < differences[2]
    waited = [entry["fr3e/overlap/seconds_hidden"] for entry in trainer.state.log_history[2:6:2]]
    assert torch.tensor(waited).min() > 0


def test_an_interrupt_leaves_no_request(server):
    # So hot that hardly a completion ends
    trainer = make_trainer(server, **SETTINGS | {"max_completion_length": 180, "temperature": 2.0})
    begin = trainer.sampler.begin

    def begin_and_interrupt(asked):
        begin(asked)
        wait_for(lambda: requests_on(server) > 0)
        raise KeyboardInterrupt

    trainer.sampler.begin = begin_and_interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    wait_for(lambda: requests_on(server) == 0)


def wait_for(is_so):
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)
