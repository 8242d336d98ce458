"""Old log-probs, with an engine in vLLM's place that samples as it does, and is off by a known error."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import factory
import pytest
import torch
from models import TINY, make_model
from peft import LoraConfig
from test_logps import MODELS, Logits, tiny
from tool_policy import MoodyWalk
from transformers import set_seed

from fr3e_trl import FR3ETrainer, fr3e_trainer, logps, old_logps

TRUNCATED = {"min_p": 0.05, "top_k": 12, "top_p": 0.9}
ERROR = 0.02  # of the engine's log-probs, in nats a token


class Engine:
    """In vLLM's place: samples with the trainer's model, and gives log-probs of what it samples from, written anew."""

    enable_sleep_mode = False

    def sync_weights(self):
        """It needs none."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.sampler = trainer.sampler

    def sample(self, requests):
        requests = [replace(request, branching=None) for request in requests]  # whose log-probs are the sampler's
        return [
            [self.with_logprobs(request, sample) for sample in samples]
            for request, samples in zip(requests, self.sampler.sample(requests), strict=True)
        ]

    def with_logprobs(self, request, sample):
        prefix, tokens = list(map(int, request.prefix_ids)), list(map(int, sample.token_ids))
        truncation = self.trainer.min_p or 0.0, self.trainer.top_k, self.trainer.top_p
        of_tokens = logprobs(self.trainer, prefix, tokens, request.temperature, *truncation)
        return replace(sample, logprobs=[x + ERROR for x in of_tokens])


@torch.no_grad()
def logprobs(trainer, prefix, tokens, temperature, min_p=0.0, top_k=0, top_p=1.0) -> list[float]:
    """Of each token, with its own logits of the whole model: what a naive reading of the definition gives."""
    ids = torch.tensor([prefix + tokens], device=trainer.model.device)
    logits = trainer.model(ids).logits[0, len(prefix) - 1 : -1].cpu().double()
    found = []
    for of_position, token in zip((logits / temperature).softmax(-1), tokens, strict=True):
        likely = of_position.argsort(descending=True).tolist()
        least, probabilities = (min_p * of_position.max()).item(), of_position.tolist()
        kept = [i for i in likely if probabilities[i] >= least]
        kept = kept[: top_k or None]
        mass = of_position[kept].cumsum(0) / of_position[kept].sum()
        kept = kept[: int((mass < top_p).sum()) + 1]
        found.append((of_position[token] / of_position[[*{*kept, token}]].sum()).log().item())
    return found


def make_trainer(model=None, **settings):
    defaults = {
        "reward_funcs": lambda completions, **kwargs: [float(sum(map(ord, text)) % 2) for text in completions],
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 1,
        "learning_rate": 0.0,  # the model stays the one that sampled
        "vllm_importance_sampling_mode": "token_truncate",
    }
    trainer = factory.make_trainer(model=model or make_model(), **defaults | settings)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.sampler = trainer.vllm_generation = Engine(trainer)
    return trainer


def rows_in_loss(trainer):
    """The batch's rows in the loss: their place, what they continue, their continuation and where it lies."""
    batch, _ = trainer.batches[0]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    for i in batch["in_loss"].nonzero().flatten().tolist():
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        completion = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
        start = int(mask[i].int().argmax())
        assert int(mask[i].sum()) == len(completion) - start
        yield i, prompt + completion[:start], completion[start:], mask[i]


DIFFERENCES = ["sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"]
LORA = LoraConfig(r=4, target_modules="all-linear")


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"temperature": 0.8}, {"min_p": 0.05}, {"top_k": 6}, {"top_p": 0.8}, TRUNCATED),
        TRUNCATED | {"temperature": 0.8},
        TRUNCATED | {"peft_config": LORA, "beta": 0.1},
        *[TRUNCATED | {"temperature": 1.5, "model": name} for name in ("Gemma2", "Granite", "Cohere")],
    ],
    ids=lambda settings: ", ".join(f"{key}={value}" for key, value in settings.items() if key != "peft_config"),
)
def test_only_the_engines_error_is_corrected(settings):
    settings = dict(settings)
    name = settings.pop("model", None)
    trainer = make_trainer(tiny(name, **MODELS[name]) if name else None, **settings)
    set_seed(1)
    trainer.train()
    batch, _ = trainer.batches[0]
    num_rows = 0
    for i, prefix, tokens, mask in rows_in_loss(trainer):
        old = torch.tensor(logprobs(trainer, prefix, tokens, trainer.temperature))
        torch.testing.assert_close(batch["old_per_token_logps"][i][mask], old, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(batch["sampling_per_token_logps"][i][mask], old + ERROR, atol=1e-5, rtol=1e-5)
        expected = torch.full((len(tokens),), -ERROR).exp()
        torch.testing.assert_close(batch["importance_sampling_ratio"][i][mask], expected, atol=1e-5, rtol=1e-5)
        num_rows += 1
    assert num_rows > 0
    ((mean, most),) = factory.logged(trainer, *DIFFERENCES)
    assert mean == pytest.approx(ERROR, abs=1e-5) and most == pytest.approx(ERROR, abs=1e-5)


@pytest.mark.parametrize(("settings", "again"), [({}, False), (TRUNCATED, True)])
def test_how_often_a_row_is_passed_forward(settings, again, monkeypatch):
    # States of two rollouts, of which some are rejected
    states = {"num_anchors": 3, "value_prior_strength": 0.0, "credit": "rollout"}
    trainer = make_trainer(**states, share_prefixes=False, **settings)
    passed = Counter()

    def count(module, args, kwargs):
        passed.update(map(tuple, kwargs["input_ids"].tolist()))

    def grow_trees(prompts):
        rollouts = FR3ETrainer._grow_trees(trainer, prompts)
        trainer.model.model.register_forward_pre_hook(count, with_kwargs=True)
        return rollouts

    def watched(inputs):
        batch = FR3ETrainer._generate_and_score_completions(trainer, inputs)
        trainer.model.model._forward_pre_hooks.clear()
        trainer.batches.append((batch, None))
        return batch

    monkeypatch.setattr(trainer, "_grow_trees", grow_trees)
    monkeypatch.setattr(trainer, "_generate_and_score_completions", watched)
    set_seed(2)
    trainer.train()
    batch, _ = trainer.batches[0]
    rows, in_loss = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1), batch["in_loss"]
    assert in_loss.any() and not in_loss.all()
    assert passed == Counter(map(tuple, rows.tolist())) + Counter(map(tuple, rows[in_loss & again].tolist()))


def test_rows_left_out_are_not_passed_forward():
    trainer = make_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=8, share_prefixes=False)
    input_ids = torch.randint(2, 40, (6, 9))
    wanted = [False, True, True, False, True, True]
    num_passed = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: num_passed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = torch.full((6, 5), 7.0)
    old_logps.fill_in(trainer, found, input_ids, torch.ones_like(input_ids), wanted)
    assert num_passed == [2, 2]
    for of_row, ids, is_wanted in zip(found, input_ids.tolist(), wanted, strict=True):
        expected = logprobs(trainer, ids[:4], ids[4:], 1.0) if is_wanted else [7.0] * 5
        torch.testing.assert_close(of_row, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_logits_of_a_truncated_distribution_are_few_at_a_time(monkeypatch):
    """A vocabulary of 5,000 and 4 rows of 100 tokens are 2 million logits; no more than 6 times 20,000 exist."""
    monkeypatch.setattr(logps, "MAX_LOGITS", 20_000)
    trainer = make_trainer(make_model(vocab_size=5_000), **TRUNCATED)
    input_ids = torch.randint(2, 5_000, (4, 104))
    found = torch.zeros(4, 100)
    assert trainer.shares_prefixes  # by a trial, which has logits of its own
    with Logits(5_000, trainer.model.parameters()) as logits:
        truncation = old_logps._truncation(trainer)
        old_logps.fill_in(trainer, found, input_ids, torch.ones_like(input_ids), [True] * 4, truncation)
    assert 20_000 <= logits.most <= 6 * 20_000
    for of_row, ids in zip(found, input_ids.tolist(), strict=True):
        expected = torch.tensor(logprobs(trainer, ids[:4], ids[4:], 1.0, **TRUNCATED))
        torch.testing.assert_close(of_row, expected, atol=1e-5, rtol=1e-5)


def test_another_model_is_refused():
    trainer = make_trainer(**TRUNCATED)
    with_logprobs = trainer.sampler.with_logprobs

    def far(request, sample):
        return replace(sample, logprobs=[x + 1.5 for x in with_logprobs(request, sample).logprobs])

    trainer.sampler.with_logprobs = far
    with pytest.raises(RuntimeError, match=r"1\.52 nats per token away"):
        trainer.train()


def test_rollouts_that_are_given_up_have_none_to_correct():
    settings = {"environment_factory": MoodyWalk, "replay_mismatch": "skip", "anchor_threshold": None, "max_steps": 1}
    settings |= {"learning_rate": 0.0, "vllm_importance_sampling_mode": "token_truncate"}
    settings |= {"reward_funcs": lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))]}
    trainer = factory.make_tool_trainer(**settings)
    engine = Engine(trainer)
    engine.sampler = trainer.sampler.sampler
    context = SimpleNamespace(max_model_len=TINY["max_position_embeddings"])
    engine.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=context))
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.sampler.sampler = trainer.vllm_generation = engine
    trainer.train()
    assert all(0 < skipped < 1 for (skipped,) in factory.logged(trainer, "fr3e/tools/skipped"))
    ((batch, _),) = trainer.batches
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert mask.any()
    ratios = batch["importance_sampling_ratio"][mask]
    torch.testing.assert_close(ratios, torch.full_like(ratios, math.exp(-ERROR)), atol=1e-4, rtol=0)


def test_rows_left_over_that_are_dropped_leave_the_loss(monkeypatch):
    settings = {"max_refills": 2, "value_prior_strength": 0.0, "num_generations": 8, "num_base_trajectories": 2}
    settings |= {"max_steps": 4, "learning_rate": 3e-3, "max_completion_length": 12, "num_anchors": 3}
    settings |= {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.5}
    trainer = make_trainer(**settings)
    trainer.sampler.with_logprobs = lambda request, sample: sample
    dropped = []
    mask_dropped = fr3e_trainer.mask_dropped

    def record(of_trainer, batch, rows):
        is_dropped = (batch["importance_sampling_ratio"] == 0).all(1).tolist()
        dropped.append([i for i, row in enumerate(rows) if is_dropped[i] and row.is_left_over])
        return mask_dropped(of_trainer, batch, rows)

    monkeypatch.setattr(fr3e_trainer, "mask_dropped", record)
    set_seed(1)
    trainer.train()
    assert any(dropped)
    for (batch, _), of_step in zip(trainer.batches, dropped, strict=True):
        mask = batch["completion_mask"] * batch["tool_mask"]
        assert not batch["in_loss"][of_step].any() and not mask[of_step].any()
