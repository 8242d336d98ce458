"""FR3ETrainer on real tiny models, through `train()`."""

import asyncio
import functools
import logging
import math
from collections import Counter, defaultdict
from statistics import fmean

import hypothesis
import pytest
import torch
from datasets import IterableDataset
from factory import CONTINUOUS, assert_same_run, digits, letters, logged, make_trainer, train, weights
from hypothesis import strategies as st
from models import make_dataset, make_model, make_tokenizer, statistics_by_hand
from peft import LoraConfig
from transformers import BitsAndBytesConfig, set_seed
from trees import rollouts_of
from trl import GRPOConfig, GRPOTrainer

from fr3e_trl import FR3ETrainer
from fr3e_trl.method.sampling import SamplingRequest

PUBLISHED = {"modulation": "exp", "value_prior_strength": 0, "negative_advantage_scale": 1, "base_selection": "mixed"}
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "per_device_eval_batch_size": 4}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.1, "loss_type": "grpo", "num_iterations": 2},
        {"scale_rewards": "batch", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
        {"eval_dataset": make_dataset(4)} | EVALUATION,
    ],
)
def test_without_exploration_it_is_grpo_trainer_exactly(settings):
    trainer = train(FR3ETrainer, num_anchors=0, max_steps=4, **settings)
    assert_same_run(trainer, train(GRPOTrainer, max_steps=4, **settings))
    # There are no trees, and a sampler
    assert trainer.trees == []
    ((sample,),) = trainer.sampler.sample([SamplingRequest([5, 6], num_samples=1, max_new_tokens=3, temperature=1.0)])
    assert 1 <= len(sample.token_ids) <= 3


def sometimes_none(completions, **kwargs):
    return [None if i % 3 == 0 else value for i, value in enumerate(letters(completions))]


SPLIT = {"beta": 0.05, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, "scale_rewards": "none"}
NORMALIZED = {"multi_objective_aggregation": "normalize_then_sum", "reward_funcs": [digits, sometimes_none]}


def tokenizer_with_template():
    tokenizer = make_tokenizer()
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>"}
    tokenizer.response_template |= {"fields": {"content": {"close_pattern": "<eos>", "content": "text"}}}
    return tokenizer


@pytest.mark.parametrize(
    "settings",
    [
        *(SPLIT | {"loss_type": loss_type} for loss_type in LOSS_TYPES),
        SPLIT | {"dataset": make_dataset(conversational=True)},
        SPLIT | {"dataset": make_dataset(conversational=True), "tokenizer": tokenizer_with_template()},
        NORMALIZED | {"loss_type": "grpo", "reward_weights": [0.7, 0.3, 1.0]},
    ],
    ids=[*LOSS_TYPES, "conversational", "with a response template", "normalized"],
)
def test_rows_without_anchors_are_grpo_trainers(settings):
    """By FR3E's own way to a batch: sampling, scoring, assembling, loss. Reward functions receive the same."""
    (ours, told), (theirs, expected) = (
        train_and_be_told(cls, **settings | off)
        for cls, off in ((FR3ETrainer, {"num_anchors": 0, "reject_degenerate_states": True}), (GRPOTrainer, {}))
    )
    assert told == expected and "solution" in told[0][3]
    # Decoding leaves special tokens out, and parsing by a template does not
    assert ("<|user|>" in str(told[0][1])) == ("tokenizer" in settings)
    names = ["loss", "grad_norm", "reward", "entropy", "completions/mean_length", "completions/clipped_ratio"]
    names.append("kl" if "beta" in settings else "rewards/letters/mean")
    torch.testing.assert_close(logged(ours, *names), logged(theirs, *names), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights(ours), weights(theirs), atol=1e-5, rtol=0)


def train_and_be_told(cls, reward_funcs=(), dataset=None, **settings):
    told = []

    def keep(completions, prompts, completion_ids, **kwargs):
        told.append((prompts, completions, completion_ids, sorted(kwargs)))
        return letters(completions)

    keep.__name__ = "letters"
    dataset = (dataset or make_dataset()).add_column("solution", list(map(str, range(16))))
    return train(cls, reward_funcs=[keep, *reward_funcs], dataset=dataset, epsilon_high=0.28, **settings), told


def test_evaluation_does_not_explore():
    settings = {"eval_dataset": make_dataset(4), "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    metrics = []
    for trainer in (make_trainer(FR3ETrainer, **settings), make_trainer(GRPOTrainer, **settings)):
        set_seed(1)
        metrics.append(trainer.evaluate())
    ours, theirs = metrics
    assert ours["eval_reward"] == theirs["eval_reward"] and ours.keys() == theirs.keys()


# What a batch consists of


def check_batch(trainer, batch, trees):
    args, pad_id = trainer.args, 0
    rows = rollouts_of(trees)
    assert len(rows) == len(batch["completion_ids"]) == args.num_generations * len(trees)
    assert all(sum(len(state.rollouts) for state in tree.states) == args.num_generations for tree in trees)
    for i, (tree, state, rollout) in enumerate(rows):
        completion = state.prefix_ids + rollout.token_ids
        length, prefix = len(completion), len(state.prefix_ids)
        assert length <= args.max_completion_length
        assert length == args.max_completion_length or completion[-1] == 1
        padding = [pad_id] * (batch["completion_ids"].shape[1] - length)
        assert batch["completion_ids"][i].tolist() == completion + padding
        assert batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist() == tree.prompt_ids
        # No token of the prefix, no padding and no rejected row is in the loss
        counted = (batch["completion_mask"][i] * batch["tool_mask"][i]).tolist()
        truncated = args.mask_truncated_completions and completion[-1] not in (1, pad_id)  # as TRL has it
        is_in_loss = not state.rejected
        if args.credit == "tree":
            teaches = any(advantage != 0 for _, _, advantage in rollout.credit)
            is_in_loss = rollout.copy_of is None and (teaches or not args.reject_degenerate_states)
        own = [int(is_in_loss and not truncated)] * (length - prefix)
        if truncated and is_in_loss and args.credit == "tree":  # tokens stay that finished rows pass through
            own = [int(weight > 0) for n, weight, _ in rollout.credit for _ in range(n)]
        assert counted == [0] * prefix + own + [0] * len(padding)
        if state.base is not None:
            assert tree.bases[state.base].token_ids[:prefix] == state.prefix_ids
    assert batch["num_items_in_batch"] == (batch["completion_mask"] * batch["tool_mask"]).sum()


def test_a_batch_of_the_published_form_is_what_was_explored():
    trainer = train(num_generations=12, per_device_train_batch_size=24, max_steps=4, **PUBLISHED)
    assert len(trainer.batches) == 4
    explored = 0
    for batch, trees in trainer.batches:
        check_batch(trainer, batch, trees)
        rows = rollouts_of(trees)
        for i, (tree, state, rollout) in enumerate(rows):
            rewards = [r.score.reward for r in state.rollouts]
            value = sum(rewards) / len(rewards)
            before = value if state.parent is None else tree.states[state.parent].value
            expected = (rollout.score.reward - value) * math.exp(before - value)
            assert state.value == value and batch["advantages"][i].item() == pytest.approx(expected, abs=1e-6)
            assert state.rejected == (len(set(rewards)) == 1)
        explored += sum(len(tree.states) - 1 for tree in trees)
        # Rewards are those of the whole completion
        texts = trainer.processing_class.batch_decode(
            [state.prefix_ids + rollout.token_ids for _, state, rollout in rows], skip_special_tokens=True
        )
        assert digits(texts) == [rollout.score.reward for _, _, rollout in rows]
    assert explored > 8


def test_what_trl_logs_of_completions_fits_the_rows():
    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(completion) for completion in completions])
        log_metric("seen", len(completions))
        return digits(completions)

    trainer = train(reward_funcs=reward, max_steps=1)
    ((_, trees),) = trainer.batches
    logs, rollouts = trainer._logs, [rollout for _, _, rollout in rollouts_of(trees)]
    means = [sum(n * a for n, _, a in r.credit) / len(r.token_ids) for r in rollouts]
    assert list(logs["advantages"]) == pytest.approx(means, abs=1e-6)
    assert list(logs["rewards"]["reward"]) == pytest.approx([rollout.score.reward for rollout in rollouts])
    assert list(logs["extra"]["length"]) == [len(completion) for completion in logs["completion"]]
    prompts = [trainer.processing_class.decode(tree.prompt_ids) for tree in trees]
    assert list(logs["prompt"]) == [prompt for prompt in prompts for _ in range(8)]
    entry = trainer.state.log_history[0]
    lengths = [len(state.prefix_ids + rollout.token_ids) for _, state, rollout in rollouts_of(trees)]
    assert entry["completions/mean_length"] == pytest.approx(sum(lengths) / 16)  # whole completions, prefix included
    assert entry["seen"] == 16 and any(r.copy_of is not None for r in rollouts)  # one call, whole groups: as by GRPO


@pytest.mark.parametrize(
    ("settings", "num_calls"),
    [
        ({}, 1),
        ({"reward_funcs": "asynchronous"}, 1),
        ({"num_generations": 4}, 1),
        ({"max_refills": 1}, None),
        ({"base_selection": "mixed"}, 2),
        ({"reuse_base": False, "num_base_trajectories": 3}, 1),
    ],
    ids=str,
)
def test_a_reward_function_sees_each_completion_once_and_whole_groups_in_one_call(settings, num_calls):
    """As by GRPOTrainer, so that it may compare them, or look at them as `rewards.view(-1, G)`: with their copies."""
    calls, size = [], settings.get("num_generations", 8)

    def compare(prompts, completions, completion_ids, **kwargs):
        calls.append((prompts, list(map(tuple, completion_ids))))
        return [len(text) - len(max(completions, key=len)) for text in completions]

    async def compare_asynchronously(**kwargs):
        return compare(**kwargs)

    settings = settings | {"reward_funcs": compare_asynchronously if "reward_funcs" in settings else compare}
    trainer = train(max_steps=2, **settings)
    rows = [row for _, trees in trainer.batches for row in rollouts_of(trees)]
    assert Counter(ids for _, of_call in calls for ids in of_call) == Counter(
        tuple(state.prefix_ids + rollout.token_ids) for _, state, rollout in rows
    )  # copies too, but not what is thrown away
    assert num_calls is None or len(calls) == 2 * num_calls
    if "base_selection" in settings:  # base trajectories are scored first
        return
    assert all(len(set(prompts[i : i + size])) == 1 for prompts, _ in calls for i in range(0, len(prompts), size))
    assert "reuse_base" in settings or any(rollout.copy_of is not None for *_, rollout in rows)
    if "max_refills" not in settings:
        ours, calls = calls, []
        train(GRPOTrainer, reward_funcs=settings["reward_funcs"], max_steps=2, num_generations=size)
        assert [prompts for prompts, _ in ours] == [prompts for prompts, _ in calls]


@pytest.mark.parametrize("settings", [{}, {"scale_rewards": "batch"}, {"max_refills": 1}], ids=str)
def test_groups_that_are_alike_count_as_such_with_copies(settings):
    """As by GRPO, where a group has one base trajectory and its copies."""
    no_anchor = {"num_generations": 4, "anchor_threshold": 100.0, "dataset": make_dataset(12), "max_steps": 3}
    alike = train(reward_funcs=lambda completions, **kwargs: [0.3] * len(completions), **no_anchor, **settings)
    assert logged(alike, "frac_reward_zero_std", "fr3e/rows/copied") == [(1.0, 0.75)] * 3


def test_what_reward_functions_log_is_a_mean_over_rows():
    """Also where they are called several times in a step, with other numbers of them."""
    calls = defaultdict(list)

    def reward(completions, log_metric, trainer_state, **kwargs):
        rewards = digits(completions)
        calls[trainer_state.global_step].append(rewards)
        log_metric("digits", fmean(rewards))
        return rewards

    trainer = train(reward_funcs=reward, **PUBLISHED, num_generations=6, num_anchors=2, per_device_train_batch_size=12)
    for entry, of_step in zip(trainer.state.log_history, calls.values(), strict=False):
        assert len({len(rewards) for rewards in of_step}) == 2
        assert entry["digits"] == pytest.approx(fmean(reward for rewards in of_step for reward in rewards))


shared_trainer = functools.cache(make_trainer)
token_lists = st.lists(st.integers(2, 40), min_size=1, max_size=20)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.lists(st.tuples(token_lists, token_lists), min_size=2, max_size=5), st.integers(1, 5))
def test_statistics_of_tokens_are_the_policys_whatever_the_batch(pairs, batch_size):
    """Neither padding nor order nor the size of micro-batches changes them, and so no anchor."""
    trainer = shared_trainer(temperature=0.6)
    trainer.args.per_device_train_batch_size = batch_size

    def statistics(pairs):
        return trainer.token_statistics(*map(list, zip(*pairs, strict=True)))

    for together in (statistics(pairs), statistics(pairs[::-1])[::-1]):
        for (prompt, completion), (logprobs, entropies) in zip(pairs, together, strict=True):
            expected, expected_entropies = statistics_by_hand(trainer.model, prompt, completion, temperature=0.6)
            torch.testing.assert_close(entropies, expected_entropies, atol=1e-5, rtol=0)
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_a_seed_decides_everything():
    first, second, other = (train(seed=seed, reward_funcs=letters) for seed in (7, 7, 8))
    assert logged(first, "loss") == logged(second, "loss") != logged(other, "loss")
    assert weights(first).equal(weights(second))


# The loss


@pytest.mark.parametrize("loss_type", [loss_type for loss_type in LOSS_TYPES if loss_type != "bnpo"])
def test_splitting_the_batch_changes_no_gradient(loss_type):
    """Micro-batches lose different numbers of rows, and still add up. (bnpo is a mean by micro-batch.)"""
    runs = []
    for split in (1, 4):
        settings = {"per_device_train_batch_size": 16 // split, "gradient_accumulation_steps": split, "beta": 0.1}
        # The reference model is the initial one: from the second step on there is a KL term
        runs.append(train(loss_type=loss_type, max_steps=3, num_iterations=3, **settings))
    whole, parts = runs
    assert not all(batch["in_loss"].all() for batch, _ in whole.batches)
    torch.testing.assert_close(logged(parts, "loss"), logged(whole, "loss"), atol=2e-5, rtol=1e-3)
    torch.testing.assert_close(logged(parts, "grad_norm"), logged(whole, "grad_norm"), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_that_teaches_nothing(loss_type):
    calls = []

    def same_at_first(completions, **kwargs):
        calls.append(len(completions))
        return [1.0] * len(completions) if len(calls) <= 1 else letters(completions)

    settings = {"loss_type": loss_type, "weight_decay": 0.0, "max_steps": 2, "beta": 0.1, "entropy_coef": 0.1}
    trainer = make_trainer(reward_funcs=same_at_first, **settings)
    before = weights(trainer)
    set_seed(1)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert first["loss"] == 0 and first["grad_norm"] == 0 and first["fr3e/states/rejected"] == 1 and first["kl"] == 0
    assert "entropy" in first  # callbacks find what GRPOTrainer logs
    assert loss_type in ("cispo", "sapo", "vespo") or "clip_ratio/region_mean" in first
    assert math.isfinite(second["loss"]) and second["grad_norm"] > 0
    assert weights(trainer).isfinite().all() and not weights(trainer).equal(before)


# Every way to train


def squared(completions, **kwargs):
    return [len(completion) ** 0.5 for completion in completions]


async def asynchronous(completions, **kwargs):
    await asyncio.sleep(0)
    return letters(completions)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_generation": 4, "per_device_train_batch_size": 8, "max_steps": 4},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 4},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 8, "steps_per_generation": 1},
        {"mask_truncated_completions": True, "loss_type": "grpo", "max_completion_length": 6},
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
        *({"scale_rewards": "group"}, {"scale_rewards": "batch"}),
        {"reward_funcs": [digits, squared], "reward_weights": [1.0, 0.1]},
        {"reward_funcs": [sometimes_none, squared], "reward_weights": [1.0, 0.0]},
        {"reward_funcs": [asynchronous, digits]},
        {"dataset": IterableDataset.from_generator(lambda: iter(make_dataset()))},
        {"gradient_checkpointing": False},
        {"temperature": 1.5, "num_iterations": 2, "max_steps": 4},
        *({"reuse_base": False}, {"modulation": "sharpened"}),
        *({"anchor_score": "surprisal"}, {"anchor_score": "random", "anchor_min_gap": 3}),
        {"modulation": "none", "reject_degenerate_states": False},
        PUBLISHED | {"reward_funcs": digits},
        {"num_anchors": 7, "value_prior_strength": 1.0},
        {"num_base_trajectories": 4, "num_anchors": 2, "base_selection": "mixed"},
        *({"num_anchors": 0, "value_prior_strength": 2.0}, {"max_completion_length": 1}),
        {"loss_type": "luspo", "num_generations": 4, "mask_truncated_completions": True},
        {"num_generations": 2, "credit": "rollout"},
        {"model": make_model(max_position_embeddings=128), "eval_dataset": make_dataset(6)} | CONTINUOUS | EVALUATION,
    ],
    ids=", ".join,  # of the names of the settings; pytest numbers those that are the same
)
def test_every_mode_trains(settings):
    trainer = make_trainer(**{"reward_funcs": letters, "max_steps": 3} | settings)  # the first has no threshold yet
    before = weights(trainer)
    set_seed(1)
    trainer.train()
    losses = logged(trainer, "loss", "grad_norm")
    assert len(losses) == trainer.args.max_steps
    assert all(math.isfinite(value) for entry in losses for value in entry)
    assert not weights(trainer).equal(before) and weights(trainer).isfinite().all()
    for batch, trees in trainer.batches:
        check_batch(trainer, batch, trees)
    micro_batches = trainer.args.max_steps * trainer.args.gradient_accumulation_steps
    num_uses = trainer.args.steps_per_generation * trainer.args.num_iterations
    assert len(trainer.batches) == math.ceil(micro_batches / num_uses)
    # Evaluation does not explore. With continuous batching TRL leaves the model in training mode for it
    is_evaluated = "eval_dataset" in settings
    assert sum("eval_reward" in entry for entry in trainer.state.log_history) == 3 * is_evaluated
    assert not is_evaluated or any(len(tree.states) > 1 for _, trees in trainer.batches for tree in trees)


# Adapters

LORA = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")


def test_qlora(tmp_path):
    make_model(hidden_size=64, head_dim=32, intermediate_size=128).save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    settings = {"peft_config": LORA, "learning_rate": 1e-2, "gradient_checkpointing": True}
    trainer = make_trainer(model=str(tmp_path), quantization_config=nf4, **settings)
    layer = trainer.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    assert type(layer).__name__ == "Linear4bit" and layer.weight.quant_type == "nf4"
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    set_seed(1)
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not p.detach().equal(before[name])}
    assert moved and all("lora" in name for name in moved)
    check_batch(trainer, *trainer.batches[0])


@pytest.mark.parametrize("settings", [{}, {"peft_config": LORA}, {"num_anchors": 0}], ids=["all", "LoRA", "GRPO"])
def test_forward_passes_call_no_more_hooks_as_steps_go_by(settings):
    """With checkpointing, transformers 5.23 adds one after each round of generation, and TRL's trainer removes none."""

    def num_hooks(max_steps):
        trainer = train(gradient_checkpointing=True, max_steps=max_steps, **settings)
        return sum(len(module._forward_hooks) for module in trainer.model.modules())

    assert num_hooks(2) == num_hooks(6) <= 6


def test_a_grpo_config_is_accepted(caplog):
    with caplog.at_level(logging.WARNING, logger="fr3e_trl"):
        trainer = make_trainer(config=GRPOConfig, beta=0.02)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("fr3e_trl")]
    told = "GRPOConfig: scale_rewards='none' and epsilon_high=0.28 in place of GRPO's defaults."
    assert lines == [f"{told} Use FR3EConfig to set them."]
    args = trainer.args
    assert (args.num_anchors, args.credit, args.value_tracker, args.beta) == (6, "tree", True, 0.02)
    assert (trainer.scale_rewards, trainer.epsilon_high) == ("none", 0.28)
    trainer.train()
    check_batch(trainer, *trainer.batches[0])


def normalized(rewards):
    """Over the rows of a prompt, (P, G, ...)."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


@pytest.mark.parametrize("each", [False, True], ids=["their sum", "each reward"])
def test_normalized_rewards_of_rows_that_cannot_be_split(each):
    """By hand: of the 3 rows of a prompt, each is compared with the chain before it, from 0."""
    settings = {"num_generations": 3, "per_device_train_batch_size": 6, "reward_weights": [0.5, 2.0], "max_steps": 3}
    settings |= {"multi_objective_aggregation": "normalize_then_sum"} if each else {"scale_rewards": "group"}
    trainer, num_branched = train(reward_funcs=[letters, squared], **settings), 0
    for batch, trees in trainer.batches:
        check_batch(trainer, batch, trees)
        rewards = torch.tensor([rollout.score.rewards for _, _, rollout in rollouts_of(trees)]).view(2, 3, 2)
        rewards = (normalized(rewards) if each else rewards) @ torch.tensor([0.5, 2.0])
        rewards = rewards / (rewards.std() + 1e-4) if each else normalized(rewards)
        for i, (tree, (first, second, third)) in enumerate(zip(trees, rewards.tolist(), strict=True)):
            if len(tree.states) == 3:
                shrunk = first / 5  # (4 * 0 + first) / (4 + 1)
                expected = [first, second - shrunk, third - (4 * shrunk + second) / 5]
                assert batch["advantages"][3 * i : 3 * i + 3].tolist() == pytest.approx(expected, abs=1e-4)
                num_branched += 1
    assert num_branched > 1


# Bad input


@pytest.mark.parametrize(
    ("dataset", "error"),
    [
        (make_dataset().select([]), "train_dataset is empty"),
        (IterableDataset.from_generator(lambda: iter([])), "train_dataset is empty"),
        (make_dataset(1), "1 examples, and one generation batch takes 2"),
    ],
    ids=["empty", "empty stream", "too small"],
)
def test_data_that_cannot_be_trained_on_is_refused(dataset, error):
    with pytest.raises(ValueError, match=error):
        train(dataset=dataset)


@pytest.mark.parametrize(
    "settings", [{"mask_truncated_completions": True}, {"loss_type": "grpo", "num_generations": 4}], ids=str
)
def test_the_value_at_the_prompt_is_that_of_whatever_was_sampled_from_it(settings):
    """Cut off or not. A short base trajectory, whose missing branches begin at the prompt, counts as much as others."""
    settings = settings | {"max_completion_length": 12, "max_steps": 2}
    trainer = train(
        reward_funcs=lambda completion_ids, **_: [float(len(ids) < 12) for ids in completion_ids], **settings
    )
    of_logs = [entry["fr3e/value/S0"] for entry in trainer.state.log_history if "fr3e/value/S0" in entry]
    for (_, trees), value in zip(trainer.batches, of_logs, strict=True):
        lengths = [[base.length for base in tree.bases] for tree in trees]
        assert 0 < value < 1
        assert value == pytest.approx(fmean(fmean(length < 12 for length in of_tree) for of_tree in lengths))


def test_a_stop_token_of_ones_own_ends_a_completion():
    """Such a completion is not cut off: rows are learned from, and TRL's metric does not count it."""
    stops = list(range(5, 30))
    settings = {"generation_kwargs": {"eos_token_id": [1, *stops]}, "reward_funcs": letters}
    trainer = train(**settings, mask_truncated_completions=True)
    assert trainer.eos_token_ids == [1, *stops]
    for entry in trainer.state.log_history[:-1]:
        assert entry["completions/clipped_ratio"] < 0.5 and entry["fr3e/rows/informative"] > 0
