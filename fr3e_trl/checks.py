"""Refuses settings, models and data that cannot work, before a run starts, with errors that say what to do."""

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

# Larger rewards make the squared norm of a gradient overflow float32: first steps of length 0, then NaN in the weights
MAX_REWARD = 1e15

# Keys of `generation_kwargs`, of transformers and vLLM, that exploration cannot honour, and what to do instead
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
        "Leave it out: it counts from where generation begins, which for a branch is inside the completion",
    ),
    (
        ("stop", "stop_strings"),
        "Set stop_token_ids: strings are only searched for after the anchor, so that one across it would be missed",
    ),
    (
        ("prompt_lookup_num_tokens", "dola_layers"),
        "Leave it out: rollouts are sampled from the policy itself, token by token",
    ),
    (
        ("seed",),
        "Set the trainer's seed: with this one, the branches of all anchors would start from the same random numbers",
    ),
    (
        ("return_dict_in_generate", "logprobs", "flat_logprobs", "logprob_token_ids", "output_kind", "echo", "stream"),
        "Leave it out: the trainer needs the output in its own format",
    ),
)
HARMLESS_KWARGS = (("do_sample", True), ("num_beams", 1), ("num_return_sequences", 1), ("min_length", 0))
# Keys that each call of `generate` sets, whatever the model's generation config has
OVERRIDDEN_KWARGS = ("max_new_tokens", "max_length", "temperature", "do_sample")

# Keys by which a model's generation config may change its distribution, and values that change nothing
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

# The file in which TRL computes rewards
TRL_TRAINER = inspect.getfile(GRPOTrainer)

# Columns with images. TRL uses the first that exists
IMAGE_COLUMNS = ("images", "image")

# Arguments that TRL passes to reward functions in addition to the dataset's columns
REWARD_ARGUMENTS = {"prompts", "completions"}

# Settings of vLLM that change the sampling distribution, but not the log-probs of vLLM or of the trainer
UNSCORED_SAMPLING = {"allowed_token_ids", "bad_words", "logit_bias", "min_p", "repetition_penalty", "top_k", "top_p"}


def plain_grpo_settings(args: FR3EConfig) -> str:
    """The settings that turn a run into plain GRPO."""
    others = "reject_degenerate_states=False, value_prior_strength=0 and negative_advantage_scale=1"
    return "num_anchors=0" if args.num_anchors else others


def refuse_unsupported(args: FR3EConfig, rollout_func: Any) -> None:
    """Refuse features that do not work with exploration yet."""
    unsupported = [
        ("a rollout_func", rollout_func is not None, "Pass sampler=, which continues prefixes too"),
        ("vllm_structured_outputs_regex", args.vllm_structured_outputs_regex is not None, "Leave it out"),
    ]
    for what, given, remedy in unsupported:
        if given:
            raise NotImplementedError(
                f"FR3ETrainer does not support {what} yet. {remedy}, or set {plain_grpo_settings(args)} to train "
                "with plain GRPO."
            )


def check_sampler(sampler: Any, args: FR3EConfig) -> None:
    """Refuse a sampler that is not callable or would have no effect."""
    if args.is_plain_grpo:
        raise ValueError(
            "sampler= has no effect, because it draws FR3E's rollouts and FR3E is off (num_anchors=0). Leave it out, "
            "or pass a rollout_func, as to GRPOTrainer."
        )
    if args.max_staleness:
        raise ValueError(
            f"max_staleness={args.max_staleness} overlaps training with a vLLM server's generation, which sampler= "
            "replaces. Set max_staleness=0. A sampler may itself draw ahead."
        )
    if not callable(sampler):
        raise TypeError(
            f"sampler={sampler!r} is not allowed: it must be a class or function that takes the trainer and returns a "
            "Sampler, for example sampler=lambda trainer: my_sampler."
        )


def refuse_unsupported_setup(trainer: TypedTrainer) -> None:
    """Refuse what can only be checked once TRL has set up the trainer, such as sharding."""
    if trainer._dist.fsdp_version == 1:
        raise NotImplementedError(
            "FR3ETrainer does not support FSDP version 1. Set fsdp_version: 2 in accelerate's configuration, or "
            "num_anchors=0 to train with plain GRPO."
        )
    if trainer._dist.is_fsdp and trainer.use_transformers_continuous_batching:
        raise NotImplementedError(
            "use_transformers_continuous_batching=True does not work with FSDP, whose processes must generate in "
            "lockstep. Leave it out, or use vLLM."
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


def eos_token_ids(trainer: TypedTrainer) -> list[int]:
    """The tokens that end a completion: TRL's and those in `generation_kwargs`."""
    given: Any = trainer.args.generation_kwargs or {}
    added = [given.get("eos_token_id") or [], given.get("stop_token_ids") or []]
    lists = [[ids] if isinstance(ids, int) else ids for ids in added]
    return list(dict.fromkeys([*trainer.eos_token_ids, *chain.from_iterable(lists)]))


def check_generation_config(trainer: TypedTrainer) -> None:
    """
    Refuse settings that exploration cannot honour in the trainer's `generation_config`, which a script may change, and
    in the model's, unless the trainer's overrides them.
    """
    model_config: Any = trainer.model.generation_config
    current: Any = trainer.generation_config
    for names, remedy in REFUSED_KWARGS:
        for name in names:
            value = getattr(current, name, None)
            is_off = value is None or (name, value) in HARMLESS_KWARGS or (value is False and name != "do_sample")
            if not is_off and name not in ("max_new_tokens", "temperature"):  # TRL sets these itself
                raise ValueError(
                    f"trainer.generation_config.{name}={value!r} cannot be honoured while exploring. {remedy}."
                )
    harmless = dict(HARMLESS_KWARGS)
    for name in (name for names, _ in REFUSED_KWARGS for name in names if name not in OVERRIDDEN_KWARGS):
        value = getattr(model_config, name, None)
        if value not in (None, False, harmless.get(name)) and getattr(current, name, None) is None:
            remedy = f"generation_kwargs={{{name!r}: {harmless[name]}}}" if name in harmless else "it to None"
            raise ValueError(
                f"The model's generation_config has {name}={value}, but rollouts must be independent samples that can "
                f"continue any prefix. Set {remedy}, or num_anchors=0 for plain GRPO."
            )
    for name, neutral in NEUTRAL.items():
        value = getattr(model_config, name, None)
        if value not in (None, neutral) and getattr(current, name, None) is None:
            logger.warning(
                "The model's generation_config has %s=%s, which changes what is sampled, but the loss does not account "
                "for it. Set generation_kwargs={%r: %s} to sample from the policy itself.",
                name,
                value,
                name,
                neutral,
            )


def obstacle_to_images(trainer: TypedTrainer) -> str | None:
    """Why a trainer that TRL has set up cannot explore prompts with images, and what to do. `None` if it can."""
    if not trainer._is_vlm:
        return (
            f"processing_class is a {type(trainer.processing_class).__name__}, which only takes text. Pass the "
            "model's processor, or leave the images out"
        )
    if is_sharded(trainer):
        return (
            "the model is sharded, and a process without images would skip the vision tower while others wait. Train "
            "with DDP, with LoRA if the model is large, or set num_anchors=0 to train with plain GRPO"
        )
    if trainer._multi_environment:
        return (
            "environment_factory is a dict, and TRL's processor renders prompts with the tools of all environments. "
            "Give one environment, or set num_anchors=0 to train with plain GRPO"
        )
    if trainer.use_vllm and trainer.vllm_mode == "server":
        return (
            "the requests that FR3ETrainer sends to a vLLM server cannot carry images. Set "
            "vllm_mode='colocate', generate without vLLM, or set num_anchors=0 to train with plain GRPO"
        )
    return None


def obstacle_to_tool_images(trainer: TypedTrainer) -> str | None:
    """Why a trainer cannot explore with tools that return images, and what to do. `None` if it can."""
    if obstacle := obstacle_to_images(trainer):
        return obstacle
    has_grid = "image_grid_thw" in trainer.processing_class.image_processor.model_input_names
    if not has_grid or trainer._image_pad_token_id is None:
        return (
            "TRL trains on images from tools only with models that use image_grid_thw, such as Qwen2.5-VL. Use such a "
            "model"
        )
    if trainer.use_vllm or trainer.has_own_sampler:
        return "only transformers' generate supports them. Generate without vLLM and without sampler="
    assert isinstance(trainer.args, FR3EConfig)
    if trainer.args.max_refills > 0:
        return "rows left over for the next step do not keep these images. Set max_refills=0"
    takes_none = trainer.args.ddp_find_unused_parameters and not (
        trainer.log_multimodal or trainer.is_deepspeed_enabled
    )
    if trainer.accelerator.num_processes > 1 and not takes_none:
        return (
            "one process may have rows with such images while another has none. Train with DDP, "
            "ddp_find_unused_parameters=True and log_multimodal=False"
        )
    return None


def warn_about_unscored_sampling(args: FR3EConfig) -> None:
    """Warn of a bias if vLLM samples with settings that the loss does not account for."""
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


def warn_about_float32_generation(trainer: TypedTrainer) -> None:
    """Warn if an adapter's model generates in float32, because PEFT's `generate` does not use autocast."""
    is_wide = trainer.model.dtype == torch.float32 and trainer.accelerator.mixed_precision != "no"
    if is_wide and is_peft_model(trainer.model) and not trainer.use_vllm:
        logger.warning(
            "The adapter's base model is in float32 and generates in float32, although updates run in %s. Load it in "
            "bfloat16 with model_init_kwargs={'dtype': 'bfloat16'} or --dtype bfloat16, which halves its memory and "
            "makes generation faster.",
            trainer.accelerator.mixed_precision,
        )


def warn_about_timeouts(args: FR3EConfig) -> None:
    """Warn if other processes time out before the main one retries a request to a server that hangs."""
    waits = args.vllm_mode == "server" and args.world_size > 1 and args.process_index == 0
    if waits and args.ddp_timeout <= args.vllm_request_timeout:
        logger.warning(
            "ddp_timeout=%d is not longer than vllm_request_timeout=%d. If the vLLM server hangs, the other processes "
            "time out and end the run before the main process repeats its request. Set ddp_timeout=%d to prevent this.",
            args.ddp_timeout,
            args.vllm_request_timeout,
            4 * args.vllm_request_timeout,
        )


def check_generation_kwargs(args: FR3EConfig) -> None:
    """Refuse `generation_kwargs` that requests set themselves, or that would mean something else at an anchor."""
    for name, value in (args.generation_kwargs or {}).items():
        if (name, value) in HARMLESS_KWARGS:
            continue
        for names, remedy in REFUSED_KWARGS:
            if name in names:
                raise ValueError(
                    f"generation_kwargs={{{name!r}: {value!r}}} cannot be honoured while exploring. {remedy}. (With "
                    f"{plain_grpo_settings(args)}, plain GRPO takes it.)"
                )


def warn_about_single_prompt(args: FR3EConfig) -> None:
    """Warn of batches of one prompt, which has no prior because there are no other prompts to average over."""
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


def warn_about_refill(args: FR3EConfig) -> None:
    """Warn of refill with a loss that divides by all rows, since refill puts more of them into the loss."""
    if args.max_refills and CREDIT_RULES[args.plan.credit].by_token and args.loss_type not in PER_TOKEN:
        logger.warning(
            "max_refills=%d with loss_type=%r scales gradients up: rows of other prompts take the places of rejected "
            "rows and copies, but the loss still divides by all rows. Set loss_type='dapo', which divides by "
            "the tokens in the loss, or lower learning_rate.",
            args.max_refills,
            args.loss_type,
        )


# Arguments of `from_pretrained` that locate its files
LOCATION_KWARGS = {"cache_dir", "gguf_file", "local_files_only", "revision", "subfolder", "token"}


@contextmanager
def explain_missing_architectures(model: object, args: FR3EConfig) -> Iterator[None]:
    """Explain TRL's failure to load a model whose config.json does not name its class."""
    try:
        yield
    except (TypeError, IndexError):
        location = {key: value for key, value in (args.model_init_kwargs or {}).items() if key in LOCATION_KWARGS}
        # `get_config_dict` runs no code of the model's
        if not isinstance(model, str) or PreTrainedConfig.get_config_dict(model, **location)[0].get("architectures"):
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
    """Refuse a tokenizer without an EOS token, or with special tokens that the model has no embedding for."""
    tokenizer = tokenizer_of(trainer)
    if None in trainer.eos_token_ids:
        raise ValueError(
            f"The tokenizer {type(tokenizer).__name__} has no EOS token, so that no completion could end. Set "
            "tokenizer.eos_token, for example to '<|im_end|>', and pass it as processing_class."
        )
    check_tokens(trainer, [tokenizer.eos_token_id, tokenizer.pad_token_id])


def check_tokens(trainer: TypedTrainer, token_ids: Iterable[int]) -> None:
    """Refuse tokens that the model has no embedding for. Only tokens that are used matter."""
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
    """Refuse an unsuitable training set, judging by its size and first example."""
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
            f"train_dataset has a column '{column}', but TRL passes something else to reward functions by that name. "
            "Rename it: "
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
    Refuse examples with an unusable prompt. The first is checked in the constructor, the others when they are drawn.

    Args:
        examples (`list[dict]`):
            Examples of the training set, each with a `"prompt"`.

    Raises:
        ValueError: A prompt is neither a string nor a list of messages, or is empty, or a message is incomplete.
    """
    for example in examples:
        prompt = example.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise _bad_prompt(example, f"is {prompt!r}. It must be a string or a list of messages, and not empty")
        if isinstance(prompt, list):
            _checked_parts(example)


def check_images(examples: list[dict[str, Any]], obstacle: str | None) -> None:
    """
    Refuse images that cannot be trained on, in examples that pass [`check_prompts`].

    Args:
        examples (`list[dict]`):
            Examples of the training set, each with a `"prompt"`.
        obstacle (`str`, *optional*):
            See [`obstacle_to_images`].

    Raises:
        NotImplementedError: There are images, or a column for them, and an obstacle.
        ValueError: Only some examples have images, a placeholder or a column lacks its image, or images are where TRL
            does not look for them.
    """
    num_images = []
    for example in examples:
        column = next((column for column in IMAGE_COLUMNS if example.get(column, []) != []), None)
        parts = _checked_parts(example) if isinstance(example.get("prompt"), list) else []
        image_parts = [part for part in parts if part["type"] == "image"]
        where = "A prompt of train_dataset has images."
        if column is not None:
            where = (
                f"train_dataset has a column '{column}', whose value is {str(example[column])[:100]}. TRL expects "
                "images in every example with this column, even if it is None. If there are none, remove it with "
                f"train_dataset.remove_columns('{column}'), or filter the example out."
            )
        if obstacle is not None and (image_parts or column is not None):
            raise NotImplementedError(f"FR3ETrainer cannot explore prompts with images here: {obstacle}. {where}")
        if column is None and not all("image" in part for part in image_parts):
            raise _bad_prompt(example, "has a placeholder without an image. Add the image, or a column 'images'")
        if column is not None and example[column] is None:
            raise ValueError(where)
        if column is not None and any("image" in part for part in image_parts):
            raise _bad_prompt(example, f"has images both in its messages and in a column '{column}'. Use only one")
        if column is not None and isinstance(example.get("prompt"), str):
            raise _bad_prompt(example, "is a string, but has images. It must be a list of messages")
        num_images.append(len(image_parts) if column is None else 1)
    check_all_or_none(num_images)


def check_all_or_none(num_images: list[int]) -> None:
    """Refuse a batch in which only some prompts have images, given the number of images of each."""
    if any(num_images) and not all(num_images):
        raise ValueError(
            f"Of the {len(num_images)} prompts or rows of a process in this batch, {sum(map(bool, num_images))} have "
            "images. TRL calls the processors of transformers with images for all prompts or for none: filter "
            "train_dataset, or give every prompt an image, for example a blank one."
        )


def _checked_parts(example: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of the messages whose content is a list, once all messages are checked."""
    messages = example["prompt"]
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
        form = "{'role': 'user', 'content': '1+1='}"
        raise _bad_prompt(example, f"has a message without a role or content. Give it both, as in {form}")
    if any(message["content"] is None and not message.get("tool_calls") for message in messages):
        raise _bad_prompt(example, "has a message whose content is None. Set it")
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if not all(isinstance(part, dict) and "type" in part for part in parts):
        form = "{'type': 'text', 'text': '1+1='}"
        raise _bad_prompt(example, f"has a message with a part that has no type. Give it one, as in {form}")
    return parts


def _bad_prompt(example: dict[str, Any], what: str) -> ValueError:
    return ValueError(f"A prompt of train_dataset {what}, or filter it out. Its example: {repr(example)[:300]}.")


def check_reward_funcs(reward_funcs: Any) -> None:
    """Refuse reward functions that cannot be called."""
    for func in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if func is not None and not isinstance(func, str) and (isinstance(func, type) or not callable(func)):
            what = f"the class {func.__name__}" if isinstance(func, type) else f"{func!r}, which cannot be called"
            raise TypeError(
                f"reward_funcs has {what}. It must have functions, names of models, or objects with a method __call__, "
                "which are called with prompts, completions and the dataset's columns."
            )


def _is_number(reward: Any) -> bool:
    """Whether TRL accepts it as a reward: a number of Python or NumPy, a `Decimal`, or a tensor of one element."""
    return isinstance(reward, Real | Decimal | np.bool_) or (isinstance(reward, torch.Tensor) and reward.numel() == 1)


@contextmanager
def name_reward_func_in_errors(names: Sequence[str]) -> Iterator[None]:
    """
    Add the name of the reward function to an error that TRL raises while it computes rewards.

    The functions are not wrapped, so that the name has to be read from the frames of TRL in the traceback.

    Args:
        names (`Sequence[str]`):
            TRL's names of the reward functions.
    """
    try:
        yield
    except Exception as error:
        name, returned, frame = None, None, None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == TRL_TRAINER:
                variables = frame.f_locals
                if "func_name" in variables:  # an asynchronous function
                    name, returned = variables["func_name"], variables.get("output")
                elif "reward_func_name" in variables:
                    index = variables.get("idx")  # set once all asynchronous functions have returned
                    name = variables["reward_func_name"] if index is None else names[index]
                    returned = variables.get("output_reward_func")
        if name is None:
            raise
        is_raised_in_trl = frame is not None and frame.f_code.co_filename == TRL_TRAINER
        if is_raised_in_trl and (problem := _rewards_problem(returned, str(error))):
            raise TypeError(f"The reward function '{name}' returned {problem}") from error
        error.add_note(f"In the reward function '{name}'.")
        raise


def _rewards_problem(returned: Any, message: str) -> str | None:
    """What is wrong with a reward function's result on which TRL failed with `message`, if it is no list of numbers."""
    if not isinstance(returned, list):
        if "iterable" not in message and "iteration" not in message:
            return None  # the call itself failed
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
    Refuse infinite and huge rewards. NaN means that there is no reward, as in GRPO.

    Args:
        rewards (`torch.Tensor` of shape (rows, reward functions)):
            Rewards of all processes, as TRL returns them.
        names (`Sequence[str]`):
            Names of the reward functions.

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
            f"{where}, in float32. A reward must be a finite number, or None or NaN for a completion that cannot be "
            "scored."
        )
    raise ValueError(
        f"{where}. A reward must be between -{MAX_REWARD:.0e} and {MAX_REWARD:.0e}, because gradients are float32. "
        "Scale it down, preferably to values around 1."
    )


# Methods of GRPOTrainer that a subclass cannot override while exploring, and what to do instead
REFUSED_OVERRIDES = {
    "_generate": "Rollouts are drawn by a sampler, which continues prefixes too: pass it as sampler=",
    "_generate_single_turn": "Rollouts are drawn by a sampler, which continues prefixes too: pass it as sampler=",
    "_calculate_rewards": "Credit is computed from what reward functions return: pass another one in reward_funcs",
}


def check_overrides(trainer: TypedTrainer, base: type, args: FR3EConfig) -> None:
    """
    Refuse methods that would not work as they do with GRPOTrainer, whether a subclass has them or a script sets them.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of `base` or of a subclass.
        base (`type`):
            `FR3ETrainer`.
        args ([`FR3EConfig`]):
            Its configuration.

    Raises:
        NotImplementedError: A method is overridden that is not called or whose result is not used, or the loss is
            replaced although each token has its own advantage.
    """
    plain = f"or set {plain_grpo_settings(args)} to train with plain GRPO"
    for name, remedy in REFUSED_OVERRIDES.items():
        for owner, _ in _overrides(trainer, name):
            if owner != base.__name__:
                raise NotImplementedError(
                    f"{owner} overrides {name}, which FR3ETrainer does not support. {remedy}, {plain}."
                )
    if not CREDIT_RULES[args.plan.credit].by_token:
        return
    for name in ("compute_loss", "_compute_loss"):
        for owner, function in _overrides(trainer, name):
            code = getattr(inspect.unwrap(function), "__code__", None)
            # A closure may hold the method that it replaces
            if code is not None and not {"compute_loss", "_compute_loss"} & {*code.co_names} and not code.co_freevars:
                raise NotImplementedError(
                    f"{owner}.{name} replaces the loss, and with credit={args.credit!r} the advantages of a "
                    "batch are of shape (B, T), not (B,). Set credit='rollout', whose advantages are GRPO's, "
                    f"call the method that it replaces, {plain}."
                )


def _overrides(trainer: TypedTrainer, name: str) -> Iterator[tuple[str, Any]]:
    """Whoever has a method in place of TRL's, and that method: the object, its classes, and a patched GRPOTrainer."""
    own = vars(trainer).get(name)
    if own is not None and getattr(own, "__func__", None) is not getattr(type(trainer), name):  # else it was put back
        yield "trainer", own
    classes = type(trainer).__mro__
    for cls in classes[: classes.index(GRPOTrainer) + 1]:
        function = vars(cls).get(name)
        if function is not None and (cls is not GRPOTrainer or not function.__module__.startswith("trl.")):
            yield cls.__name__, function
