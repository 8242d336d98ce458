"""
What a vLLM server costs and saves.

    fr3e cost vllm --url http://127.0.0.1:8000 --policy PATH_OR_ID

The server serves that policy and takes adapters: `examples/serve_demo.py` starts one on a CPU, and
`recipes/gsm8k_lora_vllm.yaml` says how on a GPU.

- Generated tokens a second with all requests in flight together, as a ratio to one after another, in turns.
- What distinct branches ask for beyond independent ones, at the 3 most uncertain places of each sample: requests, draws
  of first tokens, and time as a ratio, in turns.
- The share of a training step that the sync of the adapter takes.
- What a sync moves: the adapter alone, against all weights with the adapter merged, in bytes, computed from the shapes
  of Qwen2.5-7B with LoRA of rank 16 on all linear layers.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from ...generation.vllm import FEWEST_DRAWS
from ...method.anchors import eligible_positions, rank_anchors
from ...method.sampling import Branching, Sample, SamplingRequest
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


def three_anchors(request: SamplingRequest, samples: Sequence[Sample]) -> list[list[int]]:
    """The most uncertain places of each sample."""
    budget = request.max_new_tokens
    return [rank_anchors(s.entropies, eligible_positions(s.entropies, budget), 3) for s in samples]


def compare_branches(trainer: Any, requests: list[SamplingRequest], num_turns: int) -> None:
    """Print what distinct branches ask for, and what they take beside independent ones."""
    asked: list[dict[str, Any]] = []
    params_of = trainer.sampler.sampling_params

    def recorded(request: SamplingRequest) -> dict[str, Any]:
        asked.append(params_of(request))
        return asked[-1]

    trainer.sampler.sampling_params = recorded
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    rounds: Counter[int] = Counter()
    ratios: list[float] = []
    for _ in range(num_turns):
        seconds = {}
        for distinct, count in counts.items():
            branching = Branching(1, three_anchors, [3] * requests[0].num_samples, distinct=distinct)
            asked.clear()
            start = time.perf_counter()
            of_requests = trainer.sampler.sample(
                [replace(request, branching=branching, with_entropies=True) for request in requests]
            )
            seconds[distinct] = time.perf_counter() - start
            samples = [sample for of_request in of_requests for sample in of_request]
            branches = [branch for sample in samples for at_anchor in sample.branches.values() for branch in at_anchor]
            first = [p["n"] for p in asked if "logit_bias" in p or (p["n"] >= FEWEST_DRAWS and p["max_tokens"] == 1)]
            rounds.update(first)
            count["branches"] += len(branches)
            count["distinct"] += sum(branch.chances is not None for branch in branches)
            count["requests"] += len(asked) - len(requests)
            count["first"] += sum(first)
            count["tokens"] += sum(len(branch.token_ids) for branch in branches)
        ratios.append(seconds[True] / seconds[False])
    del trainer.sampler.sampling_params
    for distinct, count in counts.items():
        of_branch = {name: count[name] / count["branches"] for name in ("requests", "tokens", "first", "distinct")}
        print(
            f"{'Distinct' if distinct else 'Independent'} branches, {count['branches']}. For each of them: "
            f"{of_branch['requests']:.2f} requests, {of_branch['tokens']:.1f} tokens of its own, "
            f"{of_branch['first']:.1f} draws of first tokens; {of_branch['distinct']:.0%} differ"
        )
    print(f"Requests of first tokens, by draws: {', '.join(f'{n}: {rounds[n]}' for n in sorted(rounds))}")
    print(f"Time of distinct / independent: {over_turns(ratios)}", flush=True)


def run(trainer: Any, num_turns: int) -> None:
    prompts = tokenize(trainer, list(trainer.train_dataset["prompt"]))
    requests = [SamplingRequest(as_ids(ids[: 20 + 5 * j]), 4, 64, 1.0) for ids in prompts for j in range(4)]
    one_by_one = [[request] for request in requests]
    tokens_a_second(trainer, [requests])  # to warm up
    ratios = [tokens_a_second(trainer, [requests]) / tokens_a_second(trainer, one_by_one) for _ in range(num_turns)]
    print(f"\n{len(requests)} requests, 4 samples of up to 64 tokens each. Tokens a second, all in flight / one after")
    print(f"another: {over_turns(ratios)}", flush=True)

    compare_branches(trainer, requests[::4], num_turns)

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
