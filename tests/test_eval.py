"""`fr3e eval`: its estimates by hand, and whole evaluations by the command, of real tiny models."""

import itertools
import json
import math
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from models import make_tokenizer, model_on_disk
from peft import LoraConfig, PeftModel, get_peft_model
from recipe_header import header
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from fr3e_trl.commands import cli
from fr3e_trl.commands.answers import group_answers, last_match, measures
from fr3e_trl.commands.data import FR3EScriptArguments, map_columns
from fr3e_trl.commands.eval import as_markdown, read_lines
from fr3e_trl.commands.statistics import best_of_k, majority_of_k
from fr3e_trl.rewards import math_answers, math_reward

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path.stem for path in (ROOT / "recipes" / "eval").glob("*.yaml"))

REWARD = """
def digit(completions, solution, **kwargs):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(any(c in "01234" for c in text)) for text in texts]

def odd_ones(completions, **kwargs):
    return [float("nan") if "1" in str(kwargs["solution"][i]) else None if "2" in str(kwargs["solution"][i]) else 1.0
            for i in range(len(completions))]

async def length(completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("ids", completion_ids)
    log_metric("step", trainer_state.global_step)
    return [None if len(ids) == 99 else len(ids) / 10 for ids in completion_ids]
"""


@given(
    counts=st.lists(st.integers(1, 4), max_size=4),
    num_without=st.integers(0, 3),
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4),
    data=st.data(),
)
def test_estimates_are_means_over_all_choices(counts, num_without, rewards, data):
    samples = [i for i, count in enumerate(counts) for _ in range(count)] + [None] * num_without
    if not samples:
        return
    k = data.draw(st.integers(1, len(samples)))

    def of_most(chosen):
        votes = [chosen.count(i) for i in range(len(counts))]
        winners = [i for i, of_answer in enumerate(votes) if of_answer == max(votes) > 0]
        return sum(rewards[i] for i in winners) / len(winners) if winners else 0.0

    choices = list(itertools.combinations(samples, k))
    answers = list(zip(counts, rewards, strict=False))
    assert majority_of_k(answers, num_without, k) == pytest.approx(fmean(map(of_most, choices)))
    best = [max(0.0 if i is None else rewards[i] for i in chosen) for chosen in choices]
    assert best_of_k([0.0 if i is None else rewards[i] for i in samples], k) == pytest.approx(fmean(best))


def test_estimates_and_answers_by_hand():
    # 2 right of 4: of the 6 pairs only one has none. And 2 of 3 pairs have the right one of three answers, and a tie
    assert best_of_k([1, 0, 0, 1], 2) == pytest.approx(5 / 6)
    assert majority_of_k([(1, 1.0), (1, 0.0), (1, 0.0)], 0, 2) == pytest.approx(1 / 3)
    # Of 64 answers that all differ, each wins as often
    assert majority_of_k([(1, 1.0), *[(1, 0.0)] * 63], 0, 32) == pytest.approx(1 / 64)
    # Answers are read and grouped
    texts = [r"So \boxed{0.5}.", r"It is $1$ or \boxed{\frac{1}{2}}.", "0.5", r"\boxed{" + "x+" * 400 + "x}", ""]
    answers = math_answers(texts)
    assert answers[:3] == ["0.5", r"\frac{1}{2}", None] and answers[4] is None
    assert len(answers[3]) == 500
    answers = ["0.5", None, r"\frac{1}{2}", "2", "0.50", r"2.0"]
    assert group_answers(answers, by_maths=True) == [[0, 2, 4], [3, 5]]
    assert group_answers(answers, by_maths=False) == [[0], [2], [3], [4], [5]]
    assert group_answers([None, None], by_maths=True) == []
    assert last_match("<answer>(.*?)</answer>", "<answer>1</answer> <answer> 2\n</answer>") == "2"
    assert [last_match(r"\d+", text) for text in ("12 or 13", "none")] == ["13", None]
    assert last_match(r"answer (\d+)|no answer", "no answer") is None


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Evaluates by the command; returns the results and the completions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("tests_of_eval.py").write_text(REWARD)
    Dataset.from_list([{"prompt": f"{i}+{i}=", "solution": str(2 * i)} for i in range(3)]).to_json("data.jsonl")

    def run(*arguments, **settings):
        defaults = {"model_name_or_path": model_on_disk(), "dataset_name": "data.jsonl"}
        defaults |= {"reward_funcs": "tests_of_eval.digit", "num_samples": 4, "max_completion_length": 6}
        defaults |= {"batch_size": 4, "output_dir": "out"}
        settings = defaults | settings
        cli.main(["eval", *arguments, *(f"--{name}={v}" for name, v in settings.items() if v is not None)])
        output_dir = Path(settings["output_dir"])
        return json.loads((output_dir / "results.json").read_text()), read_lines(output_dir / "completions.jsonl")

    return run


def test_results_are_those_of_the_completions(evaluate, capsys):
    results, lines = evaluate("--reward_funcs", "tests_of_eval.digit", "tests_of_eval.length", reward_funcs=None)
    assert [(line["problem"], line["sample"]) for line in lines] == [(i, j) for i in range(3) for j in range(4)]
    digits = [[line["rewards"]["tests_of_eval.digit"] for line in lines[i : i + 4]] for i in (0, 4, 8)]
    assert [*itertools.chain(*digits)] == [float(any(c in "01234" for c in text)) for text in completions_of(lines)]
    assert 0 < sum(map(sum, digits)) < 12
    measured = results["rewards"]["tests_of_eval.digit"]
    assert measured["pass@1"]["mean"] == pytest.approx(sum(map(sum, digits)) / 12)
    two_wrong = [math.comb(4 - int(sum(of)), 2) / 6 for of in digits]
    assert measured["pass@2"]["mean"] == pytest.approx(1 - sum(two_wrong) / 3)
    assert measured["pass@4"]["mean"] == pytest.approx(sum(map(max, digits)) / 3)
    assert {"maj@2", "maj@4"} < measured.keys() and measured["num_scored"] == 3
    lengths = [line["num_tokens"] for line in lines]
    assert results["mean_completion_length"] == pytest.approx(sum(lengths) / 12) and max(lengths) == 6
    assert results["rewards"]["tests_of_eval.length"]["pass@1"]["mean"] == pytest.approx(sum(lengths) / 120)
    assert all(line["is_finished"] or line["num_tokens"] == 6 for line in lines)
    report, printed = Path("out/results.md").read_text(), capsys.readouterr()
    assert report in printed.out and "They are Wilson's" in report
    assert "completion" not in printed.err  # no progress bar, which is for a terminal
    assert f"| pass@1 | {measured['pass@1']['mean']:.1%} |" in report


def test_cut_evaluation_goes_on(evaluate):
    _, whole = evaluate()
    path = Path("out/completions.jsonl")
    text = path.read_text()
    first = "".join(text.splitlines(keepends=True)[:4])
    path.write_text(first + '{"problem": 1, "sam')
    assert evaluate()[1] == whole
    results, lines = evaluate(num_samples=5)
    assert lines[:12] == whole and len(lines) == 15
    assert results["rewards"]["tests_of_eval.digit"]["num_scored"] == 3
    # Of what is there, a part: nothing is sampled
    results, lines = evaluate(num_samples=2, limit=2)
    assert len(lines) == 15 and results["num_problems"] == 2
    two = [line["rewards"]["tests_of_eval.digit"] for line in whole if line["sample"] < 2 and line["problem"] < 2]
    assert results["rewards"]["tests_of_eval.digit"]["pass@1"]["mean"] == sum(two) / 4


def plain_model():
    return AutoModelForCausalLM.from_pretrained(model_on_disk())


@pytest.fixture
def saved(tmp_path):
    def save(model, tokenizer=None):
        model.save_pretrained(tmp_path / "model")
        (tokenizer or make_tokenizer()).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


def greedy(model, *prompts, num_tokens=6):
    completions = []
    for prompt in prompts or ("0+0=", "1+1=", "2+2="):
        ids = make_tokenizer()(prompt, return_tensors="pt").input_ids
        while len(ids[0]) < len(prompt) + num_tokens and ids[0, -1] != 1:
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        completions.append(make_tokenizer().decode(ids[0, len(prompt) :], skip_special_tokens=True))
    return completions


def completions_of(lines):
    return [line["completion"] for line in lines]


def test_template_is_told(evaluate, saved):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if no_thinking %}no{% endif %}"
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    model = plain_model()
    settings = {"chat_template_kwargs": '{"no_thinking": true}', "limit": 1, "num_samples": 1, "temperature": 0}
    _, (line,) = evaluate(model_name_or_path=saved(model, tokenizer), prompt_column="prompt", **settings)
    assert (line["prompt"], [line["completion"]]) == ("0+0=no", greedy(model, "0+0=no"))


@pytest.mark.parametrize("temperature", [0, 1])
def test_what_the_model_asks_of_generation_changes_nothing(evaluate, temperature, saved):
    settings = {"temperature": temperature, "num_samples": 4 if temperature else None}
    _, plain = evaluate(**settings)
    model = plain_model()
    assert temperature or completions_of(plain) == greedy(model)
    asked = {"do_sample": True, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "top_k": 2, "temperature": 0.1}
    model.generation_config.update(**asked)
    _, lines = evaluate(model_name_or_path=saved(model), output_dir="other", **settings)
    assert completions_of(lines) == completions_of(plain)


def test_directory_of_an_adapter(evaluate, saved, capsys):
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, r=16, lora_alpha=64)
    torch.manual_seed(0)
    adapter = saved(get_peft_model(plain_model(), config))
    _, lines = evaluate(model_name_or_path=adapter, temperature=0, num_samples=1)
    assert completions_of(lines) == greedy(PeftModel.from_pretrained(plain_model(), adapter)) != greedy(plain_model())
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "../base"}))
    with pytest.raises(SystemExit):
        evaluate(limit=1, model_name_or_path=adapter, output_dir="other")
    told = capsys.readouterr().err
    assert f"error: model_name_or_path='{adapter}': " in told and "../base" in told and "Traceback" not in told


# What the recipes' datasets on the hub look like, and a right answer to it
COLUMNS = {
    "gsm8k": ({"question": "1 + 1?", "answer": "1+1=<<1+1=2>>2\n#### 1,002"}, "1002"),
    "math500": (
        {"problem": "1?", "solution": r"\boxed{3}", "answer": r"\left( 3, \frac{\pi}{2} \right)", "level": 2},
        r"(3, \pi/2)",
    ),
    "aime24": ({"id": 60, "problem": "1?", "solution": "So 025.", "answer": "025", "url": "u", "year": "2024"}, "25"),
    "aime25": ({"problem": "1?", "answer": "70", "id": "0"}, "70"),
    "amc23": ({"id": 0, "question": "1?", "answer": "27.0", "url": "u"}, "27"),
    "minerva": ({"question": "1?", "answer": "4.5e33"}, r"4.5 \times 10^{33}"),
    "olympiad": (
        {"id": 1, "question": "1?", "final_answer": ["$2$, $-2$"], "modality": "Text-only", "unit": None},
        r"-2, 2",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(evaluate, name):
    example, right = COLUMNS[name]
    Dataset.from_list([example] * 2).to_json("local.jsonl")
    recipe = ROOT / "recipes" / "eval" / f"{name}.yaml"
    settings = {"dataset_name": "local.jsonl", "num_samples": 2, "reward_funcs": None}
    results, lines = evaluate("--config", str(recipe), **settings)
    assert results["rewards"]["math_reward"]["num_scored"] == 2 and len(lines) == 4
    assert lines[0]["prompt"].startswith("<|system|>Please reason step by step")
    assert f"fr3e eval --config recipes/eval/{name}.yaml --model_name_or_path MODEL" in header(recipe)
    assert yaml.safe_load(recipe.read_text())["output_dir"] == f"outputs/eval/{name}"
    # What a model might have written
    fields = ("prompt_column", "answer_column", "answer_separator")
    args = FR3EScriptArguments(**{key: results["arguments"][key] for key in fields})
    solution = map_columns(example, args)["solution"]
    assert math_reward([rf"So \boxed{{{right}}}.", r"So \boxed{1}."], [solution] * 2) == [1, 0]


def test_completions_of_a_model_that_was_trained_since_are_refused(evaluate, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(model_on_disk(), model)
    for _ in range(2):
        evaluate(limit=1, model_name_or_path=str(model))
    (weights,) = model.glob("*.safetensors")
    shutil.copy(weights, tmp_path / "weights")
    shutil.copy(tmp_path / "weights", weights)
    with pytest.raises(SystemExit):
        evaluate(limit=1, model_name_or_path=str(model))
    assert "has results of other arguments: weights was {'model.safetensors': " in capsys.readouterr().err


def test_completions_without_a_score_are_left_out_and_counted(evaluate, capsys):
    results, _lines = evaluate(reward_funcs="tests_of_eval.odd_ones")
    of_reward = results["rewards"]["tests_of_eval.odd_ones"]
    assert (of_reward["num_scored"], of_reward["num_unscored"]) == (2, 4)
    assert of_reward["pass@1"]["mean"] == 1
    assert "4 completions had no score (None or NaN). Their 1 problem(s) are left out." in capsys.readouterr().out
    # Also of a file that has NaN in it
    path = Path("out/completions.jsonl")
    path.write_text(path.read_text().replace("null", "NaN"))
    results, _ = evaluate(reward_funcs="tests_of_eval.odd_ones")
    assert results["rewards"]["tests_of_eval.odd_ones"]["num_unscored"] == 4


def test_rewards_that_are_no_shares_are_told_as_numbers():
    of_problems = [[3, -2], [1, 0], [0, 0]]
    lines = [[{"completion": "", "rewards": {"score": reward}} for reward in rewards] for rewards in of_problems]
    of_reward = measures(lines, ["score"], [1], None)["score"]
    assert of_reward["pass@1"]["low"] == pytest.approx(1 / 3 - 4.303 * 0.28868 / 3**0.5, abs=1e-3)  # Student's t
    arguments = {"model_name_or_path": "M", "dataset_name": "D", "num_samples": 2, "temperature": 1, "top_p": 1}
    results = {"arguments": arguments | {"max_completion_length": 8}, "num_problems": 3, "command": ""}
    results |= {"mean_completion_length": 2.0, "share_finished": 1.0, "rewards": {"score": of_reward}}
    text = as_markdown(results)
    assert "| pass@1 | 0.333 | -0.384 to 1.050 |" in text and "Student's t for others" in text
    of_reward["pass@1"] = {"mean": -1e300}  # of one problem
    text = as_markdown(results)
    assert "| pass@1 | -1e+300 |  |" in text and "Intervals" not in text
