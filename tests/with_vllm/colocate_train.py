"""
Train with vLLM in this process, or in each of several, and print what happened as JSON. A script: the engine makes the
process its own.

On a CPU, vLLM has no sleep mode: what would be called is recorded, around the real engine.
"""

import json
import os

from policies import SIZES, make_trainer
from servers import ENVIRONMENT
from trees import rollouts_of
from vllm_on_cpu import keep_weights_plain

from fr3e_trl.generation.vllm_weights import end_engine


def main() -> None:
    os.environ.update(ENVIRONMENT)
    keep_weights_plain()
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    sizes = SIZES | {"per_device_train_batch_size": SIZES["per_device_train_batch_size"] // num_processes}
    sizes |= {"max_steps": 4, "anchor_threshold": None}  # anchors in every step, and so two rounds
    trainer = make_trainer(None, vllm_mode="colocate", learning_rate=1e-2, **sizes)
    llm, calls = trainer.vllm_generation.llm, []
    generate, sync = llm.generate, trainer.vllm_generation.sync_weights

    def record(name, function):
        def recorded(*args, **kwargs):
            calls.append(name.format(**kwargs))
            return function(*args, **kwargs)

        return recorded

    llm.generate = record("generate", generate)
    trainer.vllm_generation.sync_weights = record("sync", sync)
    llm.wake_up = record("wake_up {tags}", lambda tags: None)
    llm.sleep = record("sleep {level}", lambda level: None)
    trainer.train()
    awake = list(calls)

    calls.clear()
    trainer.vllm_generation.enable_sleep_mode = trainer.vllm_generation._llm_weights_sleeping = True
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    trainer._generate_and_score_completions(batch)
    trainer._generate_and_score_completions(batch)
    longest = max(
        len(s.prefix_ids) + len(r.token_ids) for _, trees in trainer.batches for _, s, r in rollouts_of(trees)
    )
    if trainer.is_world_process_zero():
        result = {"log": trainer.state.log_history, "awake": awake, "with_sleep": calls, "longest": longest}
        print(json.dumps(result))
    end_engine(trainer)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
