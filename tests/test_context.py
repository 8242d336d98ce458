"""The context of a model, and completions that it has no room for."""

import logging

import pytest
import transformers as hf
from factory import make_trainer
from models import make_model
from trees import rollouts_of

from fr3e_trl.generation.context import context_length, depends_on_padding


def scaled(rope_type: str, factor: float, **parameters) -> dict:
    return {"rope_scaling": {"rope_type": rope_type, "factor": factor, **parameters}}


OF_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OF_QWEN = {"original_max_position_embeddings": 32768}
LONGROPE = {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48}}
LONGROPE |= {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "length", "may_tell"),
    [
        (hf.Qwen2Config(max_position_embeddings=32768), 32768, False),
        # Qwen2.5's recipe, and the same without the original length. Qwen3's: 40,960 are 32,768 and a completion
        (hf.Qwen2Config(max_position_embeddings=32768, **scaled("yarn", 4.0, **OF_QWEN)), 131072, False),
        (hf.Qwen2Config(max_position_embeddings=32768, **scaled("yarn", 4.0)), 131072, False),
        (hf.Qwen3Config(max_position_embeddings=40960, **scaled("yarn", 4.0, **OF_QWEN)), 131072, False),
        # Already stretched: gpt-oss, Llama 3.1 and 3.2, Phi-3
        (hf.GptOssConfig(), 131072, False),
        (hf.LlamaConfig(max_position_embeddings=131072, **scaled("llama3", 8.0, **OF_LLAMA_3)), 131072, False),
        (hf.LlamaConfig(max_position_embeddings=131072, **scaled("llama3", 32.0, **OF_LLAMA_3)), 131072, False),
        (hf.Phi3Config(max_position_embeddings=131072, **LONGROPE), 131072, True),
        (hf.LlamaConfig(max_position_embeddings=4096, **scaled("linear", 4.0)), 16384, False),
        (hf.LlamaConfig(max_position_embeddings=4096, **scaled("dynamic", 2.0)), None, True),
        # RoPE for each type of layer, in the text part of a model of images; learned positions; none
        (hf.Gemma3Config(), 131072, False),
        (hf.GPT2Config(n_positions=1024), 1024, True),
        (hf.BloomConfig(), None, False),
    ],
)
def test_context_length(config, length, may_tell):
    assert context_length(config) == length
    assert depends_on_padding(config) is may_tell


def train(caplog, **model_settings):
    model = make_model(**model_settings)
    model.lm_head.weight.data[1] = 0  # hardly any EOS: completions are as long as they may be
    trainer = make_trainer(model=model, max_completion_length=30)
    hf.set_seed(1)
    with caplog.at_level(logging.WARNING, logger="fr3e_trl"):
        trainer.train()
    warnings = [r.getMessage() for r in caplog.records if "are cut before max_completion_length" in r.getMessage()]
    rows = [t.prompt_ids + state.prefix_ids + rollout.token_ids for t, state, rollout in rollouts_of(trainer.trees)]
    return max(map(len, rows)), warnings


def test_completions_are_as_long_as_the_context(caplog):
    longest, warnings = train(caplog, max_position_embeddings=10, **scaled("yarn", 4.0))
    assert longest > 30 and not warnings
    longest, (warning,) = train(caplog, max_position_embeddings=10)
    assert longest == 10
    assert "max_completion_length=30: the model's context of 10 tokens leaves" in warning
