"""The trees that a run logs, and the page that shows them."""

import base64
import functools
import gzip
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import factory
import numpy as np
import pytest
from models import make_dataset, make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fr3e_trl.commands.cli import main
from fr3e_trl.tree_log import record as log
from fr3e_trl.tree_log.callback import report
from fr3e_trl.tree_log.display import token_texts
from fr3e_trl.tree_log.page import CHARTS, MAX_POINTS, MAX_TREES, charts, make_page

SIZES = {"per_device_train_batch_size": 32, "max_completion_length": 24, "max_steps": 3}
DEMO_POLICY = Path(__file__).parents[1] / "examples" / "demo_policy"


def is_odd(completions, **kwargs):
    return [float(len(set(completion)) % 2) for completion in completions]


def is_short(completions, **kwargs):
    return [None if len(completion) == 3 else float(len(completion) < 12) for completion in completions]


make_trainer = functools.partial(
    factory.make_trainer, reward_funcs=[is_odd, is_short], output_dir="run", log_trees=1, **SIZES
)


class Page(HTMLParser):
    """What a browser would have of a page: its elements, and what is in its scripts."""

    def __init__(self, path: Path):
        super().__init__()
        self.elements, self.scripts, self._open = [], {}, None
        self.feed(path.read_text())
        self.index = json.loads(self.scripts["index"])

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open = dict(attributes).get("id", "program") if tag == "script" else None  # until the next one begins

    def handle_data(self, data):
        if self._open:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data

    @property
    def trees(self):
        packed = [self.scripts[f"tree-{i}"] for i in range(len(self.index["trees"]))]
        return [json.loads(gzip.decompress(base64.b64decode(tree))) for tree in packed]


def close(x, y):
    """What was logged, and what it was: null stands for what does not exist."""
    x, y = (np.array(value, float).ravel() for value in (x, y))
    return x.shape == y.shape and np.allclose(x, y, rtol=1e-3, atol=6e-4, equal_nan=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"modulation": "exp", "num_generations": 12, "reuse_base": False, "value_prior_strength": 0.0},
        {"max_refills": 2, "value_prior_strength": 0.0, "num_anchors": 1, "num_base_trajectories": 4},
    ],
    ids=["defaults", "published", "refill"],
)
def test_the_page_has_what_was_explored(settings):
    trainer = make_trainer(**settings, **({"per_device_train_batch_size": 24} if "reuse_base" in settings else {}))
    trainer.train()
    main(["tree", "run"])
    page, tokenizer = Page(Path("run/trees.html")), make_tokenizer()
    shown = iter(zip(page.index["trees"], page.trees, strict=True))
    for step, (_, trees) in enumerate(trainer.batches, 1):
        for number, tree in enumerate(trees[: log.MAX_TREES], 1):
            summary, record = next(shown)
            assert (summary["step"], summary["number"]) == (step, number)
            assert "".join(record["prompt"]) == tokenizer.decode(tree.prompt_ids)
            assert summary["prompt"] and "".join(record["prompt"]).endswith(summary["prompt"])
            of_states = [record["rollouts"][k] for state in record["states"] for k in state["rollouts"]]
            assert summary["rewards"] == [rollout["reward"] for rollout in of_states]
            copies = [r.copy_of for state in tree.states for r in state.rollouts if r.copy_of is not None]
            assert (summary["numBases"], summary["copies"]) == (len(record["states"][0]["rollouts"]), len(copies))
            advantages_of_tree = [a for r in record["rollouts"] for a in [r["advantage"], *(c[2] for c in r["credit"])]]
            assert summary["credit"] == max(abs(a or 0) for a in advantages_of_tree)
            first = page.index["trees"][summary["promptOf"]]
            assert first["prompt"] == summary["prompt"] and first["promptOf"] == summary["promptOf"]
            check_branches(tree, record, settings)
            for state, of_state in zip(tree.states, record["states"], strict=True):
                exact, names = ("position", "parent", "rejected"), ("value", "entropy", "modulation")
                assert all(of_state[name] == getattr(state, name) for name in exact)
                assert all(close(of_state[name], getattr(state, name)) for name in names)
                assert of_state["base"] == (None if state.base is None else record["bases"][state.base])
                sampled = [rollout for rollout in state.rollouts if rollout.copy_of is None]
                for rollout, k in zip(sampled, of_state["rollouts"], strict=True):
                    check_rollout(rollout, record["rollouts"][k], tokenizer, is_row=True)
            for base, k, entropies in zip(tree.bases, record["bases"], tree.entropies, strict=True):
                of_base = record["rollouts"][k]
                is_row = any(base is rollout for rollout in tree.states[0].rollouts)
                assert is_row == (settings.get("reuse_base") is not False)
                check_rollout(base, of_base, tokenizer, is_row)
                assert close(of_base["entropies"], entropies)
        branches = [(tree, state, r) for tree in trees for state in tree.states[1:] for r in state.rollouts]
        differ = [r.token_ids[0] != tree.bases[state.base].token_ids[state.position] for tree, state, r in branches]
        (entry,) = [e for e in trainer.state.log_history if e["step"] == step and "fr3e/value/S0" in e]
        assert close(entry.get("fr3e/branches/distinct"), float(np.mean(differ)) if differ else None)
    assert next(shown, None) is None
    # The curves are the log's
    for chart in page.index["charts"]:
        for curve in chart["curves"]:
            assert close(
                curve["points"],
                [(e["step"], e[curve["name"]]) for e in trainer.state.log_history if curve["name"] in e],
            )
    names = {curve["name"] for chart in page.index["charts"] for curve in chart["curves"]}
    assert {"fr3e/value/S0", "fr3e/entropy", "fr3e/prompts/all_right", "fr3e/advantage/mean"} <= names
    assert not {"reward", "entropy"} & names  # over rows that start from chosen prefixes too
    assert page.index["isModulated"] == ("modulation" in settings)
    assert any(chart["spread"] for chart in page.index["charts"])
    assert page.index["rewardFuncs"] == ["is_odd", "is_short"]


def check_branches(tree, record, settings):
    """Copies, how many rows each stands for, and whether branches begin with other tokens than their trajectory."""
    by_tree = "modulation" not in settings  # which is for rollout credit
    rollouts = [r for state in tree.states for r in state.rollouts]
    of_rows = [record["rollouts"][k] for state in record["states"] for k in state["rollouts"]]
    assert all(of_row["num_rows"] == (1 + of_row["copies"] if by_tree else None) for of_row in of_rows)
    if by_tree:
        assert sum(of_row["num_rows"] for of_row in of_rows) == len(rollouts)
    for b, k in enumerate(record["bases"]):
        assert record["rollouts"][k]["copies"] == sum(r.copy_of == b for r in rollouts)
    for state, of_state in zip(tree.states[1:], record["states"][1:], strict=True):
        token = tree.bases[state.base].token_ids[state.position]
        for rollout, k in zip(state.rollouts, of_state["rollouts"], strict=True):
            assert record["rollouts"][k]["differs"] == (rollout.token_ids[0] != token)


def check_rollout(rollout, record, tokenizer, is_row):
    assert "".join(record["tokens"]) == tokenizer.decode(rollout.token_ids)
    assert len(record["tokens"]) == record["length"] == rollout.length
    assert close(record["reward"], rollout.score.reward)
    assert close(record["rewards"], rollout.score.rewards) and close(record["credit"], rollout.credit)
    assert (record["advantage"] is not None) == is_row
    if is_row and rollout.credit:  # a row's advantage is the mean of its tokens'
        assert close(record["advantage"], sum(n * a for n, _, a in rollout.credit) / rollout.length)
    if rollout.credit:
        assert sum(length for length, _, _ in record["credit"]) == record["length"]


def test_what_tools_wrote_is_marked():
    trainer = factory.make_tool_trainer(output_dir="run", log_trees=2)
    trainer.train()
    record = log.read_step(Path("run"), 1)
    rollouts = [rollout for tree in record["trees"] for rollout in tree["rollouts"]]
    stretches = [(rollout, slice(*stretch)) for rollout in rollouts for stretch in rollout["tools"]]
    assert len(stretches) > 20
    for rollout, stretch in stretches:
        text = "".join(rollout["tokens"][stretch])
        assert "<|tool|>" in text and "<call>" not in text  # the policy calls, and the tool answers
        assert rollout["entropies"] is None or set(rollout["entropies"][stretch]) == {None}


@pytest.mark.parametrize(("num_iterations", "steps"), [(1, [1, 4, 7]), (2, [1, 5, 7])])
def test_every_so_many_steps(num_iterations, steps):
    make_trainer(log_trees=3, max_steps=8, num_iterations=num_iterations).train()
    assert log.logged_steps(Path("run")) == steps


def test_a_run_that_goes_on_leaves_no_steps_of_another(caplog):
    make_trainer(max_steps=6, save_strategy="steps", save_steps=2).train()
    assert "trees" in Page(Path("run/trees.html")).index
    Path("run/trees/step-9.json.gz").write_bytes(b"")  # of an earlier run
    trainer = make_trainer(max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint="run/checkpoint-2")
    assert log.logged_steps(Path("run")) == [1, 2, 3, 4]
    moved = [log.METRICS, *(f"step-{step}.json.gz" for step in (3, 4, 5, 6, 9))]
    assert sorted(path.name for path in Path("run/trees-1").iterdir()) == moved
    assert "in run after step 2 were moved to run/trees-1" in caplog.text
    assert log.read_metrics(Path("run")) == trainer.state.log_history
    page = Page(Path("run/trees.html"))
    assert [tree["step"] for tree in page.index["trees"]] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    # As after a kill: the last line in part
    with Path("run/trees", log.METRICS).open("a") as file:
        file.write('{"loss": 0.')
    assert log.read_metrics(Path("run")) == trainer.state.log_history


@pytest.mark.parametrize("failure", ["damaged log", "full disk", "directory"])
def test_what_is_shown_ends_no_run(failure, caplog):
    if failure == "damaged log":
        make_trainer(max_steps=2, save_strategy="steps", save_steps=2).train()
        log.step_path(Path("run"), 1).write_bytes(b"")
    if failure == "full disk":
        Path("run/trees").mkdir(parents=True)
        Path("run/trees/step-2.json.gz.part").symlink_to("/dev/full")
    if failure == "directory":
        Path("run").mkdir()
        Path("run/trees").write_text("a file")
    trainer = make_trainer()
    trainer.train(resume_from_checkpoint="run/checkpoint-2" if failure == "damaged log" else None)
    assert trainer.state.global_step == 3
    (told,) = [message for message in caplog.messages if "log_trees=1" in message]
    assert "Training continues" in told
    assert {"damaged log": "step-1.json.gz", "full disk": "No space left", "directory": "run/trees"}[failure] in told


def test_training_is_what_it_is_without(caplog):
    losses = []
    for every in (None, 1):
        trainer = make_trainer(log_trees=every)
        trainer.evaluate(make_dataset(2))  # before training, is none of it
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert Path("run/trees").exists() == Path("run/trees.html").exists() == (every is not None)
    assert losses[0] == losses[1] and len(losses[0]) == 3
    earlier = {path.name: path.read_bytes() for path in [*Path("run/trees").iterdir(), Path("run/trees.html")]}
    for number, settings in enumerate(({}, {"num_anchors": 0}), 1):
        caplog.clear()
        make_trainer(max_steps=1, **settings).train()
        (told,) = [message for message in caplog.messages if "earlier run" in message]
        assert f"run/trees-{number}" in told
        assert log.logged_steps(Path("run")) == ([] if settings else [1])
    assert {path.name: path.read_bytes() for path in Path("run/trees-1").iterdir()} == earlier
    index = Page(Path("run/trees.html")).index
    assert index["trees"] == []
    assert [chart["title"] for chart in index["charts"]][:2] == ["Reward at the prompt", "Entropy, in nats"]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the sum of the sums"],
        trainers.BpeTrainer(vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["one", "two", "three", "?"])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Of characters, and of bytes for those that it does not know, as Llama 2's."""
    vocab = {token: i for i, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thesum12.√"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TEXTS = {
    byte_fallback_tokenizer: ["the sum", "√2 ≈ 1.41", "数学很难 the 数", "👩‍👩‍👧 the 👍🏽"],
    byte_level_tokenizer: ["the sum", "√2 ≈ 1.41", "数学很难 the 数", "👩‍👩‍👧 the 👍🏽", "مرحبا sum", "e\u0301\u0301"],
    word_tokenizer: ["one two three two"],
    functools.partial(AutoTokenizer.from_pretrained, DEMO_POLICY): ["5 - 1 + 3 = 7", "\n5 - 1 = 4\n4 + 3 = 7"],
}


@pytest.mark.parametrize("make, text", [(make, text) for make, texts in TEXTS.items() for text in texts])
def test_texts_of_tokens_make_the_text(make, text):
    tokenizer = make()
    token_ids = np.array(tokenizer(text)["input_ids"], np.int32)
    whole = tokenizer.decode(token_ids)
    assert whole.strip() == text.strip()
    (of_whole,) = token_texts(tokenizer, [(token_ids[:0], token_ids)])
    assert len(of_whole) == len(token_ids) and "".join(of_whole) == whole
    for cut in range(len(token_ids)):
        (pieces,) = token_texts(tokenizer, [(token_ids[:cut], token_ids[cut:])])
        assert pieces == of_whole[cut:]
        prefix = tokenizer.decode(token_ids[:cut])
        if "\ufffd" in prefix[-1:]:
            continue
        assert len(pieces) == len(token_ids) - cut and prefix + "".join(pieces) == whole


def test_bytes_that_are_no_character_are_shown_as_such():
    tokenizer = byte_level_tokenizer()
    token_ids = np.array(tokenizer("数" * 3)["input_ids"], np.int32)[[0, 3, 6, 6, 0] * 4]
    (pieces,) = token_texts(tokenizer, [(token_ids[:0], token_ids)])
    assert len(pieces) == 20 and set("".join(pieces)) == {"\ufffd"}


def test_steps_may_be_chosen(capsys):
    for step in range(1, 41):
        log.write_step(Path("run"), made_step(step, num_trees=16, length=4))
    Path("run/trees/step-x.json.gz").write_bytes(b"")  # is no step's
    main(["tree", "run", "--steps", "7", "3", "--output", "some.html"])
    assert capsys.readouterr().out.startswith("some.html: 32 trees, ")
    assert [tree["step"] for tree in Page(Path("some.html")).index["trees"]] == [7] * 16 + [3] * 16
    # Otherwise as many as a page has, from the first to the last
    assert make_page(Path("run"), Path("all.html")) == MAX_TREES // 16 * 16
    steps = list(dict.fromkeys(tree["step"] for tree in Page(Path("all.html")).index["trees"]))
    assert steps[0] == 1 and steps[-1] == 40 and len(steps) == MAX_TREES // 16
    for arguments, message in (
        (["--steps", "2", "41"], "trees of step 41 were not logged. Logged steps: 1"),
        (["--output", "nowhere/page.html"], "Use another file as --output"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["tree", "run", *arguments])
        assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_curves():
    entries = [{"step": step, "reward": float(step % 2)} for step in range(1, 4001)]
    others = [{"train_runtime": 1.0}, {"reward": math.nan}, {"reward": None}]
    (chart,) = charts([*entries, *({"step": 4000} | other for other in others)])
    (curve,) = chart["curves"]
    assert chart["title"] == CHARTS[0][0] and len(curve["points"]) == MAX_POINTS
    assert curve["points"][0] == [8, 0.5] and curve["points"][-1] == [4000, 0.5]
    # Each evaluation set has a curve
    rewards = {"easy": 0.9, "hard": 0.1}
    sets = itertools.product((0, 10), rewards)
    (chart,) = charts([{"step": i, "eval_reward": rewards[name], f"eval_{name}_runtime": 1.0} for i, name in sets])
    curves = [(curve["name"], curve["points"]) for curve in chart["curves"]]
    assert curves == [(f"eval_reward of {name}", [[0, of_set], [10, of_set]]) for name, of_set in rewards.items()]
    # What is no number in JSON is null
    log.write_logs(Path("metrics.jsonl"), [{"step": 1, "grad_norm": math.inf}])
    log.append_log(Path("metrics.jsonl"), {"step": 2, "grad_norm": math.nan, "note": "text"})
    lines = ['{"step": 1, "grad_norm": null}', '{"step": 2, "grad_norm": null, "note": "text"}']
    assert Path("metrics.jsonl").read_text().splitlines() == lines


# What completions may say

HOSTILE = [
    "</script><script>window.hurt = 1</script>",
    "<img src=x onerror='window.hurt = 1'>",
    "<!--<script>",
    "w" * 10_000,
    "مرحبا \u202eبالعالم\u202c 1 + 2",
    "👩‍👩‍👧👍🏽",
    "null\0byte \x1b[31m \x7f \x9b \u2067 \u2028",
    "{{ 7 * 7 }} {% raw %} ${window.hurt = 1}",
    "\udcff",
]


def made_step(step, num_trees, length, texts=("the ", "sum ", "of ", "1 ", "+ ", "2 ", "is ", "\n"), seed=0):
    """Trees of two base trajectories of `length` tokens and six anchors, with words from `texts`."""
    rng = np.random.default_rng(seed)
    trees = []
    for i in range(num_trees):
        words = [[texts[w] for w in rng.integers(0, len(texts), length)] for _ in range(2)]
        states = [{"base": None, "position": 0, "parent": None, "entropy": None, "rollouts": [0, 1]}]
        starts = [(0, 0), (1, 0)]  # of rollouts: base trajectory and position
        for base, k in itertools.product(range(2), range(3)):
            place = {"base": base, "position": (k + 1) * length // 4, "parent": 3 * base + k if k else 0}
            states.append({**place, "entropy": 1.5, "rollouts": [len(starts)]})
            starts.append((base, place["position"]))
        rollouts = []
        for k, (base, start) in enumerate(starts):
            tokens, reward = words[base][start:], float(rng.integers(0, 2))
            entropies = rng.exponential(0.5, length).round(3).tolist() if k < 2 else None
            rollout = {"tokens": tokens, "entropies": entropies, "tools": None, "length": len(tokens), "credit": []}
            rollout |= {"reward": reward, "rewards": [reward], "advantage": round(float(rng.normal()), 3)}
            rollouts.append(rollout | {"in_loss": states[max(k - 1, 0)]["parent"] != 4})
        for state in states:
            value = float(np.mean([rollouts[k]["reward"] for k in state["rollouts"]]))
            state |= {"value": value, "modulation": 1.0, "rejected": state["parent"] == 4}
        prompt = ["What is ", f"{step}", " + ", f"{i}?"]
        trees.append({"prompt": prompt, "states": states, "bases": [0, 1], "rollouts": rollouts})
    return {"step": step, "num_trees": num_trees, "reward_funcs": ["is_right"], "credit": "rollout", "trees": trees}


def hostile_page() -> Path:
    record = made_step(1, num_trees=2, length=24, texts=HOSTILE)
    for tree in record["trees"]:
        tree["prompt"] = HOSTILE[:]
    record["reward_funcs"] = ["</script><img src=x onerror='window.hurt = 1'>"]
    run = Path("<b>run & more")
    log.write_step(run, record)
    make_page(run, Path("hostile.html"))
    return Path("hostile.html").resolve()


def test_completions_are_text_and_nothing_else():
    page = Page(hostile_page())
    assert page.trees == log.read_step(Path("<b>run & more"), 1)["trees"]
    assert page.index["trees"][0]["prompt"] == "".join(HOSTILE)[:2000]
    # No element, and no script but the data's and the page's own
    assert not [tag for tag, _ in page.elements if tag in ("img", "b", "iframe", "link", "object")]
    assert [a.get("id") for tag, a in page.elements if tag == "script"] == ["index", "tree-0", "tree-1", None]
    assert not [a for _, a in page.elements if any(name.startswith("on") or name in ("src", "href") for name in a)]


# In a browser

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens the page of `records`, or one that is there; what it complains about fails the test."""
    complaints, pages = [], []

    def open_page(*records, path=Path("trees.html"), address="", metrics=(), run="run", **settings):
        for record in records:
            log.write_step(Path(run), record)
        if metrics:
            log.write_logs(Path(run, "trees", log.METRICS), metrics)
        if records:
            make_page(Path(run), path)
        page = browser.new_page(**{"viewport": {"width": 1400, "height": 900}} | settings)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(path.resolve().as_uri() + address)
        page.wait_for_selector("main .row")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []


def expect_text(page, selector: str, text: str) -> None:
    from playwright.sync_api import expect

    expect(page.locator(selector).first).to_have_text(text)


def counts(page, *selectors: str) -> list[int]:
    return [page.locator(selector).count() for selector in selectors]


def texts(page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


def test_two_hundred_trees_of_three_thousand_tokens(opened):
    for step in range(1, 14):
        log.write_step(Path("run"), made_step(step, num_trees=16 if step < 13 else 8, length=3000, seed=step))
    assert make_page(Path("run"), Path("run/trees.html"), list(range(1, 14))) == 200
    assert Path("run/trees/step-1.json.gz").stat().st_size < 2e6
    assert Path("run/trees.html").stat().st_size < 20e6
    page = opened(path=Path("run/trees.html"))
    assert counts(page, "nav li", "main .row", "main .token") == [200, 2, 6000]  # one tree, its branches folded


def test_the_page_tells_a_tree(opened):
    record = made_step(5, num_trees=3, length=40)
    tree = record["trees"][1]
    tree["rollouts"][1]["tools"] = [[10, 14]]
    tree["rollouts"][0]["credit"] = [[10, 1.0, 0.5], [30, 1.0, -1.0]]
    page = opened(record, address="#tree=2")
    expect_text(page, "main h2", "Step 5, tree 2")
    assert texts(page, "main tbody th") == [f"S{s}" for s in range(len(tree["states"]))]
    assert page.get_by_role("columnheader", name="V").count() == 0  # one rollout's reward is no value
    for s, state in enumerate(tree["states"]):
        cells = texts(page.locator("main tbody tr").nth(s), "td")
        marks = " ".join("✓" if tree["rollouts"][k]["reward"] else "✗" for k in state["rollouts"])
        assert cells[4].split("rejected")[0].strip() == marks
        assert ("rejected" in cells[4]) == state["rejected"]
    bases = page.locator("main article")
    end = "".join(tree["rollouts"][1]["tokens"][-3:]).replace("\n", "↵\n")
    assert page.locator("main").text_content().endswith(end)
    advantage = f"{tree['rollouts'][0]['advantage']:+.2f}".replace("-", "−")
    assert f"trajectory 1 · 40 tokens · A = {advantage}" in bases.nth(0).locator("h3").text_content()
    # Its text, the anchors' buttons left out, and where they are
    word = "e => e.className === 'anchor' ? null : e.textContent"
    words = bases.nth(0).locator(".text > .token, .text > .anchor").evaluate_all(f"all => all.map({word})")
    positions = [i - k for k, i in enumerate(i for i, word in enumerate(words) if word is None)]
    assert positions == [state["position"] for state in tree["states"] if state["base"] == 0]
    assert "".join(filter(None, words)).replace("↵\n", "\n") == "".join(tree["rollouts"][0]["tokens"])
    # A tool's words are folded
    tool = bases.nth(1).locator("details.tool")
    assert tool.count() == 1 and "Tool, 4 tokens" in tool.locator("summary").text_content()
    assert tool.get_attribute("open") is None
    # Colours: by entropy as high as it is, by credit as far from 0, above or below
    token = bases.nth(0).locator(".token")
    alphas = {h: alpha(background(token.nth(i))) for i, h in enumerate(tree["rollouts"][0]["entropies"][:8])}
    assert [alphas[h] for h in sorted(alphas)] == sorted(alphas.values()) and max(alphas.values()) > 0
    page.keyboard.press("c")
    assert page.get_by_role("button", name="Colour: credit").count() == 1
    assert background(token.nth(3)) != background(token.nth(20))
    assert "up" in token.nth(9).get_attribute("class") and "up" not in token.nth(10).get_attribute("class")
    token.nth(12).hover()
    assert all(text in page.locator("#status").text_content() for text in ("Token 13 of 40", "A = −1.00"))


def background(element) -> str:
    return element.evaluate("e => getComputedStyle(e).backgroundColor")


def alpha(colour: str) -> float:
    return float(colour.removesuffix(")").split("/")[-1].split(",")[-1]) if "rgba" in colour or "/" in colour else 1.0


def test_branches_and_copies_are_told(opened):
    record = made_step(5, num_trees=1, length=40)
    (tree,) = record["trees"]
    base, branch, other = (tree["rollouts"][k] for k in (0, 2, 3))
    base |= {"tokens": [*"abcdefghij", "y", *base["tokens"][11:]], "credit": [[10, 3.0, 1.0], [30, 2.0, -0.12]]}
    base |= {"reward": 0.0, "advantage": 0.18, "copies": 1, "num_rows": 2}
    branch |= {"reward": 1.0, "num_rows": 1, "differs": True, "tokens": ["z", *branch["tokens"][1:]]}
    other |= {"differs": False}
    page = opened(record, address="#unfold")
    page.wait_for_selector(".branch")
    assert "1 copy A copy is a missing branch" in page.locator("main .summary").text_content()
    told = texts(page.locator("main > article").first, "> .note")
    assert told[0] == "A: +1.00 before S1, −0.12 to the end."
    assert told[1].startswith("It failed, and yet A is above 0 on average: tokens before a branch learn from the")
    assert told[2] == "Counts for 1 copy too: it had no anchor for that branch."
    told = texts(page, ".branch .note")
    assert told[0] == "Begins with z. The trajectory has y." and told[1].endswith(", as the trajectory goes on.")
    cells = texts(page.locator("main tbody tr").nth(1), "td")
    assert {"y → z", f"{3}, mean {1 / 3:.2f}"} <= {*cells}  # rows that pass, of a known number
    assert page.get_by_role("columnheader", name="α").count() == 0


def test_a_tree_is_drawn(opened):
    """A lane for each rollout, no line over another, outcomes by colour and shape. Lanes lead to the text."""
    record = made_step(1, num_trees=1, length=40)
    (tree,) = record["trees"]
    tree["rollouts"][4]["reward"] = None
    page = opened(record)
    page.wait_for_selector(".lane")
    lanes = page.locator(".drawing .lane")
    # The last branch to leave is nearest to its base trajectory
    names = [name.split(",")[0].split(":")[0] for name in texts(lanes, "title")]
    assert names == ["trajectory 1", "S3", "S2", "S1", "trajectory 2", "S6", "S5", "S4"]
    numbers = [sum(rollout["reward"] == reward for rollout in tree["rollouts"]) for reward in (1.0, 0.0)]
    marks = counts(page, ".drawing .mark.right", ".drawing .mark.wrong", ".drawing .mark")
    assert marks == [*numbers, 8]
    # By token: of 40, an anchor at 10 is as far from the first as it is from that at 20
    forks = [float(x) for x in lanes.nth(0).locator(".fork").evaluate_all("all => all.map(e => e.getAttribute('cx'))")]
    assert forks[1] - forks[0] == pytest.approx(forks[2] - forks[1]) and forks[0] < forks[1]
    lanes.nth(3).locator("text").click()
    assert counts(page, ".branch") == [1]
    assert texts(page, ".branch h3")[0].startswith("S1, before token 11 of 40")
    # As wide as there is room, whatever the window
    page.set_viewport_size({"width": 390, "height": 800})
    drawing = page.locator(".drawing svg")
    # Asked again from here: the page's own rule against eval stops a wait inside the page from its second look on
    for _ in range(100):
        if (width := drawing.evaluate("svg => svg.clientWidth")) < 390:
            break
        page.wait_for_timeout(50)
    assert width < 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_trees_are_filtered_sorted_and_followed(opened):
    records = [made_step(step, num_trees=3, length=40, seed=step) for step in (1, 2)]
    for step, record in enumerate(records, 1):
        of_trees = [(0, 0, 0), (0, 1, 1), (1, 1, 1)]  # of base trajectories, one branch, the other branches
        for tree, rewards in zip(record["trees"], of_trees, strict=True):
            for k, rollout in enumerate(tree["rollouts"]):
                rollout["reward"] = float(rewards[0] if k < 2 else rewards[min(k - 1, 2)])
        record["trees"][1]["rollouts"][3]["reward"] = 0.0
        record["trees"][2]["prompt"] = ["What is ", "asked again?"]
        record["trees"][step]["rollouts"][1]["advantage"] = 5.0 + step
    page = opened(*records)
    for name, number in {"mixed": 2, "rescued": 2, "right": 2, "wrong": 2, "": 6}.items():
        page.locator("#outcome").select_option(name)
        assert page.locator("#count").text_content() == f"{number} of 6 trees"
    assert texts(page, "nav .badge") == ["rescued"] * 2
    page.locator("#order").select_option("credit")
    assert texts(page, "nav .head > :first-child")[:2] == ["Step 2, tree 3", "Step 1, tree 2"]
    page.locator("nav li button").first.click()
    expect_text(page, "main h2", "Step 2, tree 3")
    assert [text.split(" ")[1] for text in texts(page, ".same button")] == ["1", "2"]
    page.locator(".same button").first.click()
    expect_text(page, "main h2", "Step 1, tree 3")
    assert page.locator(".same button[aria-current=true]").text_content().startswith("step 1")
    page.keyboard.press("k")
    assert page.locator("nav button[aria-current=true]").count() == 1


def test_the_keyboard_does_it_all(opened):
    records = [made_step(step, num_trees=3, length=40) for step in (1, 2)]
    page = opened(*records, metrics=[{"step": step, "reward": step / 10} for step in (1, 2, 3)])
    expect_text(page, "aside output", "0.1 at 1")  # curves follow the tree's step
    for key, expected in zip("jjjk", ["1, tree 2", "1, tree 3", "2, tree 1", "1, tree 3"], strict=True):
        page.keyboard.press(key)
        expect_text(page, "main h2", f"Step {expected}")
    branches = [("ArrowRight ArrowRight Enter", 1), ("ArrowLeft Enter", 2), ("Enter", 1), ("e", 6), ("e", 0)]
    for keys, number in branches:
        for key in keys.split():
            page.keyboard.press(key)
        assert counts(page, ".branch", ".row.rejected") == [number, int(number == 6)]
        if keys.startswith("ArrowRight"):
            assert texts(page, ".branch h3")[0].startswith("S2, before token 21 of 40")
            # Where it leaves: after the anchor's button, before the token that it tries again
            assert page.evaluate("document.querySelector('.branch').previousSibling.textContent.startsWith('S2')")
            assert page.evaluate("document.querySelector('.branch').nextSibling.place") == 20
    page.keyboard.press("?")
    assert page.locator("dialog").evaluate("e => e.open")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("2 + 1")
    assert page.locator("#count").text_content() == "1 of 6 trees"
    page.keyboard.press("Enter")
    expect_text(page, "main h2", "Step 1, tree 3")  # typing chose nothing
    page.locator("#search").fill("")
    page.locator("#step").select_option("2")
    assert page.locator("#count").text_content() == "3 of 6 trees"
    page.locator("nav li button").nth(1).click()
    expect_text(page, "main h2", "Step 2, tree 2")
    expect_text(page, "aside output", "0.2 at 2")
    assert page.locator("nav button[aria-current=true]").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(opened, scheme):
    record = made_step(1, num_trees=3, length=300, texts=[*HOSTILE[:5], "the ", "sum "])
    record["trees"][0]["rollouts"][0]["tools"] = [[3, 9]]
    phone = {"viewport": {"width": 390, "height": 700}, "has_touch": True, "is_mobile": True, "color_scheme": scheme}
    page = opened(record, run="a run with a name that is longer than a phone is wide", address="#unfold", **phone)
    page.wait_for_selector(".branch")
    page.wait_for_selector(".lane")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    fits = "e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight + 1"
    for selector in ("#status", "h1", "header button", "main h2", "main h3", ".note"):
        assert all(found.evaluate(fits) for found in page.locator(selector).all()), selector
    assert all(scrolls.bounding_box()["width"] <= 390 for scrolls in page.locator(".scroll, .drawing").all())
    assert page.locator("nav").bounding_box()["height"] <= 700 / 4
    table = page.locator(".scroll")
    assert table.evaluate("e => e.scrollWidth > e.clientWidth")
    table.evaluate("e => e.scrollLeft = 200")  # and the states' names stay
    assert page.locator("main tbody th").first.bounding_box()["x"] == table.bounding_box()["x"]
    assert background(page.locator("body")) == ("rgb(17, 20, 24)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert page.locator("#status").text_content().startswith("Tap a token")
    page.locator("main .token").nth(2).tap()
    assert "Token 3 of 300" in page.locator("#status").text_content()
    page.locator("#help").tap()
    assert not page.locator(".keys").is_visible() and page.locator("dialog").is_visible()


def test_hostile_completions_do_nothing(opened):
    page = opened(path=hostile_page(), address="#unfold")
    page.wait_for_selector(".branch")
    assert page.evaluate("window.hurt") is None and counts(page, "img") == [0]
    assert page.title() == "<b>run & more: trees"
    assert {*HOSTILE[:4], "null␀byte ␛[31m ␡ � � \u2028"} <= {*texts(page, "main .token")}
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400


# Where a run reports


def test_the_page_goes_to_weights_and_biases(monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    make_trainer(report_to=["wandb"]).train()
    wandb.finish()  # else a later test's trainer has it say that the run has no address
    (html,) = Path("wandb").glob("offline-run-*/files/media/html/trees_*.html")
    assert html.read_text() == Path("run/trees.html").read_text()
    assert "was not logged" not in caplog.text
    # A page that cannot be reported does not stop the training
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    report(Path("trees.html"), ["wandb"])
    assert "trees.html was not logged to wandb" in caplog.text


def test_the_page_goes_to_trackio(tmp_path):
    """To its local files, in a process of its own: where these are, it decides when it is imported."""
    pytest.importorskip("trackio")
    program = "from test_page import make_trainer; make_trainer(report_to=['trackio']).train()"
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "was not logged" not in run.stderr, run.stderr
    page = Path("run/trees.html").read_bytes()
    copies = [path for path in Path("trackio").rglob("*") if path.is_file() and path.read_bytes() == page]
    assert len(copies) == 2  # the artifact, and the page to be looked at
