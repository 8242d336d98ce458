"""What is refused before it costs anything, or as soon as it is seen."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from factory import letters, make_trainer
from models import CPU, make_dataset, make_model, make_tokenizer
from peft import LoraConfig

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.checks import warn_about_timeouts


def user(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("good", "bad", "named"),
    [
        ("1+1=", "", ["is ''", "not empty"]),
        (user("1+1="), [], [r"is []", "not empty"]),
        ("1+1=", None, ["is None", "a string or a list of messages"]),
        (user("1+1="), [{"role": "user"}], ["without a role or content", "{'role': 'user', 'content': '1+1='}"]),
        (user("1+1="), [{"role": "user", "content": None}], ["whose content is None", "'content': None"]),
        (user("1+1="), [5, 6, 7], ["without a role or content", "[5, 6, 7]"]),
        (user("1+1="), user([{"text": "2+2="}]), ["part that has no type", "{'type': 'text', 'text': '1+1='}"]),
    ],
)
@pytest.mark.parametrize("position", [0, 3])
def test_a_prompt_that_is_none(good, bad, named, position):
    examples = [{"prompt": bad if i == position else good, "number": 2507} for i in range(4)]
    dataset = IterableDataset.from_generator(lambda: iter(examples))
    with pytest.raises(ValueError) as error:
        trainer = make_trainer(dataset=dataset)
        assert position > 0  # the first example is looked at when the trainer is made, the others when their turn comes
        trainer.train()
    assert all(words in str(error.value) for words in [*named, "A prompt of train_dataset", "2507"]), str(error.value)


def test_an_example_that_is_refused_costs_no_step():
    examples = [{"prompt": "1+1="}] * 7 + [{"prompt": ""}]
    trainer = make_trainer(dataset=IterableDataset.from_generator(lambda: iter(examples)))
    with pytest.raises(ValueError, match="not empty") as error:
        trainer.train()
    assert error.value.__notes__[0].startswith(f"Step {trainer.state.global_step}, the last that was trained, is saved")
    assert Path(f"output/checkpoint-{trainer.state.global_step}").is_dir()


def test_columns_of_images_among_examples_of_text():
    dataset = make_dataset().add_column("image", [None] * 16)
    with pytest.raises(NotImplementedError, match=r"a column 'image', whose value is None.*remove_columns\('image'\)"):
        make_trainer(dataset=dataset)
    make_trainer(dataset=dataset.remove_columns("image"))
    make_trainer(dataset=make_dataset().add_column("images", [[]] * 16), max_steps=1).train()
    examples = [{"prompt": "1+1=", "images": [] if i < 2 else ["a picture"]} for i in range(4)]
    trainer = make_trainer(dataset=IterableDataset.from_generator(lambda: iter(examples)))
    with pytest.raises(NotImplementedError, match=r"a column 'images', whose value is .*a picture"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [({}, True), ({"ddp_timeout": 7200}, False), ({"world_size": 1}, False), ({"process_index": 1}, False)],
)
def test_processes_that_wait_for_a_server_wait_long_enough(settings, is_told, caplog):
    times = {"ddp_timeout": 1800, "vllm_request_timeout": 1800.0}
    args = {"vllm_mode": "server", "world_size": 2, "process_index": 0} | times
    warn_about_timeouts(SimpleNamespace(**args | settings))
    assert ("Set ddp_timeout=7200" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("reward", "error", "named"),
    [
        (lambda completions, **kwargs: None, TypeError, "returned None. It must return a list"),
        (lambda completions, **kwargs: 1.0, TypeError, "returned 1.0. It must return a list"),
        (lambda completions, **kwargs: torch.tensor(1.0), TypeError, "0-d tensor"),
        (lambda completions, **kwargs: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda completions, **kwargs: [1e39] * len(completions), ValueError, "returned inf for completion 1 of"),
        (lambda completions, **kwargs: [-1e20] * len(completions), ValueError, "between -1e+15 and 1e+15.*Scale it"),
    ],
)
def test_a_reward_function_that_returns_no_usable_rewards(reward, error, named):
    reward.__name__ = "my_reward"
    with pytest.raises(error, match=named.replace("+", r"\+")) as raised:
        make_trainer(reward_funcs=[letters, reward]).train()
    assert "my_reward" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


def test_large_rewards_train():
    trainer = make_trainer(reward_funcs=lambda completions, **kwargs: [1e15 * (i % 2) for i in range(len(completions))])
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    after = trainer.model.lm_head.weight.detach()
    assert after.isfinite().all() and not after.equal(before)


@pytest.mark.parametrize(
    ("kwargs", "remedy"),
    [
        ({"max_new_tokens": 3}, "max_completion_length"),
        ({"temperature": 0.1}, "Set temperature"),
        ({"num_return_sequences": 2}, "num_generations"),
        ({"num_beams": 2}, "independent samples"),
        ({"do_sample": False}, "independent samples"),
        ({"min_length": 4}, "inside the completion"),
        ({"prompt_lookup_num_tokens": 3}, "Leave it out"),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "inside the completion"),
        ({"logprobs": 5}, "its own format"),
        ({"stop_strings": ["\n"]}, "Set stop_token_ids"),
        ({"seed": 1}, "Set the trainer's seed"),
    ],
)
def test_generation_kwargs_that_cannot_be_honoured(kwargs, remedy):
    (name,) = kwargs
    with pytest.raises(ValueError, match=rf"generation_kwargs={{'{name}': .*{remedy}.*num_anchors=0"):
        make_trainer(generation_kwargs=kwargs)
    make_trainer(generation_kwargs=kwargs, num_anchors=0)
    # What is left to be plain GRPO is told
    with pytest.raises(ValueError, match="With reject_degenerate_states=False, value_prior_strength=0 and"):
        make_trainer(generation_kwargs=kwargs, num_anchors=0, reject_degenerate_states=True)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("min_length", 4, "generation_kwargs={'min_length': 0}"),
        ("exponential_decay_length_penalty", (2, 3.0), "it to None"),
        ("stop_strings", ["="], "it to None"),
        # What is cut off is told
        ("min_p", 0.1, None),
        ("typical_p", 0.9, None),
        ("no_repeat_ngram_size", 2, None),
    ],
)
def test_the_same_in_the_models_own_configuration(name, value, remedy, caplog):
    model = make_model()
    setattr(model.generation_config, name, value)
    named = f"generation_config has {name}={value}"
    if remedy is not None:
        with pytest.raises(ValueError, match=re.escape(named) + ".*" + re.escape(remedy)):
            make_trainer(model=model)
        return
    make_trainer(model=model)
    assert f"{named}, which changes what is sampled" in caplog.text
    caplog.clear()
    make_trainer(model=model, generation_kwargs={name: value})
    assert "changes what is sampled" not in caplog.text
    make_trainer(model=model, num_anchors=0)


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [({}, True), ({"loss_type": "dapo"}, False), ({"max_refills": 0}, False), ({"credit": "rollout"}, False)],
    ids=str,
)
def test_refill_where_the_loss_divides_by_all_rows(settings, is_told, caplog):
    make_trainer(**{"max_refills": 1, "loss_type": "dr_grpo", "reject_degenerate_states": True} | settings)
    assert ("scales gradients up" in caplog.text) == is_told


def test_generation_kwargs_that_are_honoured():
    suppressed = list(range(4, 40))
    trainer = make_trainer(generation_kwargs={"suppress_tokens": suppressed, "do_sample": True, "num_beams": 1})
    trainer.train()
    sampled = {i for tree in trainer.trees for state in tree.states for r in state.rollouts for i in r.token_ids}
    assert sampled and not sampled & set(suppressed)
    # Ends of one's own are added to EOS: a number, which `GRPOTrainer` takes, a list, and vLLM's name
    end, eos = 7, 1
    given = [{"eos_token_id": end}, {"eos_token_id": [end]}, {"stop_token_ids": [end]}]
    trainers = [make_trainer(generation_kwargs=kwargs, max_steps=1) for kwargs in given]
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.train()
    texts, *others = (
        [r.token_ids.tolist() for tree in trainer.trees for state in tree.states for r in state.rollouts]
        for trainer in trainers
    )
    assert others == [texts, texts] and all(any(token in text for text in texts) for token in (end, eos))
    assert all(not {end, eos} & set(text[:-1]) for text in texts)


@pytest.mark.parametrize(("dtype", "told"), [(torch.float32, True), (torch.bfloat16, False)])
def test_an_adapters_model_that_generates_in_float32(dtype, told, caplog):
    adapter = LoraConfig(target_modules=["q_proj"])
    trainer = make_trainer(model=make_model().to(dtype), peft_config=adapter, bf16=True)
    assert trainer.accelerator.mixed_precision == "bf16"
    assert ("--dtype bfloat16, which halves its memory" in caplog.text) is told


FIXED = {"num_generations": 8, "per_device_train_batch_size": 8, "value_prior_strength": 4}  # TRL's default sizes
FOUR = {"num_generations": 4, "per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("settings", "says", "says_not"),
    [
        # There are two base trajectories
        (FIXED, ["generation_batch_size=8 / num_generations=8", "accumulation_steps=8"], "teaches nothing"),
        (FIXED | FOUR, ["teaches nothing"], None),
        (FIXED | {"gradient_accumulation_steps": 8}, None, None),
        # Without a prior of the batch one prompt is enough
        (FIXED | {"value_prior_strength": 0}, None, None),
        (FIXED | {"value_prior_strength": None, "value_tracker": True}, None, None),
    ],
    ids=str,
)
def test_a_batch_of_one_prompt_is_warned_of(settings, says, says_not, caplog):
    with caplog.at_level(logging.WARNING, logger="fr3e_trl"):
        make_trainer(**settings)
    warnings = [r.getMessage() for r in caplog.records if "one prompt" in r.getMessage()]
    assert len(warnings) == (says is not None)
    for warning in warnings:
        assert all(words in warning for words in says) and (says_not is None or says_not not in warning)


def test_tokens_that_the_model_has_no_embedding_for(tmp_path):
    tokenizer = make_tokenizer()
    model = make_model(vocab_size=len(tokenizer))
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    trainer = make_trainer(model=model, tokenizer=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 2
    used = Dataset.from_dict({"prompt": ["12", "1<image>2"] * 8})
    last = len(tokenizer) - 1
    refused = rf"Token {last} \('<image>'\) is used, and the model has embeddings for {last} of"
    with pytest.raises(ValueError, match=refused):
        make_trainer(model=model, tokenizer=tokenizer, dataset=used, output_dir=str(tmp_path)).train()
    tokenizer.pad_token = "<image>"
    with pytest.raises(ValueError, match=refused):
        make_trainer(model=model, tokenizer=tokenizer)


def test_what_is_not_supported_or_missing():
    with pytest.raises(NotImplementedError, match=r"vllm_structured_outputs_regex.*num_anchors=0"):
        make_trainer(vllm_structured_outputs_regex="[0-9]+")
    with pytest.raises(ValueError, match="No reward source"):
        make_trainer(reward_funcs=None)
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        FR3ETrainer(make_model(), letters, FR3EConfig("unused", **CPU), processing_class=make_tokenizer())
