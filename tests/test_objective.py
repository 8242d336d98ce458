"""What is optimised: with the defaults, the mean reward."""

import random

import torch
from datasets import Dataset
from factory import train
from models import make_model, make_tokenizer

from fr3e_trl import FR3ETrainer


def probability_of_the_better_arm(**settings) -> float:
    """On a bandit whose arm is the parity of the first token: an even one is worth .6, an odd one a coin of 1 or 0."""
    coin = random.Random(0)

    def reward(completion_ids, **kwargs):
        return [0.6 if ids[0] % 2 == 0 else float(coin.random() < 0.5) for ids in completion_ids]

    model = make_model()
    model.lm_head.weight.data.div_(20)  # as likely, nearly
    sizes = {"per_device_train_batch_size": 512, "max_completion_length": 2, "max_steps": 40}
    rates = {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    prompts = Dataset.from_dict({"prompt": ["1+1="] * 64})
    parts = {"model": model, "reward_funcs": reward, "dataset": prompts}
    train(FR3ETrainer, **parts, **sizes, **rates, **settings)
    trained = make_model()  # without the head that TRL puts in
    trained.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = trained(**make_tokenizer()("1+1=", return_tensors="pt", return_token_type_ids=False)).logits[0, -1]
    return logits.softmax(-1)[::2].sum().item()


def test_the_better_arm_wins_unless_negatives_are_halved():
    """
    By hand, at even odds and with a baseline of .55: the sure arm has an advantage of +.05, the coin one of +.45 or
    -.55, in the mean -.05. With the negative one halved it is +.0875, more than the sure arm's.
    """
    assert probability_of_the_better_arm() > 0.95
    assert probability_of_the_better_arm(negative_advantage_scale=0.5, credit="rollout") < 0.25
