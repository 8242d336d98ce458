"""
`examples/train.py`, where accelerate shards the model as its configuration says. Without a GPU it does not by itself.

    sharded_train.py BACKEND [arguments of examples/train.py]

`BACKEND` is what is to shard, `"FSDP"` or `"DEEPSPEED"`: anything else is an error.
"""

import atexit
import os
import runpy
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType

from fr3e_trl import FR3EConfig

post_init = FR3EConfig.__post_init__


def with_devices(config: FR3EConfig) -> None:
    """accelerate asks for a kind of device other than the CPU before it lets FSDP or DeepSpeed have the processes."""
    post_init(config)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


FR3EConfig.__post_init__ = with_devices
backend = sys.argv.pop(1)
script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train.py"), run_name="__main__")
assert script["trainer"].accelerator.distributed_type == backend
# What an exit does, but for the end of the interpreter: a thread of gloo's that still runs now and then aborts that
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
