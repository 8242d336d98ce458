"""What the lines of `fr3e check` train: a small model, a reward, a few prompts."""

import gc
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from ...fr3e_config import FR3EConfig
from ...trainer import FR3ETrainer
from .runner import NotRun
from .table import Setup

# Of the model that is made if none is named. Heads are as wide as kernels of attention want them
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

# Of all trainers. Where the defaults of GRPOConfig and FR3EConfig differ, FR3E's
SETTINGS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "max_completion_length": 24,
    "max_steps": 2,
    "learning_rate": 1e-4,
    "disable_dropout": True,
    "epsilon_high": 0.28,
    "scale_rewards": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": [],
}


def make_policy(setup: Setup) -> str:
    """Make the model, and tell what it is."""
    tokenizer = make_tokenizer()
    if setup.with_weights:
        config = AutoConfig.from_pretrained(setup.policy, **setup.source)
        return f"{config.model_type} of {setup.policy}, as it is"
    if setup.model_name_or_path is None:
        config, origin = Qwen3Config(**SMALL), "made here"
    else:
        config = AutoConfig.from_pretrained(setup.model_name_or_path, **setup.source)
        origin = f"of the configuration of {setup.model_name_or_path}, with random weights"
    set_seed(0)
    model = AutoModelForCausalLM.from_config(shrunk(config, tokenizer), dtype=torch.bfloat16, **setup.source)
    model.save_pretrained(setup.policy)
    tokenizer.save_pretrained(setup.policy)
    layers = model.config.num_hidden_layers
    return f"{type(model).__name__}, {layers} layers, {model.num_parameters() / 1e6:.1f} million parameters, {origin}"


def shrunk(config: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    """A configuration with a vocabulary of the tokenizer, and of the layers so many that each kind is there."""
    config = config.get_text_config()
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["any"]
    kept = min(num_layers, max(2, *(kinds.index(kind) + 1 for kind in kinds)))
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == num_layers:  # one for each layer
            setattr(config, name, value[:kept])
    config.num_hidden_layers = kept
    config.vocab_size = len(tokenizer)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.bos_token_id = None
    # As wide as keeps hidden states of about 1, so that what attention does shows in the log-probs
    config.initializer_range = config.hidden_size**-0.5
    return config


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    vocabulary = ["<pad>", "<eos>", *string.digits, *string.ascii_letters, *" +-*/=.,:?\n"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="?", padding_side="left"
    )


def variety(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that completions of any model differ in."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def make_trainer(setup: Setup, trainer_class: type[GRPOTrainer] = FR3ETrainer, **settings: Any) -> Any:
    """
    A trainer of the model. Settings are those of its configuration, or `peft_config`, `quantization_config` and
    `sampler`, which go to its constructor.
    """
    if not setup.with_weights and not Path(setup.policy, "config.json").is_file():
        raise NotRun("the model was not made")
    gc.collect()  # of the line before, for vLLM to have the memory of a GPU
    torch.cuda.empty_cache()
    names = ("peft_config", "quantization_config", "sampler")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    config_class = FR3EConfig if issubclass(trainer_class, FR3ETrainer) else GRPOConfig
    on_gpu = torch.cuda.is_available()
    device: dict[str, Any] = {
        "bf16": on_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        "use_cpu": not on_gpu,
    }
    prompts = [f"What is {3 * i} + {i}? Think first, then say: " for i in range(32)]
    args = config_class(
        output_dir=tempfile.mkdtemp(dir=setup.directory),
        model_init_kwargs={"dtype": setup.dtype, "attn_implementation": setup.attn_implementation},
        **device | setup.source | SETTINGS | settings,
    )
    return trainer_class(
        setup.policy,
        variety,
        args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(setup.policy, padding_side="left", **setup.source),
        **arguments,
    )


def logged(trainer: Any) -> list[tuple[float, ...]]:
    """Loss, norm of the gradient and mean reward of each step."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"], entry["reward"]) for entry in steps]
