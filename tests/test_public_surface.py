"""
What a script may do to a GRPOTrainer, done to FR3ETrainer: it is the same, or honoured at the next step, or refused by
an error that names it. Each runs for three steps or more, unless it is refused before.
"""

import types
from decimal import Decimal
from typing import ClassVar

import pytest
import torch
from factory import CONTINUOUS, letters, logged, make_trainer, steps_of, train, weights
from models import make_dataset, make_model
from recorder import Recorder
from transformers import GenerationConfig, TrainerCallback, set_seed
from transformers.trainer_callback import CallbackHandler
from trees import rollouts_of
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from fr3e_trl import FR3ETrainer
from fr3e_trl.samplers import make_sampler


class AtStep(TrainerCallback):
    """Changes something before a step: by default the third."""

    def __init__(self, change, step=2):
        self.change, self.step = change, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.change(self.trainer)


def changed(change, cls=Recorder, before=2, **settings):
    """A trainer that has trained for four steps, and was changed before the third, or another."""
    callback = AtStep(change, before)
    defaults = {"reward_funcs": letters, "max_steps": 4, "callbacks": [callback]}
    callback.trainer = make_trainer(cls, **defaults | settings)
    set_seed(1)
    callback.trainer.train()
    return callback.trainer


def chain(lists):
    return [item for of_list in lists for item in of_list]


def completions(trainer):
    """Completions of each prompt, of the first two steps and of the last two."""
    of_batches = [
        [[(*s.prefix_ids, *map(int, r.token_ids)) for _, s, r in rollouts_of([tree])] for tree in trees]
        for _, trees in trainer.batches
    ]
    return chain(of_batches[:2]), chain(of_batches[2:])


class Judge:
    __name__ = "judge"

    def __init__(self):
        self.calls = 0

    def __call__(self, completions, **kwargs):
        self.calls += 1
        return [Decimal(repr(reward)) for reward in letters(completions)]


# Attributes


def set_config(**values):
    return lambda trainer: [setattr(trainer.generation_config, name, value) for name, value in values.items()]


def set_trainer(**values):
    return lambda trainer: [setattr(trainer, name, value) for name, value in values.items()]


def is_shorter(before, after):
    return max(map(len, chain(before))) > 3 == max(map(len, chain(after)))


def is_longer(before, after):
    return max(map(len, chain(before))) == 12 < max(map(len, chain(after))) <= 20


def is_greedy(before, after):
    return all(len(set(rows)) > 1 for rows in before) and all(len(set(rows)) == 1 for rows in after)


STOPS = list(range(5, 30))


def leaves_out(before, after, end=None):
    first, second = ([token in STOPS for row in chain(rows) for token in row[:end]] for rows in (before, after))
    return any(first) and not any(second)


def stops(before, after):
    return leaves_out(before, after, end=-1)


def repeats_less(before, after):
    first, second = (sum(len(row) - len(set(row)) for row in chain(rows)) for rows in (before, after))
    return second < first / 2


def new_config(**values):
    return lambda trainer: setattr(trainer, "generation_config", GenerationConfig(**values))


def both(change, and_then):
    return lambda trainer: [change(trainer), and_then(trainer)]


SAMPLED = {"do_sample": True, "eos_token_id": 1, "pad_token_id": 0}
GREEDY = {"temperature": 1e-3, "top_k": 1, "top_p": 1e-6, "min_p": 1.0}
IN_EITHER = {name: (value, is_greedy) for name, value in GREEDY.items()} | {"repetition_penalty": (100.0, repeats_less)}
SAMPLING = {
    **{name: (set_trainer(**{name: value}), check) for name, (value, check) in IN_EITHER.items()},
    **{f"generation_config.{name}": (set_config(**{name: value}), check) for name, (value, check) in IN_EITHER.items()},
    "max_completion_length": (set_trainer(max_completion_length=3), is_shorter),
    "max_completion_length, longer": (set_trainer(max_completion_length=20), is_longer),
    "eos_token_ids": (set_trainer(eos_token_ids=[1, *STOPS]), stops),
    "generation_config.max_new_tokens": (set_config(max_new_tokens=3), is_shorter),
    "generation_config.eos_token_id": (set_config(eos_token_id=[1, *STOPS]), stops),
    "generation_config.suppress_tokens": (set_config(suppress_tokens=STOPS), leaves_out),
    "generation_config": (new_config(max_new_tokens=3), is_shorter),
    "generation_config, all of it": (new_config(max_new_tokens=20, **SAMPLED), is_longer),
    "both places alike": (both(set_trainer(max_completion_length=3), set_config(max_new_tokens=3)), is_shorter),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_how_completions_are_sampled_is_honoured_at_the_next_step(name):
    change, is_honoured = SAMPLING[name]
    trainer = changed(change)
    assert len(trainer.batches) == 4 and is_honoured(*completions(trainer))


BACKENDS = {"refill": {"max_refills": 1}, "sampler=": {"sampler": make_sampler}, "continuous batching": CONTINUOUS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["max_completion_length", "generation_config.suppress_tokens", "generation_config.eos_token_id"]
)
def test_other_ways_to_sample_honour_it_too(backend, name):
    change, is_honoured = SAMPLING[name]
    settings = BACKENDS[backend] | {"model": make_model(max_position_embeddings=128)}
    assert is_honoured(*completions(changed(change, **settings)))


@pytest.mark.parametrize("name", ["generation_config.max_new_tokens", "max_completion_length", "temperature"])
def test_evaluation_honours_it_too(name):
    trainer = changed(SAMPLING[name][0], num_generations_eval=8, per_device_eval_batch_size=8)
    seen = []
    trainer.reward_funcs[0] = lambda completions, completion_ids, **kwargs: (
        seen.append(completion_ids) or letters(completions)
    )
    trainer.evaluate(make_dataset(1))
    (rows,) = seen
    assert len(set(map(tuple, rows))) == 1 if name == "temperature" else max(map(len, rows)) <= 3


@pytest.mark.parametrize("settings", [{}, {"share_prefixes": True}, {"beta": 0.1}, {"loss_type": "grpo"}], ids=str)
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_a_temperature_is_that_of_samples_and_loss(settings, temperature):
    """With a rate of 0 the ratio stays 1. A batch in use keeps its own, and that of `trainer.args` changes nothing."""
    change = both(set_trainer(temperature=temperature), lambda trainer: setattr(trainer.args, "temperature", 9.0))
    trainer = changed(change, **{"learning_rate": 0.0, "num_iterations": 2, "max_steps": 6} | settings)
    logs = steps_of(trainer)
    assert len(trainer.batches) == 3 and all(entry["clip_ratio/region_mean"] == 0 for entry in logs)
    entropies = [entry["entropy"] for entry in logs]
    first, last = sum(entropies[:2]), sum(entropies[2:4])
    assert last < first if temperature < 1 else last > first
    for _, trees in trainer.batches[1:]:
        rows = [(t.prompt_ids + s.prefix_ids, r) for t, s, r in rollouts_of(trees) if r.copy_of is None]
        statistics = trainer.token_statistics([prefix for prefix, _ in rows], [r.token_ids for _, r in rows])
        for (_, rollout), (logprobs, _) in zip(rows, statistics, strict=True):
            torch.testing.assert_close(torch.tensor(rollout.logprobs), logprobs, atol=1e-4, rtol=0)


def test_a_temperature_that_changes_amid_a_batch_holds_from_the_next_one():
    trainer = changed(set_trainer(temperature=0.3), before=1, learning_rate=0.0, num_iterations=2)
    first, second, third, _ = steps_of(trainer)
    assert first["entropy"] == pytest.approx(second["entropy"]) and third["entropy"] < second["entropy"] / 2
    assert second["clip_ratio/region_mean"] == third["clip_ratio/region_mean"] == 0
    # In a checkpoint it is kept
    settings = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
    whole = changed(set_trainer(temperature=0.3), **settings)
    resumed = train(reward_funcs=letters, max_steps=4, resume=f"{whole.args.output_dir}/checkpoint-3", **settings)
    assert weights(resumed).equal(weights(whole))
    # A trainer that was made with it, and one that was given it, make the same updates
    made = train(reward_funcs=letters, max_steps=3, temperature=0.7)
    given = changed(set_trainer(temperature=0.7), before=0, max_steps=3)
    torch.testing.assert_close(weights(given), weights(made), atol=1e-5, rtol=1e-4)


REFUSED = {
    "num_generations": set_trainer(num_generations=4),
    "num_iterations": set_trainer(num_iterations=2),
    "scale_rewards": set_trainer(scale_rewards="group"),
    "loss_type": set_trainer(loss_type="grpo"),
    "multi_objective_aggregation": set_trainer(multi_objective_aggregation="normalize_then_sum"),
    "importance_sampling_level": set_trainer(importance_sampling_level="sequence"),
    "temperature=-1": set_trainer(temperature=-1),
    "max_completion_length=0": set_trainer(max_completion_length=0),
    r"eos_token_ids=\[\]": set_trainer(eos_token_ids=[]),
    "generation_config.do_sample=False": set_config(do_sample=False),
    "generation_config.num_beams=2": set_config(num_beams=2),
    "generation_config.min_length=4": set_config(min_length=4),
    "generation_config.stop_strings": set_config(stop_strings=["a"]),
    "generation_config.num_return_sequences=2": set_config(num_return_sequences=2),
    "generation_config.prompt_lookup_num_tokens=2": set_config(prompt_lookup_num_tokens=2),
    "max_completion_length=3 and trainer.generation_config.max_new_tokens=4 differ": both(
        set_trainer(max_completion_length=3), set_config(max_new_tokens=4)
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_honoured_is_refused_at_the_next_step(named):
    trainers = []
    with pytest.raises(ValueError, match=named):
        changed(lambda trainer: trainers.append(trainer) or REFUSED[named](trainer))
    assert len(trainers[0].batches) == 2  # two steps were trained before


def test_what_plain_grpo_takes_is_left_to_it():
    """With num_anchors=0: as GRPOTrainer, for which trainer.temperature and the like change nothing."""
    change = set_trainer(temperature=0.3, max_completion_length=3, scale_rewards="batch")
    theirs, ours = changed(change, GRPOTrainer), changed(change, FR3ETrainer, num_anchors=0)
    assert logged(ours, "loss", "reward") == logged(theirs, "loss", "reward")


def test_reward_functions_are_the_users_own():
    judge, sevens = Judge(), lambda completions, **kwargs: [7.0] * len(completions)
    replace = lambda trainer: trainer.reward_funcs.__setitem__(1, sevens)  # noqa: E731
    trainer = changed(both(lambda trainer: setattr(judge, "calls", 100), replace), reward_funcs=[judge, letters])
    assert trainer.reward_funcs == [judge, sevens] and judge.calls == 102 and judge.__name__ == "judge"
    rewards = [entry["rewards/letters/mean"] for entry in steps_of(trainer)]
    assert 7.0 not in rewards[:2] and rewards[2:] == [7.0, 7.0]


@pytest.mark.parametrize(
    "settings", [{}, {"multi_objective_aggregation": "normalize_then_sum", "num_generations": 4}], ids=str
)
def test_reward_weights_are_honoured(settings):
    trainer = changed(lambda trainer: trainer.reward_weights.zero_(), **settings)
    advantages = [batch["advantages"].abs().max().item() for batch, _ in trainer.batches]
    assert min(advantages[:2]) > 0
    if not settings:
        assert max(rollout.score.reward for _, _, rollout in rollouts_of(trainer.batches[3][1])) == 0
    else:
        assert max(advantages[2:]) < 1e-3


@pytest.mark.parametrize("name", ["epsilon_low", "epsilon_high"])
def test_clipping_is_honoured(name):
    trainer = changed(lambda trainer: setattr(trainer, name, -0.5))
    clipped = [entry["clip_ratio/region_mean"] for entry in steps_of(trainer)]
    assert max(clipped[:2]) == 0 and min(clipped[2:]) > 0


def test_masking_of_truncated_completions_is_honoured():
    trainer = changed(set_trainer(mask_truncated_completions=True), credit="rollout", max_completion_length=4)
    for i, (batch, trees) in enumerate(trainer.batches):
        is_cut = torch.tensor([int(rollout.token_ids[-1]) not in (0, 1) for _, _, rollout in rollouts_of(trees)])
        assert is_cut.any() and bool((batch["tool_mask"] * batch["completion_mask"])[is_cut].any()) == (i < 2)


# Callbacks and methods of a subclass


class Events(TrainerCallback):
    def __init__(self):
        self.seen = []


for _name in (name for name in dir(CallbackHandler) if name.startswith("on_") and name != "on_log"):
    setattr(Events, _name, lambda self, args, state, *a, _name=_name, **k: self.seen.append((_name, state.global_step)))


class OwnMethods(Recorder):
    """Overrides by super(), as a subclass of GRPOTrainer does."""

    called: ClassVar = set()


WRAPPED = (
    *("compute_loss", "_compute_loss", "training_step", "_prepare_inputs", "_generate_and_score_completions"),
    *("_get_per_token_logps_and_entropies", "log", "get_train_dataloader", "_get_train_sampler", "create_optimizer"),
    *("create_scheduler", "_tokenize_prompts", "get_batch_samples", "_save_checkpoint", "save_model", "evaluate"),
    *("prediction_step", "evaluation_loop", "get_eval_dataloader", "_get_eval_sampler"),
)


def _wrap(name):
    def method(self, *args, **kwargs):
        self.called.add(name)
        return getattr(super(OwnMethods, self), name)(*args, **kwargs)

    method.__code__ = method.__code__.replace(co_names=(*method.__code__.co_names, name))  # it calls the method by name
    return method


for _name in WRAPPED:
    setattr(OwnMethods, _name, _wrap(_name))


def test_callbacks_and_methods_that_call_super():
    settings = {"reward_funcs": letters, "max_steps": 3, "eval_dataset": make_dataset(4)}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2}
    events = [Events() for _ in range(3)]
    classes = GRPOTrainer, Recorder, OwnMethods
    _, plain, own = (train(cls, callbacks=[seen], **settings) for cls, seen in zip(classes, events, strict=True))
    assert events[0].seen == events[1].seen == events[2].seen
    assert {("on_save", 2), ("on_evaluate", 2), ("on_train_end", 3)} <= set(events[0].seen)
    assert own.called == set(WRAPPED)
    assert weights(own).equal(weights(plain))


@pytest.mark.parametrize(
    ("name", "told"),
    [("_generate", "sampler="), ("_generate_single_turn", "sampler="), ("_calculate_rewards", "reward_funcs")],
)
def test_methods_that_are_not_called_for_trees_are_refused(name, told, monkeypatch):
    class Own(FR3ETrainer):
        pass

    class Lower(Own):
        pass

    method = lambda self, *args, **kwargs: None  # noqa: E731
    setattr(Own, name, method)
    with pytest.raises(NotImplementedError, match=f"Own overrides {name}.*{told}.*num_anchors=0"):
        make_trainer(Lower)
    make_trainer(Lower, num_anchors=0)
    trainer = make_trainer()
    setattr(trainer, name, method)
    with pytest.raises(NotImplementedError, match=f"trainer overrides {name}.*{told}.*num_anchors=0"):
        trainer.train()
    with monkeypatch.context() as patched:
        patched.setattr(GRPOTrainer, name, method)
        patched.setattr("fr3e_trl.fr3e_trainer.check_trl", lambda: None)  # which would ask for TRL's signature
        with pytest.raises(NotImplementedError, match=f"GRPOTrainer overrides {name}.*{told}"):
            make_trainer()


def leaving_out(column):
    class Rebuilt(Recorder):
        """Returns another dict."""

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return {name: value for name, value in batch.items() if name != column}

    return Rebuilt


def test_a_subclass_returns_another_batch():
    settings = {"share_prefixes": True, "steps_per_generation": 2, "max_steps": 4}
    trainer = train(leaving_out("row"), reward_funcs=letters, **settings)
    assert trainer.shares_prefixes and len(trainer.batches) == 2
    with pytest.raises(ValueError, match=r"Rebuilt._generate_and_score_completions.*'tool_mask'"):
        train(leaving_out("tool_mask"))


def test_trl_s_own_step_grows_no_trees():
    class Pasted(FR3ETrainer):
        _generate_and_score_completions = GRPOTrainer._generate_and_score_completions

    with pytest.raises(NotImplementedError, match=r"Pasted\._generate_and_score_completions does not call super\(\)"):
        train(Pasted)


class ByRow(Recorder):
    """Shapes advantages of whole rows."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.shaped = torch.linspace(-1, 1, len(batch["completion_ids"]))
        return batch | {"advantages": self.shaped}

    def _compute_loss(self, model, inputs):
        self.in_loss = inputs["advantages"]
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("settings", [{}, {"credit": "rollout"}, {"loss_type": "grpo"}], ids=str)
def test_advantages_of_rows_that_come_back_are_each_rows(settings, caplog):
    trainer = train(ByRow, reward_funcs=letters, max_steps=3, **settings)
    assert sorted(trainer.in_loss.tolist()) == trainer.shaped.tolist()
    assert caplog.text.count("Tree credit is lost") == (settings.get("credit") != "rollout")


class Below(GMPOTrainer, FR3ETrainer):
    """TRL's trainer on top of FR3ETrainer."""


class Above(FR3ETrainer, GMPOTrainer):
    """FR3ETrainer on top of TRL's trainer."""


class OwnLoss(FR3ETrainer):
    """REINFORCE."""

    def _compute_loss(self, model, inputs):
        ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        length = inputs["completion_ids"].size(1)
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, length)
        own = inputs["completion_mask"] * inputs["tool_mask"]
        return -(logps * own).sum(1).mul(inputs["advantages"]).mean()


@pytest.mark.parametrize("cls", [Below, Above, OwnLoss])
def test_a_loss_of_ones_own_needs_advantages_of_rows(cls):
    for config in ({}, {"config": GMPOConfig}):
        with pytest.raises(NotImplementedError, match=r"_compute_loss replaces the loss.*credit='rollout'"):
            make_trainer(cls, **config)
    patched = make_trainer(credit="tree")
    patched._compute_loss = types.MethodType(OwnLoss._compute_loss, patched)
    with pytest.raises(NotImplementedError, match=r"trainer._compute_loss replaces the loss.*credit='rollout'"):
        patched.train()
    trainer = make_trainer(cls, reward_funcs=letters, credit="rollout", loss_type="grpo", max_steps=3)
    before = weights(trainer)
    trainer.train()
    assert trainer.trees and weights(trainer).isfinite().all() and not weights(trainer).equal(before)
