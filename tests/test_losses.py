"""What is left of each loss when rows are rejected: numbers worked out by hand, through `train()`."""

import factory
import pytest
import torch
from datasets import Dataset
from launches import launch

from fr3e_trl import FR3ETrainer
from fr3e_trl.method.sampling import Sample

# Two rows of the prompt "1" in the loss, of 2 tokens and reward 1 and of 6 tokens and reward 0; two of the prompt "2",
# whose rewards are equal, rejected
SAMPLES = {"1": ["ab", "abcdef"], "2": ["cd", "abcdef"]}
REWARDS = {("1", "ab"): 1.0, ("1", "abcdef"): 0.0, ("2", "cd"): 1.0, ("2", "abcdef"): 1.0}
# Their advantages are 1 - 1/2, and (0 - 1/2) halved
RIGHT, WRONG = 0.5, -0.25


class KeepsMicroBatches(FR3ETrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_batches = []

    def compute_loss(self, model, inputs, **kwargs):
        self.micro_batches.append(inputs)
        return super().compute_loss(model, inputs, **kwargs)


class FixedSampler:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def sample(self, requests):
        texts = [SAMPLES[self.tokenizer.decode(request.prefix_ids)] for request in requests]
        return [[Sample(self.tokenizer(text)["input_ids"]) for text in of_request] for of_request in texts]


def make_trainer(num_micro_batches=1, prompts=("1", "2"), num_generations=2, reward_func=None, **settings):
    """GRPO with rejection. Without a `reward_func`, on what is written down above."""

    def reward(prompts, completions, **kwargs):
        return [REWARDS[key] for key in zip(prompts, completions, strict=True)]

    fr3e = {"num_anchors": 0, "reject_degenerate_states": True, "scale_rewards": "none", "value_prior_strength": 0.0}
    defaults = {"optim": "sgd", "learning_rate": 1.0, "negative_advantage_scale": 0.5, "max_completion_length": 8}
    rows = {"per_device_train_batch_size": len(prompts) * num_generations // num_micro_batches}
    rows |= {"num_generations": num_generations, "gradient_accumulation_steps": num_micro_batches, "max_steps": 1}
    given = {"reward_funcs": reward_func or reward, "dataset": Dataset.from_dict({"prompt": prompts})}
    trainer = factory.make_trainer(KeepsMicroBatches, **given | fr3e | defaults | rows | settings)
    if reward_func is None:
        trainer.sampler = FixedSampler(trainer.processing_class)
    return trainer


def logged_loss(trainer) -> float:
    return trainer.state.log_history[0]["loss"]


# Of the policy term, which is -A a token when the ratio is 1: over all tokens (-2 * .5 + 6 * .25) / 8, and over rows
TOKEN_MEAN_METRICS, OVER_ROWS = 0.0625, (-RIGHT - WRONG) / 2


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("dapo", [TOKEN_MEAN_METRICS, TOKEN_MEAN_METRICS]),
        ("grpo", [OVER_ROWS, OVER_ROWS]),
        # A mean over the tokens of each micro-batch: of all, or of each row, and two micro-batches have none
        ("bnpo", [TOKEN_MEAN_METRICS, OVER_ROWS]),
        ("dr_grpo", [0.5 / (2 * 8), 0.5 / (2 * 8)]),  # the sum over tokens, divided by rows * max_completion_length
        ("luspo", [0.5 / 2, 0.5 / 2]),
        ("sapo", [(-RIGHT * 2 / 1.0 - WRONG * 2 / 1.05) / 2] * 2),  # sigmoid(0) * 4 / temperature, of 1.0 and 1.05
    ],
)
def test_rejected_rows_and_micro_batches_have_no_share(loss_type, expected, num_micro_batches):
    trainer = make_trainer(loss_type=loss_type, num_micro_batches=num_micro_batches)
    trainer.train()
    sizes = sorted(int(inputs["in_loss"].sum()) for inputs in trainer.micro_batches)
    assert sizes == ([2] if num_micro_batches == 1 else [0, 0, 1, 1])
    assert logged_loss(trainer) == pytest.approx(expected[num_micro_batches > 1], abs=1e-6)


def test_rows_that_are_kept_dilute_the_loss():
    """Those of the prompt "2" have as many tokens, and no advantage."""
    trainer = make_trainer(reject_degenerate_states=False)
    trainer.train()
    assert logged_loss(trainer) == pytest.approx(TOKEN_MEAN_METRICS / 2, abs=1e-6)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_entropy_bonus_and_kl_have_the_same_shares(loss_type, num_micro_batches):
    """
    Both are TRL's: the bonus is a mean over micro-batches, and the KL term of a mean over rows is one over all rows,
    also those that are not in the loss. But bnpo's micro-batches count by their rows in the loss.
    """
    trainer = make_trainer(loss_type=loss_type, num_micro_batches=num_micro_batches, beta=0.5, entropy_coef=0.25)
    with torch.no_grad():
        trainer.ref_model.lm_head.weight.mul_(0.5)
    tokenizer, kls, entropies = trainer.processing_class, [], []
    for text in SAMPLES["1"]:
        prompt, completion = tokenizer("1")["input_ids"], tokenizer(text)["input_ids"]
        policy, reference = (
            model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1).detach()
            for model in (trainer.model, trainer.ref_model)
        )
        difference = (reference - policy).gather(1, torch.tensor(completion)[:, None])[:, 0]
        kls.append(difference.exp() - difference - 1)
        entropies.append(-(policy.exp() * policy).sum(-1))

    def mean(of_rows, over_rows):
        return (torch.stack([row.mean() for row in of_rows]) if over_rows else torch.cat(of_rows)).mean().item()

    by_row = num_micro_batches > 1  # micro-batches of one row
    over_rows = loss_type == "grpo" or (loss_type == "bnpo" and by_row)
    expected = OVER_ROWS if over_rows else TOKEN_MEAN_METRICS
    # Two of four rows are in the loss, in two of four micro-batches
    share_of_kl = 0.5 if loss_type == "grpo" else 1.0
    share_of_bonus = 0.5 if by_row and loss_type != "bnpo" else 1.0
    expected += 0.5 * share_of_kl * mean(kls, over_rows) - 0.25 * share_of_bonus * mean(entropies, by_row)
    trainer.train()
    assert logged_loss(trainer) == pytest.approx(expected, abs=1e-5)
    assert trainer.beta == 0.5 and trainer.state.log_history[0]["entropy_coef"] == 0.25


def test_bnpo_counts_micro_batches_by_their_rows():
    """sum(r * L) / sum(r), with r rows in the loss and L the mean over their tokens, also where r differs."""

    def letters(prompts, completions, **kwargs):
        return [float(prompt < "5" and text > "a") for prompt, text in zip(prompts, completions, strict=True)]

    sizes = {"prompts": list("01234567"), "num_generations": 4, "num_micro_batches": 8}
    trainer = make_trainer(**sizes, reward_func=letters, loss_type="bnpo")
    trainer.train()
    total, num_rows = 0.0, []
    for inputs in trainer.micro_batches:
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).float()
        num_rows.append(int(inputs["in_loss"].sum()))
        total -= num_rows[-1] * ((inputs["advantages"][:, None] * mask).sum() / mask.sum().clamp(min=1)).item()
    assert len(set(num_rows)) > 1
    assert logged_loss(trainer) == pytest.approx(total / sum(num_rows), abs=1e-5)


def test_a_process_whose_rows_are_rejected_has_no_share(tmp_path):
    """Micro-batches of one row are the same ones in one process and in two."""
    logs = []
    for num_processes in (1, 2):
        settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // num_processes}
        settings |= {"num_generations": 4, "num_anchors": 1, "value_prior_strength": 0, "num_rewards": 2}
        settings |= {"loss_type": "bnpo", "entropy_coef": 0.1, "optim": "sgd"}
        (main, *_) = launch(tmp_path / str(num_processes), num_processes, settings, "fake")
        logs.append([entry for entry in main["logs"] if "loss" in entry])
    for alone, together in zip(*logs, strict=True):
        assert together["fr3e/states/rejected"] == alone["fr3e/states/rejected"]
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4, abs=1e-6)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4, abs=1e-6)
    assert any(0 < entry["fr3e/states/rejected"] < 1 for entry in logs[0])


def test_micro_batches_without_a_row_in_the_loss_are_in_no_mean():
    """TRL would log an entropy of 0 for each, and its mean over micro-batches would hang on their size."""
    settings = {"num_anchors": 1, "value_prior_strength": 0.0, "beta": 0.1, "max_steps": 1, "learning_rate": 0.0}

    def means(size):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 16 // size}
        trainer = factory.train(**settings, **sizes)
        ((batch, _),) = trainer.batches
        return factory.logged(trainer, "entropy", "kl", "clip_ratio/region_mean")[0], batch["in_loss"]

    (entropy, kl, clipped), in_loss = means(16)
    (of_rows, kl_of_rows, clipped_of_rows), others = means(1)
    assert 0 < in_loss.sum() < 16 and in_loss.equal(others)
    # Rows differ a little in length, and a mean of their means is another one than that over all tokens
    assert of_rows == pytest.approx(entropy, rel=0.15) and kl_of_rows == pytest.approx(kl, abs=1e-6)
    assert clipped == clipped_of_rows == 0
