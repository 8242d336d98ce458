"""Train a tiny policy with LoRA through a server; writes its logs: `overlap_train.py OUTPUT SETTINGS [sharded]`."""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType
from factory import letters, make_trainer
from models import TINY, make_model
from peft import LoraConfig
from transformers import set_seed

from fr3e_trl import FR3EConfig, FR3ETrainer

# Two updates a batch, of rows that the stand-in's draws teach
SETTINGS = {"num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
SETTINGS |= {"num_iterations": 2, "max_completion_length": 16, "max_steps": 6, "learning_rate": 0.0, "use_vllm": True}
SETTINGS |= {"vllm_mode": "server", "vllm_server_timeout": 1}


def make(cls=FR3ETrainer, vocab_size=TINY["vocab_size"], **settings):
    """A trainer of a policy that is nearly uniform, as the stand-in for the server is."""
    model = make_model(vocab_size=vocab_size)
    model.lm_head.weight.data.div_(20)
    defaults = {"model": model, "reward_funcs": letters, "peft_config": LoraConfig(r=2, target_modules="all-linear")}
    return make_trainer(cls, **SETTINGS | defaults | settings)


def with_devices(config):
    """accelerate asks for a kind of device other than the CPU before it lets FSDP have the processes."""
    post_init(config)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    if "sharded" in sys.argv:
        post_init, FR3EConfig.__post_init__ = FR3EConfig.__post_init__, with_devices
    trainer = make(**json.loads(sys.argv[2]))
    set_seed(1)
    trainer.train()
    file = Path(sys.argv[1]) / f"{os.environ.get('RANK', 0)}.json"
    backend = str(trainer.accelerator.distributed_type)
    file.write_text(json.dumps({"logs": trainer.state.log_history, "backend": backend}))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
