"""Tasks of the bench and their starting policies."""

import random
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from fr3e_trl.bench import policies
from fr3e_trl.bench.policies import demonstrations, starting_policy
from fr3e_trl.bench.tasks import TASKS
from fr3e_trl.bench.tasks.countdown import as_expression, operations, reachable


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def columns(examples):
    return {name: list(examples[name]) for name in examples.column_names if name != "prompt"}


def test_demonstrations_without_noise_are_right(task):
    problems = task.examples("heldout", 0, 100)
    clean = [task.demonstrate(problem, random.Random(0), is_noisy=False) for problem in problems]
    assert task.reward(clean, **columns(problems)) == [1.0] * 100
    assert task.reward([" ".join(text.split()[:-9]) for text in clean], **columns(problems)) == [0.0] * 100


def test_noise_is_as_strong_as_the_task_says(task):
    """Hard enough that there is something to learn, and easy enough that some completions are right."""
    problems, rng = task.examples("heldout", 0, 1000), random.Random(0)
    rewards = task.reward([task.demonstrate(problem, rng) for problem in problems], **columns(problems))
    assert 0.03 < sum(rewards) / 1000 < 0.5


def test_splits_are_disjoint(task):
    words = {
        split: {
            tuple(sorted(prompt.split())) for seed in (0, 1) for prompt in task.examples(split, seed, 300)["prompt"]
        }
        for split in ("policy", "train", "heldout")
    }
    assert not words["policy"] & words["train"]
    assert not words["policy"] & words["heldout"]
    assert not words["train"] & words["heldout"]


def test_examples_depend_on_the_seed_alone(task):
    assert task.examples("train", 3, 20).to_list() == task.examples("train", 3, 30).to_list()[:20]
    assert task.examples("train", 3, 20).to_list() != task.examples("train", 4, 20).to_list()


def test_every_word_is_one_token(task):
    tokenizer = task.make_tokenizer()
    for row in demonstrations(task, 50):
        for text in row.values():
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text.split())
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text.strip()
        assert len(row["completion"].split()) < task.max_completion_length  # with room for the end


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        # 7 + 3 = 10, 10 * 5 = 50 = 11 modulo 13
        ("+3 10 *5 11 = 11", 1.0),
        ("+3 10 *5 12 = 12", 0.0),
        ("+3 10 *5 12 = 11", 1.0),  # the answer counts
        ("= 11 11", 0.0),
        ("", 0.0),
    ],
)
def test_chain_reward(completion, reward):
    assert TASKS["chain"].reward([completion], answer=[11], prompt=["7 +3 *5 :"]) == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("8 + 3 = 11 ; 11 * 2 = 22", 1.0),
        ("3 + 8 = 11 ; 2 * 11 = 22", 1.0),
        ("8 * 3 = 24 ; 24 - 2 = 22", 1.0),
        ("8 + 3 = 12 ; 12 * 2 = 22", 0.0),
        ("8 + 3 = 11 ; 11 * 2 = 21", 0.0),
        ("8 + 3 = 11 ; 11 + 2 = 22", 0.0),  # that is 13
        ("8 + 3 = 11", 0.0),  # not all numbers
        ("8 + 8 = 16 ; 16 + 3 = 19 ; 19 + 3 = 22", 0.0),  # there is one 8
        ("11 * 2 = 22", 0.0),
        ("8 + 3 = 11 ; 11 * 2 = 22 ;", 0.0),
        ("8 ** 3 = 11 ; 11 * 2 = 22", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_reward(completion, reward):
    assert TASKS["countdown"].reward([completion], numbers=[[3, 8, 2]], target=[22]) == [reward]


def test_countdown_by_hand():
    assert as_expression("8 + 3 = 11 ; 11 * 2 = 22", [3, 8, 2]) == "((8 + 3) * 2)"
    assert [operation for operation, _ in operations((3, 8))] == [(8, "+", 3, 11), (8, "-", 3, 5), (8, "*", 3, 24)]
    # 2 * 3 = 6, 2 + 3 = 5 and 3 - 2 = 1, each with another 1
    assert reachable((1, 2, 3)) >= {7, 5, 6, 4, 0, 1, 2}


def test_machine_reward():
    task = TASKS["machine"]
    (problem,) = task.examples("heldout", 0, 1)
    words = task.demonstrate(problem, random.Random(0), is_noisy=False).split()
    for position, is_state in ((3, True), (5, False)):  # the state after the first step, a letter of the loop
        changed = [*words[:position], "x", *words[position + 1 :]]
        assert task.reward([" ".join(changed)], answer=[problem["answer"]]) == [float(not is_state)]


@pytest.fixture
def tiny():
    return replace(TASKS["chain"], policy_steps=2, policy_batch_size=4, hidden_size=16)


def test_policy_is_made_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = starting_policy(tiny)
    assert directory.parent == tmp_path / "cache" / "fr3e_trl" / "policies"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert tokenizer.padding_side == "left"
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id

    monkeypatch.setattr(SFTTrainer, "train", lambda self: pytest.fail("It was there already."))
    assert starting_policy(tiny) == directory
    assert starting_policy(tiny, directory) == directory


def test_policy_of_other_settings_is_another(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert starting_policy(tiny) != starting_policy(replace(tiny, policy_learning_rate=1e-4))


def test_policy_cut_short_is_not_there(tiny, tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SFTTrainer, "train", interrupted)
        starting_policy(tiny, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []
    assert starting_policy(tiny, tmp_path / "policy").exists()


def test_same_seed_same_policy(tiny, tmp_path):
    first, second = (
        (starting_policy(tiny, tmp_path / name) / "model.safetensors").read_bytes() for name in ("first", "second")
    )
    assert first == second


def test_make_policy_prints_where_it_is(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(policies.TASKS, "chain", tiny)
    policies.main(["--task", "chain", "--output_dir", str(tmp_path / "policy")])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "policy")
    with pytest.raises(ValueError, match="must be one of chain"):
        policies.main(["--task", "no_such"])
