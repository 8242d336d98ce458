"""The lines of `fr3e check`: functions of the [`Setup`] that return what they found, and raise what is wrong."""

import gc
import hashlib
import importlib.util
import json
import math
import os
import shutil
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from ..compat import computed_in
from ..fr3e_config import FR3EConfig
from ..fr3e_trainer import FR3ETrainer
from ..generation.growing_probe import tolerance
from ..generation.vllm_server import VLLMServer
from ..prefix_sharing import obstacle_by_design, obstacle_to_sharing, probe, without_cudnn
from ..processes import in_every_process
from .check import NotRun, Setup, Wrong
from .revision import revision, versions

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

LOGGED = "loss, norm of the gradient and reward of each step"


def machine(setup: Setup) -> str:
    """Versions and devices."""
    found = {name: version for name, version in versions(OPTIONAL).items() if version != "not installed"}
    told = ", ".join(f"{name} {version}" for name, version in (revision() | found).items())
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        return f"{told}. CUDA {torch.version.cuda}. {num_gpus(setup)} GPU(s), the first: {device.name}, {memory}"
    if shutil.which("nvidia-smi") and setup.devices != "":
        raise Wrong(f"nvidia-smi is there, and torch {torch.__version__} sees no GPU")
    return f"{told}. No GPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def num_gpus(setup: Setup) -> int:
    """How many there are. This process sees the first of them alone."""
    if setup.devices is not None:
        return len([name for name in setup.devices.split(",") if name])
    return max(torch.cuda.device_count(), len([*Path("/dev").glob("nvidia[0-9]*")]))


# What is trained


def make_policy(setup: Setup) -> str:
    """Make the model, with as many of its layers as have each kind among them."""
    source = {"trust_remote_code": setup.trust_remote_code}
    if setup.with_weights:
        return f"{AutoConfig.from_pretrained(setup.policy, **source).model_type} of {setup.policy}, as it is"
    if setup.model_name_or_path is None:
        config, origin = AutoConfig.for_model("qwen3", **SMALL), "made here"
    else:
        config = AutoConfig.from_pretrained(setup.model_name_or_path, **source).get_text_config()
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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **source)
    for part in (model, tokenizer):
        part.save_pretrained(setup.policy)
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
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer of the model, with further arguments of its own, and settings of its configuration."""
    if not setup.with_weights and not Path(setup.policy, "config.json").is_file():
        raise NotRun("the model was not made")
    gc.collect()  # of the line before, for vLLM to have the memory of a GPU
    torch.cuda.empty_cache()
    on_gpu = torch.cuda.is_available()
    defaults = {
        "output_dir": tempfile.mkdtemp(dir=setup.directory),
        "model_init_kwargs": {"dtype": setup.dtype, "attn_implementation": setup.attn_implementation},
        "trust_remote_code": setup.trust_remote_code,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        "use_cpu": not on_gpu,
    }
    source = {"padding_side": "left", "trust_remote_code": setup.trust_remote_code}
    return trainer_class(
        setup.policy,
        variety,
        (FR3EConfig if issubclass(trainer_class, FR3ETrainer) else GRPOConfig)(**defaults | SETTINGS | settings),
        train_dataset=Dataset.from_dict({"prompt": [f"What is {3 * i} + {i}? Think, then say: " for i in range(32)]}),
        processing_class=AutoTokenizer.from_pretrained(setup.policy, **source),
        **arguments or {},
    )


def trained(*args: Any, resume_from: str | None = None, **settings: Any) -> Any:
    """A trainer, see [`make_trainer`], that has trained by one seed."""
    trainer = make_trainer(*args, **settings)
    set_seed(0)
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer


def logged(trainer: GRPOTrainer) -> list[Any]:
    """Loss, norm of the gradient and mean reward of each step."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = [(entry["loss"], entry["grad_norm"], entry["reward"]) for entry in steps]
    if not all(math.isfinite(number) for step in found for number in step):
        raise Wrong(f"{LOGGED} are not finite: {found}")
    return found


# What must be equal


def losses(setup: Setup) -> str:
    """Without exploration, and the same seed, those of GRPOTrainer."""
    expected, again = (logged_again(setup, GRPOTrainer) for _ in range(2))
    hold_equal(expected, again, logged_again(setup, num_anchors=0))
    return f"loss, gradient and reward of {len(expected)} steps are equal to the last bit"


def resume(setup: Setup) -> str:
    """A run that goes on from its second step has the losses of the run that was not cut."""
    directory = str(Path(setup.directory, "whole"))
    saving: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    expected, again = logged_again(setup, **saving, output_dir=directory), logged_again(setup, **saving)
    hold_equal(expected, again, logged_again(setup, max_steps=4, resume_from=f"{directory}/checkpoint-2"))
    return "steps 3 and 4 are those of the run that was not cut, to the last bit"


def logged_again(*args: Any, **settings: Any) -> list[Any]:
    """What training logs, with FR3E's kernels, and those that compute the same each time as far as there are any."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with without_cudnn():
            return logged(trained(*args, **settings))
    finally:
        torch.use_deterministic_algorithms(False)


def hold_equal(expected: list[Any], again: list[Any], found: list[Any]) -> None:
    """Raise unless what was found is as expected. If what is expected differs from itself, nothing can be told."""
    if again != expected:
        raise NotRun(f"kernels of this device differ from run to run: {expected} and {again} of the same run")
    if found != expected:
        raise Wrong(f"{LOGGED} are {found}, and not {expected}")


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
    attention = probe.attention_of(trainer.model)
    return f"in {str(dtype).removeprefix('torch.')}, by {attention}, {', '.join(told)}"


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


# What is sampled


def grow(setup: Setup, arguments: dict[str, Any] | None = None, **settings: Any) -> str:
    """Trees of two steps, by a backend that the settings name: what is sampled must be the policy's."""
    # The policy stays as it is, to be asked again
    settings = {"learning_rate": 0.0, "anchor_threshold": 0.1} | settings
    trainer = trained(setup, arguments=arguments, **settings)
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
    apart = fmean(
        (logprobs[-rollout.length :] - torch.from_numpy(rollout.logprobs)).abs().mean().item()
        for (_, _, rollout), (logprobs, _) in zip(rows, statistics, strict=True)
    )
    allowed = ENGINE_TOLERANCE[torch.bfloat16 if trainer.use_vllm else computed_in(trainer)]
    if not apart <= allowed:
        raise Wrong(f"log-probs of what was sampled differ by {apart:.2g} nats ({allowed:g} allowed)")
    grown = f"{num_branches} branches in {len(trainer.trees)} trees"
    return f"{grown}, log-probs within {apart:.1g} nats (allowed: {allowed:g})"


def vllm_colocate(setup: Setup) -> str:
    need("vllm", "pip install 'trl[vllm]'")
    if not torch.cuda.is_available():
        raise NotRun("it takes a GPU")
    return grow(setup, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=256)


def vllm_server(setup: Setup) -> str:
    """Whether the server answers, with branches that go on from a completion."""
    if setup.vllm_server_base_url is None:
        raise NotRun("no address: --vllm_server_base_url")
    server = VLLMServer(setup.vllm_server_base_url, "see the docs on vLLM", up_timeout=2, request_timeout=30)
    prompt = server.tokenize("What is 12 + 7?")
    payload = {"prompt": prompt, "max_tokens": 16, "min_tokens": 8, "temperature": 1.0}
    (base,) = server.complete([payload])
    begun = base["choices"][0]["token_ids"][:4]
    (branches,) = server.complete([{**payload, "prompt": prompt + begun, "n": 4, "logprobs": 0}])
    lengths = [len(choice["token_ids"]) for choice in branches["choices"]]
    if len(lengths) != 4 or not all(lengths):
        raise Wrong(f"of 4 branches, {len(lengths)} came back, with {lengths} tokens")
    return f"{server.base_model} at {server.base_url}: 4 branches of {sum(lengths)} tokens"


# Adapters and processes


def need(package: str, remedy: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise NotRun(f"{package} is not installed: {remedy}")


def lora(setup: Setup, **arguments: Any) -> str:
    """The adapter moves, and nothing else."""
    need("peft", "pip install 'fr3e-trl[peft]'")
    from peft import LoraConfig

    arguments["peft_config"] = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(setup, arguments=arguments, learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    set_seed(0)
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not p.detach().equal(before[name])]
    if not moved or not all("lora" in name for name in moved):
        raise Wrong(f"what moved is {moved[:3] or 'nothing'}")
    return f"{len(moved)} tensors of the adapter moved in {len(logged(trainer))} steps, and no other"


def qlora(setup: Setup) -> str:
    need("bitsandbytes", "pip install 'fr3e-trl[quantization]'")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return lora(setup, quantization_config=config)


def processes(setup: Setup) -> str:
    """Several processes train, and have the same weights afterwards."""
    gpus = num_gpus(setup)
    number = setup.num_processes or min(2, max(1, gpus))
    if number == 1:
        raise NotRun("there are no two GPUs. --num_processes 2 takes the CPU, by gloo")
    devices = ",".join(map(str, range(number))) if setup.devices is None else setup.devices
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": devices if number <= gpus else ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
    command = [*launcher, "-m", __name__, json.dumps(vars(setup), default=str)]
    code = subprocess.run(command, env=environment, check=False).returncode  # what they print is in the log
    if code:
        raise Wrong(f"{number} processes ended with exit code {code}, see the log")
    return Path(setup.directory, "processes").read_text()


def train_together(setup: Setup) -> None:
    """What each of them does: train, compare the weights of all processes, and write what was found."""
    trainer = trained(setup, per_device_train_batch_size=NUM_ROWS // 2)
    weights = torch.cat([p.detach().float().flatten().cpu() for p in trainer.model.parameters()])
    digests = in_every_process(lambda: hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    after = f"after {len(logged(trainer))} steps"
    if len(set(digests)) > 1:
        raise RuntimeError(f"{after} the weights of the {len(digests)} processes differ")
    if trainer.is_world_process_zero():
        told = f"{len(digests)} processes, by {torch.distributed.get_backend()}: equal weights {after}"
        Path(setup.directory, "processes").write_text(told)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    train_together(Setup(**json.loads(sys.argv[1])))
