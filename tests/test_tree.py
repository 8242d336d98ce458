"""The two stages, on a policy that is a function: a sample depends on its prefix and its number alone."""

import math
import pickle
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import plain

from fr3e_trl import FR3EConfig
from fr3e_trl.method.explore import explore
from fr3e_trl.method.metrics import tree_metrics
from fr3e_trl.method.sampling import Sample
from fr3e_trl.method.tree import Rollout, Score, State, Tree, as_ids, chains_of

pytestmark = pytest.mark.fast

EOS = 0


class FunctionSampler:
    """Samples tokens 0 to 9, of which 0 ends a completion; keeps the requests it was asked for."""

    def __init__(self, eos_rate: float = 0.1):
        self.eos_rate = eos_rate
        self.requests = []

    def sample(self, requests):
        self.requests += requests
        return [
            [self._draw(request.prefix_ids.tolist(), i, request.max_new_tokens) for i in range(request.num_samples)]
            for request in requests
        ]

    def _draw(self, prefix_ids: list[int], i: int, max_new_tokens: int) -> Sample:
        rng, token_ids = random.Random(repr((prefix_ids, i))), []
        while len(token_ids) < max_new_tokens and EOS not in token_ids:
            token_ids.append(EOS if rng.random() < self.eos_rate else rng.randint(1, 9))
        return Sample(token_ids)


class BranchingSampler(FunctionSampler):
    """Draws the branches with the base trajectories, the same as it would draw when asked for them."""

    def sample(self, requests):
        return [
            samples if request.branching is None else self._with_branches(request, samples)
            for request, samples in zip(requests, super().sample(requests), strict=True)
        ]

    def _with_branches(self, request, samples):
        completions = [sample.token_ids for sample in samples]
        statistics = token_statistics([request.prefix_ids] * len(samples), [as_ids(ids) for ids in completions])
        samples = [
            Sample(ids, logprobs.numpy(), entropies.numpy())
            for ids, (logprobs, entropies) in zip(completions, statistics, strict=True)
        ]
        for sample, anchors in zip(samples, request.branching.anchors(request, samples), strict=True):
            for position in anchors:
                prefix_ids = [*request.prefix_ids.tolist(), *sample.token_ids[:position]]
                sample.branches[position] = [
                    self._draw(prefix_ids, i, request.max_new_tokens - position)
                    for i in range(request.branching.num_rollouts)
                ]
        return samples


class CountingScorer:
    """Right if the sum of the tokens is even; keeps what it scored."""

    def __init__(self):
        self.scored = []

    def __call__(self, owners, completion_ids, dialogues):
        self.scored += zip(owners, plain(completion_ids), strict=True)
        return [Score([float(sum(ids) % 2 == 0)], float(sum(ids) % 2 == 0)) for ids in completion_ids]


def token_statistics(prompt_ids, completion_ids, multimodal=None):
    return [
        (
            torch.tensor([-random.Random(repr((p, c[: i + 1]))).random() for i in range(len(c))]),
            torch.tensor([random.Random(repr((p, c[:i]))).random() for i in range(len(c))]),
        )
        for p, c in zip(plain(prompt_ids), plain(completion_ids), strict=True)
    ]


def make_args(**settings) -> FR3EConfig:
    size = settings.get("num_generations", 8)
    defaults = {"output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": [], "max_completion_length": 12}
    return FR3EConfig(**defaults | {"per_device_train_batch_size": size} | settings)


def grow(args: FR3EConfig, prompts: list[list[int]], budget=12, eos_rate=0.1, sampler_class=FunctionSampler):
    trees = [Tree(prompt_ids, budget) for prompt_ids in prompts]
    sampler, scorer = sampler_class(eos_rate), CountingScorer()
    explore(trees, args.plan, sampler, scorer, token_statistics, seed=(0, 0))
    return plain(trees), sampler, scorer


PROMPTS = [[5, 6], [7], [8, 8, 8]]

CHOICES = {"num_generations": [8, 12, 20], "value_prior_strength": [0, 4], "anchor_min_gap": [1, 3]}
CHOICES |= {"anchor_score": ["entropy", "surprisal", "random"], "base_selection": ["all", "mixed"]}
CHOICES |= {"reuse_base": [False, True]}
settings_strategy = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()})


@given(settings_strategy, st.integers(4, 12), st.sampled_from([0.02, 0.3, 1.0]))
def test_a_tree_has_exactly_its_rows_and_none_is_too_long(settings, budget, eos_rate):
    args = make_args(**settings)
    trees, _, scorer = grow(args, PROMPTS, budget, eos_rate)
    for i, tree in enumerate(trees):
        rows = [(tree, state, rollout) for state in tree.states for rollout in state.rollouts]
        assert len(rows) == args.num_generations
        assert len(tree.states) <= args.num_states
        for _, state, rollout in rows:
            completion = state.prefix_ids + rollout.token_ids
            assert 1 <= len(completion) <= budget
            assert len(completion) == budget or completion[-1] == EOS
            # Scored on the whole completion
            assert (i, completion) in scorer.scored
        if not args.reuse_base:
            assert not any(rollout is base for base in tree.bases for rollout in tree.states[0].rollouts)
        assert all(len(state.rollouts) == args.num_rollouts for state in tree.states[1:])
        for state in tree.states[1:]:
            assert 0 < len(state.prefix_ids) <= budget - 1
            assert tree.bases[state.base].token_ids[: len(state.prefix_ids)] == state.prefix_ids
            parent = tree.states[state.parent]
            assert parent.prefix_ids == state.prefix_ids[: len(parent.prefix_ids)] != state.prefix_ids
    # Trajectories that are thrown away are scored where they are selected by it
    by_score = args.base_selection == "mixed"
    thrown_away = args.num_bases * len(trees) if by_score and not args.reuse_base else 0
    assert len(scorer.scored) == args.num_generations * len(trees) + thrown_away


@given(settings_strategy, st.permutations(PROMPTS))
def test_order_and_number_of_prompts_change_no_tree(settings, prompts):
    args = make_args(**settings)
    alone = {tuple(prompt): grow(args, [prompt])[0][0] for prompt in PROMPTS}
    together, _, _ = grow(args, prompts)
    for tree in together:
        other = alone[tuple(tree.prompt_ids)]
        assert tree.states == other.states
        assert all(a.equal(b) for a, b in zip(tree.entropies, other.entropies, strict=True))


@given(settings_strategy, st.sampled_from([None, 0.6]), st.sampled_from([0.02, 0.3]))
def test_branches_drawn_with_their_bases_are_those_that_are_asked_for_later(settings, threshold, eos_rate):
    if threshold is not None:
        settings |= {"anchor_threshold": threshold, "anchor_score": "entropy"}
    args = make_args(**settings)
    expected, asked, scorer = grow(args, PROMPTS, eos_rate=eos_rate)
    trees, asked_once, their_scorer = grow(args, PROMPTS, eos_rate=eos_rate, sampler_class=BranchingSampler)
    for rollout in (rollout for tree in trees for state in tree.states for rollout in state.rollouts):
        rollout.logprobs = None  # which the other sampler does not tell
    assert [tree.states for tree in trees] == [tree.states for tree in expected]
    assert sorted(their_scorer.scored) == sorted(scorer.scored)
    prompts = [request.prefix_ids.tolist() for request in asked_once.requests]
    if args.base_selection == "all" and args.reuse_base:
        assert all(prompt in PROMPTS for prompt in prompts)  # but for anchors that a short trajectory has no place for
    else:
        assert prompts == [request.prefix_ids.tolist() for request in asked.requests]


@pytest.mark.parametrize("num_generations", [2, 3, 4, 7, 8, 16])
def test_every_base_trajectory_is_explored_alike(num_generations):
    args = make_args(num_generations=num_generations)
    trees, _, _ = grow(args, PROMPTS, budget=40, eos_rate=0.0)
    for tree in trees:
        assert len(tree.bases) == math.ceil(num_generations / 4) == len(tree.states[0].rollouts)
        anchors = Counter(state.base for state in tree.states[1:])
        assert sum(anchors.values()) == num_generations - len(tree.bases)
        # As many for each, and the odd ones to the first
        assert max(anchors.values()) - min(anchors.values()) <= 1
        assert all(anchors[i] >= anchors[j] for i in anchors for j in anchors if i < j)
        for base in anchors:
            positions = {len(state.prefix_ids) for state in tree.states if state.base == base}
            assert positions == {p + 1 for p in tree.entropies[base][1:].topk(anchors[base]).indices.tolist()}


def test_each_request_has_its_own_budget_and_temperature():
    args = make_args(num_generations=12, num_anchors=2, temperature=0.8)
    trees, sampler, _ = grow(args, PROMPTS, eos_rate=0.0)
    first, branches = sampler.requests[:3], sampler.requests[3:]
    assert all((r.num_samples, r.max_new_tokens, r.temperature) == (4, 12, 0.8) for r in first)
    states = [(tree, state) for tree in trees for state in tree.states[1:]]
    for request, (tree, state) in zip(branches, states, strict=True):
        assert request.prefix_ids.tolist() == tree.prompt_ids + state.prefix_ids
        assert (request.num_samples, request.temperature) == (4, 0.8)
        assert request.max_new_tokens == 12 - len(state.prefix_ids)


def test_anchors_are_the_most_uncertain_positions_of_the_chosen_trajectories():
    args = make_args(num_generations=20, num_anchors=4, base_selection="mixed")
    trees, _, _ = grow(args, PROMPTS, eos_rate=0.02)
    for tree in trees:
        rewards = [base.score.reward for base in tree.bases]
        chosen = list(dict.fromkeys(state.base for state in tree.states[1:]))
        assert [rewards[base] for base in chosen] == sorted(set(rewards), reverse=True)
        chains = [[state for state in tree.states if state.base == base] for base in chosen]
        for states, entropies in zip(chains, (tree.entropies[base] for base in chosen), strict=True):
            expected = sorted(entropies[1:].argsort(descending=True)[: 4 // len(chosen)].add(1).tolist())
            assert [len(state.prefix_ids) for state in states] == expected
            assert [state.entropy for state in states] == entropies[expected].tolist()
        # Each of two trajectories has its own chain
        parents = [[state.parent for state in states] for states in chains]
        assert parents == ([[0, 1], [0, 3]] if len(chosen) == 2 else [[0, 1, 2, 3]])
    assert any(len({state.base for state in tree.states[1:]}) == 2 for tree in trees)
    states, parents = chains_of(trees)
    assert len(states) == 15 and parents[5] is parents[10] is None and parents[11] == 10


def test_what_processes_tell_each_other_is_small():
    """Positions and lengths, not entropies; no tensor that keeps those of other rows alive, or takes them along."""
    args = make_args(num_generations=16)
    trees = [Tree([i, i], budget=900) for i in range(8)]
    told = []

    def views(prompt_ids, completion_ids, multimodal):
        """Of one tensor for all rows, as a forward pass leaves them."""
        of_rows = torch.rand(len(completion_ids), 900)
        return [(-row[: len(ids)], row[: len(ids)]) for row, ids in zip(of_rows, completion_ids, strict=True)]

    def once(function):
        results = pickle.dumps([function()])
        told.append(len(results))
        return pickle.loads(results)

    explore(trees, args.plan, FunctionSampler(0.0), CountingScorer(), views, (0, 0), in_every_process=once)
    num_tokens = sum(rollout.length for tree in trees for state in tree.states for rollout in state.rollouts)
    assert num_tokens > 50_000 and sum(told) < 20_000
    for tree in trees:
        for base, entropies in zip(tree.bases, tree.entropies, strict=True):
            assert entropies.untyped_storage().nbytes() == 4 * base.length


def rollout(reward: float, length: int = 2) -> Rollout:
    return Rollout([1] * length, None, Score([reward], reward))


def test_metrics_by_hand():
    bases = [rollout(0.0, 4), rollout(0.0, 4)]
    failed = Tree([1], 9, bases, mean_entropies=[0.5, 1.0])
    failed.states[0].rollouts = list(bases)
    failed.branch(0, {1: 1.5})
    failed.states[1].rollouts = [rollout(1.0), rollout(0.0)]
    solved = Tree([1], 9, [rollout(1.0, 1), rollout(1.0, 1)], mean_entropies=[2.0, 2.0])
    solved.states[0].rollouts = [*solved.bases, rollout(1.0, 3), rollout(1.0, 3)]
    failed.states[0] = replace(failed.states[0], value=0.0, rejected=True)
    failed.states[1] = replace(failed.states[1], value=0.5, modulation=math.exp(-0.5))
    solved.states[0] = replace(solved.states[0], value=1.0, rejected=True)
    metrics = tree_metrics([failed, solved], torch.tensor([0.3, -0.3]), 8)
    expected = {"value/S0": 0.5, "value/anchors": 0.5, "value_gain": 0.5, "anchor/entropy": 1.5, "anchor/count": 0.5}
    expected |= {"alpha/mean": (1 + math.exp(-0.5) + 1) / 3, "alpha/min": math.exp(-0.5), "alpha/max": 1.0}
    # A mean over tokens; and a_1 = 2, counted from 1, of 4 tokens
    expected |= {"entropy": (2.0 + 4.0 + 4.0) / 10, "anchor/position": 2 / 4}
    expected |= {"states/all_right": 1 / 3, "states/all_wrong": 1 / 3, "states/rejected": 2 / 3}
    expected |= {"prompts/all_right": 1 / 2, "prompts/all_wrong": 0.0, "prompts/rescued": 1.0}
    expected |= {"tokens/generated": 8 + 4 + 2 + 6, "tokens/per_row": 20 / 8, "tokens/per_informative_row": 20 / 2}
    expected |= {"rows/informative": 2 / 8, "rows/copied": 0.0, "advantage/mean": 0.0, "advantage/std": 0.3}
    assert metrics == pytest.approx({f"fr3e/{name}": value for name, value in expected.items()}, abs=1e-6)
    # A tool's tokens are not the policy's; a row of S_0 for a missing anchor is no base trajectory
    bases = [rollout(0.0, 4), Rollout([1] * 4, None, Score([0.0], 0.0), mask=np.array([True, False, False, False]))]
    tree = Tree([1], 9, bases, mean_entropies=[0.5, 1.0])
    tree.states[0].rollouts = [*bases, rollout(1.0)]
    tree.branch(0, {1: 1.5})
    tree.states[1].rollouts = [rollout(1.0)]
    metrics = tree_metrics([tree], torch.tensor([0.3]), 4)
    assert metrics["fr3e/entropy"] == pytest.approx((4 * 0.5 + 1 * 1.0) / 5)
    assert metrics["fr3e/prompts/rescued"] == 1 and metrics["fr3e/value/S0"] == 0
    # Those without an instance are left out
    tree = Tree([1], 9, [rollout(1.0)], mean_entropies=[2.0], states=[State(rollouts=[rollout(1.0)], value=1.0)])
    metrics = tree_metrics([tree], torch.empty(0), 4)
    assert "fr3e/prompts/rescued" not in metrics and "fr3e/value/anchors" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("settings", [{}, {"anchor_threshold": None}, {"anchor_score": "random", "credit": "rollout"}])
def test_requests_go_from_process_to_process(settings):
    """They hold plain values, whatever the sampler is made of: with a vLLM server, the main process asks for all."""
    sampler = FunctionSampler()
    sampler.of_one_process = lambda: None  # nothing that can be pickled
    args = make_args(num_generations=8, **settings)
    trees = [Tree(as_ids(prompt), 12) for prompt in PROMPTS]
    explore(trees, args.plan, sampler, CountingScorer(), token_statistics, (0, 0))
    (request, *_) = [pickle.loads(pickle.dumps(request)) for request in sampler.requests]
    assert len(pickle.dumps(request.branching)) < 2000
    (sample,) = sampler.sample([replace(request, num_samples=1)])[0]
    ((logprobs, entropies),) = token_statistics([request.prefix_ids], [as_ids(sample.token_ids)])
    of_sample = replace(sample, logprobs=logprobs.numpy(), entropies=entropies.numpy())
    anchors = [of.branching.anchors(of, [of_sample]) for of in (request, sampler.requests[0])]
    assert anchors[0] == anchors[1]
