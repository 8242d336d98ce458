"""Sampling with transformers, from real models: what is drawn, and in how many steps."""

import contextlib
from collections import Counter

import accelerate
import numpy as np
import pytest
import torch
from models import make_model
from transformers import GenerationConfig

from fr3e_trl.generation.on_transformers import GenerateSampler
from fr3e_trl.generation.sampler import SamplingRequest

PAD, EOS = 0, 1


def make_sampler(model, **generation_kwargs):
    @contextlib.contextmanager
    def generation_model():
        with torch.no_grad():
            yield model

    settings = {"do_sample": True, "top_k": 0, "pad_token_id": PAD, "eos_token_id": [EOS], "disable_compile": True}
    return GenerateSampler(generation_model, GenerationConfig(**settings | generation_kwargs), torch.device("cpu"))


def token_ids(length, seed=0):
    """Tokens that are neither padding nor EOS."""
    return np.random.default_rng(seed).integers(2, 50, length).tolist()


def request(prompt_ids, prefix_ids=(), num_samples=1, budget=12, temperature=1.0):
    """A completion's continuation, `budget` being that of the whole completion."""
    return SamplingRequest(
        [*prompt_ids, *prefix_ids], num_samples, budget - len(prefix_ids), temperature, len(prompt_ids)
    )


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
    model = make_model(max_position_embeddings=1024)
    cached = []
    model.register_forward_hook(
        lambda module, args, kwargs, output: cached.append(kwargs["past_key_values"].get_seq_length()), with_kwargs=True
    )
    sampler = make_sampler(model, suppress_tokens=[EOS])
    samples = drawn(
        sampler, [request(token_ids(prompt), token_ids(prefix), 1, *rest) for prompt, prefix, *rest in requests]
    )
    remaining = [budget - prefix for _, prefix, budget, *_ in requests]
    assert [len(sample) for (sample,) in samples] == remaining
    assert len(cached) == max(remaining) <= 300  # as many steps as the largest budget that is left
    # The last token is not in the cache. Were all rows drawn from their prompts, 339 + 300 positions would be
    longest = max(prompt + budget for prompt, _, budget, *_ in requests)
    assert cached[-1] == longest - 1 <= max(prompt for prompt, *_ in requests) + 300 - 1


def test_a_row_is_what_it_would_be_alone():
    """Whatever prompts and prefixes it shares a batch with, and whatever is in them, with its most likely tokens."""
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
    model = make_model()
    sampler = make_sampler(model, sequence_bias=[[[EOS], 100.0]])
    requests = [request(token_ids(5), token_ids(length), 2) for length in (0, 3, 9)]
    assert drawn(sampler, requests) == [[[EOS]] * 2] * 3


def test_the_shortest_completion_counts_from_the_prompt():
    sampler = make_sampler(make_model(), sequence_bias=[[[EOS], 100.0]], min_new_tokens=5)
    prompts = token_ids(5), token_ids(9)
    samples = drawn(sampler, [request(prompt, token_ids(length)) for prompt in prompts for length in (0, 3, 8)])
    assert [len(sample) for (sample,) in samples] == [6, 3, 1] * 2
    assert all(sample.index(EOS) == len(sample) - 1 for (sample,) in samples)


def test_a_sample_keeps_nothing_but_its_tokens():
    samples = make_sampler(make_model()).sample([request(token_ids(5), num_samples=3), request(token_ids(9))])
    for sample in (sample for of_request in samples for sample in of_request):
        assert sample.token_ids.dtype == np.int32 and sample.token_ids.base is None  # no view of the batch


def test_no_request_draws_nothing():
    assert make_sampler(make_model()).sample([]) == []


def test_samples_are_distributed_as_the_policy_is():
    """
    Each row at its own temperature.

    Chi-squared tests of whether the first two tokens of 2,000 continuations have the model's probabilities, for five
    prefixes: a right sampler fails with a probability of 1e-6 in all. One that took another's temperature would too.
    """
    model = make_model(seed=1)
    prompt, other = token_ids(6), token_ids(11, 1)
    requests = [
        request(prompt, [], 2000, 9, 1.0),  # samples while the others are forced
        request(prompt, token_ids(7, 2), 2000, 9, 1.0),
        request(other, token_ids(3, 3), 2000, 5, 1.4),
        request(other, token_ids(8, 4), 2000, 10, 0.8),
        request(prompt, token_ids(7, 2), 2000, 9, 1.4),
    ]
    torch.manual_seed(0)
    samples = drawn(make_sampler(model), requests)
    expected = [probabilities(model, one.prefix_ids, one.temperature) for one in requests]
    assert min(map(p_value, samples, expected)) > 1e-6 / len(requests)
    for of_request, one in zip(samples, requests, strict=True):  # that it would be missed
        for temperature in {0.8, 1.0, 1.4} - {one.temperature}:
            assert p_value(of_request, probabilities(model, one.prefix_ids, temperature)) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 3, "top_p": 0.8, "min_p": 0.1},
        {"typical_p": 0.6},
        {"epsilon_cutoff": 0.1},
        {"eta_cutoff": 0.3},
        {"top_h": 0.5},
        {"repetition_penalty": 9.0},
        {"no_repeat_ngram_size": 1},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"watermarking_config": {"bias": 2.0}},
    ],
    ids=str,
)
def test_rows_are_sampled_as_generate_samples_them_alone(settings):
    """Chi-squared tests: two tokens from a prefix are distributed as those of `generate` with these settings."""
    model = make_model(seed=1)
    anchored = request(token_ids(6), token_ids(7, 2), 1000, 9, 1.3)
    torch.manual_seed(0)
    _, samples, _ = drawn(
        make_sampler(model, **settings),
        [request(token_ids(6), budget=9), anchored, request(token_ids(11), budget=9)],
    )
    assert p_value_of_one_distribution(generated(model, anchored, **settings), samples) > 1e-6
    if not settings.keys() & {"cache_implementation", "use_cache"}:  # that the others would be missed
        assert p_value_of_one_distribution(generated(model, anchored), samples) < 1e-6


def test_the_model_computes_elsewhere_than_its_weights_are():
    """Weights that are loaded for each module's own computation are on no device between."""
    model = accelerate.cpu_offload(make_model(), execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    requests = [request(token_ids(7), budget=30), request(token_ids(12, 3), token_ids(25, 4), budget=30)]
    assert drawn(make_sampler(model, top_k=1), requests) == drawn(make_sampler(make_model(), top_k=1), requests)


def generated(model, one, **settings):
    """What `generate` itself samples for a request."""
    prefixes = torch.tensor([one.prefix_ids] * one.num_samples)
    output = model.generate(
        prefixes,
        attention_mask=torch.ones_like(prefixes),
        max_new_tokens=one.max_new_tokens,
        temperature=one.temperature,
        **{"do_sample": True, "top_k": 0, "disable_compile": True} | settings,
    )
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
    """Chi-squared test of goodness of fit."""
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
