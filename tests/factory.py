"""The tiny trainers of the tests: they train on the CPU in seconds, from the models of `models.py`."""

import inspect
import math

import torch
from models import CPU, make_dataset, make_model, make_tokenizer, model_on_disk
from recorder import Recorder
from tool_policy import look, make_tool_dataset, make_tool_policy, make_tool_tokenizer, right
from transformers import set_seed
from trl import GRPOConfig

from fr3e_trl import FR3EConfig, FR3ETrainer

DEFAULTS = {"output_dir": "output", "num_generations": 8, "per_device_train_batch_size": 16}
DEFAULTS |= {"max_completion_length": 12, "max_steps": 2, "learning_rate": 1e-3}
CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "block_size": 16, "max_batch_tokens": 128},
    "bf16": True,  # the engine's attention takes no float32
}
NOT_SETTINGS = set(inspect.signature(FR3ETrainer).parameters)


def digits(completions, **kwargs):
    """Right if more than a quarter of the characters are digits: some are, some are not."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(char.isdigit() for char in text) > len(text) / 4) for text in texts]


def letters(completions, **kwargs):
    """A reward that hardly any two completions share, so that no state is degenerate."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(math.sin(i * ord(char)) for i, char in enumerate(text, 1)) for text in texts]


def graded(completions, **kwargs):
    """0 to 4, and None for a completion in seven."""
    sums = [sum(map(ord, text)) for text in completions]
    return [None if total % 7 == 0 else float(total % 5) for total in sums]


def make_trainer(
    cls=Recorder, *, config=None, model=None, reward_funcs=digits, dataset=None, tokenizer=None, **settings
):
    """
    A trainer of the class `cls` that has not trained yet.

    Settings that its constructor knows, such as `peft_config`, go there. Others replace `DEFAULTS` in a configuration,
    which is a `GRPOConfig` if `cls` is no `FR3ETrainer`. With `beta`, the model is on disk, where TRL looks for it.
    """
    arguments = {name: settings.pop(name) for name in NOT_SETTINGS & settings.keys()}
    if config is None:
        config = FR3EConfig if issubclass(cls, FR3ETrainer) else GRPOConfig
    if model is None:
        model = model_on_disk() if settings.get("beta") else make_model()
    args = config(**CPU | DEFAULTS | settings)
    dataset = make_dataset() if dataset is None else dataset
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    return cls(model, reward_funcs, args, train_dataset=dataset, processing_class=tokenizer, **arguments)


def make_tool_trainer(cls=Recorder, **settings):
    """A tiny trainer of the policy that calls `look`, which it is given unless it has environments."""
    defaults = {"reward_funcs": right, "dataset": make_tool_dataset(), "per_device_train_batch_size": 32}
    if "environment_factory" not in settings:
        defaults["tools"] = [look]
    policy = {"model": make_tool_policy(), "tokenizer": make_tool_tokenizer()}
    return make_trainer(cls, **defaults | {"max_completion_length": 24} | policy | settings)


def train(*args, make=make_trainer, resume=None, **settings):
    """A tiny trainer that has trained, from the same seed each time, or gone on from a checkpoint."""
    trainer = make(*args, **settings)
    set_seed(100 if resume else 1)  # a checkpoint has the state of its own generators
    trainer.train(resume)
    return trainer


def steps_of(trainer) -> list[dict]:
    """What each step logged."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def logged(trainer, *names: str) -> list[tuple]:
    """What each step logged under `names`."""
    return [tuple(entry[name] for name in names) for entry in steps_of(trainer)]


def assert_same_run(mine, theirs):
    """What two trainers logged is the same, but for times, and so are their weights."""
    for entry, expected in zip(mine.state.log_history, theirs.state.log_history, strict=True):
        assert entry.keys() == expected.keys()
        for name in entry.keys() - {"step_time", "train_runtime", "eval_runtime", "train_loss"}:
            assert name.endswith("per_second") or entry[name] == expected[name], (name, entry["step"])
    assert weights(mine).equal(weights(theirs))


def weights(trainer) -> torch.Tensor:
    """All weights of the model, one after the other."""
    return torch.cat([p.detach().float().flatten() for p in trainer.model.parameters()])
