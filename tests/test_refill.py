"""Batches that are filled up with further prompts."""

import math
from collections import defaultdict
from functools import partial
from pathlib import Path

import factory
import pytest
import torch
from datasets import Dataset
from models import make_dataset, make_model
from transformers import TrainerCallback, set_seed
from trees import rollouts_of
from trl.trainer.utils import RepeatSampler

import fr3e_trl.fr3e_trainer
from fr3e_trl.method.refill import PromptStream, fill_batch, num_to_draw
from fr3e_trl.method.rows import Row, token_credit
from fr3e_trl.method.tree import Rollout
from fr3e_trl.tree_log.record import read_step


def hopeful(prompts, completions, **kwargs):
    """Prompts that begin with 9 give rewards that hardly any two completions share; the others are hopeless."""
    return [
        sum(math.sin(i * ord(char)) for i, char in enumerate(text, 1)) if prompt[0] == "9" else 0.0
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def make_prompts(num_prompts: int, num_hopeful: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{9 if i < num_hopeful else 1}+{i}=" for i in range(num_prompts)]})


# With a prior hardly a row is rejected
DEFAULTS = {"reward_funcs": hopeful, "value_prior_strength": 0}
DEFAULTS |= {"per_device_train_batch_size": 32, "max_completion_length": 8, "max_steps": 3, "learning_rate": 1e-2}


def make_trainer(dataset, **settings):
    return factory.make_trainer(dataset=dataset, **DEFAULTS | settings)


def train(dataset, **settings):
    return factory.train(dataset=dataset, **DEFAULTS | settings)


def logged(trainer, name):
    return [value for (value,) in factory.logged(trainer, name)]


GRPO = {"num_anchors": 0, "reject_degenerate_states": True}


@pytest.mark.parametrize("settings", [{}, GRPO], ids=["fr3e", "grpo"])
def test_a_batch_is_filled_when_most_prompts_are_hopeless(settings):
    """80% of them; without refill most of the batch teaches nothing. Tokens are counted over all rounds."""
    dataset = make_prompts(200, 40)
    plain = train(dataset, **settings)
    filled = train(dataset, max_refills=12, **settings)
    assert max(logged(plain, "fr3e/rows/informative")) < 0.5
    assert logged(filled, "fr3e/rows/informative") == [1.0] * 3
    assert all(0 < rounds < 12 for rounds in logged(filled, "fr3e/refill/rounds"))
    names = ["fr3e/tokens/generated", "fr3e/tokens/per_informative_row"]
    for (batch, trees), (count, per_row) in zip(filled.batches, factory.logged(filled, *names), strict=True):
        assert batch["in_loss"].all() and all(advantages.any() for advantages in batch["advantages"])
        assert count == sum(len(rollout.token_ids) for _, _, rollout in rollouts_of(trees) if rollout.copy_of is None)
        assert per_row == pytest.approx(count / batch["in_loss"].sum().item())


def test_a_batch_of_hopeless_prompts_ends():
    trainer = train(make_prompts(100, 0), max_refills=3)
    assert logged(trainer, "fr3e/refill/rounds") == [3] * 3
    assert logged(trainer, "fr3e/refill/prompts") == [12] * 3
    assert logged(trainer, "fr3e/rows/informative") == [0.0] * 3
    assert logged(trainer, "loss") == [0.0] * 3
    assert all(map(torch.equal, trainer.model.parameters(), make_model().parameters()))
    # A stream is refused
    with pytest.raises(ValueError, match="max_refills=2 draws prompts from a Dataset"):
        make_trainer(make_dataset(16).to_iterable_dataset(), max_refills=2)


def test_a_batch_that_is_full_draws_nothing():
    dataset = make_prompts(40, 40)
    settings = GRPO | {"num_generations": 16, "max_steps": 2}
    plain, filled = train(dataset, **settings), train(dataset, max_refills=5, **settings)
    assert logged(plain, "fr3e/rows/informative") == [1.0] * 2
    assert logged(filled, "fr3e/refill/prompts") == [0] * 2
    assert all(map(torch.equal, plain.model.parameters(), filled.model.parameters()))


def test_no_prompt_comes_twice_in_an_epoch():
    dataset = make_prompts(30, 6)
    trainer = train(dataset, max_refills=2, max_steps=6)
    drawn = [tuple(tree.prompt_ids) for _, trees in trainer.batches for tree in trees]
    assert len(drawn) > 60 and len(set(drawn[:30])) == len(set(drawn[30:60])) == 30
    assert drawn[:30] != drawn[30:60]
    assert len(drawn) == sum(logged(trainer, "fr3e/refill/prompts")) + 6 * 4


def test_rows_that_are_cut_off_leave_no_batch_full():
    settings = {"max_refills": 12, "mask_truncated_completions": True, "learning_rate": 0.0}
    trainer = train(make_prompts(200, 200), **GRPO, **settings)
    for (batch, _), informative in zip(trainer.batches, logged(trainer, "fr3e/rows/informative"), strict=True):
        in_loss = (batch["completion_mask"] * batch["tool_mask"]).any(1)
        assert informative == in_loss.float().mean()
    assert logged(trainer, "fr3e/rows/informative") == [1.0] * 3
    assert all(0 < rounds < 12 for rounds in logged(trainer, "fr3e/refill/rounds"))


def test_rows_that_are_left_over():
    settings = {"max_refills": 3, "max_steps": 6, "anchor_threshold": 1.0}  # no more trees than are logged
    trainer = train(make_prompts(200, 100), log_trees=1, output_dir="run", **settings)
    reused, dropped = logged(trainer, "fr3e/refill/reused"), logged(trainer, "fr3e/refill/dropped")
    informative = [
        sum(any(advantage for *_, advantage in rollout.credit) for _, _, rollout in rollouts_of(trees))
        for _, trees in trainer.batches
    ]
    left_over = [max(count - (32 - n), 0) for count, n in zip(informative, reused, strict=True)]
    # Of those of a step, each is used in the next one or dropped there
    assert [n + m for n, m in zip(reused, dropped, strict=True)] == [0, *left_over[:-1]]
    assert any(left_over) and sum(reused) > 0
    for step, (num_reused, (batch, _)) in enumerate(zip(reused, trainer.batches, strict=True), 1):
        record = read_step(Path("run"), step)  # the page has the rows of the batch
        assert record["num_trees"] == len(record["trees"])
        of_batch = sum(rollout["in_loss"] for tree in record["trees"] for rollout in tree["rollouts"])
        assert of_batch + num_reused == batch["in_loss"].sum()


def test_rows_left_over_keep_their_credit_and_the_log_probs_of_the_policy_that_they_were_sampled_from(monkeypatch):
    settings = {"max_refills": 12, "max_steps": 8, "anchor_threshold": 0.5, "num_base_trajectories": 4}
    trainer = make_trainer(make_prompts(200, 100), **settings)
    kept = []
    score_leftovers = fr3e_trl.fr3e_trainer.score_leftovers

    def record(trainer, rows, *rest):
        with torch.no_grad():
            logprobs = [trainer.token_statistics([row.prompt_ids], [row.completion_ids])[0][0] for row in rows]
        score_leftovers(trainer, rows, *rest)
        credits = [torch.from_numpy(token_credit([row], len(row.completion_ids))[1, 0]).float() for row in rows]
        keys = [(len(row.prefix_ids), *row.prompt_ids.tolist(), *row.completion_ids.tolist()) for row in rows]
        of_rows = zip([row.old_logprobs for row in rows], logprobs, credits, strict=True)
        kept.append(dict(zip(keys, of_rows, strict=True)))

    monkeypatch.setattr(fr3e_trl.fr3e_trainer, "score_leftovers", record)
    set_seed(1)
    trainer.train()
    num_seen, num_bases, factors = 0, 0, defaultdict(list)
    for before, (batch, trees) in zip(kept, trainer.batches[1:], strict=False):
        own = {
            (state.position, *tree.prompt_ids, *state.prefix_ids, *rollout.token_ids)
            for tree, state, rollout in rollouts_of(trees)
        }
        for i in batch["in_loss"].nonzero().flatten().tolist():
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
            completion = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
            start = batch["tool_mask"][i].tolist().index(1)  # the prefix is not in the loss
            key = (start, *prompt, *completion)
            if key in own or key not in before:
                continue
            kept_logprobs, logprobs, expected = before[key]
            num_seen += 1
            num_bases += len(set(expected.tolist()) - {0.0}) > 1  # other tokens have other advantages
            old, credit = (batch[name][i][: len(completion)] for name in ("old_per_token_logps", "advantages"))
            torch.testing.assert_close(old, kept_logprobs)
            torch.testing.assert_close(old[start:], logprobs[start:], atol=1e-5, rtol=1e-4)
            # All rows of a batch have the factor that makes up for what the loss is divided by
            assert credit.sign().equal(expected.sign())
            factors[id(batch)] += (credit / expected)[expected != 0].tolist()
    assert num_seen > num_bases > 0
    for of_batch in factors.values():
        assert of_batch == pytest.approx([of_batch[0]] * len(of_batch), rel=1e-4)


def test_fill_batch_and_num_to_draw_by_hand():
    rows = [Row(Rollout([2]), 0, in_loss=in_loss) for in_loss in (1, 0, 0, 1, 0, 1, 1, 1, 1)]
    names, left = {id(row): i for i, row in enumerate(rows)}, rows[7:]

    def filled(indices, left, size):
        batch, left_over, num_reused = fill_batch([rows[i] for i in indices], left, size)
        return [names[id(row)] for row in batch], [names[id(row)] for row in left_over], num_reused

    # A batch of 4: the second and third are replaced by the sixth and seventh
    assert filled(range(7), left, 4) == ([0, 5, 6, 3], [], 0)
    # Of 3 rows: what was left over fills up; and a fresh one is left over when there is no place
    assert filled(range(3), left, 3) == ([0, 7, 8], [], 2)
    assert filled([0, 1, 5, 6], left, 2) == ([0, 5], [6], 0)
    # Nothing to fill with: the rejected row stays
    assert filled([1], [], 1) == ([1], [], 0)
    # How many to draw. 24 rows of 6 prompts are 4 a prompt: 10 more take 2.5 prompts
    assert num_to_draw(10, num_informative=24, num_explored=6, limit=8) == 3
    assert num_to_draw(100, num_informative=24, num_explored=6, limit=8) == 8
    assert num_to_draw(1, num_informative=24, num_explored=6, limit=8) == 1
    assert num_to_draw(10, num_informative=0, num_explored=6, limit=8) == 8
    # A stream of prompts goes on where it was
    shuffled = partial(RepeatSampler, range(7), mini_repeat_count=1, seed=1)
    stream = PromptStream(shuffled)
    drawn = [stream.draw(5) for _ in range(5)]
    again = PromptStream(shuffled)
    again.go_to(10)
    assert [again.draw(5) for _ in range(3)] == drawn[2:]
    assert again.num_drawn == 25
    assert PromptStream(lambda: range(7)).draw(9) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_prompts_of_a_step_that_failed_come_again():
    trainer = make_trainer(make_dataset(16), max_refills=1)
    trainer.begin()
    drawn = []

    def fail(indices):
        drawn.append(indices)
        raise OSError("the server is gone")

    for _ in range(2):
        trainer._refill.begin(4)
        with pytest.raises(OSError, match="the server is gone"):
            trainer._refill.fill(fail, 4, 32)
        trainer._refill.undo()
    assert drawn[0] == drawn[1] and trainer.state_to_resume()["num_drawn"] == 0


class LooksAtTheData(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        assert len(self.trainer.get_train_dataloader()) > 0


def test_a_callback_that_looks_at_the_data_changes_nothing():
    runs = []
    for is_watched in (False, True):
        trainer = make_trainer(make_dataset(16), max_refills=1)
        if is_watched:
            trainer.add_callback(LooksAtTheData(trainer))
        set_seed(0)
        trainer.train()
        runs.append([tree.prompt_ids.tolist() for _, trees in trainer.batches for tree in trees])
    assert runs[0] == runs[1]
