"""A colocated vLLM that several processes share, in name: the engine is a fake one, all around it is real."""

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from models import make_model
from peft import LoraConfig, get_peft_model

from fr3e_trl import SamplingRequest
from fr3e_trl.generation.vllm import VLLMColocateSampler


class SharedEngine:
    """Draws the same from the same prefix, by `draw`, in all processes of `group` (`None`: this one) together."""

    def __init__(self, draw, group):
        self.draw = draw
        self.group = group
        self.calls = []
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=None))

    def generate(self, prompts, sampling_params, use_tqdm):
        asked = [
            (prompt["prompt_token_ids"], params.n, params.max_tokens)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]
        if self.group is not None:
            of_processes = [None] * dist.get_world_size(self.group)
            drawn = float(np.random.rand()), torch.rand(1).item()
            dist.all_gather_object(of_processes, (asked, drawn), group=self.group)  # hangs unless all are here
            assert all(other == (asked, drawn) for other in of_processes)
        self.calls.append(asked)
        return [
            SimpleNamespace(outputs=[self.output(prefix_ids, i, max_tokens) for i in range(num_samples)])
            for prefix_ids, num_samples, max_tokens in asked
        ]

    def output(self, prefix_ids, i, max_tokens):
        token_ids = self.draw(SamplingRequest(prefix_ids, 1, max_tokens, 1.0), i).token_ids
        places = range(len(token_ids) + 1)  # of the log-probs of each token: its own alone
        flat = {"token_ids": list(token_ids), "logprobs": [-1 / token for token in token_ids]}
        logprobs = SimpleNamespace(start_indices=places[:-1], end_indices=places[1:], **flat)
        return SimpleNamespace(token_ids=token_ids, logprobs=logprobs)


def share_engine(trainer, draw) -> SharedEngine:
    """Have a trainer's processes sample by one engine for all of them."""
    sys.modules["vllm"] = SimpleNamespace(SamplingParams=SimpleNamespace)
    num_processes, group = trainer.accelerator.num_processes, None
    if num_processes > 1:
        # As TRL makes it
        group, _ = dist.new_subgroups_by_enumeration([list(range(num_processes))])
        np.random.seed(trainer.accelerator.process_index)  # as where rewards draw by it
    engine = SharedEngine(draw, group)
    sampling = {"generation_kwargs": {}, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    processes = {"tp_group": group, "tensor_parallel_size": num_processes, "accelerator": trainer.accelerator}
    model = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"]))  # an adapter's, which all wait for
    generation = SimpleNamespace(llm=engine, model=model, **sampling, **processes)
    trainer.sampler = VLLMColocateSampler(generation, trainer.eos_token_ids, contextlib.nullcontext)
    return engine
