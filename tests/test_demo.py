"""The demo, its policy, and the script that made it."""

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
POLICY = EXAMPLES / "demo_policy"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_demo_trains_shows_a_tree_and_leaves_a_checkpoint(tmp_path):
    output = run("demo.py", "--max_steps=2", "--num_heldout=20", "--seed=3", f"--output_dir={tmp_path}")
    for when in ("before", "after"):
        assert re.search(rf"accuracy {when} training: [\d.]+% ± [\d.]+% sampled .* greedy \(20 problems\)", output)
    assert "Seed: 3" in output
    assert re.search(r"S1  before token \d+ of \d+: H = \d", output) and "TRAJECTORY" in output
    assert str(tmp_path) in output
    card = (tmp_path / "README.md").read_text()
    assert "First Return, Entropy-Eliciting Explore" in card and "None" not in card.split("## Training procedure")[0]
    assert re.search(r"accuracy after training: .*", output)[0] in card
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (POLICY, tmp_path))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == AutoTokenizer.from_pretrained(POLICY).get_vocab()


def test_a_policy_can_be_made_anew(tmp_path):
    run("make_demo_policy.py", "--max_steps=2", f"--output_dir={tmp_path}")
    made, shipped = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path, POLICY))
    assert {name: p.shape for name, p in made.items()} == {name: p.shape for name, p in shipped.items()}
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == AutoTokenizer.from_pretrained(POLICY).get_vocab()


def test_no_problem_is_in_two_splits_and_only_entirely_right_answers_are_rewarded(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo
    from make_demo_policy import SPLITS, problems

    questions = [problem["question"] for split in SPLITS for problem in islice(problems(split, seed=0), 300)]
    assert len(set(questions)) == len(questions) == 900
    completions = ["\n1 + 11 = 12\n<answer>12</answer>", "<answer>112</answer>", "<answer>-12</answer>", "12", ""]
    assert demo.is_right(completions, ["12"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]
