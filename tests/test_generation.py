"""Sampling with transformers, from real models: what is drawn, and in how many steps."""

import contextlib
import math
from collections import Counter
from dataclasses import replace

import accelerate
import numpy as np
import pytest
import torch
from factory import make_trainer
from hypothesis import given
from hypothesis import strategies as st
from models import cache_of, make_model, make_tokenizer, model_on_disk, statistics_by_hand
from peft import LoraConfig, get_peft_model
from test_matrix import by_length, largest_difference, make_family
from transformers import CompileConfig, GenerationConfig, GenerationMixin

from fr3e_trl.commands.completions import complete, sampling_config
from fr3e_trl.generation import generate
from fr3e_trl.generation.decoding import GenerateSteps
from fr3e_trl.generation.generate import GenerateSampler
from fr3e_trl.generation.vllm import NUM_LOGPROBS, entropies_of
from fr3e_trl.method.anchors import AboveThreshold, eligible_positions
from fr3e_trl.method.sampling import Branching, SamplingRequest

PAD, EOS = 0, 1


def make_sampler(model, may_grow=False, **generation_kwargs):
    @contextlib.contextmanager
    def generation_model():
        with torch.no_grad():
            yield model

    settings = {"do_sample": True, "top_k": 0, "pad_token_id": PAD, "eos_token_id": [EOS], "disable_compile": True}
    config = GenerationConfig(**settings | generation_kwargs)
    return GenerateSampler(generation_model, lambda: config, torch.device("cpu"), GenerateSteps(), may_grow=may_grow)


def token_ids(length, seed=0):
    return np.random.default_rng(seed).integers(2, 50, length).tolist()


def request(prompt_ids, prefix_ids=(), num_samples=1, budget=12, temperature=1.0):
    """A completion's continuation, `budget` being that of the whole completion."""
    ids = [*prompt_ids, *prefix_ids]
    return SamplingRequest(ids, num_samples, budget - len(prefix_ids), temperature, len(prompt_ids))


def drawn(sampler, requests):
    return [[sample.token_ids.tolist() for sample in samples] for samples in sampler.sample(requests)]


@pytest.mark.parametrize(
    "requests",
    [
        [(340, 0, 300), (340, 294, 300)],
        [(340, 100, 300), (340, 294, 300)],
        [(340, 294, 300, 1.5), (340, 0, 300)],
        [(340, 3, 300), (20, 290, 300), (200, 0, 300)],
        [(340, 0, 60), (20, 290, 300), (200, 10, 300)],  # a context that has less room after the longest prompt
    ],
    ids=str,
)
def test_a_batch_is_no_wider_and_takes_no_more_steps_than_grpos(requests):
    """Each a prompt's length, its prefix's and its budget, and a temperature. Nothing ends before its budget does."""
    model, cached = make_model(max_position_embeddings=1024), []
    keep = lambda module, args, kwargs, output: cached.append(cache_of(kwargs).get_seq_length())  # noqa: E731
    model.register_forward_hook(keep, with_kwargs=True)
    asked = [request(token_ids(prompt), token_ids(prefix), 1, *rest) for prompt, prefix, *rest in requests]
    samples = drawn(make_sampler(model, suppress_tokens=[EOS]), asked)
    remaining = [budget - prefix for _, prefix, budget, *_ in requests]
    assert [len(sample) for (sample,) in samples] == remaining
    assert len(cached) == max(remaining) <= 300  # as many steps as the largest budget that is left
    # The last token is not in the cache. Were all rows drawn from their prompts, 339 + 300 positions would be
    longest = max(prompt + budget for prompt, _, budget, *_ in requests)
    assert cached[-1] == longest - 1 <= max(prompt for prompt, *_ in requests) + 300 - 1


def test_a_row_is_what_it_would_be_alone():
    model = make_model()
    with_special = [*token_ids(20, 1), EOS, *token_ids(10, 2)]
    requests = [
        request(token_ids(7), budget=30),
        request(token_ids(12, 3), token_ids(25, 4), budget=30),
        request(token_ids(4, 5), token_ids(9, 6), num_samples=2, budget=30),
        request(token_ids(4, 5), [5, PAD, PAD, 6, PAD], budget=30),
        request([PAD, *token_ids(4, 5), PAD], token_ids(20, 7), budget=30),
        request(token_ids(40, 8), budget=4),  # what begins all rows has no room for this prompt
        request(with_special, token_ids(2, 9), budget=4),
        request(token_ids(5, 9), [*token_ids(20, 8), EOS, 7], budget=30),
    ]
    samples = drawn(make_sampler(model, top_k=1), requests)
    for of_request, one in zip(samples, requests, strict=True):
        alone = model.generate(
            torch.tensor([one.prefix_ids]),
            attention_mask=torch.ones(1, len(one.prefix_ids), dtype=torch.long),
            max_new_tokens=one.max_new_tokens,
            do_sample=False,
        )
        assert of_request == [alone[0, len(one.prefix_ids) :].tolist()] * one.num_samples
    assert len({len(sample) for (sample, *_) in samples}) > 3


def test_eos_ends_a_row_wherever_its_sampling_begins():
    model, always = make_model(), {"sequence_bias": [[[EOS], 100.0]]}
    requests = [request(token_ids(5), token_ids(length), 2) for length in (0, 3, 9)]
    assert drawn(make_sampler(model, **always), requests) == [[[EOS]] * 2] * 3
    requests = [request(token_ids(prompt), token_ids(length)) for prompt in (5, 9) for length in (0, 3, 8)]
    samples = drawn(make_sampler(model, **always, min_new_tokens=5), requests)
    assert [len(sample) for (sample,) in samples] == [6, 3, 1] * 2
    assert all(sample.index(EOS) == len(sample) - 1 for (sample,) in samples)


# Not on a GPU alone, and without a compiler
COMPILED = CompileConfig(backend="eager", fullgraph=False, mode=None)
COMPILED._compile_all_devices = True


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 3, "top_p": 0.8, "min_p": 0.1},
        {"repetition_penalty": 9.0, "suppress_tokens": [5, 6], "no_repeat_ngram_size": 2},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": False, "compile_config": COMPILED},
        {"max_logits": 1},
        {"max_logits": 500},
    ],
    ids=["plain", "truncated", "penalties", "no cache", "compiled", "one logit kept", "few logits kept"],
)
def test_logprobs_and_entropies_are_the_policys(settings, monkeypatch):
    settings = dict(settings)
    monkeypatch.setattr(generate, "MAX_LOGITS", settings.pop("max_logits", generate.MAX_LOGITS))
    model, end_at_random = make_model(), make_model(seed=3)
    requests = [
        request(token_ids(7), budget=30),
        request(token_ids(12, 3), token_ids(25, 4), 2, 30, 0.7),
        request(token_ids(4, 5), token_ids(9, 6), 1, 30, 1.6),
        request([*token_ids(20, 1), EOS, *token_ids(10, 2)], token_ids(2, 9), budget=10),
    ]
    torch.manual_seed(0)
    for policy in (model, end_at_random, model):  # each time with a record of its own
        for one, samples in zip(requests, make_sampler(policy, **settings).sample(requests), strict=True):
            for sample in samples:
                check_statistics(policy, one.prefix_ids, sample, one.temperature)
                assert sample.token_ids.dtype == np.int32
                assert sample.logprobs.dtype == sample.entropies.dtype == np.float32
                for of_tokens in (sample.token_ids, sample.logprobs, sample.entropies):
                    assert of_tokens.base is None and of_tokens.shape == sample.token_ids.shape


def branching(threshold=1.0, num_rollouts=2, shares=(8, 2), min_gap=2):
    """Of a stopping rule: nothing asks for the anchors of finished samples."""
    return Branching(num_rollouts, None, shares, AboveThreshold(threshold=threshold, min_gap=min_gap))


@pytest.mark.parametrize("sliding", [False, True])
def test_rollouts_leave_while_their_base_trajectory_grows(sliding):
    settings = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "use_sliding_window": True}
    model = make_model(**settings if sliding else {})
    requests = [
        replace(request(token_ids(7), num_samples=2, budget=30), branching=branching()),
        request(token_ids(40, 3), budget=10),  # what begins all rows has no room for this prompt
        replace(request(token_ids(12, 4), num_samples=2, budget=25, temperature=0.8), branching=branching(1.5, 1)),
    ]
    widths = []
    sampler = make_sampler(model, may_grow=True, min_new_tokens=4)
    assert sampler.grows  # it is tried out on first use, by passes of its own
    model.register_forward_hook(lambda module, args, output: widths.append(len(output.logits)))
    torch.manual_seed(1)
    drawn = sampler.sample(requests)
    steps, num_left = list(widths), 0
    for one, samples in zip(requests, drawn, strict=True):
        assert len(samples) == one.num_samples
        for b, sample in enumerate(samples):
            check_statistics(model, one.prefix_ids, sample, one.temperature)
            if one.branching is None:
                assert not sample.branches
                continue
            share, num_rollouts = one.branching.shares[b], one.branching.num_rollouts
            entropies = torch.from_numpy(sample.entropies)
            eligible = eligible_positions(entropies, one.max_new_tokens)
            anchors = one.branching.rule.choose(entropies, None, eligible, share)
            expected = dict.fromkeys(anchors, num_rollouts)
            assert {position: len(branches) for position, branches in sample.branches.items()} == expected
            num_left += len(anchors) * num_rollouts
            for position, branches in sample.branches.items():
                for branch in branches:
                    prefix_ids = [*one.prefix_ids, *sample.token_ids[:position]]
                    check_statistics(model, prefix_ids, branch, one.temperature)
                    length = position + len(branch.token_ids)
                    assert 4 < length <= one.max_new_tokens
                    assert length == one.max_new_tokens or branch.token_ids.tolist().index(EOS) == length - position - 1
    assert num_left > 8
    of_bases = [sample for samples in drawn for sample in samples]
    of_branches = [s for base in of_bases for branches in base.branches.values() for s in branches]
    assert not any(branch.branches for branch in of_branches)
    # No step has a row but those that grow, or are still forced
    num_sampled = sum(len(sample.token_ids) for sample in [*of_bases, *of_branches])
    num_forced = 20  # the second request's prompt is 20 columns wider than where all begin
    assert sum(steps) == num_sampled + num_forced - num_left  # before its first token a branch is its base
    assert len(steps) == 30  # as many as the longest completion


def check_statistics(model, prefix_ids, sample, temperature):
    logprobs, entropies = statistics_by_hand(model, prefix_ids, sample.token_ids, temperature)
    assert sample.entropies == pytest.approx(entropies.numpy(), abs=1e-4)
    assert sample.logprobs == pytest.approx(logprobs.numpy(), abs=1e-4)


def test_rollouts_that_leave_are_distributed_as_the_policy_is():
    model, prompt = make_model(seed=1), token_ids(6)
    # Any second token is an anchor: no entropy is below 0
    rule = branching(-1.0, 1, [1] * 3000, 1)
    torch.manual_seed(0)
    (samples,) = make_sampler(model, may_grow=True).sample([replace(request(prompt, [], 3000, 4, 1.4), branching=rule)])
    assert p_value([sample.token_ids.tolist() for sample in samples], probabilities(model, prompt, 1.4)) > 1e-6
    firsts = Counter(int(sample.token_ids[0]) for sample in samples if sample.branches)
    for first, _ in firsts.most_common(3):
        left = [s.branches[1][0].token_ids.tolist() for s in samples if s.branches and s.token_ids[0] == first]
        assert len(left) > 100
        assert p_value(left, probabilities(model, [*prompt, first], 1.4)) > 1e-6
        assert p_value(left, probabilities(model, [*prompt, first], 1.0)) < 1e-6  # that it would be missed


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.1}, {"cache_implementation": "static"}], ids=str)
def test_where_rows_have_a_state_of_their_own_none_leaves(settings):
    asked = replace(request(token_ids(7), num_samples=2, budget=30), branching=branching())
    (samples,) = make_sampler(make_model(), may_grow=True, **settings).sample([asked])
    assert len(samples) == 2 and not any(sample.branches for sample in samples)


def make_recurrent_gemma():
    return make_family("RecurrentGemma")[0].train()


def test_where_rows_cannot_grow(caplog, monkeypatch):
    model = make_model()
    model.generation_config.use_cache = False
    assert not make_sampler(model, may_grow=True).grows
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("fr3e_trl")]
    assert "set generation_kwargs={'use_cache': True}" in warning
    sampler = make_sampler(make_model(), may_grow=True)
    sampler.generation_config().top_k = -1
    with pytest.raises(ValueError, match="top_k"):
        sampler.grows  # noqa: B018
    monkeypatch.setattr(generate, "in_every_process", lambda function: [function(), "another model"])
    assert not make_sampler(make_model(), may_grow=True).grows


def test_a_model_that_keeps_its_rows_states_is_left_as_it_was(caplog):
    model = make_recurrent_gemma()
    model(torch.tensor([token_ids(6)]))  # it keeps states of that
    hook = model.register_forward_hook(lambda *args: None)
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    kept = [part.conv1d_state for part in model.modules() if hasattr(part, "conv1d_state")]
    assert kept and any(state is not None for state in kept)
    generator = torch.get_rng_state()
    with caplog.at_level("WARNING", "fr3e_trl"):
        sampler = make_sampler(model, may_grow=True)
        assert not sampler.grows and not sampler.grows
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("fr3e_trl")]
    assert "sampled in a second round" in warning and "RecurrentGemmaForCausalLM keeps state" in warning
    assert torch.equal(torch.get_rng_state(), generator)
    assert list(model._forward_hooks.values()) == [model._forward_hooks[hook.id]]
    for name, part in model.named_modules():
        assert vars(part).keys() == before[name].keys()
        assert all(value is before[name][key] for key, value in vars(part).items() if key != "training")
        assert part.training == before[name]["training"]


@pytest.mark.parametrize(
    ("dtype", "make"),
    [(torch.bfloat16, make_model), (torch.float16, make_model), (torch.bfloat16, make_recurrent_gemma)],
)
def test_rounding_is_told_from_a_wrong_state(dtype, make):
    assert make_sampler(make().to(dtype), may_grow=True).grows == (make is make_model)


@pytest.mark.parametrize("threshold", ["auto", None])
def test_a_compiled_policy_trains(threshold):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    settings = {"reward_funcs": by_length, "anchor_threshold": threshold, "max_steps": 3, "learning_rate": 0.0}
    trainer = make_trainer(**compiled, **settings)
    trainer.train()
    assert len(trainer.batches) == 3
    assert largest_difference(trainer) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"top_k": 3, "top_p": 0.8, "min_p": 0.1}, {"typical_p": 0.6}, {"epsilon_cutoff": 0.1}),
        *({"eta_cutoff": 0.3}, {"top_h": 0.5}, {"repetition_penalty": 9.0}, {"no_repeat_ngram_size": 1}),
        *({"watermarking_config": {"bias": 2.0}}, {"cache_implementation": "static"}, {"use_cache": False}),
    ],
    ids=str,
)
def test_rows_are_sampled_as_generate_samples_them_alone(settings):
    """Chi-squared tests of two tokens against those of `generate`, which a right sampler fails once in 1e6 times."""
    model = make_model(seed=1)
    anchored = request(token_ids(6), token_ids(7, 2), 1000, 9, 1.4)
    torch.manual_seed(0)
    others = request(token_ids(6), budget=9), request(token_ids(11), budget=9)
    _, samples, _ = drawn(make_sampler(model, **settings), [others[0], anchored, others[1]])
    assert p_value_of_one_distribution(generated(model, anchored, **settings), samples) > 1e-6
    # That a difference would be missed: of the settings, or of the temperature
    other = anchored if settings.keys() - {"cache_implementation", "use_cache"} else replace(anchored, temperature=1.0)
    assert p_value_of_one_distribution(generated(model, other), samples) < 1e-6


def test_the_model_computes_elsewhere_than_its_weights_are():
    """Weights that are loaded for each module's own computation are on no device between."""
    model = accelerate.cpu_offload(make_model(), execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    requests = [request(token_ids(7), budget=30), request(token_ids(12, 3), token_ids(25, 4), budget=30)]
    assert drawn(make_sampler(model, top_k=1), requests) == drawn(make_sampler(make_model(), top_k=1), requests)


def generated(model, one, **settings):
    prefixes = torch.tensor([one.prefix_ids] * one.num_samples)
    sampling = {"do_sample": True, "top_k": 0, "disable_compile": True, "temperature": one.temperature}
    sampling |= {"max_new_tokens": one.max_new_tokens, "attention_mask": torch.ones_like(prefixes)}
    output = model.generate(prefixes, **sampling | settings)
    return output[:, prefixes.shape[1] :].tolist()


def probabilities(model, prefix_ids, temperature):
    """Of each two tokens (V, V); what comes after EOS is padding."""
    num_tokens = model.config.vocab_size
    with torch.no_grad():
        sequences = torch.tensor([[*prefix_ids, token] for token in range(num_tokens)])
        logits = model(sequences).logits[:, -2:].double() / temperature
    first, second = logits[0, 0].softmax(-1), logits[:, 1].softmax(-1)
    second[EOS] = torch.eye(num_tokens)[PAD]
    return first[:, None] * second


def first_two(sample):
    """The tokens that are compared, with padding after EOS."""
    return tuple([*sample, PAD][:2])


def p_value(samples, probabilities):
    counts = torch.zeros_like(probabilities)
    for sample in samples:
        counts[first_two(sample)] += 1
    return chi_squared(counts.flatten()[None], probabilities.flatten() * len(samples))


def p_value_of_one_distribution(x, y):
    """Chi-squared test of homogeneity of equally many samples."""
    x, y = Counter(map(first_two, x)), Counter(map(first_two, y))
    counts = torch.tensor([[draws[outcome] for outcome in x | y] for draws in (x, y)]).double()
    return chi_squared(counts, counts.mean(0))


def chi_squared(counts, expected):
    """P-value of counts (R, K), each row of as many, where `expected` (K,) are. Those less than 5 count as one."""
    rare = expected < 5
    counts = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], dim=1)
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    is_possible = expected > 0
    statistic = ((counts - expected) ** 2 / expected)[:, is_possible].sum()
    return torch.special.gammaincc((is_possible.sum() - 1) / 2, statistic.float() / 2).item()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"anchor_score": "surprisal", "top_p": 0.9, "repetition_penalty": 1.1},
        {"num_iterations": 2, "beta": 0.1, "temperature": 0.8},
        {"max_refills": 4},
    ],
    ids=str,
)
def test_what_generation_knows_is_not_computed_again(settings):
    passes = []

    def count(module, args, kwargs, output):
        if not torch.is_grad_enabled() and cache_of(kwargs) is None:
            passes.append(module)

    def reward(completions, **kwargs):
        return [float(len(text) % 3 == 0) for text in completions]

    trainer = make_trainer(model=model_on_disk(), reward_funcs=reward, learning_rate=0.0, **settings)
    assert trainer.shares_prefixes  # tried out on first use, by passes of its own
    assert trainer.sampler.grows == trainer.sampler.may_grow  # and so is this
    trainer.model.register_forward_hook(count, with_kwargs=True)
    trainer.train()
    assert not passes and trainer.batches


def test_a_step_with_a_stopping_rule_generates_once(monkeypatch):
    calls, generate = [], GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda *a, **k: calls.append(1) or generate(*a, **k))
    trainer = make_trainer(reward_funcs=by_length, anchor_threshold=1.0, credit="tree", max_steps=3)
    assert trainer.sampler.grows
    calls.clear()
    trainer.train()
    assert len(calls) == len(trainer.batches) == 3
    for tree in (tree for _, trees in trainer.batches for tree in trees):
        for b, entropies in enumerate(tree.entropies):
            eligible = eligible_positions(entropies, tree.budget)
            expected = AboveThreshold(threshold=1.0).choose(entropies, None, eligible, 3)
            assert [state.position for state in tree.states if state.base == b] == expected


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=60), st.booleans())
def test_entropies_of_the_most_likely_tokens_are_no_more_than_those_of_all(logits, with_sampled):
    logprobs = torch.tensor(logits, dtype=torch.float64).log_softmax(0).sort(descending=True).values.tolist()
    known, others = logprobs[:NUM_LOGPROBS], logprobs[NUM_LOGPROBS:]
    if with_sampled:
        known, others = known + others[-1:], others[:-1]
    (entropy,) = entropies_of([known])
    exact = -sum(math.exp(logprob) * logprob for logprob in logprobs)
    assert entropy <= exact + 1e-5
    if not others:
        assert entropy == pytest.approx(exact, abs=1e-5)


@given(st.lists(st.lists(st.floats(-30, 0), min_size=1, max_size=21), min_size=1, max_size=6))
def test_entropies_of_several_tokens_are_those_of_each(logprobs):
    logprobs = [[value - math.log(len(of_token)) for value in of_token] for of_token in logprobs]
    apart = [entropies_of([of_token])[0] for of_token in logprobs]
    assert entropies_of(logprobs).tolist() == apart


def test_entropies_by_hand():
    # .5 and .25 are known, and .25 is left, which a third token has at most: as likely as the least likely of these two
    expected = -(0.5 * math.log(0.5) + 0.25 * math.log(0.25) + 0.25 * math.log(0.25))
    assert entropies_of([[math.log(0.25), math.log(0.5)], [0.0, -math.inf]]) == pytest.approx([expected, 0], abs=1e-6)
    assert entropies_of([]).shape == (0,)


@pytest.mark.parametrize("by", ["trainer", "evaluation"])
def test_a_frozen_head_is_not_copied_for_each_prompt(by):
    model = get_peft_model(make_model(), LoraConfig(target_modules="all-linear"))
    strides = []
    model.lm_head.register_forward_hook(lambda head, inputs, output: strides.append(inputs[0].is_contiguous()))
    if by == "trainer":
        make_trainer(model=model, max_steps=1).train()
    else:
        tokenizer = make_tokenizer()
        prompts = [token_ids(8, seed) for seed in range(3)]
        list(complete(model, tokenizer, prompts, sampling_config(model, tokenizer, 4), batch_size=3))
    assert len(strides) >= 4
    assert all(strides)
    assert not model.lm_head._forward_pre_hooks
