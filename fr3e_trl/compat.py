"""
Whether the installed TRL has the doors that [`FR3ETrainer`] goes through.

Checked when a trainer is made, by looking: no version number is compared. tests/test_trl_contract.py lists every
further name that the package relies on.
"""

import inspect
import logging
from collections.abc import Mapping

import trl
from trl import GRPOTrainer

logger = logging.getLogger(__name__)

# Methods that are overridden, and the arguments that the overrides take by name, in order
OVERRIDDEN: Mapping[str, str] = {
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_generate_single_turn": "prompt_ids images",
    "_tool_call_loop": "prompts prompt_ids completion_ids completions logprobs",
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_compute_loss": "model inputs",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep",
    "_prepare_inputs": "generation_batch",
    "_get_train_sampler": "",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs",
    "_save_rng_state": "output_dir",
    "_load_rng_state": "checkpoint",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_best_model": "",
    "_issue_warnings_after_load": "load_result",
    "create_model_card": "model_name dataset_name tags",
}


def check_trl(trainer: type[GRPOTrainer] = GRPOTrainer) -> None:
    """
    Check that TRL's methods are where the overrides expect them.

    Raises:
        ImportError: A method has moved, or takes other arguments. It names the method, TRL's version and what to do.
    """
    for name, arguments in OVERRIDDEN.items():
        expected, method = arguments.split(), getattr(trainer, name, None)
        found = [] if method is None else list(inspect.signature(method).parameters)[1:]
        if method is None or found[: len(expected)] != expected:
            has = "is gone" if method is None else f"takes ({', '.join(found)})"
            raise ImportError(
                f"TRL {trl.__version__} does not fit this version of fr3e_trl: GRPOTrainer.{name} {has}, and must take "
                f"({', '.join(expected)}) first. Upgrade fr3e_trl, or install an earlier TRL: pip install "
                f"'trl<{trl.__version__}'."
            )
