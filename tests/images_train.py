"""Train from images in several processes, against plain forward passes: `images_train.py OUTPUT SETTINGS`."""

import json
import os
import sys
from pathlib import Path

import numpy as np
from test_images import by_hand, dialogue_by_hand, look_at_picture, make_tool_trainer, make_trainer, parity
from tool_policy import look

from fr3e_trl import FR3ETrainer
from fr3e_trl.images import multimodal_of
from fr3e_trl.method.sampling import images_of

RANK = int(os.environ.get("RANK", 0))


def main(output: Path, settings: dict) -> None:
    if with_tools := settings.pop("with_tools", False):
        tool = look_at_picture if RANK == 0 else look  # so that one process may have no images at all
        trainer = make_tool_trainer("qwen2_5_vl", tool, FR3ETrainer, with_images=False, **settings)
    else:
        trainer = make_trainer("qwen2_5_vl", FR3ETrainer, **{"reward_funcs": parity, "learning_rate": 0.0} | settings)
    rows = []
    give_credit = trainer._with_credit
    trainer._with_credit = lambda batch: rows.extend(trainer._rollouts.own) or give_credit(batch)
    trainer.train()
    differences = []
    for row in rows:
        if with_tools:
            token_ids = [*row.prompt_ids, *row.completion_ids]
            logprobs = dialogue_by_hand(trainer, token_ids, images_of(row.rollout.dialogue.messages))
        else:
            logprobs, _ = by_hand(trainer, multimodal_of(trainer, row.example), row.completion_ids)
        is_own = np.array(row.loss_mask[len(row.prefix_ids) :], bool)
        of_rollout = logprobs[-row.rollout.length :].numpy()
        differences.append(np.abs(of_rollout - row.rollout.logprobs)[is_own].max().item())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {"checked": len(differences), "greatest_difference": max(differences), "losses": losses}
    (output / f"{RANK}.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
