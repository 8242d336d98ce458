"""
The lines of `fr3e check`. Each is a function of the [`Setup`] that returns what it found, and raises what is wrong.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import BitsAndBytesConfig, set_seed
from trl import GRPOTrainer

from ...commands.revision import revision
from ...generation.growing_probe import tolerance
from ...generation.vllm_server import VLLMServer
from ...prefix_sharing import forward as shared_forward
from ...prefix_sharing import probe as sharing_probe
from ...prefix_sharing import without_cudnn
from ...trainer import FR3ETrainer
from ...trl_adapter.setup import computed_in
from ...trl_adapter.watching import WatchedMixin
from ..cost.stopwatch import PARTS, measure, peak_memory
from ..measures import MeasuredFR3ETrainer, MeasuredGRPOTrainer
from .model import logged, make_trainer
from .runner import NotRun, Wrong
from .table import Setup

# Beside those of `fr3e --version`, what may be there
OPTIONAL = ("vllm", "peft", "bitsandbytes", "flash-attn", "kernels", "triton", "accelerate")

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


def losses(setup: Setup) -> str:
    """Without exploration, and the same seed, those of GRPOTrainer."""

    def train(trainer_class: type[GRPOTrainer], **settings: Any) -> list[Any]:
        trainer = make_trainer(setup, trainer_class, **settings)
        train_again(trainer)
        return logged(trainer)

    grpo = train(GRPOTrainer)
    hold_equal(grpo, train(FR3ETrainer, num_anchors=0), lambda: train(GRPOTrainer))
    return f"loss, gradient and reward of {len(grpo)} steps are equal to the last bit"


def train_again(trainer: Any, **arguments: Any) -> None:
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
    if not all(math.isfinite(number) for step in [*expected, *found] for number in step):
        raise Wrong(f"loss, norm of the gradient and reward of each step are not finite: {expected} and {found}")
    if found == expected:
        return
    control = again()
    if control != expected:
        raise NotRun(f"kernels of this device differ from run to run: {expected} and {control} of the same run")
    raise Wrong(f"loss, norm of the gradient and reward of each step are {found}, and not {expected}")


class Kept(WatchedMixin, FR3ETrainer):
    """Keeps the last batch, and the trees that it is of."""

    def on_batch(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch


def make_kept(setup: Setup) -> Any:
    """A trainer that has trained a step."""
    trainer = make_trainer(setup, Kept, max_steps=1)
    set_seed(0)
    trainer.train()
    return trainer


def sharing(setup: Setup) -> str:
    """Log-probs and gradients with what rows share forwarded once, against rows apart."""
    trainer = make_kept(setup)
    by_design = shared_forward.obstacle_by_design(trainer)
    if by_design is not None:
        raise NotRun(f"share_prefixes is off for this model: {by_design}")
    obstacle = shared_forward.obstacle_to_sharing(trainer)
    if obstacle is not None:
        raise Wrong(f"share_prefixes is off: {obstacle}")
    dtype, batch = computed_in(trainer), trainer.batch
    apart, shared = scored(trainer, batch, share=False), scored(trainer, batch, share=True)
    with sharing_probe.rounded_otherwise(trainer.model):  # as a measure of what rounding does
        rounded = scored(trainer, batch, share=False)
    told = []
    for what, of_apart, of_shared, of_rounded in zip(("log-probs", "gradients"), apart, shared, rounded, strict=True):
        scale = 1.0 if what == "log-probs" else of_apart.abs().mean()
        difference, noise = (((of_apart - other).abs().mean() / scale).item() for other in (of_shared, of_rounded))
        allowed = tolerance(dtype, noise)
        if not difference <= allowed:
            raise Wrong(f"in {dtype}, {what} differ by {difference:.2g}, and {allowed:.2g} is allowed")
        told.append(f"{what} differ by {difference:.1g} (allowed: {allowed:.1g})")
    return f"in {str(dtype).removeprefix('torch.')}, {', '.join(told)}"


def scored(trainer: Any, batch: dict[str, Any], share: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a batch's completions, and the gradient of its loss."""
    trainer.share_prefixes(share)
    trainer.model.train()
    trainer.model.zero_grad()
    prompts, completions = (
        [ids[mask.bool()].cpu().numpy() for ids, mask in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    )
    with without_cudnn():
        trainer.compute_loss(trainer.model, dict(batch)).backward()
        logprobs = [of_row for of_row, _ in trainer.token_statistics(prompts, completions)]
    gradients = [p.grad.float().flatten() for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat(logprobs), torch.cat(gradients).cpu()


def kernels(setup: Setup) -> str:
    """What computes attention, of rows apart and of shared prefixes, forward and backward."""
    trainer = make_kept(setup)
    ways = {"rows apart": False, "shared prefixes": True} if trainer.shares_prefixes else {"rows apart": False}
    told = [sharing_probe.attention_of(trainer.model)]
    for way, share in ways.items():
        names = kernels_of(lambda share=share: scored(trainer, trainer.batch, share))  # type: ignore[misc]
        told.append(f"{way}: {', '.join(sorted(names)) or 'products of matrices alone'}")
    return ". ".join(told)


def kernels_of(function: Callable[[], Any]) -> set[str]:
    """Names of what runs in a call that has to do with attention."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    with profile(activities=activities) as profiler:
        function()
    keys = {event.key for event in profiler.key_averages() if not event.key.endswith("Backward0")}
    names = {re.sub(r"<.*|\(.*", "", key).split("::")[-1] for key in keys}
    return {name for name in names if re.search("attention|attn|flash|fmha", name, re.IGNORECASE)} - {
        "scaled_dot_product_attention"  # which calls one of the others
    }


def grow(setup: Setup, **settings: Any) -> str:
    """Trees of two steps, by a backend that the settings name: what is sampled must be the policy's."""
    # The policy stays as it is, to be asked again
    trainer = make_trainer(setup, **{"learning_rate": 0.0, "anchor_threshold": 0.1} | settings)
    set_seed(0)
    trainer.train()
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
    if not abs(fmean(surprises)) <= 5 * error:
        raise Wrong(f"tokens are not the policy's: surprise less entropy is {fmean(surprises):.2f} ± {error:.2f} nats")
    return f"{told}, surprise less entropy {fmean(surprises):.2f} ± {error:.2f} nats"


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


def resume(setup: Setup) -> str:
    """A run that goes on from its second step has the losses of the run that was not cut."""

    def train() -> tuple[Any, list[Any]]:
        trainer = make_trainer(setup, max_steps=4, save_strategy="steps", save_steps=2)
        train_again(trainer)
        return trainer, logged(trainer)

    trainer, whole = train()
    checkpoint = str(Path(trainer.args.output_dir) / "checkpoint-2")
    resumed = make_trainer(setup, max_steps=4)
    train_again(resumed, resume_from_checkpoint=checkpoint)
    hold_equal(whole, logged(resumed), lambda: train()[1])
    return "steps 3 and 4 are those of the run that was not cut, to the last bit"


def cost(setup: Setup) -> str:
    """Time and memory of a step, beside GRPO's."""
    classes = {"FR3E": MeasuredFR3ETrainer, "GRPO": MeasuredGRPOTrainer}
    trainers = {name: make_trainer(setup, trainer_class, max_steps=1) for name, trainer_class in classes.items()}
    seconds, tokens, _ = measure(trainers, range(3))
    memory = {name: peak_memory(trainer) for name, trainer in trainers.items()}
    times = {name: sum(parts.values()) for name, parts in seconds.items()}
    ratios = [
        f"{what} {amounts['FR3E'] / amounts['GRPO']:.2f}"
        for what, amounts in (("time", times), ("peak memory", memory), ("generated tokens", tokens))
    ]
    shares = [
        f"{name}: " + ", ".join(f"{part} {seconds[name][part] / times[name]:.0%}" for part in PARTS) for name in seconds
    ]
    sizes = ", ".join(f"{name} {times[name] / 2:.2f} s, {memory[name] / 2**20:.0f} MiB" for name in times)
    return f"FR3E / GRPO: {', '.join(ratios)}. A step: {sizes}. {'. '.join(shares)}"


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
        [*launcher, "-m", "fr3e_trl.bench.check.processes", json.dumps(asdict(setup))],
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
