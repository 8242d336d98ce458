"""
The settings of public `GRPOConfig(...)` calls, and which parts of FR3E each gets when a script swaps names.

Facts alone were taken: what was set. Sizes of batches are left out, since they go with a number of devices, and so are
vLLM, logging, learning rates and lengths of completions. A call is here if it sets something that none before it has.
"""

import pytest
from trl import GRPOConfig

from fr3e_trl import FR3EConfig

pytestmark = pytest.mark.fast

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": []}

DAPO = {"mask_truncated_completions": True, "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}
DAPO |= {"num_generations": 16}
GEMMA = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.5, "loss_type": "bnpo", "mask_truncated_completions": True}
GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, "epsilon": 3e-4}
LITE = {"scale_rewards": "batch", "loss_type": "dapo", "beta": 0.0, "top_p": 0.99, "top_k": 100, "temperature": 0.99}
LUSPO = {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
CODER = {"beta": 0.0, "loss_type": "dr_grpo", "scale_rewards": False, "mask_truncated_completions": True}
BY_SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "dr_grpo"}

# By the repository, and the file or the model that the call is for
PUBLIC = {
    # huggingface/trl: docs/source/paper_index.md, by the paper
    "trl paper DeepSeek-R1": {"loss_type": "grpo", "beta": 0.001, "epsilon": 10.0, "num_generations": 16},
    "trl paper R1-Zero": {"num_generations": 16, "beta": 0.001},
    "trl paper GSPO": GSPO | {"epsilon_high": 4e-4, "steps_per_generation": 4},
    "trl paper DAPO": DAPO,
    "trl paper INTELLECT-2": {"delta": 4.0, "epsilon": 0.2, "beta": 0.001, "num_generations": 16},
    "trl paper Skywork-OR1": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0},
    "trl paper 80/20": DAPO | {"top_entropy_quantile": 0.2},
    "trl paper Dr. GRPO": {"loss_type": "dr_grpo", "num_generations": 8, "beta": 0.0},
    "trl paper Lite PPO": LITE | {"num_generations": 8, "num_iterations": 1},
    "trl paper ScaleRL": {"loss_type": "cispo", "epsilon_high": 5.0, "num_generations": 16, "scale_rewards": "batch"},
    "trl paper 2-GRPO": {"num_generations": 2, "loss_type": "grpo"},
    "trl paper SAPO": {"loss_type": "sapo", "sapo_temperature_neg": 1.05, "scale_rewards": "group"},
    "trl paper DeepSeek-V3.2, KL": {"beta": 0.001, "use_bias_correction_kl": True},
    "trl paper DeepSeek-V3.2, masking": {"off_policy_mask_threshold": 0.5},
    "trl paper GDPO": {"multi_objective_aggregation": "normalize_then_sum"},
    "trl paper LUSPO": LUSPO,
    "trl paper VESPO": {"loss_type": "vespo"} | VESPO,
    # huggingface/trl: other docs
    "trl docs, quick start of the trainer": {},
    "trl docs, quickstart": {"num_generations": 4},
    "trl docs, openreward": {"num_generations": 2},
    # huggingface/open-r1: recipes
    "open-r1 R1-Distill-Qwen-1.5B": {"num_generations": 16, "temperature": 0.7, "reward_weights": [1.0, 1.0, 1.0]},
    "open-r1 Qwen2.5-1.5B, code": {"num_generations": 14, "beta": 0.01, "temperature": 1.0},
    "open-r1 Qwen2.5-Coder-7B": CODER | {"num_generations": 16, "temperature": 0.7},
    # unslothai/notebooks
    "unsloth Gemma 4": GEMMA | {"temperature": 1.0, "num_generations": 2, "top_p": 0.95, "top_k": 64},
    "unsloth Muse Glimmer": BY_SEQUENCE | {"mask_truncated_completions": True, "temperature": 1.0},
    "unsloth Qwen3.5 VL": BY_SEQUENCE | {"num_generations": 2, "mask_truncated_completions": False},
    "unsloth Gemma 3 VL": BY_SEQUENCE | {"num_generations": 4, "mask_truncated_completions": False},
    "unsloth Llama 3.1 (8B)": {"num_generations": 6},
}

# Those that stay with rollout credit by what their authors set on purpose
SEQUENCES = {name for name, settings in PUBLIC.items() if settings.get("importance_sampling_level") == "sequence"}
NORMALIZED = {"trl paper GDPO"}
BY_GROUP = {"trl paper SAPO"}  # an FR3EConfig takes it at its word, which is also TRL's default


def swapped(config_class, settings):
    """The configuration of a script, one group a batch, with one name swapped or both."""
    sizes = {"per_device_train_batch_size": settings.get("num_generations", 8)}
    sizes["gradient_accumulation_steps"] = settings.get("steps_per_generation", 1)
    args = config_class(**CPU | sizes | settings)
    return args if isinstance(args, FR3EConfig) else FR3EConfig.from_grpo(args)


@pytest.mark.parametrize("config_class", [FR3EConfig, GRPOConfig])
@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_public_configuration_gets(name, config_class):
    config = swapped(config_class, PUBLIC[name])
    off = SEQUENCES | NORMALIZED | (BY_GROUP if config_class is FR3EConfig else set())
    has_tree = name not in off
    plan = config.resolve().plan
    assert plan.shape.num_anchors > 0 and (plan.credit == "tree") == has_tree
    assert (config.parts_off() == []) == has_tree  # silence means that everything is on
    assert config.value_tracker == (plan.anchor_threshold == "auto") == has_tree
