"""A tree of rollouts as text."""

import math

import pytest
from models import make_tokenizer

from fr3e_trl.method.tree import Rollout, Score, Tree, as_ids
from fr3e_trl.tree_log.display import WIDTH, _shorten, render_tree

pytestmark = pytest.mark.fast

TOKENIZER = make_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def rollout(text: str, reward: float) -> Rollout:
    return Rollout(ids(text), score=Score([reward], reward))


def make_tree(right: float = 1.0, wrong: float = 0.0) -> Tree:
    """`1+2+3=`, two base trajectories and three anchors: two on the first, the better one, and one on the second."""
    tree = Tree(ids("1+2+3="), budget=20)
    tree.bases = [rollout("3+3=\n6<eos>", right), rollout("1+5=\n7<eos>", wrong)]
    tree.branch(0, {2: 2 / 8, 5: 5 / 8})
    tree.branch(1, {4: 4 / 8})
    root, first, second, other = tree.states
    root.rollouts, root.value = list(tree.bases), (right + wrong) / 2
    first.rollouts, first.value = [rollout("4=\n7<eos>", wrong), rollout("3=\n6<eos>", right)], (right + wrong) / 2
    second.rollouts, second.value = [rollout("6<eos>", right), rollout("6<eos>", right)], right
    other.rollouts, other.value = [rollout("\n9<eos>", wrong), rollout("\n8<eos>", wrong)], wrong
    second.modulation, other.modulation = math.exp(-0.5), math.exp(0.5)
    second.rejected = other.rejected = True
    return tree


TEXT = """\
PROMPT
  1+2+3=

S0  the prompt: V = 0.50
    ✓ 3+3=↵6<eos>  (trajectory 1)
    ✗ 1+5=↵7<eos>  (trajectory 2)

TRAJECTORY 1 ✓  explored: rollouts branch before the tokens in ⟦ ⟧
  3+⟦S1: 3⟧=↵⟦S2: 6⟧<eos>

S1  before token 3 of 7: H = 0.25 nats, V = 0.50 (S0: 0.50)
    ✗ 4=↵7<eos>
    ✓ 3=↵6<eos>

S2  before token 6 of 7: H = 0.62 nats, V = 1.00 (S1: 0.50), α = 0.61, rejected
    ✓ 6<eos>
    ✓ 6<eos>

TRAJECTORY 2 ✗  explored: rollouts branch before the tokens in ⟦ ⟧
  1+5=⟦S3: ↵⟧7<eos>

S3  before token 5 of 7: H = 0.50 nats, V = 0.00 (S0: 0.50), α = 1.65, rejected
    ✗ ↵9<eos>
    ✗ ↵8<eos>"""


def test_everything_is_told_in_the_order_of_the_chains():
    assert render_tree(make_tree(), TOKENIZER).split("\n\nS0 is")[0] == TEXT
    # A terminal obeys no completion
    assert _shorten("\x1b[2J\r\t1\n2\x7f\x9b\u202e\u2069", WIDTH) == "␛[2J␍␉1↵2␡���"


def test_branches_that_differ():
    tree = make_tree()
    del tree.states[2:]
    tree.bases[0].credit = [(2, 2.0, 0.5), (5, 1.0, 0.125)]
    (first,) = tree.states[1].rollouts = tree.states[1].rollouts[:1]
    first.differs = True
    text = render_tree(tree, TOKENIZER)
    assert "  advantages: +0.50 before S1, +0.12 to the end" in text
    assert "S1  before token 3 of 7: H = 0.25 nats\n    ✗ 4=↵7<eos>\n" in text
    assert "    ✓ 3+3=↵6<eos>  (trajectory 1)\n    ✗ 1+5=↵7<eos>" in text
    first.differs = False
    assert "    ✗ 4=↵7<eos>  (same token)" in render_tree(tree, TOKENIZER)
    del tree.states[1:]  # without exploration there is the prompt alone
    text = render_tree(tree, TOKENIZER)
    assert "S1" not in text and "TRAJECTORY" not in text
    assert "    ✓ 3+3=↵6<eos>\n    ✗ 1+5=↵7<eos>" in text


def test_rewards_other_than_right_and_wrong_are_numbers_and_unscorable_ones_question_marks():
    tree = make_tree(right=1.25, wrong=-0.5)
    tree.states[2].rollouts[0] = rollout("6<eos>", math.nan)
    text = render_tree(tree, TOKENIZER)
    assert "✓" not in text and "✗" not in text
    assert "    1.25 3+3=↵6<eos>" in text and "    -0.5 4=↵7<eos>" in text and "    ? 6<eos>" in text


@pytest.mark.parametrize("length", [200, 5000])
def test_long_texts_are_shortened_to_their_ends(length):
    tree = make_tree()
    tree.prompt_ids = as_ids(ids("what is " + "1+" * length + "2="))
    tree.states[0].rollouts[0] = tree.bases[0] = rollout("3+3=\n6" + "5" * length + ".", 1.0)
    tree.states[1].rollouts[0] = rollout("4=" + "7" * length + "-8", 0.0)
    text = render_tree(tree, TOKENIZER)
    assert max(map(len, text.splitlines())) <= WIDTH and len(text) < 4000
    assert all(part in text for part in ("    ✗ 4=777", "777-8\n", "what is 1+1", "1+2="))
