"""
Train in several processes. A script, for `torch.distributed.run`, of which each process writes what it saw to OUTPUT.

    processes_train.py OUTPUT SETTINGS [fake [half_told]] [fail | fail_to_sample] [sharded] [reward_model]
        [tools | environment | moody | dice] [shared_engine] [drops]

`fake`: completions do not depend on the processes; with `half_told`, the first one's have log-probs. `fail`: the last
process raises in its reward function. `fail_to_sample`: it raises where the others sample. `sharded`: as the
configuration says, which accelerate does not do by itself without a GPU. `tools`, `environment`, `moody`, `dice`: in
several turns; an environment that is moody cannot be replayed, and dice have chance in their reset. `shared_engine`: as
`fake`, by one engine for all processes. `drops`: a third of the rows is dropped, as TRL's correction for vLLM does.
"""

import hashlib
import json
import os
import random
import sys
from pathlib import Path

import tool_policy
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from models import CPU, make_dataset, make_model, make_tokenizer
from shared_engine import share_engine
from tool_policy import WORDS
from transformers import Qwen3Config, Qwen3ForSequenceClassification
from trees import rollouts_of

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.method.sampling import Sample

RANK = int(os.environ.get("RANK", 0))

# What completions of several turns are made with
DIALOGUES = {
    "tools": {"tools": [tool_policy.look]},
    "environment": {"environment_factory": tool_policy.LockedWalk},
    "moody": {"environment_factory": tool_policy.MoodyWalk},
    "dice": {"environment_factory": tool_policy.Dice},
}


class FakeSampler:
    """Draws the same from the same prefix, in any process."""

    def __init__(self, is_told=False):
        self.is_told = is_told

    def sample(self, requests):
        return [[self.draw(request, i) for i in range(request.num_samples)] for request in requests]

    def draw(self, request, i):
        seed = hashlib.sha256(repr((request.prefix_ids.tolist(), i)).encode()).hexdigest()
        rng = random.Random(seed)
        token_ids = [rng.randrange(5, 40) for _ in range(rng.randint(1, request.max_new_tokens))]
        return Sample(token_ids, [-3.0] * len(token_ids) if self.is_told else None)


class FakeCaller(FakeSampler):
    """Calls a tool, or answers: the same from a prompt each time, of which processes may have several rollouts each."""

    def draw(self, request, i):
        seed = hashlib.sha256(repr(request.prefix_ids.tolist()).encode()).hexdigest()
        rng = random.Random(seed)
        turn = ["<call>", str(rng.randrange(10)), "</call>", "<eos>"] if rng.random() < 0.7 else ["7", "<eos>"]
        # A branch amid a turn writes the rest of it
        written = [WORDS[token] for token in request.prefix_ids.tolist()]
        begun = written[len(written) - written[::-1].index("<|assistant|>") :]
        ids = [WORDS.index(word) for word in ([*begun[:1], *turn[1:]] if begun else turn)[len(begun) :] or ["<eos>"]]
        return Sample(ids[: request.max_new_tokens])


def with_drops(trainer, batch):
    """A batch of TRL's step, with the ratios of TRL's correction: 0 for a row that it drops."""
    kept = [sum(row.completion_ids.tolist()) % 3 > 0 for row in trainer._rollouts.own]
    ratio = torch.tensor(kept, dtype=torch.float).unsqueeze(1).expand(batch["completion_mask"].shape).clone()
    logprobs = batch["old_per_token_logps"]
    return batch | {"importance_sampling_ratio": ratio, "sampling_per_token_logps": logprobs.clone()}


def main(output: Path, settings: dict, *options: str) -> None:
    scored, checkpoint = [], settings.pop("resume", None)
    num_rewards = settings.pop("num_rewards", 7)

    def letters(completions, log_extra, **kwargs):
        if "fail" in options and int(os.environ["WORLD_SIZE"]) - 1 == RANK:
            raise OSError("the reward model is gone")
        scored.extend(completions)
        log_extra("first", [text[:1] for text in completions])
        return [float(sum(map(ord, text)) % num_rewards) for text in completions]

    reward_funcs = [letters]
    if "reward_model" in options:  # before DeepSpeed has its say in how models are made
        config = make_model().config.to_dict() | {"num_labels": 1}
        reward_funcs.append(Qwen3ForSequenceClassification(Qwen3Config(**config)))
    defaults = {"max_completion_length": 12, "learning_rate": 1e-2, "max_steps": 3}
    args = FR3EConfig("output", **CPU | defaults | settings)
    if "sharded" in options:
        # accelerate asks for a kind of device other than the CPU before it lets FSDP or DeepSpeed have the processes
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    (dialogue,) = [DIALOGUES[option] for option in options if option in DIALOGUES] or [{}]
    if dialogue:
        reward_funcs = [lambda completions, **kwargs: [float(len(completion) % 3) for completion in completions]]
        made = tool_policy.make_tool_policy(), tool_policy.make_tool_dataset(6), tool_policy.make_tool_tokenizer()
    else:
        made = make_model(), make_dataset(16 if settings.get("max_refills") else 6), make_tokenizer()
    model, dataset, tokenizer = made
    others = {"reward_processing_classes": [None, make_tokenizer()][: len(reward_funcs)]} | dialogue
    trainer = FR3ETrainer(model, reward_funcs, args, dataset, processing_class=tokenizer, **others)
    if "fake" in options and dialogue:
        trainer.sampler.sampler = FakeCaller()
    elif "fake" in options:
        trainer.sampler = FakeSampler(is_told="half_told" in options and RANK == 0)
        trainer.has_own_sampler = "half_told" in options
    engine = share_engine(trainer, FakeSampler().draw) if "shared_engine" in options else None
    if "fail_to_sample" in options and RANK == 1:

        def fail(requests):
            raise MemoryError("no memory for these rollouts")

        trainer.sampler.sample = fail
    if "drops" in options:
        trainer.vllm_importance_sampling_mode = "sequence_mask"
        give_credit = trainer._with_credit
        trainer._with_credit = lambda batch: give_credit(with_drops(trainer, batch))
    trees, explore = [], trainer._generate_and_score_completions

    def of_row(tree, state, rollout):
        # Of a rollout that refill has handed over, the row alone has the prefix
        is_held = rollout.token_ids and len(state.prefix_ids) == state.position
        known = [state.position, rollout.length, rollout.score.reward, state.value, state.modulation]
        known += [tree.mean_entropies, rollout.credit, rollout.differs]
        return {"tokens": [state.prefix_ids, rollout.token_ids] if is_held else None, "known": known}

    def record(inputs):
        batch = explore(inputs)
        trees.append([of_row(*row) for row in rollouts_of(trainer.trees)])
        return batch

    trainer._generate_and_score_completions = record
    trainer.train(checkpoint)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    backend = str(trainer.accelerator.distributed_type)
    result = {"trees": trees, "logs": trainer.state.log_history, "scored": scored, "backend": backend}
    if engine is not None:
        result["engine"] = engine.calls
    (output / f"{RANK}.json").write_text(json.dumps(result))
    torch.save(state, output / f"{RANK}.pt")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:])
    except Exception as error:
        (Path(sys.argv[1]) / f"{RANK}.error").write_text(f"{type(error).__name__}: {error}")
        raise
