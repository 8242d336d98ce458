"""
The settings of public `GRPOConfig(...)` calls, and which parts of FR3E each gets when a script swaps names.

Facts alone were taken: what was set. Sizes of batches are left out, since they go with a number of devices, and so are
vLLM and logging. A call that differs from another in those alone is there once.
"""

import pytest
from trl import GRPOConfig

from fr3e_trl import FR3EConfig
from fr3e_trl.method.credit import CREDIT_RULES

pytestmark = pytest.mark.fast

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": []}

DAPO = {"mask_truncated_completions": True, "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}
DAPO |= {"num_generations": 16, "max_completion_length": 20480}
GEMMA = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.5, "loss_type": "bnpo", "mask_truncated_completions": True}
GEMMA |= {"temperature": 1.0, "learning_rate": 5e-5, "num_generations": 2}

# By the repository, and the file or the model that the call is for
PUBLIC = {
    # huggingface/trl: docs/source/paper_index.md, by the paper
    "trl paper DeepSeek-R1": {"loss_type": "grpo", "beta": 0.001, "epsilon": 10.0, "num_generations": 16},
    "trl paper R1-Zero": {"learning_rate": 4e-5, "max_completion_length": 32768, "num_generations": 16, "beta": 0.001},
    "trl paper GSPO": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "steps_per_generation": 4,
    },
    "trl paper DAPO": DAPO,
    "trl paper INTELLECT-2": {
        "delta": 4.0,
        "epsilon": 0.2,
        "beta": 0.001,
        "num_generations": 16,
        "learning_rate": 3e-7,
    },
    "trl paper Skywork-OR1": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0},
    "trl paper 80/20": DAPO | {"top_entropy_quantile": 0.2},
    "trl paper Dr. GRPO": {"loss_type": "dr_grpo", "num_generations": 8, "max_completion_length": 3000, "beta": 0.0},
    "trl paper Lite PPO": {
        "scale_rewards": "batch",
        "loss_type": "dapo",
        "beta": 0.0,
        "top_p": 0.99,
        "top_k": 100,
        "temperature": 0.99,
        "num_generations": 8,
        "num_iterations": 1,
    },
    "trl paper ScaleRL": {"loss_type": "cispo", "epsilon_high": 5.0, "num_generations": 16, "scale_rewards": "batch"},
    "trl paper 2-GRPO": {"num_generations": 2, "loss_type": "grpo"},
    "trl paper SAPO": {
        "loss_type": "sapo",
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "scale_rewards": "group",
    },
    "trl paper DeepSeek-V3.2, KL": {"beta": 0.001, "use_bias_correction_kl": True},
    "trl paper DeepSeek-V3.2, masking": {"off_policy_mask_threshold": 0.5},
    "trl paper GDPO": {"multi_objective_aggregation": "normalize_then_sum"},
    "trl paper LUSPO": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon": 2e-3,
        "epsilon_high": 2.5e-3,
    },
    "trl paper VESPO": {
        "loss_type": "vespo",
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    },
    # huggingface/trl: other docs, examples, notebooks
    "trl docs, quick start of the trainer": {},
    "trl docs, quickstart": {"num_generations": 4, "max_completion_length": 512},
    "trl docs, harbor": {"num_generations": 8},
    "trl docs, LoRA without regret": {"learning_rate": 5e-5, "num_generations": 8},
    "trl docs, openenv": {"max_completion_length": 4096},
    "trl docs, openenv wordle": {"num_generations": 4, "max_completion_length": 1024},
    "trl docs, openreward": {"num_generations": 2},
    "trl notebook, agent": {"max_completion_length": 1024},
    "trl notebook, Ministral 3": {"learning_rate": 2e-5, "num_generations": 2, "max_completion_length": 1024},
    "trl notebook, rnj-1": {"learning_rate": 2e-5, "num_generations": 8, "max_completion_length": 256},
    "trl notebook, sudoku": {
        "learning_rate": 5e-6,
        "num_generations": 2,
        "max_completion_length": 16384,
        "temperature": 0.8,
        "top_k": 10,
    },
    "trl notebook, wordle": {"learning_rate": 1e-6, "num_generations": 2, "max_completion_length": 1024},
    "trl example, 2048": {"max_completion_length": 2048},
    "trl example, catch": {"num_generations": 8, "max_completion_length": 4096},
    # huggingface/open-r1: recipes
    "open-r1 R1-Distill-Qwen-1.5B": {"num_generations": 16, "temperature": 0.7, "reward_weights": [1.0, 1.0, 1.0]},
    "open-r1 Qwen2.5-1.5B": {"num_generations": 16, "learning_rate": 2e-5, "max_completion_length": 1024},
    "open-r1 Qwen2.5-1.5B, code": {"num_generations": 14, "beta": 0.01, "temperature": 1.0, "learning_rate": 5e-6},
    "open-r1 Qwen2.5-Coder-7B": {
        "beta": 0.0,
        "loss_type": "dr_grpo",
        "scale_rewards": False,
        "num_generations": 16,
        "temperature": 0.7,
        "mask_truncated_completions": True,
        "max_completion_length": 8192,
    },
    # huggingface/cookbook
    "cookbook, an LLM": {"learning_rate": 1e-5, "num_generations": 4, "max_completion_length": 64},
    "cookbook, a VLM": {"learning_rate": 1e-5, "num_generations": 2, "max_completion_length": 1024},
    "cookbook, vLLM": {"learning_rate": 1e-5, "num_generations": 8, "max_completion_length": 512},
    "cookbook, advanced rewards": {"learning_rate": 5e-6, "max_completion_length": 1024},
    # philschmid/deep-learning-pytorch-huggingface
    "mini-R1 notebook": {"learning_rate": 5e-7, "num_generations": 2, "beta": 0.001, "max_completion_length": 1024},
    "mini-R1 recipe": {"learning_rate": 5e-7, "num_generations": 8, "beta": 0.001, "max_completion_length": 1024},
    # unslothai/notebooks
    "unsloth Gemma 4": GEMMA | {"top_p": 0.95, "top_k": 64},
    "unsloth Gemma 4, sudoku": GEMMA,
    "unsloth Ministral 3, sudoku": {"learning_rate": 5e-5, "num_generations": 4, "temperature": 1.0},
    "unsloth Muse Glimmer": {
        "importance_sampling_level": "sequence",
        "loss_type": "dr_grpo",
        "mask_truncated_completions": True,
        "learning_rate": 5e-6,
        "temperature": 1.0,
    },
    "unsloth NeMo-Gym": {
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "learning_rate": 1e-5,
        "num_generations": 8,
    },
    "unsloth gpt-oss, 2048": {"learning_rate": 2e-4, "num_generations": 2, "temperature": 1.0},
    "unsloth gpt-oss, kernels": {"learning_rate": 5e-5, "num_generations": 2, "temperature": 1.0},
    "unsloth Qwen3.5 VL": {
        "importance_sampling_level": "sequence",
        "loss_type": "dr_grpo",
        "num_generations": 2,
        "mask_truncated_completions": False,
        "learning_rate": 5e-6,
        "max_completion_length": 1024,
    },
    "unsloth Gemma 3 VL": {
        "importance_sampling_level": "sequence",
        "loss_type": "dr_grpo",
        "num_generations": 4,
        "mask_truncated_completions": False,
        "learning_rate": 5e-6,
        "max_completion_length": 1024,
    },
    "unsloth Llama 3.1 (3B)": {"learning_rate": 5e-6, "num_generations": 8},
    "unsloth Llama 3.2 (3B)": {"learning_rate": 5e-6, "num_generations": 4},
    "unsloth DeepSeek-R1-0528": {"learning_rate": 5e-6, "num_generations": 4, "temperature": 1.0},
    "unsloth Llama 3.1 (8B)": {"learning_rate": 5e-6, "num_generations": 6},
    "unsloth wordle": {
        "beta": 0.02,
        "learning_rate": 1e-5,
        "num_generations": 4,
        "top_k": 50,
        "top_p": 0.95,
        "max_completion_length": 1024,
    },
    "unsloth Phi 4": {"learning_rate": 5e-6, "num_generations": 6, "max_completion_length": 200},
    "unsloth Qwen2.5 (3B)": {"learning_rate": 5e-6, "num_generations": 8, "max_completion_length": 200},
}

# Those that stay with rollout credit by what their authors set on purpose
BY_SEQUENCE = {"trl paper GSPO", "trl paper LUSPO", *(f"unsloth {name}" for name in ("Muse Glimmer", "Qwen3.5 VL"))}
BY_SEQUENCE |= {"unsloth Gemma 3 VL"}
NORMALIZED = {"trl paper GDPO"}
BY_GROUP = {"trl paper SAPO"}  # an FR3EConfig takes it at its word, which is also TRL's default


def swapped(config_class, settings):
    """The configuration of a script, one group a batch, with one name swapped or both."""
    sizes = {"per_device_train_batch_size": settings.get("num_generations", 8)}
    sizes["gradient_accumulation_steps"] = settings.get("steps_per_generation", 1)
    args = config_class(**CPU | sizes | settings)
    return args if isinstance(args, FR3EConfig) else FR3EConfig.from_grpo(args)


def has_obstacle(settings):
    """Whether a call sets a loss or a scaling that tree credit does not take."""
    takes = CREDIT_RULES["tree"].requires
    return settings.get("loss_type", "dapo") not in takes["loss_type"] or (
        settings.get("scale_rewards") == "batch" and "batch" not in takes["scale_rewards"]
    )


@pytest.mark.parametrize("config_class", [FR3EConfig, GRPOConfig])
@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_public_configuration_gets(name, config_class):
    config = swapped(config_class, PUBLIC[name])
    off = BY_SEQUENCE | NORMALIZED | (BY_GROUP if config_class is FR3EConfig else set())
    has_tree = name not in off and not has_obstacle(PUBLIC[name])
    plan = config.resolve().plan
    assert plan.shape.num_anchors > 0 and (plan.credit == "tree") == has_tree
    assert (config.parts_off() == []) == has_tree  # silence means that everything is on
    assert config.value_tracker == (plan.anchor_threshold == "auto") == has_tree
