"""Prefixes that rows share, forwarded once: everything is what it is with every row forwarded whole."""

import functools
import logging
from collections import Counter

import factory
import hypothesis
import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from factory import weights
from hypothesis import strategies as st
from models import TINY, make_model
from peft import LoraConfig
from test_logps import tiny
from test_losses import KeepsMicroBatches
from transformers import set_seed

from fr3e_trl import FR3ETrainer
from fr3e_trl.policy_logps import padded as padded_rows
from fr3e_trl.prefix_sharing import forward, keep_together, numbered
from fr3e_trl.prefix_sharing.trie import fold

SIZES = TINY | {"vocab_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    **{name: {} for name in ("Llama", "Qwen2", "Qwen3", "Gemma")},
    **{name: {"sliding_window": 4, "query_pre_attn_scalar": 8} for name in ("Gemma2", "Gemma3")},
    "Mistral": {"sliding_window": 4},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": EXPERTS,
    "GptOss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
}


def letters(completions, **kwargs):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def make_family(family, implementation="sdpa"):
    set_seed(0)
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES.get(family, {}))
    config._attn_implementation = implementation
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{suffix}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        model.get_output_embeddings().weight.mul_(5)
    return model


@pytest.mark.parametrize("family", ["GPT2", "Qwen3"])
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_ratios_are_1_before_the_first_update_wherever_rows_begin(family, share_prefixes):
    prompts = Dataset.from_dict({"prompt": ["1+1=", "12345678+12345678+12345678="] * 4})
    exact = {"epsilon": 1e-4, "epsilon_high": 1e-4, "learning_rate": 0.0}
    settings = {"dataset": prompts, "num_iterations": 2, "share_prefixes": share_prefixes, **exact}
    trainer = make_trainer(make_family(family), **settings)
    trainer.train()
    assert factory.logged(trainer, "clip_ratio/region_mean") == [(0.0,), (0.0,)]


def make_trainer(model=None, cls=FR3ETrainer, **settings):
    return factory.make_trainer(cls, model=model, reward_funcs=letters, **{"max_completion_length": 24} | settings)


def make_rows(seed=0, num_trees=2):
    """Trees of a prompt each: base trajectories and branches that leave them, padded as TRL pads."""
    rng = np.random.default_rng(seed)
    prompts, completions = [], []
    for _ in range(num_trees):
        prompt = rng.integers(2, 50, rng.integers(1, 7))
        bases = [rng.integers(2, 50, rng.integers(1, 20)) for _ in range(rng.integers(1, 4))]
        of_prompt = list(bases)
        for _ in range(rng.integers(0, 6)):
            base = of_prompt[rng.integers(len(of_prompt))]  # a branch of a branch, too
            of_prompt.append(
                np.concatenate([base[: rng.integers(0, len(base) + 1)], rng.integers(2, 50, rng.integers(0, 9))])
            )
        of_prompt = [ids if len(ids) else base for ids in of_prompt]
        prompts += [prompt] * len(of_prompt)
        completions += of_prompt
    return prompts, completions


def padded(trainer, seed=0):
    input_ids, attention_mask = padded_rows(trainer, *make_rows(seed))
    return input_ids, attention_mask, max(map(len, make_rows(seed)[1]))


def score(trainer, input_ids, attention_mask, num_columns, share, **kwargs):
    """Log-probs, entropies and a gradient, of which each token has another share."""
    trainer.share_prefixes(share)
    trainer.model.train()
    trainer.model.zero_grad()
    logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, input_ids, attention_mask, num_columns, compute_entropy=True, **kwargs
    )
    assert trainer.shares_prefixes == share
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    (logprobs * weights + entropies * weights.flip(0)).sum().backward()
    gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return logprobs.detach(), entropies.detach(), torch.cat(gradients)


def assert_same(shared, apart):
    for of_shared, of_apart in zip(shared[:2], apart[:2], strict=True):
        torch.testing.assert_close(of_shared, of_apart, atol=1e-5, rtol=1e-5)
    scale = apart[2].abs().max()
    torch.testing.assert_close(shared[2] / scale, apart[2] / scale, atol=1e-5, rtol=0)


SETUPS = {
    "lora": {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "lora-checkpointing": {"gradient_checkpointing": True, "peft_config": LoraConfig(task_type="CAUSAL_LM", r=4)},
    "temperature": {"temperature": 0.7, "cast_lm_head_to_fp32": True},
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*FAMILIES, *SETUPS])
def test_every_family_and_setup(name, implementation):
    if name in ("Gemma2", "GptOss") and implementation == "sdpa":
        pytest.skip("it has no such attention")
    model = make_family(name if name in FAMILIES else "Qwen3", implementation)
    trainer = make_trainer(model, **SETUPS.get(name, {"router_aux_loss_coef": 0}))
    for of_parameter, parameter in trainer.model.named_parameters():
        if "lora_B" in of_parameter:
            torch.nn.init.normal_(parameter, std=0.1)
    rows = padded(trainer)
    assert_same(score(trainer, *rows, share=True), score(trainer, *rows, share=False))


@functools.cache
def shared_trainer():
    return make_trainer()


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([None, 1, 3]))
def test_any_trees(seed, batch_size):
    trainer = shared_trainer()
    rows = padded(trainer, seed)
    shared, apart = (score(trainer, *rows, share, batch_size=batch_size) for share in (True, False))
    assert_same(shared, apart)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.integers(0, 2**32 - 1))
def test_a_trie_has_each_prefix_once(seed):
    """By its definition: as many nodes as there are different prefixes, each with the token that follows it."""
    prompts, completions = make_rows(seed)
    input_ids, attention_mask = padded_rows(shared_trainer(), prompts, completions)
    scored = attention_mask[:, -max(map(len, completions)) :].bool()
    trie = fold(input_ids, attention_mask, scored)
    width = max(map(len, prompts))
    prefixes = {
        (width - len(prompt), *row[:end])
        for prompt, completion in zip(prompts, completions, strict=True)
        for row in [[*prompt.tolist(), *completion.tolist()]]
        for end in range(2, len(row) + 1)
    }
    assert trie.input_ids.shape == trie.labels.shape == (1, len(prefixes))
    # Each node is in a path once as a new one, and there its column follows that of the one before it
    outputs = torch.cat([path[:, start:].flatten() for start, path in trie.paths])
    assert outputs[trie.nodes].tolist() == list(range(len(prefixes)))
    labels = trie.labels[0][trie.predictors]
    assert labels[scored].tolist() == input_ids[:, -scored.size(1) :][scored].tolist()


def test_what_is_forwarded():
    """A prompt of 3 tokens, a base trajectory of 5 and branches after 2 and 3 of these, of which one ends in 3 more."""
    prompt, base = [11, 12, 13], [20, 21, 22, 23, 24]
    rows = [base, [*base[:2], 30, 31], [*base[:3], 40, 41, 42]]
    trainer = shared_trainer()
    input_ids, attention_mask = padded_rows(trainer, [np.array(prompt)] * 3, [np.array(row) for row in rows])
    loss_mask = torch.tensor([[1] * 5 + [0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()
    trie = fold(input_ids, attention_mask, loss_mask)
    # Of the base all tokens but the last; of the branches the last that they share, once more, and all but their last
    assert trie.input_ids.shape == (1, 7 + 2 + 3)
    assert (trie.labels != -100).sum() == 5 + 2 + 3
    assert (fold(input_ids, attention_mask, attention_mask[:, 3:].bool()).labels != -100).sum() == 5 + 2 + 3
    # The base is not in the loss: what the branches share of it is forwarded without a label
    assert (fold(input_ids[1:], attention_mask[1:], loss_mask[1:]).labels != -100).sum() == 2 + 3
    trainer.share_prefixes(True)
    assert trainer.shares_prefixes
    forwarded: list[int] = []
    hook = trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: forwarded.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    # Rows without a scored token are left out; the first alone stands for all where none has one
    for kept, num_nodes in [([0, 1], 7 + 2), ([], 7)]:
        mask = torch.zeros_like(loss_mask)
        mask[kept] = loss_mask[kept]
        trainer._loss_mask = mask
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, input_ids, attention_mask, 6)
        assert forwarded.pop() == num_nodes and not forwarded
        assert torch.equal(logprobs != 0, mask)
        logprobs.sum().backward()
        gradients = [param.grad.abs().sum() for param in trainer.model.parameters()]
        assert (sum(gradients) > 0) == bool(kept)
        trainer.model.zero_grad()
    hook.remove()


def train(share, cls=FR3ETrainer, **settings):
    return factory.train(cls, reward_funcs=letters, max_completion_length=24, share_prefixes=share, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 2, "max_steps": 4},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "loss_type": "grpo"},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 12},
        {"beta": 0.1},
        {"num_anchors": 0, "reject_degenerate_states": True, "scale_rewards": "none"},
        {"importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 4},
        {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
        {"max_refills": 2},
        {"mask_truncated_completions": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_every_way_to_train(settings):
    settings = {"optim": "sgd", "learning_rate": 0.1} | settings
    shared, apart = (train(share, **settings) for share in (True, False))
    assert shared.shares_prefixes and not apart.shares_prefixes
    names = ["loss", "grad_norm"]
    if "gradient_accumulation_steps" not in settings:
        names.append("entropy")  # TRL logs its mean over micro-batches, which have other rows
    for of_shared, of_apart in zip(*(factory.logged(trainer, *names) for trainer in (shared, apart)), strict=True):
        assert of_shared == pytest.approx(of_apart, abs=1e-4, rel=1e-4)
    torch.testing.assert_close(weights(shared), weights(apart), atol=1e-5, rtol=0)
    assert (weights(shared) - weights(make_trainer())).abs().max() > 1e-4


class CountsPositions(FR3ETrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forwarded = Counter()

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        name = "reference" if model is self.ref_model else "policy"
        hook = model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: self.forwarded.update({name: args[0].numel()})
        )
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        hook.remove()
        return result


def test_fewer_tokens_are_forwarded():
    settings = {"cls": CountsPositions, "beta": 0.1, "num_iterations": 2, "max_steps": 4}
    shared, apart = (train(share, **settings).forwarded for share in (True, False))
    assert all(0 < shared[name] < 0.7 * apart[name] for name in ("policy", "reference"))


@pytest.mark.parametrize("batch_size", [8, 4])
def test_rows_of_a_prompt_stay_together(batch_size):
    num_prompts = {}
    for share in (True, False):
        sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 32 // batch_size}
        trainer = train(share, KeepsMicroBatches, max_steps=1, **sizes)
        num_prompts[share] = [len({tuple(ids) for ids in b["prompt_ids"].tolist()}) for b in trainer.micro_batches]
        assert sum(len(batch["prompt_ids"]) for batch in trainer.micro_batches) == 32
    assert num_prompts[True] == [1] * (32 // batch_size)
    assert max(num_prompts[False]) > 1


def test_prompts_are_shuffled_in_the_place_of_rows():
    """Of rows 0 to 5, TRL's shuffle has made the order 3 5 0 4 1 2. Prompts 7 of rows 0, 2, 5 and 8 of 1, 3, 4."""
    prompts, completions, shuffled = [7, 8, 7, 8, 8, 7], [4, 2, 9, 1, 3, 6], [3, 5, 0, 4, 1, 2]
    rows = {"prompt_ids": [[0, i] for i in prompts], "prompt_mask": [[0, 1]] * 6, "completion_ids": completions}
    batch = numbered({name: torch.tensor(of_rows) for name, of_rows in rows.items()})
    micro_batches = [
        {name: of_rows[part] for name, of_rows in batch.items()} | {"number": torch.tensor(5), "none": None}
        for part in torch.tensor(shuffled).split(2)
    ]
    keep_together(micro_batches)
    # The prompt of row 0 has rank 3, and that of row 1 rank 5
    assert [batch["completion_ids"].tolist() for batch in micro_batches] == [[4, 6], [9, 1], [2, 3]]
    assert [batch["prompt_ids"][:, 1].tolist() for batch in micro_batches] == [[7, 7], [7, 8], [8, 8]]
    assert all(batch.keys() == {*rows, "number", "none"} and batch["number"] == 5 for batch in micro_batches)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_compiled_model_is_not_compiled_for_each_batch(implementation):
    trainer = make_trainer(make_model(attn_implementation=implementation))
    assert trainer.shares_prefixes
    graphs = []
    compiled = torch.compile(trainer.model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    nums = []
    for seed in range(6):
        input_ids, attention_mask, num_columns = padded(trainer, seed)
        logprobs, others = (
            trainer._get_per_token_logps_and_entropies(model, input_ids, attention_mask, num_columns)[0]
            for model in (compiled, trainer.model)
        )
        torch.testing.assert_close(logprobs, others)
        nums.append(len(graphs))
    assert nums[2] == nums[-1]


ALIBI = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)


def test_processes_decide_alike(monkeypatch, caplog):
    def in_two(function):
        return [function(), "the other process has no memory for the trial"]

    monkeypatch.setattr(forward, "in_every_process", in_two)
    assert not make_trainer().shares_prefixes
    assert "with all of its tokens: the other process has no memory" in caplog.text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: transformers.BloomForCausalLM(ALIBI), "BloomForCausalLM"),
        (lambda: make_family("Qwen3Moe"), "router_aux_loss_coef"),
        (lambda: make_family("Qwen3", "of_its_own"), "attn_implementation='of_its_own'"),
    ],
    ids=["alibi", "router", "attention"],
)
def test_it_is_off_by_itself(make, reason, caplog):
    # An attention of which nothing is known
    transformers.AttentionInterface.register("of_its_own", transformers.AttentionInterface()["sdpa"])
    trainer = make_trainer(make())
    with caplog.at_level(logging.WARNING, "fr3e_trl"):
        assert not trainer.shares_prefixes and not trainer.shares_prefixes
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("fr3e_trl")]
    assert "share_prefixes is off" in warning and reason in warning


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [8, 2048])
@pytest.mark.parametrize("family", ["Qwen2Moe", "Phimoe", "Mistral"])
def test_windows_of_the_mask_alone(family, window, dtype):
    settings = EXPERTS | {"num_local_experts": 4, "shared_expert_intermediate_size": 32}
    settings |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 2}
    model = tiny(family, **SIZES | settings | {"max_position_embeddings": 4096})
    trainer = make_trainer(model.to(dtype), router_aux_loss_coef=0.0)
    assert trainer.shares_prefixes == (family == "Mistral")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_deep_model_in_bfloat16_shares(seed):
    """Its rounding moves log-probs further than one unit in the last place, and by no other shape of a batch."""
    model = make_model(seed, num_hidden_layers=16, hidden_size=64).to(torch.bfloat16)
    assert factory.make_trainer(FR3ETrainer, model=model).shares_prefixes
