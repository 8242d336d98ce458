"""`fr3e eval` with a real server on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from servers import POLICY
from transformers import AutoModelForCausalLM, AutoTokenizer

from fr3e_trl.commands import cli

ROOT = Path(__file__).parents[2]
REWARD = "recipes.smoke_reward.answer_reward"


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    """The reward is looked for from the root of the repository."""
    monkeypatch.chdir(ROOT)


def evaluate(output_dir, **settings):
    defaults = {
        "model_name_or_path": POLICY,
        "dataset_name": "recipes/smoke.jsonl",
        "reward_funcs": REWARD,
        "answer_regex": "<answer>(.*?)</answer>",
        "max_completion_length": 80,
        "output_dir": output_dir,
    }
    cli.main(["eval", *(f"--{name}={value}" for name, value in (defaults | settings).items())])
    results = json.loads((output_dir / "results.json").read_text())
    lines = [json.loads(line) for line in (output_dir / "completions.jsonl").read_text().splitlines()]
    return results, sorted(lines, key=lambda line: (line["problem"], line["sample"]))


def test_server_and_generate_agree(server, tmp_path):
    greedy = {"temperature": 0, "num_samples": 1}
    _, here = evaluate(tmp_path / "here", **greedy)
    results, there = evaluate(tmp_path / "there", vllm_server_base_url=server.url, **greedy)
    assert there == here
    assert 0 < results["rewards"][REWARD]["pass@1"]["mean"] < 1


def test_samples_of_a_server_go_on_where_they_were_cut(server, tmp_path):
    settings = {"vllm_server_base_url": server.url, "num_samples": 4, "limit": 8}
    _, lines = evaluate(tmp_path, **settings)
    path = tmp_path / "completions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    assert evaluate(tmp_path, **settings)[1] == lines  # each completion has a seed of its own
    assert len({line["completion"] for line in lines}) > 8
    assert all(line["is_finished"] or line["num_tokens"] == 80 for line in lines)


def test_server_loads_an_adapter(server, tmp_path):
    adapter = tmp_path / "adapter"
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, r=8, lora_alpha=16)
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(POLICY), config).save_pretrained(adapter)
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(adapter)
    settings = {"model_name_or_path": adapter, "temperature": 0, "num_samples": 1, "limit": 8}
    _, here = evaluate(tmp_path / "here", **settings)
    _, there = evaluate(tmp_path / "there", vllm_server_base_url=server.url, **settings)
    assert [line["completion"] for line in there] == [line["completion"] for line in here]
    _, plain = evaluate(tmp_path / "plain", **settings | {"model_name_or_path": POLICY})
    assert [line["completion"] for line in plain] != [line["completion"] for line in here]
