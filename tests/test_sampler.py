"""Rollouts drawn by a sampler that is passed to the trainer."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from factory import letters, make_tool_trainer, make_trainer, weights
from launches import launch
from test_processes import same, trees_of, weights_of
from test_trainer import check_batch
from transformers import set_seed
from trees import rollouts_of

from fr3e_trl import Sample, Sampler, SamplingRequest
from fr3e_trl.generation.sampler import OwnSampler
from fr3e_trl.generation.vllm import RequestQueue
from fr3e_trl.generation.vllm_server import ServerFault, in_parallel
from fr3e_trl.method.anchors import AboveThreshold
from fr3e_trl.method.sampling import Branching
from fr3e_trl.samplers import make_sampler


class Digits(Sampler):
    """Draws digits, all as likely, and an EOS by the last token of the budget."""

    def __init__(self, trainer, with_logprobs=True):
        self.rng = np.random.default_rng(trainer.args.seed)
        self.with_logprobs = with_logprobs
        self.requests: list[SamplingRequest] = []

    def sample(self, requests):
        self.requests += requests
        return [[self.draw(request.max_new_tokens) for _ in range(request.num_samples)] for request in requests]

    def draw(self, max_new_tokens: int) -> Sample:
        token_ids = [*self.rng.integers(5, 15, max_new_tokens - 1), 1]
        return Sample(token_ids, np.log([0.1] * len(token_ids)) if self.with_logprobs else None)


def test_rollouts_are_those_of_the_sampler():
    trainer = make_trainer(sampler=Digits, reward_funcs=letters, anchor_threshold=None)
    before = weights(trainer)
    set_seed(1)
    trainer.train()
    assert not weights(trainer).equal(before)
    for batch, trees in trainer.batches:
        check_batch(trainer, batch, trees)
        for _, state, rollout in rollouts_of(trees):
            assert all(5 <= token < 15 for token in rollout.token_ids[:-1]) and rollout.token_ids[-1] == 1
            assert len(state.prefix_ids) + rollout.length == 12
        assert all(len(tree.states) == 7 for tree in trees)
    requests = trainer.sampler.sampler.requests
    prompts = [request for request in requests if request.num_sampled_before == 0]
    assert sum(request.num_samples for request in prompts) == 2 * 2 * 2 and len(requests) == len(prompts) + 2 * 2 * 6
    assert all(request.max_new_tokens == 12 - request.num_sampled_before for request in requests)
    assert all(request.branching is None for request in requests)


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_the_ratio_is_against_the_log_probs_that_were_given(with_logprobs):
    """A loss by hand: of dapo, the mean of clipped ratios times advantages over the tokens that were sampled."""
    settings = {"credit": "rollout", "max_steps": 1, "learning_rate": 0.0}
    trainer = make_trainer(sampler=lambda trainer: Digits(trainer, with_logprobs), reward_funcs=letters, **settings)
    trainer.train()
    batch, _ = trainer.batches[0]
    assert ("old_per_token_logps" in batch) == with_logprobs
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    arguments = trainer.model.eval(), input_ids, mask, batch["completion_ids"].size(1)
    logprobs = trainer._get_per_token_logps_and_entropies(*arguments)[0]
    ratios = torch.exp(logprobs - np.log(0.1)) if with_logprobs else torch.ones_like(logprobs)
    advantages = batch["advantages"].unsqueeze(1)
    terms = torch.min(ratios * advantages, ratios.clamp(0.8, 1.28) * advantages)
    counted = batch["completion_mask"] * batch["tool_mask"]
    loss = trainer.state.log_history[0]["loss"]
    assert loss == pytest.approx(-(terms * counted).sum().item() / counted.sum().item(), abs=1e-4)


@pytest.mark.parametrize("make", [make_trainer, make_tool_trainer])
def test_the_built_in_sampler_may_be_passed(make):
    runs = []
    for arguments in ({}, {"sampler": make_sampler}):
        trainer = make(per_device_train_batch_size=16, anchor_threshold=None, **arguments)
        set_seed(1)
        trainer.train()
        runs.append(trainer.batches)
    for (batch, _), (expected, _) in zip(*runs, strict=True):
        assert all(batch[name].equal(expected[name]) for name in ("completion_ids", "tool_mask", "advantages"))
        assert not batch["tool_mask"].equal(batch["completion_mask"])


@dataclass(repr=False)
class Returns:
    change: Callable

    def sample(self, requests: list[SamplingRequest]) -> list[list[Sample]]:
        return self.change([[Sample([5] * request.max_new_tokens)] * request.num_samples for request in requests])


def first(sample: Sample):
    return lambda samples: [[sample, *samples[0][1:]], *samples[1:]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda samples: samples[1:], "1 lists of samples for 2 requests"),
        (lambda samples: [samples[0][1:], *samples[1:]], "1 samples for request 0, whose num_samples=2"),
        (lambda samples: [samples[0] * 2, *samples[1:]], "4 samples for request 0, whose num_samples=2"),
        (first(Sample([])), "request 0 that has no tokens"),
        (first(Sample([5] * 13)), "13 tokens, more than the request's max_new_tokens=12"),
        (first(Sample([5, 1], [0.0])), "1 logprobs for 2 tokens"),
        (first(Sample([5, 1], [0.0, float("nan")])), "2 logprobs for 2 tokens. It must have a finite"),
        (first(Sample([5, 1], [0.0, 0.0], [0.1] * 3)), "3 entropies for 2 tokens"),
        (first(Sample([5, 1], None, [0.1] * 2)), "entropies but no logprobs"),
    ],
)
def test_what_is_not_what_was_asked_for(change, named):
    with pytest.raises(ValueError, match=f"The sampler Returns returned .*{named}"):
        make_trainer(sampler=lambda trainer: Returns(change)).train()


def test_samplers_that_are_refused():
    with pytest.raises(TypeError, match=r"sampler=<.*Returns.*it must be a class or function that takes the trainer"):
        make_trainer(sampler=Returns(list))
    with pytest.raises(ValueError, match=r"no logprobs.*vllm_importance_sampling_correction=False"):
        OwnSampler(Returns(list), needs_logprobs=True).sample([SamplingRequest([5, 6], 1, 3, 1.0)])
    with pytest.raises(ValueError, match="num_anchors=0"):
        make_trainer(sampler=Digits, num_anchors=0)
    make_trainer(sampler=Digits, num_anchors=0, reject_degenerate_states=True)


def test_the_example(tmp_path):
    example = Path(__file__).parent.parent / "examples" / "own_sampler.py"
    command = [sys.executable, example, "--max_steps=1", f"--output_dir={tmp_path}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "fr3e/value/S0" in result.stdout and (tmp_path / "model.safetensors").exists()


def test_the_order_in_which_a_server_is_asked():
    order = []

    def ask(item):
        order.append(item)
        if item == "hangs":
            raise ServerFault(item)
        yield from [item + 0.1, item + 0.2] if isinstance(item, int) else []

    in_parallel(ask, [1, 2, 3], limit=1)
    assert [int(item) for item in order] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    order.clear()
    with pytest.raises(ServerFault, match="hangs"):
        in_parallel(ask, ["hangs"] * 20, limit=4)
    assert len(order) == 4


def test_a_colocated_vllm_with_tensor_parallelism(tmp_path):
    """As in one process. The engine is a fake one, of which all must ask the same at once; their group is real."""
    settings = {"num_generations": 8, "optim": "sgd"}  # moves the weights by their gradients, and by no more
    runs = {}
    for num_processes in (1, 2):
        sizes = {"per_device_train_batch_size": 24 // num_processes}
        output = tmp_path / str(num_processes)
        runs[num_processes] = launch(output, num_processes, settings | sizes, "shared_engine")
    (alone,), shared = runs[1], runs[2]
    assert len(alone["engine"]) == 6 and shared[0]["engine"] == shared[1]["engine"] == alone["engine"]
    assert same(trees_of(shared), trees_of([alone]))
    torch.testing.assert_close(weights_of(tmp_path / "2"), weights_of(tmp_path / "1"), atol=1e-6, rtol=1e-6)


def test_vllms_branches_leave_while_their_base_trajectories_grow():
    """Two of them, told in turns, three tokens at a time. A branch is asked for with the part that has its anchor."""
    branching = Branching(2, None, [2, 1], AboveThreshold(threshold=0.5, min_gap=2))
    request = SamplingRequest([9, 9], 2, 6, 1.0, with_entropies=True, branching=branching)
    queue = RequestQueue([request], draws_branches=True)
    assert [asked.num_samples for asked in queue.pending] == [1, 1]
    assert all(queue.is_streamed(asked) for asked in queue.pending)
    parts = [Sample([3, 4, 5], [-0.5] * 3, np.array(h, np.float32)) for h in ([0.9, 0.8, 0.9], [0.6, 0.4, 0.7])]
    asked = [
        [(further.prefix_ids.tolist(), further.max_new_tokens) for further in queue.add(b, [part])]
        for part in parts
        for b in range(2)
    ]
    # Never position 0; position 2 is too near to 1; the second one has a single anchor
    first, second = ([9, 9, 3], 5), ([9, 9, 3, 4, 5], 3)
    assert asked == [[first], [first], [second], []]
    for i in range(2, len(queue.pending)):
        of_branch = queue.pending[i]
        assert not queue.is_streamed(of_branch)
        queue.add(i, [Sample([6 + k], [-1.0]) for k in range(of_branch.num_samples)])
    ((one, other),) = queue.samples
    assert one.token_ids == other.token_ids == [3, 4, 5] * 2
    assert one.entropies == pytest.approx([0.9, 0.8, 0.9, 0.6, 0.4, 0.7]) and len(one.logprobs) == 6
    assert [list(sample.branches) for sample in (one, other)] == [[1, 3], [1]]
    for sample in (one, other):
        for branches in sample.branches.values():
            assert [branch.token_ids[0] for branch in branches] == [6, 7]
