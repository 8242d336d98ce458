"""
Attention of shared prefixes by the kernels that GPUs run, and how large its tensors are.

FlashAttention and flex_attention's backward pass, which CPUs lack, have stand-ins that compute by definition.
"""

import functools
import math

import factory
import pytest
import torch
from test_prefix_sharing import FAMILIES, assert_same, make_family, make_trainer, padded, score
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen2Config
from transformers import modeling_flash_attention_utils as flash_attention_utils
from transformers.integrations import flash_attention, flex_attention, sdpa_attention

from benchmarks.measures import MeasuredGRPOTrainer
from fr3e_trl import FR3ETrainer
from fr3e_trl.prefix_sharing import attention as shared_attention
from fr3e_trl.prefix_sharing.trie import fold

FLASH = ("flash_attention_2", "kernels-community/vllm-flash-attn3")


def by_definition(query, key, value, is_seen, scale, softcap=0.0, sink=None):
    """Attention of a row: (q, H, D), (k, H', D) and (k, H', D), with a mask of shape (q, k)."""
    key, value = (states.repeat_interleave(query.size(1) // key.size(1), 1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or 1 / math.sqrt(query.size(-1)))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    is_seen = is_seen | ~is_seen.any(-1, keepdim=True)  # a padding token sees nothing, and what it gets is not used
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


def seen_at_lower_right(num_queries, num_keys, causal, window_size):
    """The rule of FlashAttention since 2.1: the last query is where the last key is."""
    distance = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
    left, right = window_size
    is_seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        is_seen &= distance <= left
    if right >= 0:
        is_seen &= -distance <= right
    return is_seen


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    s_aux=None,  # vllm-flash-attn3 has it
):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    lengths_q, lengths_k = (bounds.diff().tolist() for bounds in (cu_seqlens_q, cu_seqlens_k))
    assert (max_seqlen_q, max_seqlen_k) == (max(lengths_q), max(lengths_k))
    outputs = []
    for row in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
        is_seen = seen_at_lower_right(len(row[0]), len(row[1]), causal, window_size)
        outputs.append(by_definition(*row, is_seen, softmax_scale, softcap, s_aux))
    return torch.cat(outputs)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), **kwargs):
    is_seen = seen_at_lower_right(q.size(1), k.size(1), causal, window_size)
    rows = zip(q, k, v, strict=True)
    options = {"softcap": kwargs.get("softcap", 0.0), "sink": kwargs.get("s_aux")}
    return torch.stack([by_definition(*row, is_seen, softmax_scale, **options) for row in rows])


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """As torch's, which has only CUDA kernels."""
    assert enable_gqa
    options = {"softmax_scale": scale, "causal": window_size == (-1, 0), "window_size": window_size}
    return flash_attn_varlen_func(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)


def flex_by_definition(query, key, value, training, score_mod, block_mask, enable_gqa, scale, **kwargs):
    """As `compile_friendly_flex_attention` of transformers."""
    is_seen = create_mask(block_mask.mask_mod, len(query), 1, query.size(2), key.size(2), device=query.device)
    softcap = next((cell.cell_contents for cell in score_mod.__closure__ if isinstance(cell.cell_contents, float)), 0.0)
    rows = zip(*(states.transpose(1, 2) for states in (query, key, value)), is_seen[:, 0], strict=True)
    return torch.stack([by_definition(*row, scale, softcap) for row in rows]).transpose(1, 2)


@pytest.fixture
def stand_ins(monkeypatch):
    functions = flash_attn_func, flash_attn_varlen_func, None
    pads = flash_attention_utils._pad_input, flash_attention_utils._unpad_input
    monkeypatch.setattr(flash_attention_utils, "_lazy_imports", lambda *args, **kwargs: functions + pads)
    monkeypatch.setattr(flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", flex_by_definition)
    # As transformers registers a kernel of the hub
    AttentionInterface.register(FLASH[1], flash_attention.flash_attention_forward)
    AttentionMaskInterface.register(FLASH[1], AttentionMaskInterface()[FLASH[0]])


def trainer_with(family, implementation):
    """A trainer of a model that transformers would not make without the kernel."""
    trainer = make_trainer(make_family(family, "eager"), router_aux_loss_coef=0)
    trainer.model.config._attn_implementation = implementation
    return trainer


@functools.cache
def scored_apart(family):
    trainer = trainer_with(family, "eager")
    rows = padded(trainer)
    return rows, score(trainer, *rows, share=False)


# Not GPT2, which transformers takes in half precision alone, and not those that have no such attention
KERNELS = [("flash", family) for family in FAMILIES if family != "GPT2"]
KERNELS += [("sdpa", family) for family in FAMILIES if family not in ("Gemma2", "GptOss")]
KERNELS += [("flex", family) for family in ("Qwen3", "Gemma2", "Mistral")]


@pytest.mark.parametrize(("kernel", "family"), KERNELS)
def test_kernels_of_gpus(kernel, family, stand_ins, monkeypatch):
    rows, apart = scored_apart(family)
    # Only GptOss has attention sinks
    implementations = {"flash": FLASH[family == "GptOss"], "sdpa": "sdpa", "flex": "flex_attention"}
    trainer = trainer_with(family, implementations[kernel])
    if kernel == "flash":
        assert_same(score(trainer, *rows, share=False), apart)
    if kernel == "sdpa":
        monkeypatch.setattr(shared_attention, "runs_flash", lambda *states: True)
    monkeypatch.setattr(shared_attention, "FLEX_BLOCK", 8)
    with torch.compiler.set_stance("force_eager"):  # transformers compiles the masks of rows apart
        assert_same(score(trainer, *rows, share=True), apart)


def test_a_kernel_that_is_registered_anew():
    trainer = trainer_with("Qwen3", "sdpa")
    rows = padded(trainer)
    score(trainer, *rows, share=True)
    AttentionInterface.register("sdpa", sdpa_attention.sdpa_attention_forward)
    with pytest.raises(RuntimeError, match="registered again"):
        trainer._get_per_token_logps_and_entropies(trainer.model, *rows)


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize(("start", "length"), [(0, 128), (0, 700), (5, 133), (129, 640), (255, 257), (256, 512)])
def test_blocks_of_flex_attention(start, length, window):
    blocks = shared_attention.block_mask(start, length, window, torch.device("cpu"))
    expected = create_block_mask(blocks.mask_mod, None, None, length - start, length, "cpu")
    assert blocks.shape == expected.shape
    assert torch.equal(blocks.to_dense(), expected.to_dense())
    assert torch.equal(blocks.full_kv_num_blocks, expected.full_kv_num_blocks)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
@pytest.mark.parametrize("block", [1, 3, 5])
def test_queries_in_blocks(family, implementation, block, monkeypatch):
    rows, apart = scored_apart(family)
    monkeypatch.setattr(shared_attention, "BLOCK", block)
    assert_same(score(trainer_with(family, implementation), *rows, share=True), apart)


@pytest.mark.parametrize("trainer_class", [FR3ETrainer, MeasuredGRPOTrainer])
@pytest.mark.parametrize("was_on", [True, False])
def test_cudnn_is_left_out_where_gradients_are_computed(trainer_class, was_on):
    """Its kernel runs on GPUs alone, where it was seen to give gradients of NaN: here, whether sdpa may take it."""
    seen = []

    def reward(completions, **kwargs):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(seen) == 2:
            raise KeyError("of the second step")
        return [float(len(completion)) for completion in completions]

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(was_on)
    trainer = factory.make_trainer(trainer_class, reward_funcs=reward, max_steps=2, num_generations=4)
    with pytest.raises(KeyError, match="of the second step"):
        trainer.train()
    after = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)
    assert after == was_on and seen == [False, False]


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that operations make, of those that `counts` says yes to. Views are none."""

    def __init__(self, counts=lambda tensor: True):
        super().__init__()
        self.counts, self.bytes = counts, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        outputs = func(*args, **kwargs or {})
        for tensor in tensors_in(outputs):
            if storage_of(tensor) not in given and self.counts(tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return outputs


def storage_of(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def folded_rows(num_prompts, num_rows, prompt_length, length):
    """Completions of random tokens: of each prompt two base trajectories, from which the others branch off anywhere."""
    prompts = torch.randint(2, 99, (num_prompts, 1, prompt_length)).expand(-1, num_rows, -1)
    completions = torch.randint(2, 99, (num_prompts, num_rows, length))
    own = torch.ones_like(completions, dtype=torch.bool)
    num_branches = num_rows - 2
    for branch in range(num_branches):
        position = length * (branch // 2 + 1) // (num_branches // 2 + 1)
        completions[:, 2 + branch, :position] = completions[:, branch % 2, :position]
        own[:, 2 + branch, :position] = False
    input_ids = torch.cat([prompts, completions], dim=2).flatten(0, 1)
    mask = torch.ones_like(input_ids)
    mask[0, 0] = 0  # one is shorter
    return fold(input_ids, mask, own.flatten(0, 1))


@pytest.mark.parametrize("flash", [False, True], ids=["sdpa", "flash"])
def test_nothing_grows_with_the_square_of_the_length(flash, monkeypatch):
    """64 rows of 16k tokens in a layer, forward and backward, on fake tensors."""
    trie = folded_rows(num_prompts=8, num_rows=8, prompt_length=64, length=16_000)
    if flash:
        monkeypatch.setattr(shared_attention, "runs_flash", lambda *states: True)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=2, hidden_size=16, intermediate_size=16, num_hidden_layers=1, **heads)

    def is_mask(tensor):
        """Masks alone are wider than hidden states, but for sums over queries, which are in float32."""
        return tensor.dim() > 1 and tensor.size(-1) > 2 * config.hidden_size and tensor.dtype != torch.float32

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
        shared_attention.share(model, "sdpa")
        with Largest(is_mask) as masks, Largest() as tensors:
            model.model(**trie.model_inputs, use_cache=False).last_hidden_state.sum().backward()
    assert 0 < tensors.bytes < 16_000**2 / 4  # and a mask for the rows that leave early would have as many again
    assert masks.bytes == 0 if flash else 0 < masks.bytes <= 2 * shared_attention.BLOCK * (64 + 16_000)
