"""The lines of `fr3e check`: functions of the [`Setup`] that return what they found, or raise an error."""

import gc
import importlib.util
import os
import shutil
import socket
import string
import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from accelerate.utils import patch_environment, set_seed
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.multiprocessing.spawn import ProcessException, spawn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import GRPOTrainer

from ..compat import computed_in
from ..fr3e_config import FR3EConfig
from ..fr3e_trainer import FR3ETrainer
from ..generation.growing_probe import tolerance
from ..generation.vllm_server import VLLMServer
from ..method.tree import Rollout
from ..prefix_sharing import obstacle_by_design, obstacle_to_sharing, probe, without_cudnn
from ..processes import in_every_process
from .check import CheckFailed, NotRun, Setup
from .outputs import revision, versions

OPTIONAL = ("vllm", "peft", "bitsandbytes", "flash-attn", "kernels", "triton", "accelerate")

# The default model. Its heads are wide enough for all kernels of attention
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 512}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": True}


def machine(setup: Setup) -> str:
    """Versions and devices."""
    found = ", ".join(f"{name} {version}" for name, version in (revision() | versions(OPTIONAL)).items())
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        return f"{found}. CUDA {torch.version.cuda}. {len(setup.gpus)} GPU(s), the first: {device.name}, {memory}"
    if shutil.which("nvidia-smi") and setup.gpus:
        raise CheckFailed(f"nvidia-smi is installed, but torch {torch.__version__} sees no GPU")
    return f"{found}. No GPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def make_policy(setup: Setup) -> str:
    """Save a model of the architecture with random weights, and as few layers as have one of each kind."""
    source = {"trust_remote_code": setup.trust_remote_code}
    if setup.with_weights:
        return f"{AutoConfig.from_pretrained(setup.policy, **source).model_type} of {setup.policy}, with its weights"
    if setup.model_name_or_path is None:
        config, origin = AutoConfig.for_model("qwen3", **SMALL), "made here"
    else:
        config = AutoConfig.from_pretrained(setup.model_name_or_path, **source).get_text_config()
        origin = f"configured like {setup.model_name_or_path}, with random weights"
    num_layers, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or ["any"]
    config.num_hidden_layers = min(num_layers, max(2, *(kinds.index(kind) + 1 for kind in kinds)))
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == num_layers:  # one for each layer
            setattr(config, name, value[: config.num_hidden_layers])
    tokenizer = make_tokenizer()
    config.vocab_size, config.bos_token_id = len(tokenizer), None
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.initializer_range = config.hidden_size**-0.5  # large enough that attention affects the log-probs
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **source)
    model.save_pretrained(setup.policy)
    tokenizer.save_pretrained(setup.policy)
    return f"{type(model).__name__}, {config.num_hidden_layers} layers, {origin}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    vocabulary = ["<pad>", "<eos>", *string.digits, *string.ascii_letters, *" +-*/=.,:?\n"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="?")


def variety(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """A reward that varies between completions of any model."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def trained(setup: Setup, make_trainer: Any = FR3ETrainer, resume_from: Any = None, **settings: Any) -> Any:
    """A trainer of the model after training with a fixed seed."""
    if not setup.with_weights and not Path(setup.policy, "config.json").is_file():
        raise NotRun("the model was not made")
    gc.collect()  # the previous line's model, so that vLLM gets the memory of the GPU
    torch.cuda.empty_cache()
    on_gpu = torch.cuda.is_available()
    config = {
        "output_dir": tempfile.mkdtemp(dir=setup.directory),
        "model_init_kwargs": {"dtype": setup.dtype, "attn_implementation": setup.attn_implementation},
        "trust_remote_code": setup.trust_remote_code,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        "use_cpu": not on_gpu,
        "per_device_train_batch_size": 16,
        "max_completion_length": 24,
        "max_steps": 2,
        "learning_rate": 1e-4,
        "disable_dropout": True,
        "scale_rewards": "none",
        "epsilon_high": 0.28,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    dataset = Dataset.from_dict({"prompt": [f"What is {3 * i} + {i}? Think, then say: " for i in range(32)]})
    trainer = make_trainer(setup.policy, variety, FR3EConfig(**config | settings), train_dataset=dataset)
    set_seed(0)
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer


def losses(setup: Setup) -> str:
    """Without exploration, losses equal GRPOTrainer's with the same seed."""
    check_equal(setup, {"make_trainer": GRPOTrainer, "num_anchors": 0}, {"num_anchors": 0})
    return "loss, gradient and reward of each step are equal to the last bit"


def resume(setup: Setup) -> str:
    """A run that is resumed after its second step has the losses of an uninterrupted one."""
    whole = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": f"{setup.directory}/whole"}
    check_equal(setup, whole, {"max_steps": 4, "resume_from": f"{setup.directory}/whole/checkpoint-2"})
    return "steps 3 and 4 equal those of an uninterrupted run, to the last bit"


def check_equal(setup: Setup, expected: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise unless runs with these settings log the same. Kernels are deterministic where torch has such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with without_cudnn():
            histories = [trained(setup, **settings).state.log_history for settings in (expected, expected, other)]
    finally:
        torch.use_deterministic_algorithms(False)
    names = ("loss", "grad_norm", "reward")
    first, again, found = ([[log[name] for name in names] for log in logs if "loss" in log] for logs in histories)
    if not np.isfinite(first + found).all():
        raise CheckFailed(f"loss, gradient norm or reward of a step is not finite: {first}, {found}")
    if again != first:
        raise NotRun(f"kernels of this device are not deterministic: the same run gave {first} and {again}")
    if found != first:
        raise CheckFailed(f"loss, gradient norm and reward of each step are {found}, not {first}")


def sharing(setup: Setup) -> str:
    """Log-probs and gradients with shared prefixes equal those of rows apart, up to rounding."""
    trainer = trained(setup, max_steps=1)
    by_design = obstacle_by_design(trainer)
    if by_design is not None:
        raise NotRun(f"share_prefixes is off for this model: {by_design}")
    obstacle = obstacle_to_sharing(trainer)
    if obstacle is not None:
        raise CheckFailed(f"share_prefixes is off: {obstacle}")
    dtype, messages = computed_in(trainer), []
    apart, shared = logps_and_gradient(trainer, share=False), logps_and_gradient(trainer, share=True)
    with probe.rounded_otherwise(trainer.model):  # how much rounding alone changes
        noisy = logps_and_gradient(trainer, share=False)
    for i, (name, scale) in enumerate([("log-probs", 1.0), ("gradients", apart[1].abs().mean().item())]):
        difference, noise = (((apart[i] - other[i]).abs().mean() / scale).item() for other in (shared, noisy))
        allowed = tolerance(dtype, noise)
        if not difference <= allowed:
            raise CheckFailed(f"in {dtype}, {name} differ by {difference:.2g}, and {allowed:.2g} is allowed")
        messages.append(f"{name} differ by {difference:.1g} (allowed: {allowed:.1g})")
    return f"in {str(dtype).removeprefix('torch.')}, by {probe.attention_of(trainer.model)}, {', '.join(messages)}"


def logps_and_gradient(trainer: FR3ETrainer, share: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the last step's rollouts, and the gradient of its loss."""
    trainer.share_prefixes(share)
    trainer.model.train()
    trainer.model.zero_grad()
    with without_cudnn():
        trainer.compute_loss(trainer.model, dict(trainer._buffered_inputs[0])).backward()
        logps = torch.cat([row_logps for _, row_logps in logps_of_rollouts(trainer)])
    gradients = [p.grad.float().flatten() for p in trainer.model.parameters() if p.grad is not None]
    return logps, torch.cat(gradients).cpu()


def logps_of_rollouts(trainer: FR3ETrainer) -> list[tuple[Rollout, torch.Tensor]]:
    """The rollouts of the last step's trees, with the policy's log-probs of their tokens."""
    prompts, completions, rollouts = zip(
        *(
            (tree.prompt_ids, np.concatenate([state.prefix_ids, rollout.token_ids]), rollout)
            for tree in trainer.trees
            for state in tree.states
            for rollout in state.rollouts
            if rollout.copy_of is None
        ),
        strict=True,
    )
    statistics = trainer.token_statistics(prompts, completions)
    return [(rollout, logps[-rollout.length :]) for rollout, (logps, _) in zip(rollouts, statistics, strict=True)]


def grow(setup: Setup, **settings: Any) -> str:
    """Trees grow, and the log-probs of what was sampled are the policy's."""
    # Without learning, so that the policy is still the one that sampled
    trainer = trained(setup, learning_rate=0.0, anchor_threshold=0.1, **settings)
    num_branches = sum(len(state.rollouts) for tree in trainer.trees for state in tree.states if len(state.prefix_ids))
    if not num_branches:
        raise CheckFailed("no branch grew")
    difference = fmean(
        (logps - torch.from_numpy(rollout.logprobs)).abs().mean().item()
        for rollout, logps in logps_of_rollouts(trainer)
    )
    # An engine's kernels round differently
    allowed = 1e-3 if computed_in(trainer) == torch.float32 and not trainer.use_vllm else 5e-2
    if not difference <= allowed:
        raise CheckFailed(f"log-probs of what was sampled differ by {difference:.2g} nats ({allowed:g} allowed)")
    return f"{num_branches} branches, log-probs within {difference:.1g} nats (allowed: {allowed:g})"


def vllm_colocate(setup: Setup) -> str:
    require("vllm", "pip install 'trl[vllm]'")
    if not torch.cuda.is_available():
        raise NotRun("it needs a GPU")
    return grow(setup, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=256)


def vllm_server(setup: Setup) -> str:
    """The server answers, with several completions and their tokens."""
    if setup.vllm_server_base_url is None:
        raise NotRun("no address: --vllm_server_base_url")
    server = VLLMServer(setup.vllm_server_base_url, "see the docs on vLLM", up_timeout=2, request_timeout=30)
    prompt = server.tokenize("What is 12 + 7?")
    payload = {"prompt": prompt, "max_tokens": 16, "min_tokens": 8, "temperature": 1.0, "n": 4, "logprobs": 0}
    (branches,) = server.complete([payload])
    lengths = [len(choice["token_ids"]) for choice in branches["choices"]]
    if len(lengths) != 4 or not all(lengths):
        raise CheckFailed(f"of 4 completions, {len(lengths)} came back, with {lengths} tokens")
    return f"{server.base_model} at {server.base_url}: 4 completions of {sum(lengths)} tokens"


def require(package: str, remedy: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise NotRun(f"{package} is not installed: {remedy}")


def lora(setup: Setup, **arguments: Any) -> str:
    """Training moves the adapter."""
    require("peft", "pip install 'fr3e-trl[peft]'")
    from peft import LoraConfig

    peft_config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trained(setup, partial(FR3ETrainer, peft_config=peft_config, **arguments), learning_rate=1e-2)
    moved = [name for name, p in trainer.model.named_parameters() if "lora_B" in name and p.any()]  # they start at 0
    if not moved:
        raise CheckFailed("training moved no weight of the adapter")
    return f"training moved {len(moved)} matrices of the adapter"


def qlora(setup: Setup) -> str:
    require("bitsandbytes", "pip install 'fr3e-trl[quantization]'")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return lora(setup, quantization_config=config)


def processes(setup: Setup) -> str:
    """Several processes train, and have the same weights afterwards."""
    number = setup.num_processes or min(2, len(setup.gpus))
    if number < 2:
        raise NotRun("there are no two GPUs. --num_processes 2 uses the CPU, with gloo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
    gpus = ",".join(setup.gpus) if number <= len(setup.gpus) else ""
    environment = {"master_addr": address, "master_port": port, "world_size": number, "cuda_visible_devices": gpus}
    with patch_environment(**environment, omp_num_threads=1):
        try:
            spawn(train_together, (setup,), number)
        except ProcessException as error:
            raise CheckFailed(str(error).strip().splitlines()[-1]) from error
    return f"{number} processes on {'GPUs' if gpus else 'the CPU'}: equal weights after training"


def train_together(rank: int, setup: Setup) -> None:
    """Train in one of several processes, and compare the weights of all."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    trainer = trained(setup, per_device_train_batch_size=8)
    weights = in_every_process(lambda: [p.double().sum().item() for p in trainer.model.parameters()])
    if any(other != weights[0] for other in weights):
        raise RuntimeError(f"after training, the weights of the {len(weights)} processes differ")
    trainer.accelerator.end_training()
