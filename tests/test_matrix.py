"""
Every family of models for three steps with the defaults: whether rows grow, whether prefixes are shared, and that what
was sampled has the log-probs of a plain forward pass. The same for settings. The tables are
docs/reference/models.md, written by

    python tests/test_matrix.py --write
"""

import argparse
import logging
import math
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from factory import make_trainer
from models import TINY, make_dataset, make_tokenizer
from peft import LoraConfig
from transformers import set_seed
from trees import rollouts_of

from fr3e_trl.prefix_sharing import obstacle_to_sharing

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"

WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = ROUTED_EXPERTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EVERY_SECOND = {"attn_layer_period": 2, "attn_layer_offset": 1}
NO_HEAD_DIM = {"head_dim": None}  # a setting that is None is left out
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
BY_LAYER = {"vocab_size_per_layer_input": TINY["vocab_size"], "hidden_size_per_layer_input": 8}
SLIDING_AND_FULL = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}

# Settings of each family's configuration beside those of TINY
FAMILIES = {
    "Apertus": {},
    "Arcee": {},
    "BitNet": {},
    "Bloom": NO_HEAD_DIM,
    "CodeGen": {"rotary_dim": 4} | NO_HEAD_DIM,
    "Cohere": {},
    "Cohere2": WINDOW,
    "Cohere2Moe": EXPERTS | WINDOW,
    "DeepseekV2": LATENT | ROUTED_EXPERTS | NO_HEAD_DIM,
    "DeepseekV3": LATENT | GROUPS | NO_HEAD_DIM,
    "DiffLlama": {},
    "Ernie4_5": {},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "Exaone4": WINDOW,
    "Falcon": NO_HEAD_DIM,
    "GPT2": NO_HEAD_DIM,
    "GPTBigCode": NO_HEAD_DIM,
    "GPTJ": {"rotary_dim": 4} | NO_HEAD_DIM,
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8} | NO_HEAD_DIM,
    "GPTNeoX": NO_HEAD_DIM,
    "Gemma": {},
    "Gemma2": WINDOW | {"query_pre_attn_scalar": 8},
    "Gemma3": WINDOW | {"query_pre_attn_scalar": 8},
    "Gemma3n": SLIDING_AND_FULL
    | BY_LAYER
    | {"num_kv_shared_layers": 0, "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0]},
    "Gemma4": SLIDING_AND_FULL | BY_LAYER | {"global_head_dim": 8},
    "Glm": {},
    "Glm4": {},
    "Glm4Moe": GROUPS,
    "GptOss": WINDOW | LOCAL_EXPERTS,
    "Granite": {},
    "GraniteMoe": LOCAL_EXPERTS,
    "GraniteMoeShared": LOCAL_EXPERTS | {"shared_intermediate_size": 32},
    "Helium": {},
    "HunYuanDenseV1": {},
    "JetMoe": LOCAL_EXPERTS | {"kv_channels": 8} | NO_HEAD_DIM,
    "Llama": {},
    "Llama4": LOCAL_EXPERTS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "MiniMaxM2": LOCAL_EXPERTS,
    "MiniMaxM3VL": LOCAL_EXPERTS,
    "Ministral": WINDOW,
    "Mistral": WINDOW,
    "Mixtral": LOCAL_EXPERTS,
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2} | NO_HEAD_DIM,
    "Nemotron": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32} | NO_HEAD_DIM,
    "Olmo2": NO_HEAD_DIM,
    "Olmo3": WINDOW,
    "Olmoe": EXPERTS | NO_HEAD_DIM,
    "Phi": NO_HEAD_DIM,
    "Phi3": NO_HEAD_DIM,
    "Phimoe": LOCAL_EXPERTS | WINDOW | {"router_jitter_noise": 0.0},
    "Qwen2": NO_HEAD_DIM,
    "Qwen2Moe": EXPERTS | WINDOW | SHARED_EXPERT | {"use_sliding_window": True, "max_window_layers": 2},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "SeedOss": {},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": WINDOW,
    # Recurrent, and hybrids
    "BailingHybrid": LATENT
    | LOCAL_EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 32, "num_mtp_layers": 0}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "Bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "DeepseekV4": ROUTED_EXPERTS
    | WINDOW
    | {"q_lora_rank": 16, "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2}
    | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "num_nextn_predict_layers": 0},
    "FalconH1": MAMBA2 | {"mamba_d_ssm": 64},
    "FalconMamba": {"state_size": 4} | NO_HEAD_DIM,
    "GraniteMoeHybrid": MAMBA2
    | LOCAL_EXPERTS
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "Inkling": INKLING
    | {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1, "logits_mup_width_multiplier": 1.0},
    "Inkling2": INKLING | {"unpadded_vocab_size": TINY["vocab_size"]},
    "Jamba": EVERY_SECOND
    | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4}
    | {"use_mamba_kernels": False},
    "KimiLinear": {},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Lfm3": WINDOW | {"layer_types": ["conv", "full_attention"]},
    "Mamba": {"state_size": 4} | NO_HEAD_DIM,
    "Mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "MiniMax": LOCAL_EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "NemotronH": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "OlmoHybrid": LINEAR,
    "Qwen3Next": EXPERTS | LINEAR | SHARED_EXPERT,
    "Qwen3_5Moe": EXPERTS | LINEAR | SHARED_EXPERT,
    "Qwen4Exp": EXPERTS
    | LINEAR
    | SHARED_EXPERT
    | {"hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_size": 2}
    | {"ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 1}
    | {"heads_per_ngram": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 256} | NO_HEAD_DIM,
    "Zamba": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    }
    | NO_HEAD_DIM,
    "Zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
        "chunk_size": 16,
        "adapter_rank": 4,
        "use_mem_rope": False,
    },
    "Zaya": EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "xLSTM": {"num_heads": 4, "num_blocks": 2} | NO_HEAD_DIM,
}

# Models that see, trained on text alone: those of vision_models.py, with their processor
VISION = {
    "Qwen2.5-VL": "qwen2_5_vl",
    "Gemma3 with vision": "gemma3",
    "SmolVLM": "smolvlm",
    "LLaVA": "llava",
    "InternVL": "internvl",
}

# And others, with a tokenizer: their classes, and their settings beside those of TINY
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
LINEAR_ROPE = {"rope_parameters": ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}}
EYE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_EYE = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16} | EYE
PERCEIVER = {
    "hidden_size": 32,
    "resampler_n_latents": 2,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 8,
    "num_key_value_heads": 1,
}
TEXT_ALONE = {
    "Qwen3-VL": (
        "Qwen3VL",
        {"rope_parameters": ROPE | {"mrope_interleaved": True}},
        QWEN_EYE | {"deepstack_visual_indexes": [0]},
        {},
    ),
    "Qwen3.5": ("Qwen3_5", LINEAR | LINEAR_ROPE, QWEN_EYE, {}),
    "Qwen2-VL": (
        "Qwen2VL",
        {"rope_parameters": ROPE},
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
        {},
    ),
    "Qwen3.5-MoE": ("Qwen3_5Moe", EXPERTS | LINEAR | SHARED_EXPERT | LINEAR_ROPE, QWEN_EYE, {}),
    "Idefics2": ("Idefics2", {"model_type": "mistral"}, EYE, {"perceiver_config": PERCEIVER, "image_token_id": 2}),
    "Idefics3": ("Idefics3", {"model_type": "llama"}, EYE, {"image_token_id": 2}),
    "LLaVA-NeXT": (
        "LlavaNext",
        {"model_type": "llama"},
        EYE | {"model_type": "clip_vision_model"},
        {"image_token_index": 2},
    ),
    "LFM2-VL": (
        "Lfm2Vl",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        EYE | {"model_type": "siglip2_vision_model"},
        {"image_token_id": 2},
    ),
    "Muse Glimmer": (
        "MuseGlimmer",
        WINDOW,
        EYE | {"pos_emb_height": 4, "pos_emb_width": 4},
        {"out_hidden_size": 32, "projector_hidden_size": 32, "image_token_id": 2, "video_token_id": 3},
    ),
    "PaliGemma": (
        "PaliGemma",
        {"model_type": "gemma"},
        EYE | {"model_type": "siglip_vision_model"},
        {"image_token_index": 2, "hidden_size": 32, "projection_dim": 32},
    ),
}
NAMES = [*FAMILIES, *VISION, *TEXT_ALONE]

# For which `generate` is wrong, in GRPOTrainer as well: in batches of prompts of several lengths, or in all batches
WRONG_WHERE_PADDED, WRONG_IN_BATCHES = ("MiniMax", "RecurrentGemma"), ("Rwkv",)

# Whose `generate` reads prompts in both directions. The forward pass of a loss, which is told of no images, does not
READS_PROMPTS_BOTH_WAYS = ("PaliGemma",)

# TRL's GRPOTrainer asks the configuration for a setting that they have not got, unless it is told to do without
NO_ROUTER_LOSS = ("DeepseekV4", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared", "Phimoe")

# With the Qwen3 of models.py
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
SETTINGS = {
    "LoRA": LORA,
    "`bf16=True`": {"bf16": True},
    "`bf16=True`, LoRA": LORA | {"bf16": True},
    "`beta=0.1`": {"beta": 0.1},
    "`num_iterations=2`": {"num_iterations": 2},
    "`steps_per_generation=4`": {"steps_per_generation": 4, "per_device_train_batch_size": 8},
    "`gradient_accumulation_steps=4`": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
    "`mask_truncated_completions=True`": {"mask_truncated_completions": True},
    "`top_entropy_quantile=0.5`": {"top_entropy_quantile": 0.5},
    "`off_policy_mask_threshold=0.5`": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "evaluation each step": EVALUATION,
    "`top_k=10`": {"top_k": 10},
}


def make_family(name):
    """A tiny model, with weights large enough for each part of it to matter, and its tokenizer or processor."""
    set_seed(0)
    if name in VISION:
        import vision_models  # older transformers, on which other tests run, have not got all of them

        return vision_models.make_vision_model(VISION[name]), vision_models.make_processor(VISION[name])
    if name in TEXT_ALONE:
        prefix, text, vision, others = TEXT_ALONE[name]
        config = getattr(transformers, f"{prefix}Config")(text_config=TINY | text, vision_config=vision, **others)
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    else:
        settings = {key: value for key, value in (TINY | FAMILIES[name]).items() if key != "head_dim" or value}
        kinds = [f"{name}TextConfig", f"{name}Config"]
        config = next(getattr(transformers, kind) for kind in kinds if hasattr(transformers, kind))(**settings)
        for key in vars(config):
            if re.search("dropout$|pdrop$|layerdrop$", key):  # TRL leaves some of them on
                setattr(config, key, 0.0)
        kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        model = getattr(transformers, f"{name}{kind}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        model.get_output_embeddings().weight.mul_(4)
    return model, make_tokenizer()


def by_length(completions, **kwargs):
    return [float(len(str(completion)) % 3) for completion in completions]


SIZES = {"reward_funcs": by_length, "max_completion_length": 14, "max_steps": 3, "learning_rate": 0.0}


def train(name, **settings):
    model, processing_class = make_family(name)
    if name in NO_ROUTER_LOSS:
        settings["router_aux_loss_coef"] = 0.0
    dataset = make_dataset(conversational=name in VISION)
    if name in WRONG_WHERE_PADDED:
        dataset = dataset.filter(lambda example: len(example["prompt"]) == 5)
    trainer = make_trainer(model=model, dataset=dataset, tokenizer=processing_class, **SIZES | settings)
    trainer.train()
    return trainer


def largest_difference(trainer):
    """Between log-probs that rollouts were sampled with and those of a plain forward pass, row by row."""
    model, largest, num_branches = trainer.model.eval(), 0.0, 0
    for _, trees in trainer.batches:
        for tree, state, rollout in rollouts_of(trees):
            num_branches += state.position > 0
            ids = torch.tensor([tree.prompt_ids + state.prefix_ids + rollout.token_ids])
            with torch.no_grad():
                logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(1)
            length = len(rollout.token_ids)
            expected = logprobs[-length - 1 : -1].gather(1, ids[0, -length:, None])[:, 0]
            largest = max(largest, np.abs(expected.numpy() - np.asarray(rollout.logprobs)).max().item())
    assert num_branches > 0
    return largest


def reason(obstacle):
    """An obstacle without what differs from one machine to the next."""
    if obstacle is None:
        return "yes"
    obstacle = re.sub(r"^it changes log-probs.*", "other log-probs", obstacle)
    obstacle = re.sub(r"\w+ keeps a state.*", "a state that does not follow rows", obstacle)
    obstacle = re.sub(r"\w+ raises (\w+).*", r"raises `\1`", obstacle, flags=re.DOTALL)
    obstacle = re.sub(r"layers of \w+ are recurrent.*", "recurrent layers", obstacle)
    obstacle = re.sub(r"layers of \w+ are convolutions.*", "convolutions", obstacle)
    obstacle = re.sub(r"the window of .*", "a window in its mask alone", obstacle)
    obstacle = re.sub(r"the images of a prompt.*", "it has a processor of images", obstacle)
    return f"no: {obstacle}"


def answers(trainer):
    """Whether rollouts left growing rows, and whether prefixes were shared."""
    grows = reason(None if trainer.sampler.grows else trainer.sampler._obstacle_to_growing())
    shares = reason(obstacle_to_sharing(trainer))
    if trainer.aux_loss_enabled:
        trainer.aux_loss_enabled = False
        without = reason(obstacle_to_sharing(trainer))
        shares = "with `router_aux_loss_coef=0`" if without == "yes" else without
    assert trainer.shares_prefixes == (shares == "yes")
    return grows, shares


def row_of(name):
    """A family's row of the table, and how far log-probs are off."""
    try:
        trainer = train(name)
    except Exception as error:
        with pytest.raises(type(error)):  # nor does GRPOTrainer
            train(name, num_anchors=0)
        return f"| {name} | `GRPOTrainer` raises `{type(error).__name__}` | |", 0.0
    grows, shares = answers(trainer)
    difference = largest_difference(trainer)
    if name in WRONG_WHERE_PADDED:
        grows += "; `generate` itself is wrong where prompts are padded"
    if name in WRONG_IN_BATCHES:
        grows += "; `generate` itself is wrong in batches"
    if name in READS_PROMPTS_BOTH_WAYS:
        grows += "; `generate` itself reads prompts in both directions"
    return f"| {name} | {grows} | {shares} |", difference


def row_of_setting(name):
    """A setting's row of the table, and how far log-probs are off."""
    settings = SETTINGS[name]
    if "eval_strategy" in settings:
        settings = settings | {"eval_dataset": make_dataset(4)}
    set_seed(0)
    trainer = make_trainer(**SIZES | settings)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(map(math.isfinite, losses))
    assert sum("eval_reward" in entry for entry in trainer.state.log_history) == 3 * ("eval_strategy" in settings)
    grows, shares = answers(trainer)
    return f"| {name} | {grows} | {shares} |", 0.0 if "top_k" in settings else largest_difference(trainer)


def rows_of_page():
    return [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and " | " in line]


@pytest.mark.parametrize("name", NAMES)
def test_every_family(name):
    row, difference = row_of(name)
    assert row in rows_of_page(), "run `python tests/test_matrix.py --write`"
    assert (difference < 1e-4) != (name in WRONG_IN_BATCHES + READS_PROMPTS_BOTH_WAYS)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(name):
    row, difference = row_of_setting(name)
    assert row in rows_of_page(), "run `python tests/test_matrix.py --write`"
    assert difference < (0.1 if "bf16" in name else 1e-4)


def test_the_page_has_no_others():
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows_of_page()]
    assert names == ["Family", *NAMES, "Setting", *SETTINGS]


HEAD = """# Models

Any decoder that `GRPOTrainer` can train should work. Encoders, and encoders with a decoder, are refused. Two ways to
save time depend on the architecture, and the trainer tries both on your model before it uses them. Where one does not
work it is turned off, a line in the log says why, and training is correct all the same:

- **One round of generation.** Branches start while their base trajectory is still being generated, so that a step needs
  one call of `generate` instead of two. All of the model's state must be in a cache whose rows can be reordered.
- **Shared prefixes.** Tokens that rows have in common are forwarded once. The result for a token must depend on other
  tokens through attention alone, which excludes recurrent layers, convolutions and ALiBi.

{no_router_loss} need `router_aux_loss_coef=0`, as in TRL.
Other mixtures of experts need it to share prefixes.

The table is of transformers {version} and tiny models with random weights, trained for three steps with the default
settings on a CPU. Log-probs of all sampled tokens were within 1e-4 of a plain forward pass, unless a note says
otherwise; such notes hold for `GRPOTrainer` too. The families from Qwen2.5-VL on were trained on text alone here: see
[images](../guides/images.md). `python tests/test_matrix.py --write` writes this page.

| Family | One round of generation | Shared prefixes |
|---|---|---|
"""


TAIL = """
Not in the table are families that differ only in size from one that is, such as Cwm and Ministral3 from Mistral, and
models of speech or images around a text model that is in it, such as Nemotron-H Omni.

## Settings

The same for a tiny Qwen3 with the defaults and one setting that differs. Log-probs were within 1e-4 of a plain forward
pass, and within 0.1 in bfloat16. With `top_k` they are those of the truncated distribution.

| Setting | One round of generation | Shared prefixes |
|---|---|---|
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--write", action="store_true", help="write docs/reference/models.md, in place of printing its table"
    )
    parser.add_argument("names", nargs="*", help="families and settings, by default all")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    rows = {}
    for name in arguments.names or [*NAMES, *SETTINGS]:
        rows[name], difference = row_of_setting(name) if name in SETTINGS else row_of(name)
        print(f"{rows[name]} {difference:.1e}", file=sys.stderr, flush=True)
    if arguments.write:
        *most, last = NO_ROUTER_LOSS
        head = HEAD.format(version=transformers.__version__, no_router_loss=f"{', '.join(most)} and {last}")
        families, settings = ("".join(f"{rows[name]}\n" for name in names) for names in (NAMES, SETTINGS))
        PAGE.write_text(head + families + TAIL + settings)


if __name__ == "__main__":
    main()
