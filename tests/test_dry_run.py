"""What `fr3e train --dry_run` tells, against formulas by hand and what training does and takes."""

import pytest
from datasets import Dataset
from models import CPU, make_model, make_tokenizer

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands import cli
from fr3e_trl.commands.dry_run import most_tokens, num_steps, settings, sizes


def reward(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


def args_of(tmp_path, **overrides):
    defaults = {"num_generations": 8, "per_device_train_batch_size": 8, "max_completion_length": 8}
    return FR3EConfig(tmp_path, **CPU | defaults | overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_train_epochs": 2},
        {"num_train_epochs": 1.5, "gradient_accumulation_steps": 3, "steps_per_generation": 2, "num_iterations": 2},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 1},
    ],
)
def test_steps_are_those_of_training(overrides, tmp_path):
    dataset = Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(7)]})
    args = args_of(tmp_path, value_tracker=True, **overrides)
    expected = num_steps(args, len(dataset))
    trainer = FR3ETrainer(make_model(), reward, args, dataset, processing_class=make_tokenizer())
    trainer.train()
    assert trainer.state.global_step == expected
    told = dict(sizes(args, len(dataset)))
    assert told["optimizer updates in all"] == str(expected)
    assert told["base trajectories per prompt"] == str(len(trainer.trees[0].bases))
    assert told["generation batch"] == f"{8 * len(trainer.trees)} completions of {len(trainer.trees)} prompts"


def test_tokens_and_steps_by_hand(tmp_path):
    # 4 prompts of 8 rows of 8 tokens
    four = {"gradient_accumulation_steps": 4, "value_tracker": True}
    assert most_tokens(args_of(tmp_path, **four)) == 4 * 8 * 8
    assert most_tokens(args_of(tmp_path, num_anchors=0, gradient_accumulation_steps=4)) == 4 * 8 * 8
    # 4 base trajectories that are not reused beside 8 rows
    assert most_tokens(args_of(tmp_path, reuse_base=False, num_anchors=1, **four)) == 4 * (4 + 8) * 8
    assert most_tokens(args_of(tmp_path, max_refills=2, **four)) == 3 * 4 * 8 * 8
    # As transformers takes 0. Below it, epochs count
    assert [num_steps(args_of(tmp_path, max_steps=most), 7) for most in (0, -1)] == [0, 21]


def test_dry_run_needs_no_weights(tmp_path, capsys):
    make_model().config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    Dataset.from_dict({"prompt": ["12", "1234"] * 8, "solution": ["1"] * 16}).to_json(tmp_path / "data.jsonl")
    given = {"model_name_or_path": tmp_path, "dataset_name": tmp_path / "data.jsonl", "output_dir": tmp_path / "out"}
    given |= {"gradient_accumulation_steps": 2, "bf16": False, "use_cpu": True}
    cli.main(["train", "--dry_run", *(f"--{name}={value}" for name, value in given.items())])
    printed = " ".join(capsys.readouterr().out.split())
    rows = ["num_anchors 6", "completions per step 16 per device, 16 in all", "prompts per step 2"]
    for row in (*rows, "optimizer updates in all 24", "examples 16, used for 3 epochs"):
        assert row in printed, row
    assert not (tmp_path / "out").exists()
    told = dict(settings(args_of(tmp_path, learning_rate=2e-6)))
    assert told["learning_rate"] == "2e-06" and told["num_anchors"] == "6"
    assert "beta" not in told and "bf16" not in told
