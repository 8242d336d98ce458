"""What is refused before it costs anything, with errors that say what to do."""

import inspect
import logging
import math
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from transformers import PreTrainedConfig, PreTrainedModel
from trl import GRPOTrainer

from .compat import PER_TOKEN, TypedTrainer, is_sharded, tokenizer_of
from .fr3e_config import FR3EConfig
from .method.credit import CREDIT_RULES

logger = logging.getLogger(__name__)

# Greater ones make the square of a gradient's norm overflow float32: first steps of length 0, then weights that are NaN
MAX_REWARD = 1e15

# Keys of `generation_kwargs`, transformers' and vLLM's, that exploration cannot honour, and what to do
REFUSED_KWARGS = (
    (
        ("max_new_tokens", "max_length", "max_tokens"),
        "Set max_completion_length, which limits prefix and continuation together",
    ),
    (("temperature",), "Set temperature"),
    (("n", "num_return_sequences", "best_of"), "Set num_generations, the rows of a prompt"),
    (
        ("do_sample", "num_beams", "num_beam_groups", "use_beam_search", "penalty_alpha"),
        "Leave it out: rollouts must be independent samples",
    ),
    (
        (
            *("min_length", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
            *("exponential_decay_length_penalty", "presence_penalty", "frequency_penalty"),
            *("structured_outputs", "thinking_token_budget", "repetition_detection"),
            *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
        ),
        "Leave it out: it counts from where generation begins, which for a branch is amid the completion",
    ),
    (
        ("stop", "stop_strings"),
        "Set stop_token_ids: a string is only searched for after the anchor, so that one across it would be missed",
    ),
    (
        ("prompt_lookup_num_tokens", "dola_layers"),
        "Leave it out: rollouts are sampled from the policy token by token, without lookup or contrast of layers",
    ),
    (
        ("seed",),
        "Set the trainer's seed: with this one, the branches of all anchors would begin with the same random numbers",
    ),
    (
        ("return_dict_in_generate", "logprobs", "flat_logprobs", "logprob_token_ids", "output_kind", "echo", "stream"),
        "Leave it out: the trainer needs the output in a form of its own",
    ),
)
HARMLESS_KWARGS = (("do_sample", True), ("num_beams", 1), ("num_return_sequences", 1), ("min_length", 0))
# Those that generation is always given anew, whatever a model's own configuration says
OVERRIDDEN_KWARGS = ("max_new_tokens", "max_length", "temperature", "do_sample")

# What a model's own generation config may change of its distribution, and the values that change nothing
NEUTRAL = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}

# Where TRL computes rewards
TRL_TRAINER = inspect.getfile(GRPOTrainer)

# Columns that TRL takes images from, the first that there is
IMAGE_COLUMNS = ("images", "image")

# What TRL calls reward functions with, beside the dataset's columns
REWARD_ARGUMENTS = {"prompts", "completions"}

# Settings of vLLM that change what is sampled, and that neither the policy's log-probs nor ours take into account
UNSCORED_SAMPLING = {"allowed_token_ids", "bad_words", "logit_bias", "min_p", "repetition_penalty", "top_k", "top_p"}


def settings_of_plain_grpo(args: FR3EConfig) -> str:
    """What is to be set for a run to be plain GRPO."""
    rest = "reject_degenerate_states=False, value_prior_strength=0 and negative_advantage_scale=1"
    return "num_anchors=0" if args.num_anchors else rest


def refuse_unsupported(args: FR3EConfig, rollout_func: Any) -> None:
    """Refuse what exploration does not work with yet."""
    unsupported = [
        ("a rollout_func", rollout_func is not None, "Pass sampler=, which continues prefixes too"),
        ("vllm_structured_outputs_regex", args.vllm_structured_outputs_regex is not None, "Leave it out"),
    ]
    for what, given, remedy in unsupported:
        if given:
            raise NotImplementedError(
                f"FR3ETrainer does not support {what} yet. {remedy}, or set {settings_of_plain_grpo(args)} to train "
                "with plain GRPO."
            )


def check_sampler(sampler: Any, args: FR3EConfig) -> None:
    """Refuse a sampler that is none, or that nothing would be drawn by."""
    if args.is_plain_grpo:
        raise ValueError(
            "sampler= has no effect, because it draws FR3E's rollouts and FR3E is off (num_anchors=0). Leave it out, "
            "or pass a rollout_func, as to GRPOTrainer."
        )
    if args.max_staleness:
        raise ValueError(
            f"max_staleness={args.max_staleness} overlaps what a vLLM server draws, and sampler= takes its place: set "
            "max_staleness=0. A sampler may itself draw ahead."
        )
    if not callable(sampler):
        raise TypeError(
            f"sampler={sampler!r} is not allowed: it must be a class or function that takes the trainer and returns a "
            "Sampler, for example sampler=lambda trainer: my_sampler."
        )


def refuse_unsupported_setup(trainer: TypedTrainer) -> None:
    """Refuse what shows only when TRL has set up the trainer: how its processes are sharded."""
    if trainer._dist.fsdp_version == 1:
        raise NotImplementedError(
            "FR3ETrainer does not support FSDP version 1. Set fsdp_version: 2 in accelerate's configuration, or "
            "num_anchors=0 to train with plain GRPO."
        )
    if trainer._dist.is_fsdp and trainer.use_transformers_continuous_batching:
        raise NotImplementedError(
            "use_transformers_continuous_batching=True does not work with FSDP, whose processes must generate in "
            "step. Leave it out, or use vLLM."
        )
    if not trainer.use_vllm:
        check_generation_config(trainer)
    config = trainer.args
    if isinstance(config, FR3EConfig) and config.max_staleness and trainer.environment_factories is not None:
        raise NotImplementedError(
            f"max_staleness={config.max_staleness} does not work with environments, because a prompt is known only "
            "once its environment is reset, which TRL does when a batch begins. Set max_staleness=0."
        )
    if trainer.environment_factories is not None and not trainer.tools:
        raise NotImplementedError(
            "environment_factory makes environments without tools: they have no public method other than reset and "
            "get_reward. FR3ETrainer needs tools to explore an environment. Use the dataset for prompts and "
            "reward_funcs for rewards, or set num_anchors=0 to train with plain GRPO."
        )


def ends_of(trainer: TypedTrainer) -> list[int]:
    """The tokens that end a completion: TRL's, and those that `generation_kwargs` add."""
    given: Any = trainer.args.generation_kwargs or {}
    added = [given.get("eos_token_id") or [], given.get("stop_token_ids") or []]
    lists = [[ids] if isinstance(ids, int) else ids for ids in added]
    return list(dict.fromkeys([*trainer.eos_token_ids, *chain.from_iterable(lists)]))


def check_generation_config(trainer: TypedTrainer) -> None:
    """
    Refuse what exploration cannot honour of a trainer's `generation_config`, which may be changed or replaced, and what
    a model's own brings that `generation_kwargs` may not, unless overridden.
    """
    of_model: Any = trainer.model.generation_config
    chosen: Any = trainer.generation_config
    for names, remedy in REFUSED_KWARGS:
        for name in names:
            value = getattr(chosen, name, None)
            is_off = value is None or (name, value) in HARMLESS_KWARGS or (value is False and name != "do_sample")
            if not is_off and name not in ("max_new_tokens", "temperature"):  # which the trainer's own say
                raise ValueError(
                    f"trainer.generation_config.{name}={value!r} cannot be honoured while exploring. {remedy}."
                )
    harmless = dict(HARMLESS_KWARGS)
    for name in (name for names, _ in REFUSED_KWARGS for name in names if name not in OVERRIDDEN_KWARGS):
        value = getattr(of_model, name, None)
        if value not in (None, False, harmless.get(name)) and getattr(chosen, name, None) is None:
            remedy = f"generation_kwargs={{{name!r}: {harmless[name]}}}" if name in harmless else "it to None"
            raise ValueError(
                f"The model's generation_config has {name}={value}, but rollouts must be independent samples that can "
                f"continue any prefix. Set {remedy}, or num_anchors=0 for plain GRPO."
            )
    for name, neutral in NEUTRAL.items():
        value = getattr(of_model, name, None)
        if value not in (None, neutral) and getattr(chosen, name, None) is None:
            logger.warning(
                "The model's generation_config has %s=%s, which changes what is sampled, but the loss does not account "
                "for it. Set generation_kwargs={%r: %s} to sample from the policy itself.",
                name,
                value,
                name,
                neutral,
            )


def obstacle_to_images(trainer: TypedTrainer) -> str | None:
    """Why a trainer that TRL has set up cannot explore from prompts with images, and what to do; `None` if it can."""
    if not trainer._is_vlm:
        return (
            f"processing_class is a {type(trainer.processing_class).__name__}, which takes text alone. Pass the "
            "model's processor, or leave the images out"
        )
    if is_sharded(trainer):
        return (
            "the model is sharded, and a process without images would skip the vision tower while others wait. Train "
            "with DDP, with LoRA if the model is large, or set num_anchors=0 to train with plain GRPO"
        )
    if trainer._multi_environment:
        return (
            "environment_factory is a dict, and TRL's processor is told the tools of all of its environments. Give one "
            "environment, or set num_anchors=0 to train with plain GRPO"
        )
    if trainer.use_vllm and trainer.vllm_mode == "server":
        return (
            "the requests that FR3ETrainer sends to a vLLM server cannot carry images. Set "
            "vllm_mode='colocate', generate without vLLM, or set num_anchors=0 to train with plain GRPO"
        )
    return None


def obstacle_to_tool_images(trainer: TypedTrainer) -> str | None:
    """Why a trainer cannot explore where tools return images, and what to do; `None` if it can."""
    if obstacle := obstacle_to_images(trainer):
        return obstacle
    has_grid = "image_grid_thw" in trainer.processing_class.image_processor.model_input_names
    if not has_grid or trainer._image_pad_token_id is None:
        return (
            "TRL trains on images from tools only with models that use image_grid_thw, such as Qwen2.5-VL. Use one of "
            "these"
        )
    if trainer.use_vllm or trainer.has_own_sampler:
        return "only transformers' generate supports them. Generate without vLLM and without sampler="
    assert isinstance(trainer.args, FR3EConfig)
    if trainer.args.max_refills > 0:
        return "rows that are left over for the next step do not keep them. Set max_refills=0"
    takes_none = trainer.args.ddp_find_unused_parameters and not (
        trainer.log_multimodal or trainer.is_deepspeed_enabled
    )
    if trainer.accelerator.num_processes > 1 and not takes_none:
        return (
            "rows of one process may have them where those of another have none. Train with DDP, "
            "ddp_find_unused_parameters=True and log_multimodal=False"
        )
    return None


def warn_of_unscored_sampling(args: FR3EConfig) -> None:
    """Tell of a bias that stays: vLLM samples with settings that the loss does not take into account."""
    unscored = sorted(UNSCORED_SAMPLING & set(args.generation_kwargs or {}))
    if args.repetition_penalty != 1:
        unscored.append("repetition_penalty")
    if unscored and args.vllm_importance_sampling_correction:
        logger.warning(
            "vLLM samples with %s, which the loss does not account for: the log-probs of vLLM and of the trainer "
            "differ by more than rounding, and the importance ratio (importance_sampling_ratio) corrects for that as "
            "if the policy had changed. This favours tokens that these settings make rarer. Leave them out, or set "
            "vllm_importance_sampling_correction=False.",
            " and ".join(unscored),
        )


def warn_of_float32_generation(trainer: TypedTrainer) -> None:
    """Tell if an adapter's model generates in float32: `generate` of PEFT is not under the autocast of updates."""
    is_wide = trainer.model.dtype == torch.float32 and trainer.accelerator.mixed_precision != "no"
    if is_wide and is_peft_model(trainer.model) and not trainer.use_vllm:
        logger.warning(
            "The adapter's base model is in float32 and generates in float32, although updates run in %s. Load it in "
            "bfloat16 with model_init_kwargs={'dtype': 'bfloat16'} or --dtype bfloat16, which halves its memory and "
            "makes generation faster.",
            trainer.accelerator.mixed_precision,
        )


def warn_of_timeouts(args: FR3EConfig) -> None:
    """Tell if the other processes give up before the main one has asked a server that hangs again."""
    waits = args.vllm_mode == "server" and args.world_size > 1 and args.process_index == 0
    if waits and args.ddp_timeout <= args.vllm_request_timeout:
        logger.warning(
            "ddp_timeout=%d is not longer than vllm_request_timeout=%d. If the vLLM server hangs, the other processes "
            "give up and end the run before the main process asks the server again. Set ddp_timeout=%d to prevent "
            "that.",
            args.ddp_timeout,
            args.vllm_request_timeout,
            4 * args.vllm_request_timeout,
        )


def check_generation_kwargs(args: FR3EConfig) -> None:
    """Refuse `generation_kwargs` that requests have of their own, or that mean something else at an anchor."""
    for name, value in (args.generation_kwargs or {}).items():
        if (name, value) in HARMLESS_KWARGS:
            continue
        for names, remedy in REFUSED_KWARGS:
            if name in names:
                raise ValueError(
                    f"generation_kwargs={{{name!r}: {value!r}}} cannot be honoured while exploring. {remedy}. (With "
                    f"{settings_of_plain_grpo(args)}, plain GRPO takes it.)"
                )


def warn_of_single_prompt(args: FR3EConfig) -> None:
    """Warn of batches of one prompt, where the prior of a prompt, the mean over the others, does not exist."""
    has_prior = args.value_prior_strength and not args.value_tracker and not args.normalizes_rewards
    if has_prior and args.generation_batch_size == args.num_generations:
        alone = f", {CREDIT_RULES[args.plan.credit].without_prior}"
        logger.warning(
            "A generation batch has one prompt (generation_batch_size=%d / num_generations=%d), so no other prompts "
            "provide a prior for its state%s. Set, for example, gradient_accumulation_steps=%d for 8 prompts, or "
            "value_tracker=True to use the prompts of earlier steps.",
            args.generation_batch_size,
            args.num_generations,
            alone if args.num_bases == 1 else "",
            8 * args.steps_per_generation,
        )


def warn_of_refill(args: FR3EConfig) -> None:
    """Warn of refill where the loss divides by all rows, those that rejected rows and copies would have been too."""
    if args.max_refills and CREDIT_RULES[args.plan.credit].by_token and args.loss_type not in PER_TOKEN:
        logger.warning(
            "max_refills=%d with loss_type=%r scales gradients up: rows of other prompts take the places of rejected "
            "rows and copies, but the loss still divides by all rows. Set loss_type='dapo', which divides by "
            "the tokens in the loss, or lower learning_rate.",
            args.max_refills,
            args.loss_type,
        )


# Arguments of `from_pretrained` that say where files are
WHERE_A_MODEL_IS = {"cache_dir", "gguf_file", "local_files_only", "revision", "subfolder", "token"}


@contextmanager
def classless_model(model: object, args: FR3EConfig) -> Iterator[None]:
    """Where TRL fails on a name whose configuration does not say which class the model has, say that."""
    try:
        yield
    except (TypeError, IndexError):
        place = {key: value for key, value in (args.model_init_kwargs or {}).items() if key in WHERE_A_MODEL_IS}
        # Without running code that comes with it
        if not isinstance(model, str) or PreTrainedConfig.get_config_dict(model, **place)[0].get("architectures"):
            raise
        raise ValueError(
            f"model_name_or_path={model!r} has a config.json without 'architectures', the class of the model. Add it, "
            'for example "architectures": ["Qwen3ForCausalLM"], or pass the trainer the model itself.'
        ) from None


def check_model(model: object) -> None:
    """Refuse a model that cannot generate text from prompts alone."""
    model = getattr(model, "get_base_model", lambda: model)()
    name = type(model).__name__
    remedy = "Pass a causal language model, for example AutoModelForCausalLM.from_pretrained(NAME)."
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {name}, which is not allowed: it must be a name or a PreTrainedModel. {remedy}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model is a {name}, an encoder-decoder, which cannot continue a prompt. {remedy}")
    if not model.can_generate():
        raise ValueError(f"model is a {name}, which cannot generate text. {remedy}")


def check_tokenizer(trainer: TypedTrainer) -> None:
    """Refuse a tokenizer that TRL has set up and that cannot end a completion, or whose own tokens the model lacks."""
    tokenizer = tokenizer_of(trainer)
    if None in trainer.eos_token_ids:
        raise ValueError(
            f"The tokenizer {type(tokenizer).__name__} has no EOS token, so that no completion could end. Set "
            "tokenizer.eos_token, for example to '<|im_end|>', and pass it as processing_class."
        )
    check_tokens(trainer, [tokenizer.eos_token_id, tokenizer.pad_token_id])


def check_tokens(trainer: TypedTrainer, token_ids: Iterable[int]) -> None:
    """Refuse tokens that the model has no embedding for. Those that a tokenizer has and nobody uses do no harm."""
    weight: Any = trainer.model.get_input_embeddings().weight
    num_embeddings, largest = weight.shape[0], max(token_ids, default=-1)
    if not is_sharded(trainer) and 0 < num_embeddings <= largest:
        tokenizer = tokenizer_of(trainer)
        raise ValueError(
            f"Token {largest} ({tokenizer.decode([largest])!r}) is used, and the model has embeddings for "
            f"{num_embeddings} of the tokenizer's {len(tokenizer)} tokens. Pass the model's own tokenizer as "
            "processing_class, or call model.resize_token_embeddings(len(tokenizer))."
        )


def check_dataset(dataset: Dataset | IterableDataset, args: FR3EConfig, has_environments: bool = False) -> None:
    """Refuse a training set that cannot be trained on, as far as its size and first example tell."""
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(
            f"train_dataset is a {type(dataset).__name__}, which is not allowed: it must be a Dataset or an "
            "IterableDataset, for example load_dataset(NAME, split='train') or Dataset.from_list(EXAMPLES)."
        )
    for name in ("max_refills", "max_staleness"):
        if getattr(args, name) > 0 and not isinstance(dataset, Dataset):
            raise ValueError(
                f"{name}={getattr(args, name)} draws prompts from a Dataset, and train_dataset is an "
                f"{type(dataset).__name__}. Load it without streaming, or set {name}=0."
            )
    example = next(iter(dataset), None)
    if example is None:
        raise ValueError("train_dataset is empty. It must have at least one example, with a 'prompt'.")
    if "prompt" not in example and not has_environments:
        raise ValueError(f"train_dataset has the columns {sorted(example)}. It must have one named 'prompt'.")
    for column in sorted(example.keys() & REWARD_ARGUMENTS):
        raise ValueError(
            f"train_dataset has a column '{column}', and reward functions get something else by that name. Rename it: "
            f"train_dataset.rename_column('{column}', 'reference_{column}')."
        )
    if "prompt" in example:
        check_prompts([example])
    num_prompts = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < num_prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} examples, and one generation batch takes {num_prompts} "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}). Use a "
            "larger dataset or a smaller batch."
        )


def check_prompts(examples: list[dict[str, Any]]) -> None:
    """
    Refuse examples that cannot be explored from: the first when the trainer is made, all when their turn comes.

    Args:
        examples (`list[dict]`):
            Examples of the training set, each with a `"prompt"`.

    Raises:
        ValueError: A prompt is neither a text nor a list of messages, or is empty, or a message is not whole.
    """
    for example in examples:
        prompt = example.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise _bad_prompt(example, f"is {prompt!r}. It must be a text or a list of messages, and not empty")
        if isinstance(prompt, list):
            _checked_parts(example)


def check_images(examples: list[dict[str, Any]], obstacle: str | None) -> None:
    """
    Refuse images that cannot be trained on, in examples that [`check_prompts`] lets pass.

    Args:
        examples (`list[dict]`):
            Examples of the training set, each with a `"prompt"`.
        obstacle (`str`, *optional*):
            See [`obstacle_to_images`].

    Raises:
        NotImplementedError: There are images, or a column for them, and an obstacle.
        ValueError: Some examples have images and others none, a place or a column for them has none, or they are in a
            place where TRL does not look for them.
    """
    num_images = []
    for example in examples:
        column = next((column for column in IMAGE_COLUMNS if example.get(column, []) != []), None)
        parts = _checked_parts(example) if isinstance(example.get("prompt"), list) else []
        places = [part for part in parts if part["type"] == "image"]
        where = "A prompt of train_dataset has images."
        if column is not None:
            where = (
                f"train_dataset has a column '{column}', whose value is {str(example[column])[:100]}. TRL takes every "
                "example of it, None too, for one with images. If there are none, remove it by "
                f"train_dataset.remove_columns('{column}'), or filter the example out."
            )
        if obstacle is not None and (places or column is not None):
            raise NotImplementedError(f"FR3ETrainer cannot explore from images here: {obstacle}. {where}")
        if column is None and not all("image" in part for part in places):
            raise _bad_prompt(example, "has a place for an image, and no image. Give it one, or a column 'images'")
        if column is not None and example[column] is None:
            raise ValueError(where)
        if column is not None and any("image" in part for part in places):
            raise _bad_prompt(example, f"has images in its messages and in a column '{column}'. Put all into one")
        if column is not None and isinstance(example.get("prompt"), str):
            raise _bad_prompt(example, "is a text beside images. It must be a list of messages")
        num_images.append(len(places) if column is None else 1)
    check_all_or_none(num_images)


def check_all_or_none(num_images: list[int]) -> None:
    """Refuse a batch of prompts of which some have images, as processors do, by the number that each has."""
    if any(num_images) and not all(num_images):
        raise ValueError(
            f"Of the {len(num_images)} prompts or rows of a process in this batch, {sum(map(bool, num_images))} have "
            "images. The processors of transformers, as TRL calls them, take images for all prompts or for none: "
            "filter train_dataset, or give every prompt an image, a blank one for example."
        )


def _checked_parts(example: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a conversation whose messages have a list of parts for content."""
    messages = example["prompt"]
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
        form = "{'role': 'user', 'content': '1+1='}"
        raise _bad_prompt(example, f"has a message without a role or content. Give it both, as in {form}")
    if any(message["content"] is None and not message.get("tool_calls") for message in messages):
        raise _bad_prompt(example, "has a message whose content is None. Write it")
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if not all(isinstance(part, dict) and "type" in part for part in parts):
        form = "{'type': 'text', 'text': '1+1='}"
        raise _bad_prompt(example, f"has a message with a part that has no type. Give it one, as in {form}")
    return parts


def _bad_prompt(example: dict[str, Any], what: str) -> ValueError:
    return ValueError(f"A prompt of train_dataset {what}, or filter it out. Its example: {repr(example)[:300]}.")


def check_reward_funcs(reward_funcs: Any) -> None:
    """Refuse rewards that cannot be called."""
    for func in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if func is not None and not isinstance(func, str) and (isinstance(func, type) or not callable(func)):
            what = f"the class {func.__name__}" if isinstance(func, type) else f"{func!r}, which cannot be called"
            raise TypeError(
                f"reward_funcs has {what}. It must have functions, names of models, or objects with a method __call__, "
                "which are called with prompts, completions and the dataset's columns."
            )


def _is_number(reward: Any) -> bool:
    """Whether TRL makes a number of it: Python's, `Decimal`, NumPy's, or a tensor of one element."""
    return isinstance(reward, Real | Decimal | np.bool_) or (isinstance(reward, torch.Tensor) and reward.numel() == 1)


@contextmanager
def named_reward_funcs(names: Sequence[str]) -> Iterator[None]:
    """
    Have an error of TRL's computation of rewards say which reward function it is about.

    The functions stay what the user passed, so that the only one who knows is TRL, where the error has come up.

    Args:
        names (`Sequence[str]`):
            What TRL calls the reward functions.
    """
    try:
        yield
    except Exception as error:
        name, returned, frame = None, None, None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == TRL_TRAINER:
                of_trl = frame.f_locals
                if "func_name" in of_trl:  # one that is asynchronous
                    name, returned = of_trl["func_name"], of_trl.get("output")
                elif "reward_func_name" in of_trl:
                    at = of_trl.get("idx")  # of those that are, once all have returned
                    name = of_trl["reward_func_name"] if at is None else names[at]
                    returned = of_trl.get("output_reward_func")
        if name is None:
            raise
        is_of_trl = frame is not None and frame.f_code.co_filename == TRL_TRAINER
        if is_of_trl and (problem := _no_rewards(returned, str(error))):
            raise TypeError(f"The reward function '{name}' returned {problem}") from error
        error.add_note(f"In the reward function '{name}'.")
        raise


def _no_rewards(returned: Any, told: str) -> str | None:
    """What a reward function returned that TRL has failed on, if it is no list of numbers."""
    if not isinstance(returned, list):
        if "iterable" not in told and "iteration" not in told:
            return None  # it failed on something else: the call itself
        return f"{returned!r}. It must return a list, with a number for each completion, or None for one without."
    for i, reward in enumerate(returned, 1):
        if not _is_number(reward):
            return (
                f"{str(reward)[:100]!r} for completion {i} of {len(returned)}. A reward must be a number, or None for "
                "a completion that cannot be scored."
            )
    return None


def check_rewards(rewards: torch.Tensor, names: Sequence[str]) -> None:
    """
    Refuse rewards that cannot be trained on. NaN is no reward, as to GRPO.

    Args:
        rewards (`torch.Tensor` of shape (rows, reward functions)):
            Those of all processes, as TRL returns them.
        names (`Sequence[str]`):
            The reward functions.

    Raises:
        ValueError: A reward is infinite, or too large.
    """
    refused = (rewards.abs() > MAX_REWARD).nonzero().tolist()
    if not refused:
        return
    row, func = refused[0]
    value = rewards[row, func].item()
    where = f"The reward function '{names[func]}' returned {value:g} for completion {row + 1} of {len(rewards)}"
    if math.isinf(value):
        raise ValueError(
            f"{where}, in float32. A reward must be a finite number. None or NaN says that a completion cannot be "
            "scored."
        )
    raise ValueError(
        f"{where}. A reward must be between -{MAX_REWARD:.0e} and {MAX_REWARD:.0e}, since gradients have the precision "
        "of float32: scale it down, best to values around 1."
    )


# Methods of GRPOTrainer that a subclass cannot override while exploring, and what to do
REFUSED_OVERRIDES = {
    "_generate": "Rollouts are drawn by a sampler, which continues prefixes too: pass it as sampler=",
    "_generate_single_turn": "Rollouts are drawn by a sampler, which continues prefixes too: pass it as sampler=",
    "_calculate_rewards": "Credit is computed from what the reward functions return: pass another one in reward_funcs",
}


def check_overrides(trainer: type, base: type, args: FR3EConfig) -> None:
    """
    Refuse methods of a subclass that would not do what they do for GRPOTrainer.

    Args:
        trainer (`type`):
            The class of the trainer that is made.
        base (`type`):
            `FR3ETrainer`.
        args ([`FR3EConfig`]):
            Its configuration.

    Raises:
        NotImplementedError: One is overridden that is not called or whose result is not used, or the loss is replaced
            where advantages are of tokens.
    """
    plain = f"or set {settings_of_plain_grpo(args)} to train with plain GRPO"
    for name, remedy in REFUSED_OVERRIDES.items():
        owner = next(cls for cls in trainer.__mro__ if name in vars(cls))
        if owner is not base:
            raise NotImplementedError(
                f"{owner.__name__} overrides {name}, which FR3ETrainer does not support. {remedy}, {plain}."
            )
    if not CREDIT_RULES[args.plan.credit].by_token:
        return
    for cls in trainer.__mro__[: trainer.__mro__.index(GRPOTrainer)]:
        for name in {"compute_loss", "_compute_loss"} & vars(cls).keys():
            code = getattr(inspect.unwrap(vars(cls)[name]), "__code__", None)
            if code is not None and not {"compute_loss", "_compute_loss"} & set(code.co_names):
                raise NotImplementedError(
                    f"{cls.__name__}.{name} replaces the loss, and with credit={args.credit!r} the advantages of a "
                    "batch are of shape (B, T), not (B,). Set credit='rollout', whose advantages are GRPO's, "
                    f"call super().{name}, {plain}."
                )
