"""Tasks of the bench and their starting policies."""

import itertools
import random
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from benchmarks.policies import demonstrations, starting_policy
from benchmarks.tasks import TASKS


# Those with tools are in test_search.py, and the tests have one of their own
@pytest.fixture(
    params=[name for name, task in TASKS.items() if not task.tools and "benchmarks" in type(task).__module__]
)
def task(request):
    return TASKS[request.param]


def columns(examples):
    return {name: list(examples[name]) for name in examples.column_names if name != "prompt"}


def test_demonstrations(task):
    """Right without noise, which leaves the task hard enough to learn something, and easy enough for some."""
    problems = task.examples("heldout", 0, 100)
    clean = [task.demonstrate(problem, random.Random(0), is_noisy=False) for problem in problems]
    assert all(task.is_right(text, problem) for text, problem in zip(clean, problems, strict=True))
    assert task.reward([" ".join(text.split()[:-9]) for text in clean], **columns(problems)) == [0.0] * 100
    if task.name != "graded":
        assert task.reward(clean, **columns(problems)) == [1.0] * 100
    problems, rng = task.examples("heldout", 0, 1000), random.Random(0)
    rewards = task.reward([task.demonstrate(problem, rng) for problem in problems], **columns(problems))
    low, high = {"hard": (0.005, 0.03), "lengths": (0.4, 0.6)}.get(task.name, (0.03, 0.5))
    assert low < sum(rewards) / 1000 < high


def test_splits_are_disjoint_and_every_word_is_one_token(task):
    words = [
        {tuple(sorted(prompt.split())) for seed in (0, 1) for prompt in task.examples(split, seed, 300)["prompt"]}
        for split in ("policy", "train", "heldout")
    ]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(words, 2))
    tokenizer = task.make_tokenizer()
    for row in demonstrations(task, 50):
        for text in row.values():
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text.split()) and tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text.strip()
        assert len(row["completion"].split()) < task.max_completion_length  # with room for the end


def test_tasks_are_those_of_the_kept_runs(monkeypatch):
    """Problems, demonstrations and what makes the policy, in short. A change makes other runs than are kept."""
    names = """
        chain-048640f3e9ae countdown-29136527c917 countdown_taught-76eb533458cd machine-c6403bb6b69b hard-d54c4b6f71a4
        distractors-edb422f6346b graded-67bd09887db3 search-a9ce197ebd60 lengths-3bf0453a863f
    """
    monkeypatch.setattr("benchmarks.policies.made_once", lambda directory, *_: directory)  # where it would be made
    for name in names.split():
        assert starting_policy(TASKS[name.partition("-")[0]]).name == name


# Of each task an answer, and completions with their rewards
REWARDS = {
    "chain": (
        {"answer": 11, "prompt": "7 +3 *5 :"},  # 7 + 3 = 10, 10 * 5 = 50 = 11 modulo 13
        [
            ("+3 10 *5 11 = 11", 1.0),
            ("+3 10 *5 12 = 12", 0.0),
            ("= 11 11", 0.0),
            ("", 0.0),
            ("+3 10 *5 12 = 11", 1.0),  # the answer counts
        ],
    ),
    "countdown": (
        {"numbers": [3, 8, 2], "target": 22},
        [
            *(
                (right, 1.0)
                for right in ("8 + 3 = 11 ; 11 * 2 = 22", "3 + 8 = 11 ; 2 * 11 = 22", "8 * 3 = 24 ; 24 - 2 = 22")
            ),
            ("8 + 3 = 12 ; 12 * 2 = 22", 0.0),
            ("8 + 3 = 11 ; 11 * 2 = 21", 0.0),
            ("8 + 3 = 11 ; 11 + 2 = 22", 0.0),  # that is 13
            ("8 + 3 = 11", 0.0),  # not all numbers
            ("8 + 8 = 16 ; 16 + 3 = 19 ; 19 + 3 = 22", 0.0),  # there is one 8
            ("11 * 2 = 22", 0.0),
            ("", 0.0),
            ("8 + 3 = 11 ; 11 * 2 = 22 ;", 0.0),
            ("8 ** 3 = 11 ; 11 * 2 = 22", 0.0),
        ],
    ),
    "distractors": (
        {"answer": "4 7"},
        [
            ("s1 0 a 4 now well b a s2 4 b 7 well well a b", 1.0),
            ("s1 0 a 4 well now b a s2 4 b 7 now well a b", 1.0),
            ("s1 0 a 4 now well b a s2 4 b 8 well well a b", 0.0),
            ("s1 0 a 4 now well b a s2 4 b well 7 well a b", 0.0),
        ],
    ),
    "graded": (
        {"answer": "4 7 6 1"},
        [
            ("s1 0 a 4 s2 4 b 7 s3 7 c 6 s4 6 d 1 keep", 0.8),
            ("s1 0 a 4 s2 4 b 7 s3 7 c 6 s4 6 d 5 keep", 0.8 * 3 / 4),
            ("s1 0 a 4 s2 4 b 8 s3 8 c 6 s4 6 d 1 keep", 0.8 / 4),  # what is right again does not count
            ("s1 0 a 4 s2 4 b 7 keep", 0.8 * 2 / 4),
            ("s1 0 a 5 s2 5 b 7 s3 7 c 6 s4 6 d 1 keep", 0.0),
            ("s1 0 a 4 s2 4 b 7 s3 7 c 6 s4 6 d 1", 0.0),  # neither
            ("", 0.0),
        ],
    ),
}
SMALL = {**TASKS, "graded": replace(TASKS["graded"], num_steps=4, num_careful=0)}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards(name):
    columns, completions = REWARDS[name]
    for completion, reward in completions:
        (given,) = SMALL[name].reward([completion], **{column: [value] for column, value in columns.items()})
        assert given == pytest.approx(reward), completion


@pytest.mark.parametrize("name", ["machine", "hard"])
def test_machine_reward(name):
    task = TASKS[name]
    (problem,) = task.examples("heldout", 0, 1)
    words = task.demonstrate(problem, random.Random(0), is_noisy=False).split()
    for position, is_state in ((3, True), (5, False)):  # the state after the first step, a letter of the loop
        changed = [*words[:position], "x", *words[position + 1 :]]
        assert task.reward([" ".join(changed)], answer=[problem["answer"]]) == [float(not is_state)]


def test_graded_bets_are_fair():
    """The coin is the completion's: it falls the same way again, and half of the time for other letters."""
    loops = itertools.product("abcdefghijkl", repeat=3)
    bets = [f"s1 0 a 4 {' '.join(loop)} s2 4 b 7 s3 7 c 6 s4 6 d 9 bet" for loop in loops]
    rewards, again = (SMALL["graded"].reward(bets, answer=["4 7 6 1"] * len(bets)) for _ in range(2))
    assert rewards == again
    assert SMALL["graded"].reward([bets[0].replace("9 bet", "2 keep")], answer=["4 7 6 2"]) == [0.6]  # an even state
    assert set(rewards) == {0.5 * 3 / 4, 3 / 4}  # the last state is wrong
    assert sum(rewards) / len(rewards) == pytest.approx(0.75 * 3 / 4, abs=0.018)  # 4 standard errors


def test_policy_is_made_once(tmp_path, monkeypatch):
    tiny = replace(TASKS["chain"], policy_steps=2, policy_batch_size=4, hidden_size=16)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SFTTrainer, "train", interrupted)
        starting_policy(tiny, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = starting_policy(tiny)
    assert directory.parent == tmp_path / "cache" / "fr3e_trl" / "policies"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert tokenizer.padding_side == "left"
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    monkeypatch.setattr(SFTTrainer, "train", lambda self: pytest.fail("It was there already."))
    assert starting_policy(tiny) == starting_policy(tiny, directory) == directory
