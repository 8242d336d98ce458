"""Log-probs in tiles: what a softmax over all logits gives, with all gradients, by any way a model has its head."""

import peft
import pytest
import torch
import transformers
from models import TINY, make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import set_seed

from fr3e_trl import logps
from fr3e_trl.logps import Softmax, score, tile_logps, truncated_logps


class Logits(TorchDispatchMode):
    """Counts the floats of tensors with a dimension of the vocabulary's size that exist at a time."""

    def __init__(self, vocab_size, weights):
        super().__init__()
        self.vocab_size, self.storages, self.most = vocab_size, {}, 0
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and self.vocab_size in tensor.shape and tensor.is_floating_point():
                storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
                if tensor.untyped_storage().data_ptr() not in self.weights:
                    self.storages[storage.cdata] = (storage, tensor.untyped_storage().nbytes() // tensor.itemsize)
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return output


SOFTMAXES = [Softmax(), Softmax(temperature=0.7, scale=0.25), Softmax(temperature=1.3, scale=2.0, softcap=3.0)]


def of_all_logits(hidden, weight, bias, targets, softmax):
    logits = hidden @ weight.t() * softmax.scale
    if bias is not None:
        logits = logits + bias * softmax.scale
    if softmax.softcap is not None:
        logits = softmax.softcap * (logits / softmax.softcap).tanh()
    log_p = (logits / softmax.temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(logps, "TILE_POSITIONS", 3)
    monkeypatch.setattr(logps, "TILE_VOCAB", 8)


@pytest.mark.parametrize("softmax", SOFTMAXES, ids=["plain", "scale", "softcap"])
@pytest.mark.parametrize("wanted", [(1, 0), (0, 1), (1, 1)], ids=["logps", "entropies", "both"])
@pytest.mark.parametrize("num_positions", [0, 1, 3, 10])
def test_all_logits_at_once_give_the_same(num_positions, wanted, softmax, small_tiles):
    """Tiles of 3 positions and 8 of 20 tokens: the last ones are smaller."""
    torch.manual_seed(0)
    head = torch.randn(num_positions, 6), torch.randn(20, 6), torch.randn(20)
    targets = torch.arange(num_positions) * 2  # in each tile
    weights = torch.randn(2, num_positions)
    found = []
    for compute in (tile_logps, of_all_logits):
        tensors = [tensor.clone().requires_grad_() for tensor in head]
        outputs = compute(*tensors, targets, softmax)
        sum((outputs[i] * weights[i]).sum() for i in range(2) if wanted[i]).backward()
        found.append([*outputs, *(tensor.grad for tensor in tensors)])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def test_half_precision_is_summed_in_float32(small_tiles):
    """So the gradient of the head, of 1,000 positions, is as near as rounding each of its terms leaves it."""
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(1000, 16).bfloat16(), torch.randn(20, 16).bfloat16(), torch.arange(1000) % 20
    exact, rounded = weight.double().requires_grad_(), weight.clone().requires_grad_()
    of_all_logits(hidden.double(), exact, None, targets, Softmax())[0].sum().backward()
    own, _ = tile_logps(hidden, rounded, None, targets, Softmax())
    own.sum().backward()
    assert own.dtype == torch.float32 and rounded.grad.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.grad.double(), exact.grad, atol=0.3, rtol=2**-7)


def test_logits_are_few_at_a_time(monkeypatch):
    """Of 64 positions and 5,000 tokens, 320,000 logits: three tiles of 8 positions, forward and backward."""
    monkeypatch.setattr(logps, "TILE_POSITIONS", 8)
    hidden = torch.randn(64, 16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(5_000, 16))
    with Logits(5_000, [weight]) as logits:
        own, entropies = tile_logps(hidden, weight.detach(), None, torch.arange(64), Softmax())
        (own.sum() + entropies.sum()).backward()
    assert 8 * 5_000 <= logits.most <= 4 * 8 * 5_000


def test_truncation_keeps_what_was_sampled():
    """Of probabilities 1/2, 1/4, 1/8 and 1/8, the two that are most likely are kept, and the target."""
    weight = torch.tensor([[0.5], [0.25], [0.125], [0.125]]).log()
    truncation = transformers.LogitsProcessorList([transformers.TopKLogitsWarper(2)])
    found, _ = truncated_logps(torch.ones(3, 1), weight, None, torch.tensor([0, 1, 3]), Softmax(), truncation)
    torch.testing.assert_close(found.exp(), torch.tensor([2 / 3, 1 / 3, 1 / 7]))


def tiny(name, **settings):
    set_seed(0)
    config = getattr(transformers, f"{name}Config")(**TINY | settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MODELS = {
    "Llama": {},
    "Gemma2": {"final_logit_softcapping": 3.0, "attn_implementation": "eager", "tie_word_embeddings": True},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "MiniCPM3": LATENT | {"dim_model_base": 8, "num_key_value_heads": 4},
    "Mamba": {"state_size": 4},
}


def assert_scored(model):
    """Against the model's own logits, and the gradients by way of these."""
    torch.manual_seed(1)
    config = model.config.get_text_config()
    input_ids = torch.randint(2, config.vocab_size, (3, 9))
    targets = input_ids.roll(-1, 1)
    targets[:, -1] = targets[0, 3:] = -100
    at, temperature, found = targets != -100, 0.8, []
    for is_own in (True, False):
        model.zero_grad()
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        if is_own:
            softmax = Softmax.of(model.config, temperature)
            own, entropies = score(model, model.get_output_embeddings(), inputs, targets, softmax)
            assert own.shape == at.shape and not own[~at].any() and not entropies[~at].any()
            own, entropies = own[at], entropies[at]
        else:
            log_p = (model(**inputs).logits / temperature).log_softmax(-1)[at]
            own, entropies = log_p.gather(1, targets[at][:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
        (own.sum() + entropies[::2].sum()).backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append((own.detach(), entropies.detach(), torch.cat(gradients)))
    for of_score, of_logits in zip(*found, strict=True):
        torch.testing.assert_close(of_score, of_logits, atol=2e-5, rtol=2e-5)
    assert not model.get_output_embeddings()._forward_hooks and not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_scale_logits(name):
    assert_scored(tiny(name, **MODELS[name]))


def test_a_head_that_is_trained_beside_an_adapter():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    assert_scored(peft.get_peft_model(make_model(), config))


def test_without_a_target_the_gradient_is_0_and_not_none_and_a_head_must_be_called():
    model, other = make_model(), torch.nn.Linear(1, 1)
    inputs, targets = {"input_ids": torch.ones(2, 5, dtype=torch.long)}, torch.full((2, 5), -100)
    own, entropies = score(model, model.lm_head, inputs, targets, Softmax.of(model.config, 1.0))
    own.sum().backward()
    assert not own.any() and not entropies.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="called 0 times"):
        score(model, other, inputs, inputs["input_ids"], Softmax())
