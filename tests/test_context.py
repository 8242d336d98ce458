"""The context of a model, and completions that it has no room for."""

import logging

import pytest
from factory import make_trainer
from models import make_model
from transformers import (
    BloomConfig,
    Gemma3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    set_seed,
)
from trees import rollouts_of

from fr3e_trl.generation.context import context_length, knows_padding


def yarn(factor: float, **parameters) -> dict:
    return {"rope_scaling": {"rope_type": "yarn", "factor": factor, **parameters}}


def llama3(factor: float) -> dict:
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **frequencies}}


LONGROPE = {"rope_type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen2Config(max_position_embeddings=32768), 32768),
        # Qwen2.5's recipe, and the same without the original length
        (Qwen2Config(max_position_embeddings=32768, **yarn(4.0, original_max_position_embeddings=32768)), 131072),
        (Qwen2Config(max_position_embeddings=32768, **yarn(4.0)), 131072),
        # Qwen3's: 40,960 are 32,768 and a completion
        (Qwen3Config(max_position_embeddings=40960, **yarn(4.0, original_max_position_embeddings=32768)), 131072),
        # Already stretched: gpt-oss, Llama 3.1 and 3.2, Phi-3
        (GptOssConfig(), 131072),
        (LlamaConfig(max_position_embeddings=131072, **llama3(8.0)), 131072),
        (LlamaConfig(max_position_embeddings=131072, **llama3(32.0)), 131072),
        (
            Phi3Config(
                max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=LONGROPE.copy()
            ),
            131072,
        ),
        (LlamaConfig(max_position_embeddings=4096, rope_scaling={"rope_type": "linear", "factor": 4.0}), 16384),
        (LlamaConfig(max_position_embeddings=4096, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), None),
        # RoPE for each type of layer, in the text part of a model of images; learned positions; none
        (Gemma3Config(), 131072),
        (GPT2Config(n_positions=1024), 1024),
        (BloomConfig(), None),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else str(value),
)
def test_context_length(config, expected):
    assert context_length(config) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2Config(), True),
        (LlamaConfig(), False),
        (Gemma3Config(), False),
        (BloomConfig(), False),
        (LlamaConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), True),
        (Phi3Config(original_max_position_embeddings=4096, rope_parameters=LONGROPE.copy()), True),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else str(value),
)
def test_which_models_may_tell_where_a_row_begins(config, expected):
    assert knows_padding(config) is expected


def digits(completions, **kwargs):
    return [float(sum(char.isdigit() for char in completion)) for completion in completions]


def train(caplog, **model_settings):
    model = make_model(**model_settings)
    model.lm_head.weight.data[1] = 0  # hardly any EOS: completions are as long as they may be
    trainer = make_trainer(model=model, reward_funcs=digits, max_completion_length=30)
    set_seed(1)
    with caplog.at_level(logging.WARNING, logger="fr3e_trl"):
        trainer.train()
    warnings = [r.getMessage() for r in caplog.records if "are cut before max_completion_length" in r.getMessage()]
    lengths = [
        len(tree.prompt_ids + state.prefix_ids + rollout.token_ids)
        for tree, state, rollout in rollouts_of(trainer.trees)
    ]
    return max(lengths), warnings


def test_completions_are_as_long_as_yarn_makes_the_context(caplog):
    longest, warnings = train(caplog, max_position_embeddings=10, **yarn(4.0))
    assert longest > 30 and not warnings


def test_completions_that_the_context_cuts_are_warned_of_once(caplog):
    longest, (warning,) = train(caplog, max_position_embeddings=10)
    assert longest == 10
    assert "max_completion_length=30: the model's context of 10 tokens leaves" in warning
