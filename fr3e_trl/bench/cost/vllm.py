"""
What a vLLM server costs and saves.

    fr3e cost vllm --url http://127.0.0.1:8000 --policy PATH_OR_ID

The server serves that policy and takes adapters: `examples/serve_demo.py` starts one on a CPU, and
`recipes/gsm8k_lora_vllm.yaml` says how on a GPU.

- Generated tokens a second with all requests in flight together, as a ratio to one after another, in turns.
- The share of a training step that the sync of the adapter takes.
- What a sync moves: the adapter alone, against all weights with the adapter merged, in bytes, computed from the shapes
  of Qwen2.5-7B with LoRA of rank 16 on all linear layers.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from ...method.sampling import SamplingRequest
from ...method.tree import as_ids
from ...trainer import FR3ETrainer
from ...trl_adapter.prompts import tokenize
from ..arms import make_config
from ..runs import be_quiet
from .common import SETTINGS, make_parser, over_turns

# https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json
QWEN_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


def bytes_moved() -> tuple[int, int]:
    """Of all weights in bfloat16, and of the adapter in float32 as PEFT keeps it."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(QWEN_7B)
        num_weights = sum(param.numel() for param in base.parameters())
        policy = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    num_adapter = sum(param.numel() for name, param in policy.named_parameters() if "lora_" in name)
    return 2 * num_weights, 4 * num_adapter


def make_trainer(url: str, policy: str, output_dir: str) -> Any:
    """A trainer of an adapter, with long prompts of a kind that any policy can read."""
    sums = [" + ".join(str((7 * i + 13 * j) % 90 + 10) for j in range(20)) for i in range(8)]
    settings = SETTINGS | {
        "trainer": "fr3e",
        "num_prompts": 4,
        "num_generations": 16,
        "max_completion_length": 64,
        "max_steps": 8,
        "learning_rate": 1e-3,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
    }
    return FR3ETrainer(
        policy,
        lambda completions, **kwargs: [float(len(text) % 7) for text in completions],
        make_config(settings, Path(output_dir), seed=0),
        train_dataset=Dataset.from_dict({"prompt": [f"{terms} =" for terms in sums]}),
        processing_class=AutoTokenizer.from_pretrained(policy),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )


def tokens_a_second(trainer: Any, batches: list[list[SamplingRequest]]) -> float:
    start = time.perf_counter()
    samples = [sample for batch in batches for of_request in trainer.sampler.sample(batch) for sample in of_request]
    return sum(len(sample.token_ids) for sample in samples) / (time.perf_counter() - start)


def run(trainer: Any, num_turns: int) -> None:
    prompts = tokenize(trainer, list(trainer.train_dataset["prompt"]))
    requests = [SamplingRequest(as_ids(ids[: 20 + 5 * j]), 4, 64, 1.0) for ids in prompts for j in range(4)]
    one_by_one = [[request] for request in requests]
    tokens_a_second(trainer, [requests])  # to warm up
    ratios = [tokens_a_second(trainer, [requests]) / tokens_a_second(trainer, one_by_one) for _ in range(num_turns)]
    print(f"\n{len(requests)} requests, 4 samples of up to 64 tokens each. Tokens a second, all in flight / one after")
    print(f"another: {over_turns(ratios)}", flush=True)

    syncs: list[float] = []
    sync = trainer.vllm_generation.sync_weights

    def timed_sync() -> None:
        start = time.perf_counter()
        sync()
        syncs.append(time.perf_counter() - start)

    trainer.vllm_generation.sync_weights = timed_sync
    trainer.train()
    steps = [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry]
    print(f"Share of a training step that the sync of the adapter takes: {sum(syncs[1:]) / sum(steps[1:]):.1%}")
    weights, adapter = bytes_moved()
    print(
        f"Qwen2.5-7B, rank 16: {weights / 1e9:.2f} GB of weights in bfloat16, {adapter / 1e9:.3f} GB of adapter in "
        f"float32: {weights / adapter:.0f} times as much"
    )


def main(argv: list[str]) -> None:
    """Measure, and print the ratios."""
    parser = make_parser(__doc__, num_turns=(5, "turns"))
    parser.add_argument("--url", required=True, help="address of the server")
    parser.add_argument("--policy", required=True, help="directory or hub id of the policy that it serves")
    options = parser.parse_args(argv)
    be_quiet()
    with tempfile.TemporaryDirectory() as output_dir:
        run(make_trainer(options.url, options.policy, output_dir), options.num_turns)
