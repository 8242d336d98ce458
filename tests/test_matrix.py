"""
Every family of models for three steps with the defaults: whether rows grow, whether prefixes are shared, and that what
was sampled has the log-probs of a plain forward pass. The table is docs/models.md, written by

    python tests/test_matrix.py --write
"""

import argparse
import logging
import re
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from factory import make_trainer
from models import make_dataset, make_tokenizer
from recorder import Recorder
from transformers import set_seed
from trees import rollouts_of

from fr3e_trl.trl_adapter.shared_forward import _obstacle as obstacle_to_sharing

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

TINY = {
    "vocab_size": len(make_tokenizer()),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
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

# Settings of each family's configuration beside those of TINY
FAMILIES = {
    "Apertus": {},
    "Arcee": {},
    "BitNet": {},
    "Bloom": NO_HEAD_DIM,
    "CodeGen": {"rotary_dim": 4} | NO_HEAD_DIM,
    "Cohere": {},
    "Cohere2": WINDOW,
    "DeepseekV2": LATENT | ROUTED_EXPERTS | NO_HEAD_DIM,
    "DeepseekV3": LATENT | GROUPS | NO_HEAD_DIM,
    "DiffLlama": {},
    "Ernie4_5": {},
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
    "Glm4": {},
    "Glm4Moe": GROUPS,
    "GptOss": WINDOW | LOCAL_EXPERTS,
    "Granite": {},
    "Helium": {},
    "HunYuanDenseV1": {},
    "Llama": {},
    "MiniMaxM2": LOCAL_EXPERTS,
    "Ministral": WINDOW,
    "Mistral": WINDOW,
    "Mixtral": LOCAL_EXPERTS,
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2} | NO_HEAD_DIM,
    "Nemotron": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32} | NO_HEAD_DIM,
    "Olmo3": WINDOW,
    "Phi3": NO_HEAD_DIM,
    "Phimoe": LOCAL_EXPERTS | WINDOW | {"router_jitter_noise": 0.0},
    "Qwen2": NO_HEAD_DIM,
    "Qwen2Moe": EXPERTS
    | WINDOW
    | {"shared_expert_intermediate_size": 32, "use_sliding_window": True, "max_window_layers": 2},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "SeedOss": {},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": WINDOW,
    # Recurrent, and hybrids
    "Bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "FalconH1": MAMBA2 | {"mamba_d_ssm": 64},
    "FalconMamba": {"state_size": 4} | NO_HEAD_DIM,
    "GraniteMoeHybrid": MAMBA2
    | LOCAL_EXPERTS
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "Jamba": EVERY_SECOND
    | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4}
    | {"use_mamba_kernels": False},
    "KimiLinear": {},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
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
    "Qwen3Next": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 256} | NO_HEAD_DIM,
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
    "xLSTM": {"num_heads": 4, "num_blocks": 2} | NO_HEAD_DIM,
}

# Models that see, trained on text alone: with their processor, or with a tokenizer
VISION = {
    "Qwen2.5-VL": "qwen2_5_vl",
    "Gemma3 with vision": "gemma3",
    "SmolVLM": "smolvlm",
    "LLaVA": "llava",
    "InternVL": "internvl",
    "Qwen3-VL": None,
    "Qwen3.5": None,
}

# For which `generate` is wrong, in GRPOTrainer as well: in batches of prompts of several lengths, or in all batches
WRONG_WHERE_PADDED, WRONG_IN_BATCHES = ("MiniMax", "RecurrentGemma"), ("Rwkv",)

# TRL's GRPOTrainer asks the configuration for a setting that they have not got, unless it is told to do without
NO_ROUTER_LOSS = ("GraniteMoeHybrid", "Phimoe")


def make_qwen(name):
    """Those that are not in vision_models.py."""
    import vision_models

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "mrope_interleaved": True}
    text = {**vision_models.TEXT, "vocab_size": TINY["vocab_size"], "head_dim": 8, "num_key_value_heads": 2}
    if name == "Qwen3.5":
        text |= LINEAR | {"rope_parameters": rope | {"partial_rotary_factor": 1.0}}
        vision.pop("deepstack_visual_indexes")
        config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
        return transformers.Qwen3_5ForConditionalGeneration(config)
    config = transformers.Qwen3VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision)
    return transformers.Qwen3VLForConditionalGeneration(config)


def make_family(name):
    """A tiny model, with weights large enough for each part of it to matter, and its tokenizer or processor."""
    set_seed(0)
    if VISION.get(name) is not None:
        import vision_models  # older transformers, on which other tests run, have not got all of them

        return vision_models.make_vision_model(VISION[name]), vision_models.make_processor(VISION[name])
    if name in VISION:
        model = make_qwen(name)
    else:
        settings = {key: value for key, value in (TINY | FAMILIES[name]).items() if key != "head_dim" or value}
        config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**settings)
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


def train(name, **settings):
    model, processing_class = make_family(name)
    if name in NO_ROUTER_LOSS:
        settings["router_aux_loss_coef"] = 0.0
    dataset = make_dataset(conversational=VISION.get(name) is not None)
    if name in WRONG_WHERE_PADDED:
        dataset = dataset.filter(lambda example: len(example["prompt"]) == 5)
    sizes = {"max_completion_length": 14, "max_steps": 3, "learning_rate": 0.0}
    trainer = make_trainer(
        model=model, reward_funcs=by_length, dataset=dataset, tokenizer=processing_class, **sizes | settings
    )
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
    obstacle = re.sub(r"the window of .*", "a window in its mask alone", obstacle)
    obstacle = re.sub(r"the images of a prompt.*", "it has a processor of images", obstacle)
    return f"no: {obstacle}"


def row_of(name):
    """A family's row of the table, and how far log-probs are off."""
    try:
        trainer = train(name)
    except Exception as error:
        with pytest.raises(type(error)):  # nor does GRPOTrainer
            train(name, num_anchors=0)
        return f"| {name} | `GRPOTrainer` raises `{type(error).__name__}` | |", 0.0
    grows = reason(None if trainer.sampler.grows else trainer.sampler._obstacle_to_growing())
    shares = reason(obstacle_to_sharing(trainer))
    if trainer.aux_loss_enabled:
        trainer.aux_loss_enabled = False
        without = reason(obstacle_to_sharing(trainer))
        shares = "with `router_aux_loss_coef=0`" if without == "yes" else without
    assert trainer.shares_prefixes == (shares == "yes")
    difference = largest_difference(trainer)
    if name in WRONG_WHERE_PADDED:
        grows += "; `generate` itself is wrong where prompts are padded"
    if name in WRONG_IN_BATCHES:
        grows += "; `generate` itself is wrong in batches"
    return f"| {name} | {grows} | {shares} |", difference


def rows_of_page():
    return [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and " | " in line][1:]


@pytest.mark.parametrize("name", [*FAMILIES, *VISION])
def test_every_family(name):
    row, difference = row_of(name)
    assert row in rows_of_page(), "run `python tests/test_matrix.py --write`"
    assert (difference < 1e-4) != (name in WRONG_IN_BATCHES)


def test_the_page_has_no_others():
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows_of_page()] == [*FAMILIES, *VISION]


HEAD = """# Models

Rollouts can leave a base trajectory while it still grows. A step then generates once, and not twice. The model must
keep all that it knows of a row in a cache that can be reordered. Other models draw the rollouts in a second round.

Rows that share a prefix can be forwarded together, which costs less. What a model makes of a token must then depend on
attention alone.

The trainer tries both on your model when training begins, and logs one line where the answer is no. Training is right
in either case.

This table has tiny models of transformers {version}, with random weights, after three steps with the default settings.
The log-probs of all tokens that they sampled are within 1e-4 of a plain forward pass, but where a note says otherwise.
Such notes hold for `GRPOTrainer` too. The families from Qwen2.5-VL on are trained on text alone.
`python tests/test_matrix.py --write` writes this page.

| Family | Rollouts leave growing rows | Prefixes shared |
|---|---|---|
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write docs/models.md, in place of printing its table")
    parser.add_argument("names", nargs="*", help="families, by default all")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for name in arguments.names or [*FAMILIES, *VISION]:
        row, difference = row_of(name)
        rows.append(row)
        print(f"{row} {difference:.1e}", file=sys.stderr, flush=True)
    if arguments.write:
        PAGE.write_text(HEAD.format(version=transformers.__version__) + "\n".join(rows) + "\n")


if __name__ == "__main__":
    Recorder.log = partial(lambda *args, **kwargs: None)
    main()
