"""What each of several processes of `fr3e check` does: `torch.distributed.run` starts it."""

import hashlib
import json
import sys

import torch
from transformers import set_seed

from ...processes import in_every_process
from .model import logged, make_trainer
from .table import Setup


def main(setup: Setup) -> None:
    """Train, compare the weights of all processes, and print what was found."""
    trainer = make_trainer(setup, per_device_train_batch_size=8)
    set_seed(0)
    trainer.train()
    weights = torch.cat([p.detach().float().flatten().cpu() for p in trainer.model.parameters()])
    digests = in_every_process(lambda: hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    if len(set(digests)) > 1:
        raise RuntimeError(f"after {len(logged(trainer))} steps the weights of the {len(digests)} processes differ")
    if not weights.isfinite().all():
        raise RuntimeError(f"after {len(logged(trainer))} steps not all weights are finite")
    if trainer.is_world_process_zero():
        backend = torch.distributed.get_backend()
        print(f"{len(digests)} processes, by {backend}: equal weights after {len(logged(trainer))} steps")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Setup(**json.loads(sys.argv[1])))
