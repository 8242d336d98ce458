"""Arms of a comparison that take another trainer than FR3E's or GRPO's own."""

from pathlib import Path

import pytest
import torch
from bench_task import Ones
from factory import letters
from models import model_on_disk

from benchmarks.arms import make_trainer

SETTINGS = {"loss_type": "dapo", "num_generations": 4, "num_prompts": 4, "num_iterations": 2, "num_train_examples": 16}
SETTINGS |= {"learning_rate": 1e-3, "logging_steps": 1}
FR3E = {"trainer": "fr3e", "scale_rewards": "none", "epsilon_high": 0.28}


class Letters(Ones):
    """Each completion has a reward of its own, so that every step teaches."""

    def reward(self, completions, **kwargs):
        return letters(completions)


def trained(**settings):
    trainer = make_trainer(SETTINGS | settings, Path(model_on_disk()), Letters(), Path("out"), 0, max_steps=6)
    trainer.train()
    return trainer, [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_half_swap_trains_as_the_whole_one():
    _, expected = trained(**FR3E)
    _, gradients = trained(trainer="half_swap", scale_rewards="group", epsilon_high=None)  # TRL's own defaults
    assert gradients == expected and any(gradients)


def check_stale(trainer, updates):
    """What rollouts come with are log-probs of the weights of so many updates before, and updates begin with newer."""
    weights, batches, score = [], [], trainer._generate_and_score_completions

    def kept(inputs):
        batches.append((trainer.state.global_step, score(inputs)))
        return batches[-1][1]

    trainer._generate_and_score_completions = kept
    begin_update = trainer.begin_update
    copied = lambda: {name: p.clone() for name, p in trainer.model.state_dict().items()}  # noqa: E731
    trainer.begin_update = lambda: weights.append(copied()) or begin_update()
    trainer.train()
    assert [step for step, _ in batches] == [0, 2, 4]
    for step, batch in batches:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        padding = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        of_policies = []
        for name, place in (("old", step), ("sampling", max(0, step - updates))):
            trainer.model.load_state_dict(weights[place])
            with torch.no_grad():
                score = trainer._get_per_token_logps_and_entropies
                logps, *_ = score(trainer.model, ids, padding, batch["completion_ids"].size(1))
            mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
            torch.testing.assert_close(batch[f"{name}_per_token_logps"][mask], logps[mask], rtol=1e-4, atol=1e-4)
            of_policies.append(logps[mask])
        assert of_policies[0].allclose(of_policies[1]) == (step == 0)


@pytest.mark.parametrize("staleness, updates", [(0.5, 1), (1, 2)])
def test_stale_rollouts_are_of_the_policy_of_so_many_updates_before(staleness, updates):
    fresh, _ = trained(**FR3E)
    settings = SETTINGS | FR3E | {"staleness": staleness}
    trainer = make_trainer(settings, Path(model_on_disk()), Letters(), Path("out"), 0, max_steps=6)
    check_stale(trainer, updates)
    assert fresh.batches[0] == trainer.batches[0]  # before anything can be old
