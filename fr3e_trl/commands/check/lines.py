"""The lines of `fr3e check`: functions of the [`Setup`] that return what they found, and raise what is wrong."""

import contextlib
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from ...compat import computed_in
from ...fr3e_config import FR3EConfig
from ...fr3e_trainer import FR3ETrainer
from ...generation.growing_probe import tolerance
from ...generation.vllm_server import VLLMServer
from ...prefix_sharing import obstacle_by_design, obstacle_to_sharing, probe, without_cudnn
from ...processes import in_every_process
from ..revision import revision
from .command import Setup
from .runner import NotRun, Wrong

# Beside those of `fr3e --version`, what may be there
OPTIONAL = ("vllm", "peft", "bitsandbytes", "flash-attn", "kernels", "triton", "accelerate")

# Of the model that is made if none is named. Heads are as wide as kernels of attention want them
SMALL: dict[str, Any] = {
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
NUM_ROWS = 16
SETTINGS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": NUM_ROWS,
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

# How far log-probs of an engine of its own may be from the policy's, in nats a token: its kernels round otherwise
ENGINE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}

LAUNCH_SECONDS = 80


def machine(setup: Setup) -> str:
    """Versions and devices."""
    found = [f"{name} {version}" for name, version in revision().items()]
    for name in OPTIONAL:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    found.append(f"Python {sys.version.split()[0]}")
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        number = f"{num_gpus(setup)} GPU(s), the first: {device.name}, {device.total_memory / 2**30:.0f} GiB"
        return f"{', '.join(found)}. CUDA {torch.version.cuda}. {number}"
    if shutil.which("nvidia-smi") and setup.devices != "":
        raise Wrong(f"nvidia-smi is there, and torch {torch.__version__} sees no GPU")
    return f"{', '.join(found)}. No GPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def num_gpus(setup: Setup) -> int:
    """How many there are. This process sees the first of them alone."""
    if setup.devices is not None:
        return len([name for name in setup.devices.split(",") if name])
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return torch.cuda.device_count()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


# What is trained


def make_policy(setup: Setup) -> str:
    """Make the model, with as many of its layers as have each kind among them."""
    if setup.with_weights:
        return f"{AutoConfig.from_pretrained(setup.policy, **setup.source).model_type} of {setup.policy}, as it is"
    if setup.model_name_or_path is None:
        config, origin = Qwen3Config(**SMALL), "made here"
    else:
        config = AutoConfig.from_pretrained(setup.model_name_or_path, **setup.source).get_text_config()
        origin = f"of the configuration of {setup.model_name_or_path}, with random weights"
    tokenizer, num_layers = make_tokenizer(), config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["any"]
    config.num_hidden_layers = min(num_layers, max(2, *(kinds.index(kind) + 1 for kind in kinds)))
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == num_layers:  # one for each layer
            setattr(config, name, value[: config.num_hidden_layers])
    config.vocab_size, config.bos_token_id = len(tokenizer), None
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    # As wide as keeps hidden states of about 1, so that what attention does shows in the log-probs
    config.initializer_range = config.hidden_size**-0.5
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **setup.source)
    model.save_pretrained(setup.policy)
    tokenizer.save_pretrained(setup.policy)
    size = f"{config.num_hidden_layers} layers, {model.num_parameters() / 1e6:.1f} million parameters"
    return f"{type(model).__name__}, {size}, {origin}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    vocabulary = ["<pad>", "<eos>", *string.digits, *string.ascii_letters, *" +-*/=.,:?\n"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="?", padding_side="left"
    )


def variety(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """A reward that completions of any model differ in."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def make_trainer(
    setup: Setup,
    trainer_class: type[GRPOTrainer] = FR3ETrainer,
    peft_config: Any = None,
    quantization_config: Any = None,
    **settings: Any,
) -> Any:
    """A trainer of the model. Settings are those of its configuration, or `sampler`."""
    if not setup.with_weights and not Path(setup.policy, "config.json").is_file():
        raise NotRun("the model was not made")
    gc.collect()  # of the line before, for vLLM to have the memory of a GPU
    torch.cuda.empty_cache()
    arguments = {"sampler": settings.pop("sampler")} if "sampler" in settings else {}
    on_gpu = torch.cuda.is_available()
    device: dict[str, Any] = {
        "bf16": on_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        "use_cpu": not on_gpu,
    }
    prompts = [f"What is {3 * i} + {i}? Think first, then say: " for i in range(32)]
    config_class = FR3EConfig if issubclass(trainer_class, FR3ETrainer) else GRPOConfig
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
        peft_config=peft_config,
        quantization_config=quantization_config,
        **arguments,
    )


def trained(setup: Setup, *args: Any, **settings: Any) -> Any:
    """A trainer, see [`make_trainer`], that has trained by one seed."""
    trainer = make_trainer(setup, *args, **settings)
    set_seed(0)
    trainer.train()
    return trainer


def logged(trainer: GRPOTrainer) -> list[tuple[float, ...]]:
    """Loss, norm of the gradient and mean reward of each step."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"], entry["reward"]) for entry in steps]


# What must be equal


def losses(setup: Setup) -> str:
    """Without exploration, and the same seed, those of GRPOTrainer."""

    def train(trainer_class: type[GRPOTrainer], **settings: Any) -> list[Any]:
        trainer = make_trainer(setup, trainer_class, **settings)
        train_again(trainer)
        return logged(trainer)

    grpo = train(GRPOTrainer)
    hold_equal(grpo, train(FR3ETrainer, num_anchors=0), lambda: train(GRPOTrainer))
    return f"loss, gradient and reward of {len(grpo)} steps are equal to the last bit"


def resume(setup: Setup) -> str:
    """A run that goes on from its second step has the losses of the run that was not cut."""

    def train() -> tuple[GRPOTrainer, list[Any]]:
        trainer = make_trainer(setup, max_steps=4, save_strategy="steps", save_steps=2)
        train_again(trainer)
        return trainer, logged(trainer)

    trainer, whole = train()
    resumed = make_trainer(setup, max_steps=4)
    train_again(resumed, resume_from_checkpoint=str(Path(str(trainer.args.output_dir)) / "checkpoint-2"))
    hold_equal(whole, logged(resumed), lambda: train()[1])
    return "steps 3 and 4 are those of the run that was not cut, to the last bit"


def train_again(trainer: GRPOTrainer, **arguments: Any) -> None:
    """Train by one seed, with kernels that compute the same each time as far as there are any, and those of FR3E."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        set_seed(0)
        with without_cudnn():
            trainer.train(**arguments)
    finally:
        torch.use_deterministic_algorithms(before)


def hold_equal(expected: list[Any], found: list[Any], again: Callable[[], list[Any]]) -> None:
    """Raise unless both are equal, and finite. If what is expected differs from itself, nothing can be told."""
    what = "loss, norm of the gradient and reward of each step"
    if not all(math.isfinite(number) for step in [*expected, *found] for number in step):
        raise Wrong(f"{what} are not finite: {expected} and {found}")
    if found == expected:
        return
    control = again()
    if control != expected:
        raise NotRun(f"kernels of this device differ from run to run: {expected} and {control} of the same run")
    raise Wrong(f"{what} are {found}, and not {expected}")


class Kept(FR3ETrainer):
    """Keeps the last batch."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.batch = dict(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


def sharing(setup: Setup) -> str:
    """Log-probs and gradients with what rows share forwarded once, against rows apart."""
    trainer = trained(setup, Kept, max_steps=1)
    by_design = obstacle_by_design(trainer)
    if by_design is not None:
        raise NotRun(f"share_prefixes is off for this model: {by_design}")
    obstacle = obstacle_to_sharing(trainer)
    if obstacle is not None:
        raise Wrong(f"share_prefixes is off: {obstacle}")
    dtype = computed_in(trainer)
    apart, shared = scored(trainer, share=False), scored(trainer, share=True)
    with probe.rounded_otherwise(trainer.model):  # as a measure of what rounding does
        rounded = scored(trainer, share=False)
    told = []
    for what, of_apart, of_shared, of_rounded in zip(("log-probs", "gradients"), apart, shared, rounded, strict=True):
        scale = 1.0 if what == "log-probs" else of_apart.abs().mean()
        difference, noise = (((of_apart - other).abs().mean() / scale).item() for other in (of_shared, of_rounded))
        allowed = tolerance(dtype, noise)
        if not difference <= allowed:
            raise Wrong(f"in {dtype}, {what} differ by {difference:.2g}, and {allowed:.2g} is allowed")
        told.append(f"{what} differ by {difference:.1g} (allowed: {allowed:.1g})")
    return f"in {str(dtype).removeprefix('torch.')}, {', '.join(told)}"


def scored(trainer: Kept, share: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the kept batch's completions, and the gradient of its loss."""
    batch = trainer.batch
    trainer.share_prefixes(share)
    trainer.model.train()
    trainer.model.zero_grad()
    prompts, completions = (
        [ids[mask.bool()].cpu().numpy() for ids, mask in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    )
    with without_cudnn():
        trainer.compute_loss(trainer.model, batch).backward()
        logprobs = [of_row for of_row, _ in trainer.token_statistics(prompts, completions)]
    gradients = [p.grad.float().flatten() for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat(logprobs), torch.cat(gradients).cpu()


def kernels(setup: Setup) -> str:
    """What computes attention, of rows apart and of shared prefixes, forward and backward."""
    trainer = trained(setup, Kept, max_steps=1)
    ways = {"rows apart": False, "shared prefixes": True} if trainer.shares_prefixes else {"rows apart": False}
    told = [probe.attention_of(trainer.model)]
    for way, share in ways.items():
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]) as run:
            scored(trainer, share)
        keys = {event.key for event in run.key_averages() if not event.key.endswith("Backward0")}
        names = {re.sub(r"<.*|\(.*", "", key).split("::")[-1] for key in keys}
        names = {name for name in names if re.search("attention|attn|flash|fmha", name, re.IGNORECASE)}
        names.discard("scaled_dot_product_attention")  # which calls one of the others
        told.append(f"{way}: {', '.join(sorted(names)) or 'products of matrices alone'}")
    return ". ".join(told)


# What is sampled


def grow(setup: Setup, **settings: Any) -> str:
    """Trees of two steps, by a backend that the settings name: what is sampled must be the policy's."""
    # The policy stays as it is, to be asked again
    trainer = trained(setup, **{"learning_rate": 0.0, "anchor_threshold": 0.1} | settings)
    rows = [
        (tree.prompt_ids, np.concatenate([state.prefix_ids, rollout.token_ids]), rollout)
        for tree in trainer.trees
        for state in tree.states
        for rollout in state.rollouts
        if rollout.copy_of is None
    ]
    num_branches = sum(len(ids) > rollout.length for _, ids, rollout in rows)
    if not num_branches:
        raise Wrong("no branch grew")
    statistics = trainer.token_statistics([prompt for prompt, _, _ in rows], [ids for _, ids, _ in rows])
    surprises: list[float] = []
    differences: list[float] = []
    for (_, _, rollout), (logprobs, entropies) in zip(rows, statistics, strict=True):
        own, entropies = logprobs[-rollout.length :], entropies[-rollout.length :]
        surprises += (-own - entropies).tolist()
        if rollout.logprobs is not None:
            differences += (own - torch.from_numpy(rollout.logprobs)).abs().tolist()
    told = f"{num_branches} branches in {len(trainer.trees)} trees"
    if differences:
        allowed = ENGINE_TOLERANCE[torch.bfloat16 if trainer.use_vllm else computed_in(trainer)]
        if not fmean(differences) <= allowed:
            raise Wrong(f"log-probs of what was sampled differ by {fmean(differences):.2g} nats ({allowed:g} allowed)")
        told += f", log-probs within {fmean(differences):.1g} nats (allowed: {allowed:g})"
    error = stdev(surprises) / math.sqrt(len(surprises))
    surprise = f"mean surprisal − entropy is {fmean(surprises):.2f} ± {error:.2f} nats (0 expected)"
    if not abs(fmean(surprises)) <= 5 * error:
        raise Wrong(f"tokens are not the policy's: {surprise}")
    return f"{told}, {surprise}"


def continuous(setup: Setup) -> str:
    # The engine's attention takes no float32
    cache = {"num_blocks": 32, "max_batch_tokens": 512}  # by default it takes most of the memory
    settings = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": cache}
    try:
        return grow(setup, **settings, bf16=True)
    except ImportError as error:  # of an older transformers
        raise NotRun(str(error)) from None
    except ValueError as error:
        if "paged|" not in str(error):
            raise
        raise NotRun(f"transformers has no such engine for {setup.attn_implementation}") from None


def vllm_colocate(setup: Setup) -> str:
    need("vllm", "pip install 'trl[vllm]'")
    if not torch.cuda.is_available():
        raise NotRun("it takes a GPU")
    return grow(setup, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=256)


def vllm_server(setup: Setup) -> str:
    """Whether the server answers, with branches that go on from a completion."""
    if setup.vllm_server_base_url is None:
        raise NotRun("no address: --vllm_server_base_url")
    server = VLLMServer(setup.vllm_server_base_url, "see docs/vllm.md", up_timeout=2, request_timeout=30)
    prompt = server.tokenize("What is 12 + 7?")
    payload = {"prompt": prompt, "max_tokens": 16, "min_tokens": 8, "temperature": 1.0}
    (base,) = server.complete([payload])
    begun = base["choices"][0]["token_ids"][:4]
    (branches,) = server.complete([{**payload, "prompt": prompt + begun, "n": 4, "logprobs": 0}])
    lengths = [len(choice["token_ids"]) for choice in branches["choices"]]
    if len(lengths) != 4 or not all(lengths):
        raise Wrong(f"of 4 branches, {len(lengths)} came back, with {lengths} tokens")
    return f"{server.base_model} at {server.base_url}: 4 branches of {sum(lengths)} tokens"


# Adapters, costs, processes


def need(package: str, remedy: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise NotRun(f"{package} is not installed: {remedy}")


def lora(setup: Setup, **settings: Any) -> str:
    """The adapter moves, and nothing else."""
    need("peft", "pip install 'fr3e-trl[peft]'")
    from peft import LoraConfig

    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(setup, peft_config=config, learning_rate=1e-2, **settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    set_seed(0)
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not p.detach().equal(before[name])]
    if not moved or not all("lora" in name for name in moved):
        raise Wrong(f"what moved is {moved[:3] or 'nothing'}")
    if not all(map(math.isfinite, sum(logged(trainer), ()))):
        raise Wrong(f"loss, norm of the gradient and reward of each step are {logged(trainer)}")
    return f"{len(moved)} tensors of the adapter moved, and no other"


def qlora(setup: Setup) -> str:
    need("bitsandbytes", "pip install 'fr3e-trl[quantization]'")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return lora(setup, quantization_config=config)


def cost(setup: Setup) -> str:
    """Time, memory and generated tokens of a step, compared with GRPO's."""
    found = []
    for trainer_class in (FR3ETrainer, GRPOTrainer):
        trainer = make_trainer(setup, trainer_class, max_steps=1)
        trainer.train()
        began = time.perf_counter()
        trainer.train()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        (*_, log) = (entry for entry in trainer.state.log_history if "loss" in entry)
        tokens = log.get("fr3e/tokens/generated", NUM_ROWS * log["completions/mean_length"])
        found.append((seconds, peak_memory(trainer), tokens))
    ratios = ", ".join(
        f"{what} {of_fr3e / of_grpo:.2f}"
        for what, of_fr3e, of_grpo in zip(("time", "peak memory", "generated tokens"), *found, strict=True)
    )
    steps = (f"{name} {found[i][0]:.2f} s, {found[i][1] / 2**20:.0f} MiB" for i, name in enumerate(("FR3E", "GRPO")))
    return f"FR3E / GRPO: {ratios}. A step: {', '.join(steps)}"


def peak_memory(trainer: GRPOTrainer) -> int:
    """Most bytes of tensors of a step beside those before it: on the GPU, or as PyTorch's profiler records them."""
    gc.collect()  # what is freed below was made below
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.train()
    events: Any = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(num_bytes for _, num_bytes in changes))


def processes(setup: Setup) -> str:
    """Several processes train, and have the same weights afterwards."""
    number = setup.num_processes or min(2, max(1, num_gpus(setup)))
    if number == 1:
        raise NotRun("there are no two GPUs. --num_processes 2 takes the CPU, by gloo")
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(number))) if setup.devices is None else setup.devices
    if number > num_gpus(setup):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
    process = subprocess.Popen(
        [*launcher, "-m", __name__, json.dumps(asdict(setup))],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # of which the launcher tells its processes
        process.wait()
        raise Wrong(f"{number} processes still ran after {LAUNCH_SECONDS} s") from None
    print(output)
    if process.returncode:
        errors = re.findall(r"^(?:\[rank\d\]: ?)?(\S*(?:Error|Exception)\b.*)$", output, re.MULTILINE)
        raise Wrong(f"{number} processes ended with {process.returncode}: {(errors or [output[-200:]])[0]}")
    return output.splitlines()[-1]


def train_together(setup: Setup) -> None:
    """What each of them does: train, compare the weights of all processes, and print what was found."""
    trainer = trained(setup, per_device_train_batch_size=NUM_ROWS // 2)
    weights = torch.cat([p.detach().float().flatten().cpu() for p in trainer.model.parameters()])
    digests = in_every_process(lambda: hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    after = f"after {len(logged(trainer))} steps"
    if len(set(digests)) > 1:
        raise RuntimeError(f"{after} the weights of the {len(digests)} processes differ")
    if not weights.isfinite().all():
        raise RuntimeError(f"{after} not all weights are finite")
    if trainer.is_world_process_zero():
        print(f"{len(digests)} processes, by {torch.distributed.get_backend()}: equal weights {after}")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    train_together(Setup(**json.loads(sys.argv[1])))
