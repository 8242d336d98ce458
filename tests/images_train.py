"""
Train from prompts with images in several processes, and compare what each sampled with a plain forward pass.

A script, for `accelerate launch`, like `processes_train.py`:

    images_train.py OUTPUT SETTINGS
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from models import CPU
from test_images import by_hand, parity
from vision_models import make_image_dataset, make_processor, make_vision_model

from fr3e_trl import FR3EConfig, FR3ETrainer

RANK = int(os.environ.get("RANK", 0))


def main(output: Path, settings: dict) -> None:
    defaults = {"max_completion_length": 12, "max_steps": 2, "learning_rate": 0.0}
    args = FR3EConfig("output", **CPU | defaults | settings)
    trainer = FR3ETrainer(
        make_vision_model("qwen2_5_vl"),
        parity,
        args,
        train_dataset=make_image_dataset(8),
        processing_class=make_processor("qwen2_5_vl"),
    )
    rows = []
    assemble = trainer.assemble
    trainer.assemble = lambda batch_rows, *args: (
        rows.extend(trainer.own_rows(batch_rows)) or assemble(batch_rows, *args)
    )
    trainer.train()
    differences = []
    for row in rows:
        logprobs, _ = by_hand(trainer, trainer.multimodal_of(row.example), row.completion_ids)
        differences.append(np.abs(logprobs[len(row.prefix_ids) :].numpy() - row.rollout.logprobs).max().item())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {"checked": len(differences), "greatest_difference": max(differences), "losses": losses}
    (output / f"{RANK}.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
