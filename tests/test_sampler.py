"""Rollouts drawn by a sampler that is passed to the trainer."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from factory import digits, letters, make_tool_trainer, make_trainer, train, weights
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


class Digits:
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


def own(trainer) -> Digits:
    return trainer.sampler.sampler


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
    prompts = [request for request in own(trainer).requests if request.num_sampled_before == 0]
    branches = [request for request in own(trainer).requests if request.num_sampled_before > 0]
    assert sum(request.num_samples for request in prompts) == 2 * 2 * 2 and len(branches) == 2 * 2 * 6
    assert all(request.max_new_tokens == 12 - request.num_sampled_before for request in [*prompts, *branches])
    assert all(request.branching is None for request in own(trainer).requests)


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


def built_in(trainer):
    return make_sampler(trainer)


def test_the_built_in_sampler_may_be_passed():
    """The same rollouts, in two rounds."""
    theirs = train(reward_funcs=letters, anchor_threshold=None)
    ours = make_trainer(sampler=built_in, reward_funcs=letters, anchor_threshold=None)
    set_seed(1)
    ours.train()
    for (batch, _), (expected, _) in zip(ours.batches, theirs.batches, strict=True):
        assert batch["completion_ids"].equal(expected["completion_ids"])
        assert batch["advantages"].equal(expected["advantages"])


def test_turns_may_be_written_by_a_sampler():
    """With tools it writes the turns: as the built-in one, the same trees."""
    runs = []
    for arguments in ({}, {"sampler": built_in}):
        set_seed(1)
        trainer = make_tool_trainer(per_device_train_batch_size=16, max_steps=1, **arguments)
        trainer.train()
        runs.append(trainer.batches[0][0])
    theirs, ours = runs
    assert all(ours[name].equal(theirs[name]) for name in ("completion_ids", "tool_mask", "advantages"))
    assert not ours["tool_mask"].equal(ours["completion_mask"])


class Returns:
    """Gives the first request another answer."""

    def __init__(self, change):
        self.change = change

    def sample(self, requests: list[SamplingRequest]) -> list[list[Sample]]:
        samples = [[Sample([5] * request.max_new_tokens)] * request.num_samples for request in requests]
        return self.change(samples)


def first(sample: Sample):
    return lambda samples: [[sample, *samples[0][1:]], *samples[1:]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda samples: samples[1:], "samples of 1 requests for 2"),
        (lambda samples: [samples[0][1:], *samples[1:]], "1 samples for request 0, whose num_samples=2"),
        (lambda samples: [samples[0] * 2, *samples[1:]], "4 samples for request 0, whose num_samples=2"),
        (first(Sample([])), "request 0 that has no tokens"),
        (first(Sample([5] * 13)), "13 tokens, and the request's max_new_tokens=12"),
        (first(Sample([5, 1], [0.0])), "1 logprobs for 2 tokens"),
        (first(Sample([5, 1], [0.0, float("nan")])), "2 logprobs for 2 tokens. There must be a finite one"),
        (first(Sample([5, 1], [0.0, 0.0], [0.1] * 3)), "3 entropies for 2 tokens"),
        (first(Sample([5, 1], None, [0.1] * 2)), "entropies and no logprobs"),
    ],
)
def test_what_is_not_what_was_asked_for(change, named):
    with pytest.raises(ValueError, match=f"The sampler Returns returned .*{named}"):
        make_trainer(sampler=lambda trainer: Returns(change)).train()


def test_log_probs_that_vllms_correction_needs():
    sampler = OwnSampler(Returns(list), needs_logprobs=True)
    with pytest.raises(ValueError, match=r"no logprobs.*vllm_importance_sampling_correction=False"):
        sampler.sample([SamplingRequest([5, 6], 1, 3, 1.0)])


def test_samplers_that_are_refused():
    with pytest.raises(TypeError, match=r"sampler=<.*Returns.*it must be a class or function that takes the trainer"):
        make_trainer(sampler=Returns(list))
    with pytest.raises(ValueError, match="num_anchors=0"):
        make_trainer(sampler=Digits, num_anchors=0)
    make_trainer(sampler=Digits, num_anchors=0, reject_degenerate_states=True)
    with pytest.raises(NotImplementedError, match=r"rollout_func.*sampler="):
        make_trainer(reward_funcs=digits, rollout_func=lambda prompts, trainer: {})


def test_the_interface_is_public():
    class Own(Sampler):
        def sample(self, requests):
            return [[Sample([1])] * request.num_samples for request in requests]

    (samples,) = Own().sample([SamplingRequest([5, 6], 2, 3, 1.0)])
    assert len(samples) == 2


EXAMPLE = Path(__file__).parent.parent / "examples" / "own_sampler.py"


def test_the_example(tmp_path):
    command = [sys.executable, EXAMPLE, "--max_steps=1", f"--output_dir={tmp_path}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "fr3e/value/S0" in result.stdout and (tmp_path / "model.safetensors").exists()


def test_branches_are_asked_for_before_further_base_trajectories():
    """A server with many of these would have dropped a branch's prefix from its cache."""
    order = []

    def ask(item):
        order.append(item)
        yield from [item + 0.1, item + 0.2] if isinstance(item, int) else []

    in_parallel(ask, [1, 2, 3], most=1)
    assert [int(item) for item in order] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_nothing_more_is_asked_of_a_server_that_has_failed():
    """It may hang: each further request would wait for it as long."""
    order = []

    def ask(item):
        order.append(item)
        raise ServerFault("hangs")
        yield

    with pytest.raises(ServerFault, match="hangs"):
        in_parallel(ask, range(20), most=4)
    assert len(order) == 4


def test_a_colocated_vllm_with_tensor_parallelism(tmp_path):
    """
    Two processes that share an engine train as one process does. The engine is a fake one, of which all processes must
    ask the same at the same time; the group of processes is real.
    """
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


# vLLM


def test_vllms_branches_leave_while_their_base_trajectories_grow():
    """Two of them, told in turns, three tokens at a time. A branch is asked for with the part that has its anchor."""
    branching = Branching(2, None, [2, 1], AboveThreshold(threshold=0.5, min_gap=2))
    request = SamplingRequest([9, 9], 2, 6, 1.0, with_entropies=True, branching=branching)
    queue = RequestQueue([request], draws_branches=True)
    assert [asked.num_samples for asked in queue.asked] == [1, 1]
    assert all(queue.is_growing(asked) for asked in queue.asked)
    parts = [Sample([3, 4, 5], [-0.5] * 3, np.array(h, np.float32)) for h in ([0.9, 0.8, 0.9], [0.6, 0.4, 0.7])]
    asked = [
        [(further.prefix_ids.tolist(), further.max_new_tokens) for further in queue.answer(b, [part])]
        for part in parts
        for b in range(2)
    ]
    # Never position 0; position 2 is too near to 1; the second one has a single anchor
    first, second = ([9, 9, 3], 5), ([9, 9, 3, 4, 5], 3)
    assert asked == [[first], [first], [second], []]
    for i in range(2, len(queue.asked)):
        of_branch = queue.asked[i]
        assert not queue.is_growing(of_branch)
        queue.answer(i, [Sample([6 + k], [-1.0]) for k in range(of_branch.num_samples)])
    ((one, other),) = queue.samples
    assert one.token_ids == other.token_ids == [3, 4, 5] * 2
    assert one.entropies == pytest.approx([0.9, 0.8, 0.9, 0.6, 0.4, 0.7]) and len(one.logprobs) == 6
    assert [list(sample.branches) for sample in (one, other)] == [[1, 3], [1]]
    for sample in (one, other):
        for branches in sample.branches.values():
            assert [branch.token_ids[0] for branch in branches] == [6, 7]
