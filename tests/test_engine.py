"""`fr3e cost engine`: the model of an engine, by hand, and what it says."""

import random
import re
import statistics

import pytest

from fr3e_trl.bench.cost.engine_model import WAYS, Engine, Lengths, draw_prompt, seconds_of
from fr3e_trl.commands import cli

pytestmark = pytest.mark.fast


def make_engine(max_running=4):
    return Engine(max_running, step_seconds=1.0, sequence_seconds=0.5)


def test_sequences_wait_for_a_place():
    engine = make_engine(max_running=2)
    for length in (3, 1, 2):
        engine.add(length)
    engine.run()
    # A step of 3 and 1; then the third one comes in: two steps. All with two running, which take 1 + 2 * .5
    assert (engine.seconds, engine.num_tokens) == (3 * 2.0, 6)


def test_a_sequence_that_grows_has_others_added():
    engine = make_engine()
    engine.add(4, {2: lambda: engine.add(3)})
    engine.run()
    # Two steps alone, two with the other, and its last alone
    assert (engine.seconds, engine.num_tokens) == (2 * 1.5 + 2 * 2.0 + 1.5, 7)


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        ("GRPO", 4 * 2.0 + 1.5),  # rows of 4 and 5
        ("two rounds", 4 * 1.5 + 3 * 1.5),
        ("by prompt", 4 * 1.5 + 3 * 1.5),
        ("by rule", 2 * 1.5 + 2 * 2.0 + 1.5),
        ("mixed", 3 * 2.0 + 1.5),
    ],
)
def test_ways_by_hand(way, seconds):
    """A base trajectory of 4 tokens, and a branch of 3 that leaves it after 2."""
    assert seconds_of(way, [[(4, [(2, 3)])]], [4, 5], make_engine).seconds == seconds


def test_a_prompt_does_not_wait_for_others():
    prompts = [[(2, [(1, 4)])], [(6, [])]]
    # Both for two steps, then the branch and the longer one for four
    assert seconds_of("by prompt", prompts, [], make_engine).seconds == 2 * 2.0 + 4 * 2.0
    assert seconds_of("two rounds", prompts, [], make_engine).seconds == 2 * 2.0 + 4 * 1.5 + 4 * 1.5


def test_lengths_are_lognormal():
    lengths = Lengths(mean=1000, spread=0.5, longest=100_000, rng=random.Random(0))
    drawn = [lengths.draw() for _ in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(1000, rel=0.02)
    # Those that are known to be longer than 1500 are what is left of all
    longer = [length for length in drawn if length > 1500]
    known = [lengths.draw(1500) for _ in range(5_000)]
    assert min(known) > 1500 and statistics.mean(known) == pytest.approx(statistics.mean(longer), rel=0.02)


@pytest.mark.parametrize("gap", [None, 30])
def test_a_prompt_has_its_branches(gap):
    rng = random.Random(0)
    lengths = Lengths(mean=100, spread=0.8, longest=300, rng=rng)
    for _ in range(200):
        bases = draw_prompt(lengths, 2, 5, gap)
        assert [len(branches) for _, branches in bases] == [3, 2]
        for length, branches in bases:
            for position, remaining in branches:
                assert 0 <= position <= length and remaining >= 1
                assert position == length or position + remaining <= 301


def test_command(capsys, tmp_path):
    sizes = ["--mean_length=100", "--longest=400", "--max_running=32", "--num_steps=2"]
    cli.main(["cost", "engine", *sizes, "--output", str(tmp_path / "engine.png")])
    output = capsys.readouterr().out
    ratios = {}
    for way in WAYS:
        (row,) = [line for line in output.splitlines() if re.match(rf"│ {way} +│", line)]
        ratios[way] = [float(cell) for cell in row.strip("│").split("│")[1:]]
    assert set(ratios["GRPO"]) == {1.0}
    # Where all rows run at once, a second round is what a step waits for
    assert ratios["two rounds"][3] > ratios["by prompt"][3] > ratios["by rule"][3]
    assert (tmp_path / "engine.png").stat().st_size > 10_000
