"""`fr3e gradient-check`: its numbers by hand, and its gradients against the exact one."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from models import model_on_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from fr3e_trl.bench import gradient_check
from fr3e_trl.bench.gradient_check import ArmResult, Reference, find_reference, measure_arm, summarize
from fr3e_trl.bench.gradients import (
    batch_gradients,
    cosine,
    flat_gradient,
    progress,
    progress_error,
    reference_quality,
)
from fr3e_trl.bench.tasks import TASKS

BASE = {"scale_rewards": "none", "loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0}
GRPO = BASE | {"trainer": "grpo", "num_generations": 8}
FR3E = BASE | {"trainer": "fr3e", "num_generations": 4, "num_anchors": 1}


@dataclass(frozen=True)
class OneLetter:
    """A completion is one token, and right if it is a letter: so the true gradient can be had. It has eight prompts."""

    name: str = "one_letter"
    max_completion_length: int = 1
    tools = ()
    max_tool_calling_iterations = None

    def examples(self, split, seed, size):
        return Dataset.from_list([{"prompt": f"{i % 8}="} for i in range(size)])

    def reward(self, completions, **columns):
        return [float(completion.isalpha()) for completion in completions]


@dataclass(frozen=True)
class Letters(OneLetter):
    """The same with completions that are long enough to branch, and a reward for each letter."""

    name: str = "letters"
    max_completion_length: int = 8

    def reward(self, completions, **columns):
        return [sum(map(str.isalpha, completion)) / 8 for completion in completions]


@pytest.fixture(autouse=True)
def small_reference(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(gradient_check.REFERENCE, "num_prompts", 64)


@pytest.fixture
def policy(tmp_path):
    return Path(model_on_disk())


def exact_gradient(policy):
    """Of the mean probability of a letter as the next token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    letters = [token_id for token, token_id in tokenizer.get_vocab().items() if len(token) == 1 and token.isalpha()]
    inputs = tokenizer(list(OneLetter().examples("train", 0, 8)["prompt"]), return_tensors="pt")
    loss = -model(**inputs).logits[:, -1].softmax(-1)[:, letters].sum(1).mean()
    loss.backward()
    return flat_gradient(model)


def test_cosine_by_hand():
    # 3 * 4 + 4 * 3 = 24, of 5 * 5
    assert cosine(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])) == pytest.approx(24 / 25)
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([-2.0, 0.0])) == pytest.approx(-1)
    assert cosine(torch.zeros(2), torch.tensor([4.0, 3.0])) == 0


def test_progress_by_hand():
    assert progress(0.6) == pytest.approx(0.36 / 0.64)
    # 2 * 0.6 / 0.64² * 0.01
    assert progress_error(0.6, 0.01) == pytest.approx(0.029296875)
    step = 1e-6
    assert progress_error(0.6, 1.0) == pytest.approx((progress(0.6 + step) - progress(0.6)) / step, rel=1e-4)


def test_reference_quality_is_what_halves_and_noise_make_it():
    """Signal of norm 1, and noise of squared norm 0.25 in either half: halves agree to 1 / 1.25 = 0.8."""
    generator = torch.Generator().manual_seed(0)
    signal, *noise = torch.randn(3, 1_000_000, generator=generator)
    halves = [signal + 0.5 * part for part in noise]
    assert cosine(*halves) == pytest.approx(0.8, abs=0.003)
    assert cosine(halves[0] + halves[1], signal) == pytest.approx(reference_quality(0.8), abs=0.003)
    assert reference_quality(0.98) == pytest.approx(math.sqrt(1.96 / 1.98))
    assert reference_quality(-0.1) == 0


def test_summary_by_hand():
    """
    Cosines .5 and .7: mean .6, standard deviation .1414, standard error .1. A batch had half the tokens.

    Minus .1 and .5: differences of .4 and .2, mean .3, standard deviation .1414, standard error .1.
    """
    result = ArmResult({}, [0.5, 0.7], generated_tokens=500, rows=8, rows_with_signal=4, mean_cosine=0.8)
    versus = ArmResult({}, [0.1, 0.5], generated_tokens=500, rows=8, rows_with_signal=4, mean_cosine=0.8)
    assert summarize(result, versus, tokens_per_batch=1000, quality=1.0) == pytest.approx(
        {
            "cosine": 0.6,
            "cosine_error": 0.1,
            "difference": 0.3,
            "difference_error": 0.1,
            "true_cosine": 0.6,
            "progress": 2 * 0.5625,
            "progress_error": 2 * 0.29296875,
        }
    )
    assert summarize(result, versus, 1000, quality=0.9)["true_cosine"] == pytest.approx(0.6 / 0.9)


def test_reference_points_along_the_exact_gradient(policy):
    reference = find_reference(OneLetter(), policy, agreement=0.98, max_tokens=10**6)
    exact = exact_gradient(policy)
    assert reference.agreement >= 0.98
    assert cosine(reference.gradient, exact) == pytest.approx(reference.quality, abs=0.02)


@pytest.mark.parametrize("settings", [GRPO, FR3E | {"num_anchors": 0, "value_prior_strength": 2.0}])
def test_updates_point_along_the_exact_gradient_on_average(policy, settings):
    """Those of the real trainers, in batches of hundreds of rows."""
    reference = Reference(torch.stack([exact_gradient(policy)] * 2))
    result = measure_arm(settings | {"num_prompts": 128}, policy, OneLetter(), 4, seed=0, reference=reference)
    assert result.mean_cosine > 0.9
    assert all(0.5 < cos < result.mean_cosine for cos in result.cosines)


def test_arms_agree_with_a_sampled_reference(policy):
    """On completions of several tokens, where FR3E branches: a GRPO of large batches approaches the reference."""
    task = Letters()
    reference = find_reference(task, policy, agreement=0.98, max_tokens=10**6)
    small, large = (
        measure_arm(GRPO | {"num_prompts": num_prompts}, policy, task, 4, seed=0, reference=reference)
        for num_prompts in (16, 256)
    )
    assert large.mean_cosine > 0.95
    assert max(small.cosines) < min(large.cosines)
    branching = measure_arm(FR3E | {"num_prompts": 256}, policy, task, 4, seed=0, reference=reference)
    assert branching.mean_cosine > 0.8
    assert branching.generated_tokens < 256 * 4 * 8


def test_policy_stays_where_it_is(policy):
    gradients = []
    trainer = batch_gradients(FR3E | {"num_prompts": 4}, policy, Letters(), 3, 0, gradients.append)
    assert trainer.state.global_step == len(gradients) == 3
    assert not torch.equal(gradients[0], gradients[1])
    before = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


def test_gradient_accumulation_changes_nothing(policy):
    whole, parts = [], []
    settings = GRPO | {"num_prompts": 8}
    batch_gradients(settings, policy, Letters(), 2, 0, whole.append)
    batch_gradients(settings | {"per_device_train_batch_size": 16}, policy, Letters(), 2, 0, parts.append)
    for one, other in zip(whole, parts, strict=True):
        assert cosine(one, other) == pytest.approx(1, abs=1e-4)


def test_cut_reference_goes_on(policy, monkeypatch):
    chunks = []
    extended = gradient_check._extended

    def counted(*args):
        chunks.append(args)
        return extended(*args)

    monkeypatch.setattr(gradient_check, "_extended", counted)
    task = Letters()
    first = find_reference(task, policy, agreement=1.0, max_tokens=1)
    assert (len(chunks), first.num_batches) == (1, gradient_check.CHUNK)
    tokens = 2 * first.generated_tokens - 100  # reached in the next chunk but one at most
    longer = find_reference(task, policy, agreement=1.0, max_tokens=tokens)
    num_chunks = len(chunks)
    assert longer.num_batches == num_chunks * gradient_check.CHUNK
    assert find_reference(task, policy, agreement=1.0, max_tokens=tokens).num_batches == longer.num_batches
    assert len(chunks) == num_chunks

    monkeypatch.setenv("XDG_CACHE_HOME", "another")
    uncut = find_reference(task, policy, agreement=1.0, max_tokens=tokens)
    torch.testing.assert_close(uncut.halves, longer.halves)


def test_report(policy, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TASKS, "letters", Letters())
    arguments = {
        "task": "letters",
        "policy": str(policy),
        "output_dir": str(tmp_path / "check"),
        "base": json.dumps(BASE | {"num_generations": 4}),
        "arms": json.dumps({"grpo": {"trainer": "grpo"}, "fr3e": {"trainer": "fr3e", "num_anchors": 1}}),
        "tokens_per_batch": 400,
        "num_batches": 3,
        "max_reference_tokens": 1,
    }
    argv = [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]
    gradient_check.main(argv)
    page = capsys.readouterr().out
    report = json.loads((tmp_path / "check" / "gradient_check.json").read_text())
    assert (tmp_path / "check" / "gradient_check.png").stat().st_size > 0
    for arm, row in report["arms"].items():
        assert f"| {arm} | {sum(row['cosines']) / 3:.3f} ±" in page
        assert len(row["cosines"]) == 3
        assert row["generated_tokens"] == pytest.approx(400, rel=0.2)

    # Again, beside the other arm: nothing is measured anew
    monkeypatch.setattr(gradient_check, "batch_gradients", lambda *args: pytest.fail("It was there already."))
    gradient_check.main(argv)
    assert capsys.readouterr().out == page
    gradient_check.main([*argv, "--versus", "fr3e"])
    difference = report["arms"]["fr3e"]["difference"]
    assert f"{difference:+.3f} ±" in page and f"{-difference:+.3f} ±" in capsys.readouterr().out


def test_wrong_settings_are_refused(tmp_path):
    good = {"task": "chain", "output_dir": str(tmp_path), "base": GRPO, "arms": {"a": {}}, "tokens_per_batch": 100}
    gradient_check.GradientCheckArguments(**good)
    for wrong, message in (
        ({"task": "chains"}, "must be one of"),
        ({"num_batches": 1}, "at least 2"),
        ({"versus": "b"}, "versus='b' must be one of the arms: a"),
        ({"arms": {"a": {"num_anchors": 1}}}, "use trainer='fr3e'"),
        ({"arms": {}}, "arms is empty"),
        ({"arms": {"a/b": {}}}, "name is a file's too"),
        ({"arms": {"a": {"trainer": "fr3e", "num_anchors": 9}}}, "Arm 'a': num_anchors=9 does not fit"),
        ({"tokens_per_batch": 0}, "tokens_per_batch=0 must be a whole number of at least 1"),
        ({"max_reference_tokens": -1}, "max_reference_tokens=-1 must be"),
        ({"agreement": 1.1}, "agreement=1.1 must be a number above 0 and at most 1"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"policy": "no/such"}, "policy='no/such' must be the directory of a model"),
    ):
        with pytest.raises(ValueError, match=message):
            gradient_check.GradientCheckArguments(**good | wrong)
