"""
How much memory a run takes on each device, by formulas of plain numbers. All results are in bytes.

What lives as long as the run (weights, optimizer states) and what an update or a generation adds (gradients,
activations, logits, the cache) are told apart: the most that is needed at a time is the first and the larger of the
second. Weights, gradients, states and the cache are counted; activations are estimated, for dense decoder layers as
Llama, Qwen2, Qwen3 and Mistral have them, with attention that keeps no matrix of scores (sdpa, FlashAttention). Nothing
is divided between processes, as FSDP and ZeRO do. What the allocator leaves between tensors, CUDA's context and the
buffers of communication are left out.
"""

from dataclasses import dataclass

# States of an optimizer per trainable parameter, by transformers' name of it: how many there are, where they have the
# parameters' own type, and how many bytes where they have another. Sources: the state tensors of torch.optim and of
# bitsandbytes. AdamW keeps two moments, Lion one, RMSprop and Adagrad the squares; SGD has no momentum by default, and
# Adafactor keeps sums of rows and columns, which are few.
STATES_IN_OWN_TYPE = {
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "adamw_torch_npu_fused": 2,
    "adamw_torch_xla": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd": 0,
    "adafactor": 0,
}
STATE_BYTES = {
    "adamw_8bit": 2,
    "adamw_bnb_8bit": 2,
    "adamw_torch_8bit": 2,
    "adamw_torch_4bit": 1,
    "paged_adamw_8bit": 2,
    "paged_adamw_32bit": 8,
    "lion_32bit": 4,
    "lion_8bit": 1,
    "paged_lion_32bit": 4,
    "paged_lion_8bit": 1,
    "rmsprop_bnb": 4,
    "rmsprop_bnb_32bit": 4,
    "rmsprop_bnb_8bit": 1,
}

# Float32 tensors of a step of generation: logits, the same by temperature, log-probs, what top_p leaves, and chances
SAMPLING_COPIES = 5

# Of TRL's fused LM head (`trl.kernels.chunked_logprob`): tokens and words of a tile of logits
TILE_TOKENS = 4096
TILE_WORDS = 32768
# Float32 tiles beside it where there is no Triton: the formulas of the backward pass written out in torch
TORCH_TILES = 7


@dataclass(frozen=True)
class Decoder:
    """
    Sizes of a dense decoder.

    Args:
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size (`int`):
            As in its configuration.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


def quantized_bytes(num_parameters: int, bits: int, nested: bool = False) -> float:
    """
    Weights in 8 bits, or in 4 with a float32 for each block of 64, or with these quantized too.

    Source: QLoRA, arXiv 2305.14314, section 3: constants take 0.5 bits a parameter, and 0.127 when they are quantized.
    """
    constants = 0.0 if bits == 8 else 0.127 if nested else 0.5
    return num_parameters * (bits + constants) / 8


def optimizer_bytes(optim: str, num_trainable: int, bytes_each: int) -> int:
    """States of transformers' optimizer of that name, one of those above, for parameters of so many bytes each."""
    each = STATE_BYTES[optim] if optim in STATE_BYTES else STATES_IN_OWN_TYPE[optim] * bytes_each
    return num_trainable * each


def layer_bytes(decoder: Decoder, num_tokens: int, compute_bytes: int, weight_bytes: int) -> int:
    """
    What a layer keeps for its backward pass.

    For each token, by what autograd saves, with h the hidden size, a and k those of all heads of queries and of keys,
    and i the intermediate size:

    - two RMSNorms, in float32 whatever the type of the rest: their input, normalized and scaled, 3 h each;
    - queries, rotated queries, what attention returns, and that in the order of the output projection: 4 a; and rotated
      keys and values, and what was rotated: 3 k;
    - gate, SiLU of the gate, up, and their product: 4 i;
    - under autocast, where weights are float32, the scaled inputs of the projections once more, 2 h.

    The way of counting is that of Korthikanti et al., arXiv 2205.05198, section 4.1, there for GPT's layers.
    """
    h, i = decoder.hidden_size, decoder.intermediate_size
    a, k = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    norms = 2 * 3 * h * 4
    casts = 2 * h * compute_bytes if compute_bytes < weight_bytes else 0
    return num_tokens * (norms + casts + compute_bytes * (4 * a + 3 * k + 4 * i))


def activation_bytes(
    decoder: Decoder, num_tokens: int, compute_bytes: int, weight_bytes: int, checkpointing: bool
) -> tuple[int, int]:
    """
    What a micro-batch keeps for its backward pass, without the logits, and what of it is computed again there.

    With gradient checkpointing each layer's input is kept, and one layer at a time is computed again (Chen et al.,
    arXiv 1604.06174). Without, all of every layer is kept.

    Args:
        decoder ([`Decoder`]):
            The model.
        num_tokens (`int`):
            Tokens of the micro-batch: rows times the longest prompt and completion.
        compute_bytes, weight_bytes (`int`):
            Bytes of a number of the computation, 2 in bf16, and of a weight. The stream between layers has the latter.
        checkpointing (`bool`):
            Whether gradient checkpointing is on.
    """
    layer = layer_bytes(decoder, num_tokens, compute_bytes, weight_bytes)
    if not checkpointing:
        return decoder.num_layers * layer, 0
    return decoder.num_layers * num_tokens * decoder.hidden_size * weight_bytes, layer


def logits_bytes(num_tokens: int, vocab_size: int, compute_bytes: int, has_triton: bool) -> int:
    """
    A tile of logits, which is all of them that TRL's fused LM head has at a time.

    Its buffer is as wide as a tile whatever the vocabulary. Without Triton (on a CPU), there are tiles in float32
    beside it.
    """
    num_tokens = min(num_tokens, TILE_TOKENS)
    tile = num_tokens * TILE_WORDS * compute_bytes
    return tile if has_triton else tile + TORCH_TILES * num_tokens * min(vocab_size, TILE_WORDS) * 4


def cache_bytes(decoder: Decoder, num_tokens: int, bytes_each: int) -> int:
    """Keys and values of so many tokens, which generation keeps: 2 a layer and head of them."""
    return 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * num_tokens * bytes_each


@dataclass(frozen=True)
class MemoryEstimate:
    """
    What a device holds.

    Args:
        weights, reference, states, casts (`float`):
            Weights, the reference model's, the optimizer's states; and weights cast by autocast, in an update.
        gradients, activations, recomputed, logits (`float`):
            Of an update. The logits are gone when a layer is computed again.
        cache, sampling (`float`):
            Of generation: keys and values; logits of a step, and what is made of them to draw a token.
        keeps_gradients (`bool`):
            Whether there are gradients while completions are generated: where an update takes several generations.
    """

    weights: float
    reference: float
    states: float
    casts: float
    gradients: float
    activations: float
    recomputed: float
    logits: float
    cache: float
    sampling: float = 0.0
    keeps_gradients: bool = False

    @property
    def lasting(self) -> float:
        """What is there all the time, once the first update is done."""
        return self.weights + self.reference + self.states

    @property
    def update(self) -> float:
        """The most of an update, beside what lasts."""
        return self.gradients + self.casts + self.activations + max(self.recomputed, self.logits)

    @property
    def generation(self) -> float:
        """The most of generation, beside what lasts."""
        return self.cache + self.sampling + (self.gradients if self.keeps_gradients else 0)

    @property
    def peak(self) -> float:
        return self.lasting + max(self.update, self.generation)
