"""What a run will do and take, told before it begins: `fr3e train --dry_run`."""

import importlib.util
import math
from dataclasses import fields
from itertools import islice
from typing import Any

import torch
import transformers
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.training_args import OptimizerNames
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config, maybe_apply_chat_template

from ..fr3e_config import FR3EConfig
from ..trl_adapter.card import SECRET, concealed
from .memory_estimate import (
    SAMPLING_COPIES,
    STATE_BYTES,
    STATES_IN_OWN_TYPE,
    Decoder,
    MemoryEstimate,
    activation_bytes,
    cache_bytes,
    logits_bytes,
    optimizer_bytes,
    quantized_bytes,
)

MEASURED_PROMPTS = 1000  # of the training set, whose longest prompt is taken for the longest of all

VALUE_WIDTH = 32  # columns of a terminal that are left to values, with the space around them

Table = list[tuple[str, str]]


def print_plan(
    args: FR3EConfig,
    model_args: ModelConfig,
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """
    Print the settings, the sizes, and an estimate of the memory of a run. No weights are loaded.

    Args:
        args ([`FR3EConfig`]):
            Settings of the run.
        model_args (`ModelConfig`):
            The model, with PEFT and quantization.
        dataset (`Dataset` or `IterableDataset`):
            The training set.
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
    """
    if args.process_index != 0:
        return
    prompt_length = longest_prompt(dataset, tokenizer, args.chat_template_kwargs)
    model = empty_model(args, model_args)
    show("Settings that GRPOConfig has otherwise", settings(args))
    if off := args.parts_off():
        print("\n".join([*off, ""]))
    show("The run", sizes(args, len(dataset) if isinstance(dataset, Dataset) else None))
    if getattr(model.config.get_text_config(), "num_attention_heads", None) is None:
        kind = type(model.config).__name__
        show("Memory", [("not estimated", f"{kind} says nothing of attention heads, by which activations are counted")])
        return
    show(
        f"Memory of each of {args.world_size} device(s), estimated: rows of {prompt_length} + "
        f"{args.max_completion_length} tokens",
        memory_rows(args, model, memory(args, model_args, model, prompt_length)),
    )


def settings(args: FR3EConfig) -> Table:
    """The settings, as resolved, that `GRPOConfig` does not have or has another value for."""
    args.resolve()
    default = GRPOConfig(args.output_dir, bf16=args.bf16, use_cpu=args.use_cpu)
    names = [field.name for field in fields(args) if field.init]
    return [
        (name, "***" if SECRET.search(name) else str(concealed(getattr(args, name))))
        for name in sorted(names)
        if not hasattr(default, name) or getattr(args, name) != getattr(default, name)
    ]


def sizes(args: FR3EConfig, num_examples: int | None) -> Table:
    """Rows, prompts, updates, steps and tokens of a run on `num_examples` examples, `None` if they are streamed."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    prompts = args.generation_batch_size // args.num_generations
    updates = args.num_iterations * args.steps_per_generation / args.gradient_accumulation_steps
    branched = args.num_states - 1
    table = [
        ("rows a step", f"{rows} a device, {rows * args.world_size} in all"),
        ("prompts a step", number(rows * args.world_size / args.num_generations)),
        ("rows a prompt", str(args.num_generations)),
        ("base trajectories a prompt", str(args.num_bases if branched else args.num_generations)),
        ("anchors a prompt", f"{branched} with {args.num_rollouts} rollout(s) each" if branched else "0: plain GRPO"),
        ("generation batch", f"{args.generation_batch_size} rows of {prompts} prompts"),
        ("optimizer updates a generation batch", number(updates)),
        ("most tokens generated a generation batch", f"{most_tokens(args):,}"),
        ("most tokens an update, on average", f"{math.ceil(most_tokens(args) / updates):,}"),
    ]
    steps = num_steps(args, num_examples)
    if num_examples is None or steps is None:
        return [
            *table,
            ("optimizer updates in all", "unknown: the dataset is streamed" if steps is None else str(steps)),
        ]
    epochs = steps / updates * prompts / num_examples
    return [
        *table,
        ("optimizer updates in all", f"{steps:,}"),
        ("examples, and epochs of them", f"{num_examples:,}, {number(epochs)}"),
    ]


def num_steps(args: FR3EConfig, num_examples: int | None) -> int | None:
    """Optimizer updates of the whole run, as `Trainer` counts them; `None` if that takes a length that is not there."""
    if args.max_steps >= 0:
        return args.max_steps
    if num_examples is None:
        return None
    batches = num_examples // (args.generation_batch_size // args.num_generations)  # an incomplete one is left out
    micro_batches = batches * args.num_iterations * args.steps_per_generation
    return math.ceil(args.num_train_epochs * max(1, math.ceil(micro_batches / args.gradient_accumulation_steps)))


def most_tokens(args: FR3EConfig) -> int:
    """Tokens of a generation batch if every completion is as long as it may be, and anchors are where they begin."""
    prompts = args.generation_batch_size // args.num_generations
    completions = args.num_generations + (0 if args.reuse_base or args.num_states == 1 else args.num_bases)
    return prompts * (1 + args.max_refills) * completions * args.max_completion_length


def longest_prompt(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any] | None = None
) -> int:
    """Tokens of the longest prompt of the first examples. `template`: what the chat template is told beside them."""
    prompts = [
        maybe_apply_chat_template({"prompt": example["prompt"]}, tokenizer, **(template or {}))["prompt"]
        for example in islice(dataset, MEASURED_PROMPTS)
    ]
    return max(map(len, tokenizer(prompts).input_ids))


def empty_model(args: FR3EConfig, model_args: ModelConfig) -> Any:
    """The model, and its adapter if it gets one, on a device without memory."""
    init = {key: value for key, value in (args.model_init_kwargs or {}).items() if key in ("revision", "dtype")}
    trust = {"trust_remote_code": args.trust_remote_code}
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=init.get("revision"), **trust)
    dtype = init.get("dtype", "float32")
    dtype = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else getattr(torch, str(dtype), dtype)
    named = getattr(transformers, (config.architectures or [""])[0], None)  # of a model that sees, no causal LM
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **trust) if named is None else named(config)
        model = model.to(dtype)
        peft_config = get_peft_config(model_args)
        if peft_config is None:
            return model
        from peft import get_peft_model

        return get_peft_model(model, peft_config)


def memory(args: FR3EConfig, model_args: ModelConfig, model: Any, prompt_length: int) -> MemoryEstimate:
    """
    An estimate of what each device holds.

    Args:
        args ([`FR3EConfig`]), model_args (`ModelConfig`):
            The run.
        model (`nn.Module`):
            The model without memory, as of [`empty_model`].
        prompt_length (`int`):
            Tokens of a long prompt.
    """
    decoder = decoder_of(model.config)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    quantization = get_quantization_config(model_args)
    weight_bytes = next(iter([*frozen, *trainable])).element_size()
    # An adapter is in float32, but TRL has it in bfloat16 beside quantized weights
    trainable_bytes = weight_bytes if not frozen else 2 if quantization else 4
    num_trainable = count(trainable)
    weights = weight_bytes * count(frozen) + trainable_bytes * num_trainable
    if quantization is not None:
        bits = 4 if model_args.load_in_4bit else 8
        quantized = count(quantized_parameters(model))
        weights += quantized_bytes(quantized, bits, model_args.use_bnb_nested_quant) - weight_bytes * quantized
    compute_bytes = 2 if args.bf16 or args.fp16 else weight_bytes
    length = prompt_length + args.max_completion_length
    num_tokens = args.per_device_train_batch_size * length
    kept, recomputed = activation_bytes(
        decoder, num_tokens, compute_bytes, weight_bytes, checkpointing=args.gradient_checkpointing
    )
    return MemoryEstimate(
        weights=weights,
        reference=weights if args.beta and not model_args.use_peft else 0,
        states=optimizer_bytes(optimizer(args), num_trainable, trainable_bytes),
        casts=compute_bytes * count(model.parameters()) if compute_bytes < weight_bytes and not quantization else 0,
        gradients=trainable_bytes * num_trainable,
        activations=kept,
        recomputed=recomputed,
        logits=logits_bytes(num_tokens, decoder.vocab_size, compute_bytes, has_triton=not args.use_cpu),
        cache=0 if args.use_vllm else cache_bytes(decoder, rows_at_once(args) * length, compute_bytes),
        sampling=0 if args.use_vllm else SAMPLING_COPIES * 4 * rows_at_once(args) * decoder.vocab_size,
        keeps_gradients=args.steps_per_generation < args.gradient_accumulation_steps,
    )


def optimizer(args: FR3EConfig) -> str:
    """The name of the optimizer, or of AdamW for one whose states are not known."""
    name = OptimizerNames(args.optim).value
    return name if name in STATE_BYTES | STATES_IN_OWN_TYPE else "adamw_torch"


def rows_at_once(args: FR3EConfig) -> int:
    """Rows of a device that transformers' `generate` decodes together, of the larger of the two stages."""
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if args.num_states == 1 or args.plan.anchor_threshold is not None or not args.reuse_base:
        return rows
    return math.ceil(rows * max(args.num_bases, args.num_generations - args.num_bases) / args.num_generations)


def quantized_parameters(model: Any) -> list[torch.Tensor]:
    """Weights that bitsandbytes quantizes: of linear layers that are frozen, without the output's."""
    head = model.get_output_embeddings()
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
    ]


def decoder_of(config: Any) -> Decoder:
    """The sizes that the estimate needs, from a model's configuration."""
    config = config.get_text_config()
    num_heads = config.num_attention_heads
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return Decoder(
        hidden_size=config.hidden_size,
        intermediate_size=max(width) if isinstance(width, list) else width,  # Gemma 3n has one for each layer
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=config.vocab_size,
    )


def count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def memory_rows(args: FR3EConfig, model: nn.Module, estimate: MemoryEstimate) -> Table:
    """The estimate's parts, of which those of an update and of generation are not there at once."""
    trainable = count(parameter for parameter in model.parameters() if parameter.requires_grad)
    checkpointing = "with gradient checkpointing" if args.gradient_checkpointing else "without gradient checkpointing"
    name = OptimizerNames(args.optim).value
    taken_for = "" if optimizer(args) == name else f", taken for those of {optimizer(args)}"
    parts = [
        ("weights", estimate.weights),
        ("reference model", estimate.reference),
        (f"optimizer states ({name}{taken_for})", estimate.states),
        ("update: gradients", estimate.gradients),
        ("update: weights in the type of autocast, at most", estimate.casts),
        (f"update: activations of {args.per_device_train_batch_size} rows, {checkpointing}", estimate.activations),
        ("update: a layer computed again", estimate.recomputed),
        ("update: a tile of logits", estimate.logits),
    ]
    table = [
        ("parameters, and those that are trained", f"{count(model.parameters()):,}, {trainable:,}"),
        *((part, gib(num_bytes)) for part, num_bytes in parts if num_bytes),
    ]
    if args.use_vllm and args.vllm_mode == "colocate":
        share = args.vllm_gpu_memory_utilization
        total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
        taken = f"{share:.0%} of the device" if total is None else gib(share * total)
        table.append(("vLLM, beside all of these (vllm_gpu_memory_utilization)", taken))
    elif args.use_vllm:
        table.append(("vLLM", "nothing here: it is on the server"))
    else:
        table.append((f"generation: keys and values of {rows_at_once(args)} rows", gib(estimate.cache)))
        table.append(("generation: logits of a step", gib(estimate.sampling)))
    return [*table, ("most at a time, without the allocator's gaps", gib(estimate.peak))]


def gib(num_bytes: float) -> str:
    """A size, such as `1.50 GiB`."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def number(value: float) -> str:
    """A number without a fraction that is 0."""
    return f"{value:.3g}" if value % 1 and value < 1000 else f"{value:,.0f}"


def show(title: str, table: Table) -> None:
    """Print a table, by rich where it is installed."""
    if importlib.util.find_spec("rich") is None:
        width = max(len(name) for name, _ in table)
        print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in table), ""]))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    rich_table = RichTable(box=box.SIMPLE_HEAD, show_header=False, title=title, title_justify="left")
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 120  # a log has no width: rows stay whole
    # On a narrow terminal labels fold before values do
    label_width = min(max(len(name) for name, _ in table), max(console.width - VALUE_WIDTH, console.width // 3))
    rich_table.add_column(overflow="fold", width=label_width)
    rich_table.add_column(overflow="fold")
    for row in table:
        rich_table.add_row(*row)
    console.print(rich_table)
