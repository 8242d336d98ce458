"""The method in one file is the package's: the same rows give the same anchors, credit and loss."""

import copy
from pathlib import Path

import factory
import pytest
import torch
from factory import logged
from models import make_model
from torch.nn.utils.rnn import pad_sequence

EXAMPLES = Path(__file__).parents[1] / "examples"
SETTINGS = {"num_generations": 4, "max_completion_length": 16, "max_steps": 4, "reward_funcs": factory.letters}
SETTINGS["value_prior_strength"] = 4.0  # fixed, as in the file


@pytest.fixture(scope="module")
def one_file():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import fr3e_in_one_file

        yield fr3e_in_one_file


@pytest.fixture(scope="module")
def trainer():
    trainer = factory.train(**SETTINGS)
    assert any(r.copy_of is not None for _, trees in trainer.batches for t in trees for r in t.states[0].rollouts)
    return trainer


def rollouts_of(tree):
    """What was sampled of a tree, each with the position where it begins."""
    return [(state.position, r) for state in tree.states for r in state.rollouts if r.copy_of is None]


def as_rows(one_file, tree):
    prompt, base = torch.tensor(tree.prompt_ids), tree.bases[0].token_ids
    return [
        one_file.Row(prompt, torch.tensor([*base[:position], *rollout.token_ids]), position, rollout.score.reward)
        for position, rollout in rollouts_of(tree)
    ]


def test_anchors_and_thresholds(one_file, trainer):
    threshold = None
    for (_, trees), (following,) in zip(trainer.batches, logged(trainer, "fr3e/anchor/threshold"), strict=True):
        entropies = [tree.entropies[0] for tree in trees]
        for tree, of_base in zip(trees, entropies, strict=True):
            if threshold is not None:  # the first step of the package has none
                assert one_file.first_anchors(of_base, threshold) == [state.position for state in tree.states[1:]]
        threshold = one_file.next_threshold(threshold, [one_file.uncertainty(of_base) for of_base in entropies])
        assert following == pytest.approx(threshold, rel=1e-6)


def test_credit_and_loss(one_file, trainer):
    for (_, trees), (loss,) in zip(trainer.batches, logged(trainer, "loss"), strict=True):
        rows = [as_rows(one_file, tree) for tree in trees]
        credit = []
        for tree, of_tree, prior in zip(trees, rows, one_file.priors_of(rows), strict=True):
            credit += (of_rows := one_file.tree_credit(of_tree, prior))
            for (weights, advantages), (position, rollout) in zip(of_rows, rollouts_of(tree), strict=True):
                expected = [[(w, a)] * n for n, w, a in [(position, 0.0, 0.0), *rollout.credit]]
                expected = torch.tensor([value for stretch in expected for value in stretch], dtype=torch.float64)
                torch.testing.assert_close(advantages, expected[:, 1], atol=1e-9, rtol=1e-9)
                if advantages.any():  # else the row is rejected
                    torch.testing.assert_close(weights, expected[:, 0])
        weights, advantages = (pad_sequence(list(of), batch_first=True) for of in zip(*credit, strict=True))
        zeros = torch.zeros_like(weights)  # the policy has not moved yet
        assert one_file.policy_loss(zeros, zeros, weights, advantages).item() == pytest.approx(loss, abs=1e-5)


def test_it_trains_as_the_package_does(one_file):
    """The same rows, twice each: the same entropies, losses, clipped ones too, and weights in the end."""
    settings = {"model": make_model(), "num_iterations": 2, "max_steps": 6, "lr_scheduler_type": "constant"}
    model = copy.deepcopy(settings["model"])
    trainer = factory.train(**SETTINGS | settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trainer.args.learning_rate, weight_decay=0)
    losses = []
    for _, trees in trainer.batches:
        rows = [as_rows(one_file, tree) for tree in trees]
        with torch.no_grad():
            _, entropies = one_file.log_probs_and_entropies(model, [of_tree[0] for of_tree in rows])
        for mine, tree in zip(entropies, trees, strict=True):
            theirs = torch.as_tensor(tree.entropies[0])
            torch.testing.assert_close(mine[: len(theirs)], theirs, atol=1e-4, rtol=1e-4)
        losses += one_file.learn(model, optimizer, rows)
    assert losses == pytest.approx([loss for (loss,) in logged(trainer, "loss")], abs=1e-5)
    parameters = torch.cat([param.detach().flatten() for param in model.parameters()])
    torch.testing.assert_close(parameters, factory.weights(trainer), atol=1e-4, rtol=0)
    assert any(clipped > 0 for (clipped,) in logged(trainer, "clip_ratio/region_mean"))


def test_it_learns(one_file, capsys):
    assert len((EXAMPLES / "fr3e_in_one_file.py").read_text().splitlines()) <= 200  # and is short
    one_file.main(num_steps=10)
    before, after = (float(line.split()[3].rstrip("%")) for line in capsys.readouterr().out.splitlines())
    assert after > before + 5
