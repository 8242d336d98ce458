"""What is asked of vLLM for a request. No engine is needed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from fr3e_trl.generation.vllm import VLLMColocateSampler
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


@pytest.mark.parametrize(
    ("num_prompt_tokens", "min_tokens", "expected"), [(None, 5, 5), (12, 5, 5), (9, 5, 2), (9, 2, 0), (9, 40, 20)]
)
def test_the_shortest_completion_counts_from_the_prompt(num_prompt_tokens, min_tokens, expected):
    request = SamplingRequest([5] * 12, 2, 20, 0.7, num_prompt_tokens)
    assert SamplingParams(**asked_for(request=request, min_tokens=min_tokens)).min_tokens == expected


def test_a_token_that_is_left_out_gets_the_least_bias():
    request = replace(REQUEST, distinct_from=9)
    assert SamplingParams(**asked_for(request=request, logit_bias={7: 1.0})).logit_bias == {7: 1.0, 9: -100.0}
