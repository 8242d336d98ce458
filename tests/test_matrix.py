"""
Every family of models for three steps with the defaults: whether rows grow, whether prefixes are shared, and that what
was sampled has the log-probs of a plain forward pass. The same for settings. The tables of
docs/reference/models.md are written by

    python tests/test_matrix.py --write
"""

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
from models import TINY, make_dataset, make_tokenizer, statistics_by_hand
from peft import LoraConfig
from transformers import set_seed
from trees import rollouts_of

from fr3e_trl.prefix_sharing import obstacle_to_sharing

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "models.md"

WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
GROUPS = ROUTED_EXPERTS | GROUPED
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
MAMBA2 |= {"mamba_expand": 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR = HYBRID | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4}
LINEAR |= {"linear_value_head_dim": 8}
NO_HEAD_DIM = {"head_dim": None}  # a setting that is None is left out
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
BY_LAYER = {"vocab_size_per_layer_input": TINY["vocab_size"], "hidden_size_per_layer_input": 8}
SLIDING_AND_FULL = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 8}
INKLING |= ROUTED_EXPERTS | {"d_rel": 4, "rel_extent": 16, "layer_types": ["hybrid_sliding", "hybrid"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
HYPER = {"hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_size": 2}
NGRAMS = {"ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 1}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64}
INDEXER |= {"heads_per_ngram": 2, "indexer_compress_ratio": 4}
INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "q_lora_rank": 16, "num_key_value_heads": 1}
INDEXED |= {"hc_mult": 2}
GEMMA_3N = {"num_kv_shared_layers": 0, "laurel_rank": 8, "altup_num_inputs": 2}
GEMMA_3N |= {"activation_sparsity_pattern": [0.0, 0.0]}
MAMBA_FIRST = {"layer_types": ["mamba", "attention"]}


def like(names, settings):
    return dict.fromkeys(names.split(), settings)


# Settings of each family's configuration beside those of TINY
DECODERS = {
    **like("Apertus Arcee BitNet Cohere DiffLlama Ernie4_5 Gemma Glm Glm4 Granite Helium HunYuanDenseV1 Llama", {}),
    **like("Nemotron Qwen3 SeedOss SmolLM3 StableLm", {}),
    **like("Bloom Falcon GPT2 GPTBigCode GPTNeoX Olmo2 Phi Phi3 Qwen2", NO_HEAD_DIM),
    **like("Cohere2 Exaone4 Ministral Mistral Olmo3 Starcoder2", WINDOW),
    **like("GraniteMoe MiniMaxM2 MiniMaxM3VL Mixtral", LOCAL_EXPERTS),
    **like("CodeGen GPTJ", {"rotary_dim": 4} | NO_HEAD_DIM),
    **like("Gemma2 Gemma3", WINDOW | {"query_pre_attn_scalar": 8}),
    "Cohere2Moe": EXPERTS | WINDOW,
    "DeepseekV2": LATENT | ROUTED_EXPERTS | NO_HEAD_DIM,
    "DeepseekV3": LATENT | GROUPS | NO_HEAD_DIM,
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8} | NO_HEAD_DIM,
    "Gemma3n": SLIDING_AND_FULL | BY_LAYER | GEMMA_3N,
    "Gemma4": SLIDING_AND_FULL | BY_LAYER | {"global_head_dim": 8},
    "Glm4Moe": GROUPS,
    "GptOss": WINDOW | LOCAL_EXPERTS,
    "GraniteMoeShared": LOCAL_EXPERTS | {"shared_intermediate_size": 32},
    "JetMoe": LOCAL_EXPERTS | {"kv_channels": 8} | NO_HEAD_DIM,
    "Llama4": LOCAL_EXPERTS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2} | NO_HEAD_DIM,
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32} | NO_HEAD_DIM,
    "Olmoe": EXPERTS | NO_HEAD_DIM,
    "Phimoe": LOCAL_EXPERTS | WINDOW | {"router_jitter_noise": 0.0},
    "Qwen2Moe": EXPERTS | WINDOW | SHARED_EXPERT | {"use_sliding_window": True, "max_window_layers": 2},
    "Qwen3Moe": EXPERTS,
}
RECURRENT = {  # and hybrids
    "BailingHybrid": LATENT | LOCAL_EXPERTS | HYBRID | GROUPED | {"moe_intermediate_size": 32, "num_mtp_layers": 0},
    "Bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "DeepseekV4": ROUTED_EXPERTS | WINDOW | INDEXED | {"o_groups": 2, "o_lora_rank": 8, "num_nextn_predict_layers": 0},
    "FalconH1": MAMBA2 | {"mamba_d_ssm": 64},
    **like("FalconMamba Mamba", {"state_size": 4} | NO_HEAD_DIM),
    "GraniteMoeHybrid": MAMBA2 | LOCAL_EXPERTS | MAMBA_FIRST | {"shared_intermediate_size": 32},
    "Inkling": INKLING
    | {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1, "logits_mup_width_multiplier": 1.0},
    "Inkling2": INKLING | {"unpadded_vocab_size": TINY["vocab_size"]},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "KimiLinear": {},
    "Lfm2": CONVOLUTION,
    "Lfm2Moe": EXPERTS | CONVOLUTION | {"num_dense_layers": 1},
    "Lfm3": WINDOW | CONVOLUTION,
    "Mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "MiniMax": LOCAL_EXPERTS | HYBRID | {"block_size": 8},
    "NemotronH": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8}
    | {"n_groups": 1, "ssm_state_size": 8, "chunk_size": 16},
    "OlmoHybrid": LINEAR,
    **like("Qwen3Next Qwen3_5Moe", EXPERTS | LINEAR | SHARED_EXPERT),
    "Qwen4Exp": EXPERTS | LINEAR | SHARED_EXPERT | HYPER | NGRAMS | INDEXER,
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 256} | NO_HEAD_DIM,
    "Zamba": {"num_hidden_layers": 4, "num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    | {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    | NO_HEAD_DIM,
    "Zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"], "mamba_d_state": 8}
    | {"mamba_ngroups": 1, "n_mamba_heads": 8, "num_mem_blocks": 1, "chunk_size": 16, "adapter_rank": 4}
    | {"use_mem_rope": False},
    "Zaya": EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "xLSTM": {"num_heads": 4, "num_blocks": 2} | NO_HEAD_DIM,
}
FAMILIES = dict(sorted(DECODERS.items())) | dict(sorted(RECURRENT.items()))

# Models that see, trained on text alone: those of vision_models.py, with their processor
VISION = {"Qwen2.5-VL": "qwen2_5_vl", "Gemma3 with vision": "gemma3", "SmolVLM": "smolvlm", "LLaVA": "llava"}
VISION |= {"InternVL": "internvl"}


def kind(model_type):
    return {"model_type": model_type}


# And others, with a tokenizer: their classes, and their settings beside those of TINY
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
INTERLEAVED = ROPE | {"mrope_interleaved": True}
LINEAR_ROPE = {"rope_parameters": INTERLEAVED | {"partial_rotary_factor": 1.0}}
EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
EYE |= {"patch_size": 4}
QWEN_EYE = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16} | EYE
QWEN_2_EYE = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
PERCEIVER = {"hidden_size": 32, "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2}
PERCEIVER |= {"resampler_head_dim": 8, "num_key_value_heads": 1}
PALI = {"image_token_index": 2, "hidden_size": 32, "projection_dim": 32}
PROJECTED = {"out_hidden_size": 32, "projector_hidden_size": 32, "image_token_id": 2, "video_token_id": 3}
TEXT_ALONE = {
    "Qwen3-VL": ("Qwen3VL", {"rope_parameters": INTERLEAVED}, QWEN_EYE | {"deepstack_visual_indexes": [0]}, {}),
    "Qwen3.5": ("Qwen3_5", LINEAR | LINEAR_ROPE, QWEN_EYE, {}),
    "Qwen2-VL": ("Qwen2VL", {"rope_parameters": ROPE}, QWEN_2_EYE, {}),
    "Qwen3.5-MoE": ("Qwen3_5Moe", EXPERTS | LINEAR | SHARED_EXPERT | LINEAR_ROPE, QWEN_EYE, {}),
    "Idefics2": ("Idefics2", kind("mistral"), EYE, {"perceiver_config": PERCEIVER, "image_token_id": 2}),
    "Idefics3": ("Idefics3", kind("llama"), EYE, {"image_token_id": 2}),
    "LLaVA-NeXT": ("LlavaNext", kind("llama"), EYE | kind("clip_vision_model"), {"image_token_index": 2}),
    "LFM2-VL": ("Lfm2Vl", CONVOLUTION | kind("lfm2"), EYE | kind("siglip2_vision_model"), {"image_token_id": 2}),
    "Muse Glimmer": ("MuseGlimmer", WINDOW, EYE | {"pos_emb_height": 4, "pos_emb_width": 4}, PROJECTED),
    "PaliGemma": ("PaliGemma", kind("gemma"), EYE | kind("siglip_vision_model"), PALI),
}
NAMES = [*FAMILIES, *VISION, *TEXT_ALONE]

# For which `generate` is wrong, in GRPOTrainer as well: in batches of prompts of several lengths, or in all batches.
# The forward pass of a loss, which is told of no images, does not read prompts in both directions
WRONG = {
    **like("MiniMax RecurrentGemma", "is wrong where prompts are padded"),
    "Rwkv": "is wrong in batches",
    "PaliGemma": "reads prompts in both directions",
}

# TRL's GRPOTrainer asks the configuration for a setting that they have not got, unless it is told to do without
NO_ROUTER_LOSS = ("DeepseekV4", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared", "Phimoe")

# With the Qwen3 of models.py
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
EVALUATION |= {"eval_dataset": make_dataset(4)}
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
    if "padded" in WRONG.get(name, ""):
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
            expected, _ = statistics_by_hand(model, tree.prompt_ids + state.prefix_ids, rollout.token_ids)
            largest = max(largest, np.abs(expected.numpy() - np.asarray(rollout.logprobs)).max().item())
    assert num_branches > 0
    return largest


SHORT = {
    r"^it changes log-probs.*": "other log-probs",
    r"\w+ keeps state.*": "a state that does not follow rows",
    r"\w+ raises (\w+).*": r"raises `\1`",
    r"layers of \w+ are recurrent.*": "recurrent layers",
    r"layers of \w+ are convolutions.*": "convolutions",
    r"the window of .*": "a window in its mask alone",
    r"images are forwarded.*": "it has a processor of images",
}


def reason(obstacle):
    if obstacle is None:
        return "yes"
    for pattern, short in SHORT.items():
        obstacle = re.sub(pattern, short, obstacle, flags=re.DOTALL)
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
    if name in WRONG:
        grows += f"; `generate` itself {WRONG[name]}"
    return f"| {name} | {grows} | {shares} |", difference


def row_of_setting(name):
    """A setting's row of the table, and how far log-probs are off."""
    settings = SETTINGS[name]
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
    assert (difference < 1e-4) == (name not in WRONG or "padded" in WRONG[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(name):
    row, difference = row_of_setting(name)
    assert row in rows_of_page(), "run `python tests/test_matrix.py --write`"
    assert difference < (0.1 if "bf16" in name else 1e-4)


def test_the_page_has_no_others():
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows_of_page()]
    assert names == ["Family", *NAMES, "Setting", *SETTINGS]
    *most, last = NO_ROUTER_LOSS
    assert f"{', '.join(most)} and {last} need `router_aux_loss_coef=0`" in PAGE.read_text()


def write():
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    rows = {}
    for name in [*NAMES, *SETTINGS]:
        rows[name], difference = row_of_setting(name) if name in SETTINGS else row_of(name)
        print(f"{rows[name]} {difference:.1e}", file=sys.stderr, flush=True)
    tables = iter((NAMES, SETTINGS))
    of_table = lambda match: match[1] + "".join(f"{rows[name]}\n" for name in next(tables))  # noqa: E731
    page = re.sub(r"(\|---\|---\|---\|\n)(?:\|.*\n)+", of_table, PAGE.read_text())
    PAGE.write_text(re.sub(r"(?<=of transformers )\S+", transformers.__version__, page))


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
