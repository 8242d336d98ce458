"""Tasks of the bench and their starting policies."""

import itertools
import random
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from benchmarks import make_policy
from benchmarks.policies import demonstrations, starting_policy
from benchmarks.tasks import TASKS
from benchmarks.tasks.countdown import as_expression, operations, reachable
from benchmarks.tasks.distractors import FILLERS
from benchmarks.tasks.machine import TABLE


# Those with tools are in test_search.py, and the tests have one of their own
@pytest.fixture(
    params=[name for name, task in TASKS.items() if not task.tools and "benchmarks" in type(task).__module__]
)
def task(request):
    return TASKS[request.param]


def columns(examples):
    return {name: list(examples[name]) for name in examples.column_names if name != "prompt"}


def test_demonstrations_without_noise_are_right(task):
    problems = task.examples("heldout", 0, 100)
    clean = [task.demonstrate(problem, random.Random(0), is_noisy=False) for problem in problems]
    assert all(task.is_right(text, problem) for text, problem in zip(clean, problems, strict=True))
    assert task.reward([" ".join(text.split()[:-9]) for text in clean], **columns(problems)) == [0.0] * 100
    if task.name != "graded":
        assert task.reward(clean, **columns(problems)) == [1.0] * 100


def test_noise_is_as_strong_as_the_task_says(task):
    """Hard enough that there is something to learn, and easy enough that some completions are right."""
    problems, rng = task.examples("heldout", 0, 1000), random.Random(0)
    rewards = task.reward([task.demonstrate(problem, rng) for problem in problems], **columns(problems))
    low, high = {"hard": (0.005, 0.03), "lengths": (0.4, 0.6)}.get(task.name, (0.03, 0.5))
    assert low < sum(rewards) / 1000 < high


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


@pytest.mark.parametrize("name", ["machine", "hard"])
def test_machine_reward(name):
    task = TASKS[name]
    (problem,) = task.examples("heldout", 0, 1)
    words = task.demonstrate(problem, random.Random(0), is_noisy=False).split()
    for position, is_state in ((3, True), (5, False)):  # the state after the first step, a letter of the loop
        changed = [*words[:position], "x", *words[position + 1 :]]
        assert task.reward([" ".join(changed)], answer=[problem["answer"]]) == [float(not is_state)]


def test_hard_machine_is_the_machine_with_a_shorter_loop():
    """From state 12, the loop i g j: each step reads a letter, and the loop goes on behind it."""
    task = TASKS["hard"]
    text = task.demonstrate({"prompt": "s0 : : 12 i g j"}, random.Random(0), is_noisy=False)
    first, second = f"s1 12 i {TABLE[12, 'i']} g j i", f"s2 {TABLE[12, 'i']} g {TABLE[TABLE[12, 'i'], 'g']} j i g"
    assert text.startswith(f"{first} {second} s3 ")
    assert len(text.split()) == 16 * 7


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("s1 0 a 4 now well b a s2 4 b 7 well well a b", 1.0),
        ("s1 0 a 4 well now b a s2 4 b 7 now well a b", 1.0),
        ("s1 0 a 4 now well b a s2 4 b 8 well well a b", 0.0),
        ("s1 0 a 4 now well b a s2 4 b well 7 well a b", 0.0),
    ],
)
def test_distractors_reward(completion, reward):
    assert TASKS["distractors"].reward([completion], answer=["4 7"]) == [reward]


def test_distractors_are_a_machine_with_two_words_after_each_state():
    task, rng = TASKS["distractors"], random.Random(0)
    machine = replace(TASKS["machine"], num_steps=10, loop_length=3)
    fillers = []
    for problem in task.examples("heldout", 0, 200):
        words = task.demonstrate(problem, rng, is_noisy=False).split()
        steps = [words[i : i + 9] for i in range(0, 90, 9)]
        assert [word for step in steps for word in (*step[:4], *step[6:])] == machine.demonstrate(
            problem, random.Random(0), is_noisy=False
        ).split()
        fillers += [word for step in steps for word in step[4:6]]
    assert set(fillers) == set(FILLERS)
    assert fillers.count("well") / 4000 == pytest.approx(0.5, abs=0.032)  # 4 standard errors


@pytest.mark.parametrize(
    ("completion", "last", "reward"),
    [
        ("s1 0 a 4 s2 4 b 7 s3 7 c 6 s4 6 d 1 keep", "1", 0.8),
        ("s1 0 a 4 s2 4 b 7 s3 7 c 6 s4 6 d 2 keep", "2", 0.6),
        ("s1 0 a 4 s2 4 b 7 s3 7 c 6 s4 6 d 5 keep", "1", 0.8 * 3 / 4),
        ("s1 0 a 4 s2 4 b 8 s3 8 c 6 s4 6 d 1 keep", "1", 0.8 / 4),  # what is right again does not count
        ("s1 0 a 4 s2 4 b 7 keep", "1", 0.8 * 2 / 4),
        ("s1 0 a 5 s2 5 b 7 s3 7 c 6 s4 6 d 1 keep", "1", 0.0),
        ("s1 0 a 4 s2 4 b 7 s3 7 c 6 s4 6 d 1", "1", 0.0),  # neither
        ("", "1", 0.0),
    ],
)
def test_graded_reward(completion, last, reward):
    task = replace(TASKS["graded"], num_steps=4, num_careful=0)
    assert task.reward([completion], answer=[f"4 7 6 {last}"]) == [pytest.approx(reward)]


def test_graded_reward_begins_behind_the_careful_steps():
    """Three states are right: one of the last two, or, where one step was careful, two of three."""
    completion = "s1 0 a 4 s2 4 b 7 s3 7 c 6 s4 6 d 5 keep"
    for num_careful, share in ((3, 0), (2, 1 / 2), (1, 2 / 3)):
        task = replace(TASKS["graded"], num_steps=4, num_careful=num_careful)
        assert task.reward([completion], answer=["4 7 6 1"]) == [pytest.approx(0.8 * share)]


def test_graded_bets_are_fair():
    """The coin is the completion's: it falls the same way again, and half of the time for other letters."""
    task = replace(TASKS["graded"], num_steps=4, num_careful=0)
    loops = itertools.product("abcdefghijkl", repeat=3)
    bets = [f"s1 0 a 4 {' '.join(loop)} s2 4 b 7 s3 7 c 6 s4 6 d 9 bet" for loop in loops]
    rewards = task.reward(bets, answer=["4 7 6 1"] * len(bets))
    assert rewards == task.reward(bets, answer=["4 7 6 1"] * len(bets))
    assert set(rewards) == {0.5 * 3 / 4, 3 / 4}  # the last state is wrong
    assert sum(rewards) / len(rewards) == pytest.approx(0.75 * 3 / 4, abs=0.018)  # 4 standard errors


def test_graded_choice_is_best_without_noise():
    """It earns (.8 + .75) / 2, where as many end in odd states as in even, and either choice everywhere .7 or .75."""
    task = TASKS["graded"]
    problems = task.examples("heldout", 0, 1000)
    clean = [task.demonstrate(problem, random.Random(0), is_noisy=False) for problem in problems]
    for text, problem in zip(clean, problems, strict=True):
        assert text.split()[-1] == ("keep" if int(problem["answer"].split()[-1]) % 2 else "bet")
    assert sum(task.reward(clean, **columns(problems))) / 1000 == pytest.approx(0.775, abs=0.02)


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
    monkeypatch.setitem(TASKS, "chain", tiny)
    make_policy.main(["--task", "chain", "--output_dir", str(tmp_path / "policy")])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "policy")
    with pytest.raises(ValueError, match="must be one of chain"):
        make_policy.main(["--task", "no_such"])
