"""What is asked of vLLM for a request. No engine is needed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs

from fr3e_trl.generation.vllm import VLLMColocateSampler, entropies_of
from fr3e_trl.method.sampling import SamplingRequest

# The 9 tokens of a prompt, and 3 that were sampled before
REQUEST = SamplingRequest([5] * 12, 2, 20, 0.7, num_prompt_tokens=9)


def asked_for(request=REQUEST, **generation_kwargs):
    generation = SimpleNamespace(
        top_p=0.9, top_k=0, min_p=None, repetition_penalty=1.0, generation_kwargs=generation_kwargs
    )
    return VLLMColocateSampler(generation, [1, 2], None).sampling_params(request)


def test_a_request_has_its_own_budget_temperature_and_number():
    params = SamplingParams(**asked_for(top_p=0.5, logit_bias={7: 1.0}))
    assert (params.max_tokens, params.temperature, params.n, params.logprobs) == (20, 0.7, 2, 0)
    assert (params.top_p, params.logit_bias, params.stop_token_ids, params.min_tokens) == (0.5, {7: 1.0}, [1, 2], 0)


def test_ends_are_those_of_the_trainer():
    """Which adds `stop_token_ids` to them."""
    assert SamplingParams(**asked_for(stop_token_ids=[2])).stop_token_ids == [1, 2]


def test_what_an_engine_tells_of_tokens():
    """In vLLM's flat form as in its form of dictionaries, whether or not the token is one of the most likely."""
    token_ids = [7, 9, 3]
    told = [([7, 5, 7], [-1.5, -0.4, -1.5]), ([9, 5, 7], [-3.0, -0.2, -1.9]), ([3, 3, 5], [-0.1, -0.1, -2.6])]
    flat, dictionaries = create_sample_logprobs(True), create_sample_logprobs(False)
    for ids, logprobs in told:
        for form in (flat, dictionaries):
            append_logprobs_for_next_position(form, ids, logprobs, [None] * 3, 1, 2)
    generation = SimpleNamespace(top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, generation_kwargs={})
    sampler = VLLMColocateSampler(generation, [1], None)
    sample = sampler._sample(replace(REQUEST, with_entropies=True), SimpleNamespace(token_ids=token_ids, logprobs=flat))
    assert sample.token_ids == token_ids and sample.logprobs == [-1.5, -3.0, -0.1]
    expected = entropies_of([known.logprob for known in of_token.values()] for of_token in dictionaries)
    assert sample.entropies.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("num_prompt_tokens", "min_tokens", "expected"), [(None, 5, 5), (12, 5, 5), (9, 5, 2), (9, 2, 0), (9, 40, 20)]
)
def test_the_shortest_completion_counts_from_the_prompt(num_prompt_tokens, min_tokens, expected):
    request = SamplingRequest([5] * 12, 2, 20, 0.7, num_prompt_tokens)
    assert SamplingParams(**asked_for(request=request, min_tokens=min_tokens)).min_tokens == expected
