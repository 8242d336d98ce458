"""Prompts with images, with tiny models of five families: of each way in which a batch holds images, one at least."""

import functools
import random
import re
from pathlib import Path
from types import SimpleNamespace

import factory
import numpy as np
import pytest
import tool_policy
import torch
import vision_models
from datasets import Dataset, IterableDataset
from factory import assert_same_run, letters, logged, weights
from launches import launch
from models import make_dataset
from peft import LoraConfig
from recorder import Recorder
from tool_policy import CALLS, WORDS, instead_of_look, look, make_tool_dataset, make_tool_tokenizer
from trl import GRPOTrainer
from vision_models import FAMILIES, SPECIAL_TOKENS, make_image, make_image_dataset, make_processor, make_vision_model

from fr3e_trl import FR3ETrainer, checks, old_logps
from fr3e_trl.checks import obstacle_to_images, obstacle_to_tool_images
from fr3e_trl.generation.generate import _initial_width
from fr3e_trl.generation.vllm import VLLMColocateSampler
from fr3e_trl.images import images_in, select_rows
from fr3e_trl.method.sampling import SamplingRequest, images_of
from fr3e_trl.samplers import make_sampler

FORMS = ["image", "images", "parts"]

# Each family with one of the forms that a dataset has images in
FORM_OF = dict(zip(FAMILIES, ["images", "parts", "image", "parts", "images"], strict=True))


def parity(completions, **kwargs):
    """A reward that many completions share, so that states are rejected."""
    return [float(sum(map(ord, c[0]["content"])) % 2) for c in completions]


def parity_of_some(completions, prompts, **kwargs):
    """Of every other question, all completions are as good."""
    odd = [int(prompt[0]["content"][-1]["text"].rstrip("=").split("+")[1]) % 2 for prompt in prompts]
    return [reward * is_odd for reward, is_odd in zip(parity(completions), odd, strict=True)]


def make_trainer(family, cls=Recorder, **settings):
    model = vision_models.vision_model_on_disk(family) if settings.get("beta") else make_vision_model(family)
    defaults = {"reward_funcs": letters, "dataset": make_image_dataset(), "tokenizer": make_processor(family)}
    return factory.make_trainer(cls, model=model, **defaults | settings)


train = functools.partial(factory.train, make=make_trainer)


@torch.no_grad()
def by_hand(trainer, messages, token_ids, temperature=1.0):
    """Log-probs and entropies of a completion by a plain forward pass: the processor's tensors, and the tokens."""
    inputs = trainer.processing_class.apply_chat_template(
        [messages], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    length = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([token_ids.tolist()])], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in inputs.keys() & {"token_type_ids", "mm_token_type_ids"}:
        inputs[name] = torch.cat([inputs[name], torch.zeros(1, len(token_ids), dtype=torch.long)], 1)
    logits = trainer.model(**inputs).logits[0, length - 1 : -1].float() / temperature
    policy = torch.distributions.Categorical(logits=logits)
    return policy.log_prob(torch.tensor(token_ids.tolist())), policy.entropy()


def with_other_images(messages):
    """The same prompt, its images upside down and in negative: as many tokens."""

    def changed(message):
        if not isinstance(message.get("content"), list):
            return message
        parts = [part | {"image": negative(part["image"])} if "image" in part else part for part in message["content"]]
        return message | {"content": parts}

    return list(map(changed, messages))


def negative(image):
    return image.rotate(180).point(lambda value: 255 - value)


def rollouts_of(trees):
    return [(tree, state, rollout) for tree in trees for state in tree.states for rollout in state.rollouts]


def close(x, y) -> bool:
    return np.allclose(np.asarray(x), np.asarray(y), atol=2e-4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_rows_without_anchors_are_grpo_trainers(family):
    settings = {"epsilon_high": 0.28, "scale_rewards": "none", "beta": 0.05, "max_completion_length": 6}
    settings |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    told = {}

    def train_and_be_told(cls, **kwargs):
        def reward_func(completions, prompts, **columns):
            images = [images_of(prompt) for prompt in prompts]
            pixels = [[np.asarray(image).tobytes() for image in of_row] for of_row in images]
            texts = [[part.get("text") for part in prompt[0]["content"]] for prompt in prompts]
            told.setdefault(cls, []).append((pixels, texts, completions, sorted(columns)))
            return letters(completions)

        return train(
            family, cls, dataset=make_image_dataset(form=FORM_OF[family]), reward_funcs=reward_func, **settings | kwargs
        )

    theirs = train_and_be_told(GRPOTrainer)
    ours = train_and_be_told(FR3ETrainer, num_anchors=0, reject_degenerate_states=True)
    assert all(all(pixels) for pixels, *_ in told[FR3ETrainer])
    assert told[FR3ETrainer] == told[GRPOTrainer]
    names = ["loss", "grad_norm", "reward", "entropy", "kl", "completions/mean_length", "completions/clipped_ratio"]
    torch.testing.assert_close(logged(ours, *names), logged(theirs, *names), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(weights(ours), weights(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_see_their_prompts_images(family):
    trainer = train(family, dataset=make_image_dataset(form=FORM_OF[family]), learning_rate=0.0, max_steps=1)
    ((batch, trees),) = trainer.batches
    num_branches = 0
    for tree in trees:
        (base, *_), (entropies, *_) = tree.bases, tree.entropies
        logprobs_by_hand, entropies_by_hand = by_hand(trainer, tree.multimodal, base.token_ids)
        assert close(entropies, entropies_by_hand) and close(base.logprobs, logprobs_by_hand)
        _, entropies_of_others = by_hand(trainer, with_other_images(tree.multimodal), base.token_ids)
        assert (entropies - entropies_of_others).abs().max() > 0.05
        for state in tree.states[1:]:
            for rollout in state.rollouts:
                whole = np.concatenate([state.prefix_ids, rollout.token_ids])
                of_whole, _ = by_hand(trainer, tree.multimodal, whole)
                assert close(rollout.logprobs, of_whole[state.position :])
                num_branches += 1
    assert num_branches >= 8
    # Log-probs of a truncated distribution, in batches of 3 of 8 rows: cut off at no token, as TRL scores them
    input_ids, mask = (
        torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1)[:8] for name in ("ids", "mask")
    )
    images = select_rows(images_in(batch), list(range(8)))
    arguments = trainer.model, input_ids, mask, batch["completion_ids"].size(1), 3
    with torch.no_grad():
        expected, found = (
            trainer._get_per_token_logps_and_entropies(*arguments, **images, truncation=truncation)[0]
            for truncation in (None, lambda ids, logits: logits)
        )
    assert (expected != 0).sum() > 8
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    bases = [(tree.prompt_ids, tree.bases[0].token_ids, tree.multimodal) for tree in trees]
    trainer.args.per_device_train_batch_size = 3  # a batch of several prompts, of which the last is smaller
    statistics = trainer.token_statistics(*map(list, zip(*bases * 2, strict=True)))
    for (_, token_ids, messages), (logprobs, entropies) in zip(bases * 2, statistics, strict=True):
        logprobs_by_hand, entropies_by_hand = by_hand(trainer, messages, token_ids)
        assert close(logprobs, logprobs_by_hand) and close(entropies, entropies_by_hand)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2_5_vl", {"peft_config": LoraConfig(target_modules="all-linear")}),
        ("gemma3", {}),
        ("smolvlm", {"value_tracker": True}),
        ("llava", {"beta": 0.1, "num_iterations": 2, "per_device_train_batch_size": 8, "steps_per_generation": 2}),
        ("internvl", {"anchor_threshold": 0.3, "credit": "tree"}),
    ],
)
def test_every_family_trains(family, settings, caplog):
    trainer = make_trainer(family, dataset=make_image_dataset(form="images"), share_prefixes=True, **settings)
    before = {name: param.clone() for name, param in trainer.model.named_parameters() if param.requires_grad}
    trainer.train()
    assert np.isfinite(logged(trainer, "loss", "grad_norm")).all()
    assert all(any(len(tree.states) > 1 for tree in trees) for _, trees in trainer.batches)
    of_images = [name for name in before if not any(part in name for part in ("language", "text_model", "lm_head"))]
    moved = [name for name in of_images if not before[name].equal(trainer.model.get_parameter(name))]
    assert len(moved) > len(of_images) / 2
    assert not trainer.shares_prefixes
    assert caplog.text.count("share_prefixes is off, and each row is forwarded with all of its tokens: images") == 1


class Keeps(Recorder):
    """Keeps the log-probs that its losses are made of, and the rows that were left over."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes, self.left_over = [], []

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.left_over += self._refill.leftovers if self._refill else []
        return batch

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)
        if torch.is_grad_enabled():
            rows = zip(input_ids, attention_mask.bool(), output[0].detach(), strict=True)
            self.passes += [row for row in rows if row[-1].any()]  # others were skipped
        return output


def check_passes(trainer):
    """A row's log-probs in the loss are those that it was sampled with, and there are some that have none."""
    ((batch, trees),) = trainer.batches
    sampled = {
        (*tree.prompt_ids, *state.prefix_ids, *rollout.token_ids): rollout
        for tree, state, rollout in rollouts_of(trees)
    }
    assert 0 < len(trainer.passes) < len(batch["advantages"])  # the others are rejected
    for input_ids, mask, logprobs in trainer.passes:
        rollout = sampled[tuple(input_ids[mask].tolist())]
        of_rollout = logprobs[mask[-len(logprobs) :]][-rollout.length :]
        assert close(of_rollout[rollout.written], rollout.logprobs[rollout.written])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "llava", "internvl"])
def test_rows_keep_their_images_when_they_are_shuffled_split_and_rejected(family):
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "value_prior_strength": 0}
    settings |= {"reward_funcs": parity_of_some, "learning_rate": 0.0, "max_steps": 1}
    check_passes(train(family, Keeps, dataset=make_image_dataset(form="images"), **settings))


@pytest.fixture
def knows_nothing(monkeypatch):
    """Have trainers not take generation's word for how likely tokens were."""
    monkeypatch.setattr(old_logps, "in_float32", lambda trainer: False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_old_log_probs_of_rows_left_over_are_of_the_images(family, knows_nothing):
    settings = {"max_refills": 3, "learning_rate": 0.0, "max_steps": 6, "reward_funcs": parity}
    settings |= {"value_prior_strength": 0, "steps_per_generation": 2, "per_device_train_batch_size": 8}
    trainer = train(family, Keeps, gradient_accumulation_steps=1, **settings)
    assert trainer.left_over
    for row in trainer.left_over:
        assert close(row.old_logprobs[len(row.prefix_ids) :], row.rollout.logprobs)


def test_what_an_engine_samples_is_corrected_with_the_images():
    trainer = make_trainer("qwen2_5_vl", temperature=1.5, learning_rate=0.0, max_steps=1)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(enable_sleep_mode=False, sync_weights=lambda: None)
    trainer.train()
    ((batch, _),) = trainer.batches
    in_loss = (batch["completion_mask"] * batch["tool_mask"]).bool()
    ratios = batch["importance_sampling_ratio"].expand_as(in_loss)[in_loss]
    assert len(ratios) > 32 and (ratios - 1).abs().max() < 1e-3


def test_prompts_that_differ_by_their_images_alone_are_remembered_apart():
    prompt = [{"role": "user", "content": "1+1="}]
    examples = [{"prompt": prompt, "image": make_image(i)} for i in (0, 0, 1, 2)]
    dataset = IterableDataset.from_generator(lambda: iter(examples))
    settings = {"per_device_train_batch_size": 32, "max_steps": 1, "value_tracker": True, "shuffle_dataset": False}
    ((_, trees),) = train("gemma3", dataset=dataset, **settings).batches
    assert all(tree.prompt_ids.tolist() == trees[0].prompt_ids.tolist() for tree in trees)
    keys = [tree.key for tree in trees]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_resuming_continues_the_run():
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5, "max_refills": 1, "value_prior_strength": 0}
    settings |= {"per_device_train_batch_size": 8, "steps_per_generation": 2, "reward_funcs": parity}
    whole = train("qwen2_5_vl", **settings)
    assert_same_run(train("qwen2_5_vl", resume="output/checkpoint-3", **settings), whole)


def test_the_best_model_is_loaded_at_the_end():

    def worse(completions, trainer_state, **kwargs):
        return [reward - 1000 * trainer_state.global_step for reward in letters(completions)]

    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    settings |= {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "per_device_train_batch_size": 8}
    trainer = train("gemma3", reward_funcs=worse, eval_dataset=make_image_dataset().select(range(2)), **settings)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    model = trainer.model
    first, last = (type(model).from_pretrained(f"output/checkpoint-{step}").state_dict() for step in (1, 2))
    assert all(value.equal(first[name]) for name, value in model.state_dict().items())
    assert not all(value.equal(last[name]) for name, value in model.state_dict().items())


@instead_of_look
def look_at_picture(key: str) -> list:
    return shown(look(digits_in(key)))


def digits_in(key):
    return "".join(re.findall(r"\d", key)) or "0"


def make_picture(digit):
    return make_image(int(digit), (16 + 8 * (int(digit) % 2), 16))


def shown(digit):
    return [{"type": "image", "image": make_picture(digit)}, {"type": "text", "text": digit}]


@functools.cache
def _trained_on_pictures(family):
    """The weights of a policy for dialogues in which every other question, and every other answer, has a picture."""
    processor = make_processor(family, make_tool_tokenizer())
    model = make_vision_model(family, tokenizer=make_tool_tokenizer())
    draw, placeholder = random.Random(0), vision_models.PLACEHOLDERS[family]

    def with_picture(role):
        return role[0] + draw.choice(["", placeholder])

    def inputs_of(texts):
        texts = [re.sub(r"<\|(?:user|tool)\|>", with_picture, text) for text in texts]
        digits = [re.findall(rf"{re.escape(placeholder)}(\d)", text) for text in texts]
        pictures = [[make_picture(digit) for digit in of_text] for of_text in digits]
        return processor(text=texts, images=pictures, padding=True, padding_side="right", return_tensors="pt")

    tool_policy.train_tool_policy(model, inputs_of, answers_at_once=True)
    return model.state_dict()


def make_tool_trainer(family, tool, cls=Recorder, with_images=True, **settings):
    columns = make_tool_dataset(8).to_dict() | ({"image": [make_image(i) for i in range(8)]} if with_images else {})
    processor = make_processor(family, make_tool_tokenizer())
    model = make_vision_model(family, tokenizer=make_tool_tokenizer())
    model.load_state_dict(_trained_on_pictures(family))
    unwritten = [token for token in SPECIAL_TOKENS[family] if token in ("<image>", "<|image_pad|>", "<|video_pad|>")]
    defaults = {"model": model, "tokenizer": processor, "dataset": Dataset.from_dict(columns)}
    defaults |= {"reward_funcs": lambda completions, **kwargs: [float(len(completion)) for completion in completions]}
    defaults |= {"tools": tool and [tool], "max_completion_length": 64, "learning_rate": 0.0}
    defaults |= {"generation_kwargs": {"suppress_tokens": processor.tokenizer.convert_tokens_to_ids(unwritten)}}
    return factory.make_trainer(cls, **defaults | settings)


def test_tools_are_called_by_a_policy_that_sees():
    trainer = make_tool_trainer("llava", look, max_completion_length=24, max_steps=4)
    trainer.train()
    num_turns = 0
    for batch, trees in trainer.batches:
        assert len(batch["pixel_values"]) == len(batch["prompt_ids"]) == 16
        for tree, state, rollout in rollouts_of(trees):
            whole = np.concatenate([state.prefix_ids, rollout.token_ids])
            of_whole, _ = by_hand(trainer, tree.multimodal, whole)
            is_own = rollout.mask.astype(bool)
            assert close(rollout.logprobs[is_own], of_whole[state.position :][is_own])
            num_turns += len(rollout.dialogue.turns)
    assert num_turns > 72, num_turns  # of 64 rollouts: some call a tool


@torch.no_grad()
def dialogue_by_hand(trainer, token_ids, images):
    """Log-probs of tokens by a plain forward pass: of what the processor makes of their text and the images."""
    token_ids = list(map(int, token_ids))
    text = re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", trainer.processing_class.decode(token_ids))
    inputs = trainer.processing_class(text=[text], images=images or None, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [token_ids]
    logprobs = trainer.model(**inputs).logits[0, :-1].log_softmax(1)
    return logprobs.gather(1, inputs["input_ids"][0, 1:, None]).squeeze(1)


@pytest.mark.parametrize("with_images", [False, True])
def test_rollouts_see_the_images_that_their_tools_returned(with_images):
    CALLS.clear()
    trainer = make_tool_trainer("qwen2_5_vl", look_at_picture, with_images=with_images, max_steps=4)
    trainer.train()
    num_calls, differences = 0, []
    num_seen = dict.fromkeys(["none", "base", "branch", "branch of a later turn"], 0)
    for tree, state, rollout in [of_rollout for _, trees in trainer.batches for of_rollout in rollouts_of(trees)]:
        if rollout.copy_of is not None:
            continue
        of_prompt, messages = images_of(tree.multimodal or []), rollout.dialogue.messages
        token_ids = [*tree.prompt_ids, *state.prefix_ids, *rollout.token_ids]
        turn = rollout.dialogue.turn_at(state.position)
        logprobs = dialogue_by_hand(trainer, token_ids, [*of_prompt, *images_of(messages)])
        assert close(rollout.logprobs[rollout.mask], logprobs[-rollout.length :][rollout.mask])
        turns = [i for i, message in enumerate(messages) if message["role"] != "tool"]
        num_calls += sum(len(message.get("tool_calls") or []) for message in messages[turns[turn] :])
        if not images_of(messages):
            num_seen["none"] += 1
            continue
        num_seen["base" if state.base is None else "branch of a later turn" if turn else "branch"] += 1
        others = images_of(with_other_images(messages))
        of_others = dialogue_by_hand(trainer, token_ids, [*of_prompt, *others])
        start, end = rollout.dialogue.turns[-1]
        differences.append((logprobs - of_others)[start - end :].abs().max())
    assert min(differences) > 0 and np.median(differences) > 5e-4  # most would be found to have seen other images
    assert len(CALLS) == num_calls
    assert min(num_seen.values()) > 0, num_seen


def written(messages):
    """A number by what the policy wrote: few rollouts have the same, whatever a machine's rounding has them draw."""
    own = [message for message in messages if message["role"] == "assistant"]
    return sum(ord(char) for message in own for char in f"{message.get('content')}{message.get('tool_calls')}")


@pytest.mark.parametrize("with_images", [False, True])
def test_rows_keep_the_images_of_their_tools(with_images, knows_nothing):

    def reward(completions, answer, **kwargs):
        return [float(written(of_row) % 5 * (int(a) % 2)) for of_row, a in zip(completions, answer, strict=True)]

    settings = {"reward_funcs": reward, "generation_kwargs": None, "value_prior_strength": 0, "beta": 0.1}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 16}
    settings |= {"peft_config": LoraConfig(target_modules="all-linear"), "with_images": with_images}
    trainer = make_tool_trainer("qwen2_5_vl", look_at_picture, Keeps, **settings)
    video = trainer._tokenizer.convert_tokens_to_ids("<|video_pad|>")
    with torch.no_grad():  # a video's token is written as often as a digit, which makes it no video
        trainer.model.lm_head.weight[video] = trainer.model.lm_head.weight[WORDS.index("7")]
    trainer.train()
    ((batch, trees),) = trainer.batches
    num_images = batch["num_images"]
    assert (0 in num_images) != with_images and len(set(num_images)) > 1
    assert (batch["completion_ids"] == video).any()
    is_scored = (batch["completion_mask"] * batch["tool_mask"]).bool()
    for row, (_, _, rollout) in enumerate(rollouts_of(trees)):
        if batch["in_loss"][row]:
            assert close(batch["old_per_token_logps"][row][is_scored[row]], rollout.logprobs[rollout.mask])
    assert 0 < batch["in_loss"].sum() <= len(trainer.passes)
    check_passes(trainer)
    assert np.abs(logged(trainer, "kl")).max() < 1e-6


class ShowingWalk(tool_policy.MoodyWalk):
    """Shows what it tells, which is another thing when it is asked again."""

    def look(self, key: str) -> list:
        return shown(super().look(digits_in(key)))


def test_rollouts_that_are_given_up_keep_the_images_of_their_prefix():
    settings = {"environment_factory": ShowingWalk, "replay_mismatch": "skip"}
    trainer = make_tool_trainer("qwen2_5_vl", None, with_images=False, **settings)
    trainer.train()
    num_given_up = 0
    for batch, trees in trainer.batches:
        for num_images, (tree, state, rollout) in zip(batch["num_images"], rollouts_of(trees), strict=True):
            token_ids = [*tree.prompt_ids, *state.prefix_ids, *rollout.token_ids]
            logprobs = dialogue_by_hand(trainer, token_ids, images_of(rollout.dialogue.messages))[-rollout.length :]
            num_given_up += rollout.dialogue.is_broken and num_images > 0
            assert rollout.dialogue.is_broken or close(rollout.logprobs[rollout.mask], logprobs[rollout.mask])
        assert len(batch["image_grid_thw"]) == sum(batch["num_images"])
    assert num_given_up > 0


def test_without_exploration_it_is_grpo_trainer_exactly():
    settings = {"learning_rate": 1e-3, "num_generations": 4, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"eval_dataset": make_image_dataset(4), "per_device_eval_batch_size": 4}
    train = functools.partial(factory.train, "qwen2_5_vl", look_at_picture, make=make_tool_trainer, **settings)
    assert_same_run(train(FR3ETrainer, num_anchors=0), train(GRPOTrainer))


def test_what_the_engine_in_this_process_is_asked():
    image, other = make_image(0), make_image(1)
    parts = [{"type": "text", "text": "1"}, *({"type": "image", "image": shown} for shown in (image, other))]
    prompts = [None, *([{"role": "user", "content": parts[:num_parts]}] for num_parts in (2, 3))]
    asked = [
        VLLMColocateSampler._prompt(None, SamplingRequest([3, 4], 1, 5, 1.0, multimodal=messages))
        for messages in prompts
    ]
    ids = {"prompt_token_ids": [3, 4]}
    shown = [{}, {"multi_modal_data": {"image": image}}, {"multi_modal_data": {"image": [image, other]}}]
    assert asked == [ids | images for images in shown]
    # Tokens of tools' images are there when the model takes them: no EOS follows
    for images, width in (([], 4), ([make_image(0)], 9)):
        branch = SamplingRequest([3] * 9, 1, 2, 1.0, num_prompt_tokens=4, tool_images=images)
        assert _initial_width([branch, SamplingRequest([3] * 4, 1, 7, 1.0)], [1]) == width


@pytest.mark.parametrize("with_tools", [False, True])
def test_two_processes(tmp_path, with_tools):
    settings = {"num_generations": 8, "per_device_train_batch_size": 12, "max_refills": 1}
    if with_tools:
        settings = {"num_generations": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}
        settings |= {"with_tools": True, "ddp_find_unused_parameters": True, "log_multimodal": False}
    results = launch(tmp_path / "output", 2, settings, script=Path(__file__).with_name("images_train.py"))
    for result in results:
        assert result["checked"] > 12 and result["greatest_difference"] < 2e-4
    assert results[0]["losses"] == results[1]["losses"] and np.isfinite(results[0]["losses"]).all()


# What is refused


@pytest.mark.parametrize("form", FORMS)
def test_images_for_some_prompts_of_a_batch_are_refused_as_trl_cannot_take_them(form):
    def example(i):
        images = [make_image(i)] if i % 2 else []
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": f"{i}="}]
        columns = {"image": {"image": images[0] if images else None}, "images": {"images": images}, "parts": {}}[form]
        text = content if form == "parts" else f"{i}="
        return {"prompt": [{"role": "user", "content": text}], **columns}

    dataset = IterableDataset.from_generator(lambda: map(example, range(1, 9)))
    with pytest.raises(ValueError, match=r"value is None|with images for all prompts or for none"):
        train("llava", dataset=dataset, shuffle_dataset=False)
    with pytest.raises(TypeError, match="NoneType"):
        train("llava", GRPOTrainer, dataset=dataset, shuffle_dataset=False)


@pytest.mark.parametrize(
    ("content", "columns", "named"),
    [
        (None, {"image": make_image(0)}, "a string, but has images"),
        ("1+1=", {"image": None}, "remove_columns\\('image'\\)"),
        ([{"type": "image"}], {}, "a placeholder without an image"),
        ([{"type": "image", "image": make_image(0)}], {"images": ["x"]}, "in its messages and in a column 'images'"),
    ],
)
def test_examples_whose_images_cannot_be_read(content, columns, named):
    example = {"prompt": [{"role": "user", "content": content}] if content else "1+1=", **columns}
    with pytest.raises(ValueError, match=named):
        make_trainer("llava", dataset=IterableDataset.from_generator(lambda: iter([example])))


@pytest.mark.parametrize("form", FORMS)
def test_a_tokenizer_takes_no_images(form):
    with pytest.raises(NotImplementedError, match=r"only takes text. Pass the model's processor"):
        factory.make_trainer(dataset=make_image_dataset(form=form))


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("llava", {}, r"models that use image_grid_thw"),
        ("qwen2_5_vl", {"max_refills": 1}, "Set max_refills=0"),
        ("qwen2_5_vl", {"sampler": make_sampler}, "without vLLM and without sampler="),
    ],
)
def test_a_tool_that_returns_an_image_is_refused(family, settings, named):
    with pytest.raises(NotImplementedError, match=f"A tool returned an image, and .* {named}"):
        make_tool_trainer(family, look_at_picture, **settings).train()


def test_what_is_refused_with_more_than_there_is_here(monkeypatch):
    trainer = make_tool_trainer("qwen2_5_vl", look_at_picture)
    assert obstacle_to_tool_images(trainer) is None
    with monkeypatch.context() as patch:
        patch.setattr(trainer.accelerator.state, "num_processes", 2)
        assert "ddp_find_unused_parameters=True and log_multimodal=False" in obstacle_to_tool_images(trainer)
    with pytest.raises(ValueError, match="does not support multimodal models"):  # by TRL
        make_trainer("llava", use_transformers_continuous_batching=True)
    trainer = make_trainer("llava")
    assert obstacle_to_images(trainer) is None
    trainer._multi_environment = True
    assert "Give one environment" in obstacle_to_images(trainer)
    trainer._multi_environment, trainer.use_vllm, trainer.vllm_mode = False, True, "server"
    assert "vllm_mode='colocate'" in obstacle_to_images(trainer)
    monkeypatch.setattr(checks, "is_sharded", lambda trainer: True)
    with pytest.raises(NotImplementedError, match="cannot explore prompts with images here: the model is sharded"):
        make_trainer("llava")
    make_trainer("llava", dataset=make_dataset(8, conversational=True))
