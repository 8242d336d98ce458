"""Pushing to the hub, the model card, and loading what was pushed without this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

from hub_stand_in import running_hub
from huggingface_hub import ModelCard

# What a user of the models runs, who has not got fr3e_trl
LOAD = """
import json, sys
sys.modules["fr3e_trl"] = None
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

def load(repo, is_adapter):
    model = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(repo).eval()
    inputs = AutoTokenizer.from_pretrained(repo)("12+3=", return_tensors="pt")
    return model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist()

print(json.dumps([load(*arguments) for arguments in json.loads(sys.argv[1])]))
"""

# What trains, by the repository that it is pushed to
RUNS = {"tiny-grpo": ("grpo",), "tiny-model": ("fr3e",), "tiny-saves": ("fr3e", "every_save")}
RUNS |= {"tiny-adapter": ("fr3e", "lora")}


def run(hub, directory: Path, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "token-of-someone", "HF_HOME": str(directory / "cache")}
    variables |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    given = {"cwd": directory, "env": os.environ | variables | environment, "capture_output": True, "text": True}
    completed = subprocess.run([sys.executable, *command], **given)
    assert not check or completed.returncode == 0, completed.stderr[-3000:]
    return completed


def train(hub, directory: Path, runs: dict, **options) -> subprocess.CompletedProcess:
    script, arguments = Path(__file__).with_name("hub_train.py"), [[name, *run] for name, run in runs.items()]
    return run(hub, directory, str(script), json.dumps(arguments), **options)


def load(hub, directory: Path, *arguments: tuple[str, bool]) -> list:
    return last_line(run(hub, directory, "-c", LOAD, json.dumps(arguments)))


def last_line(completed: subprocess.CompletedProcess) -> list:
    return json.loads(completed.stdout.splitlines()[-1])


def test_what_is_pushed_is_what_grpo_trainer_pushes_and_loads_without_this_package(tmp_path):
    with running_hub() as hub:
        before = dict(zip(RUNS, last_line(train(hub, tmp_path, RUNS)), strict=True))
        loaded = [("tiny-grpo", False), ("tiny-model", False), ("tiny-adapter", True)]  # with plain PEFT
        after = load(hub, tmp_path, *((f"someone/{name}", is_adapter) for name, is_adapter in loaded))
    assert after == [before[name] for name, _ in loaded]
    grpo, fr3e, saves, adapter = (hub.repos[f"someone/{name}"] for name in RUNS)
    for name in ("tiny-grpo", "tiny-model"):
        assert hub.commits[f"someone/{name}"] == ["End of training"]
    assert fr3e.keys() == grpo.keys() >= {"model.safetensors", "tokenizer.json", "README.md"}
    assert fr3e["model.safetensors"] != grpo["model.safetensors"]
    theirs = grpo["README.md"].decode().replace("tiny-grpo", "tiny-model")  # its name, in the title
    check_card(fr3e["README.md"].decode(), theirs)
    # Every save
    assert any("step" in message for message in hub.commits["someone/tiny-saves"])
    assert "fr3e" in ModelCard(saves["README.md"].decode()).data.tags
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= adapter.keys()
    assert "model.safetensors" not in adapter


def check_card(text: str, of_grpo: str) -> None:
    card, theirs = ModelCard(text), ModelCard(of_grpo)
    assert {"trl", "fr3e", "generated_from_trainer"} <= set(card.data.tags) and "grpo" not in card.data.tags
    assert card.data.library_name == "transformers" and card.data.datasets == "sums/of-digits"
    assert card.data.to_dict().keys() == theirs.data.to_dict().keys()
    # TRL's sections, and another
    sections = [[line for line in c.text.splitlines() if line.startswith("#")] for c in (card, theirs)]
    assert [section for section in sections[0] if section != "### Training run"] == sections[1]
    assert "[First Return, Entropy-Eliciting Explore](https://huggingface.co/papers/2507.07017)" in card.text
    assert "trained with FR3E" in card.text
    assert "title = {{First Return, Entropy-Eliciting Explore}}" in " ".join(card.text.split())
    assert "[sums/of-digits](https://huggingface.co/datasets/sums/of-digits)" in card.text
    assert 'pipeline("text-generation", model="someone/tiny-model", device_map="auto")' in card.text


def test_a_hub_that_refuses_says_so_and_the_model_is_kept(tmp_path):
    with running_hub() as hub:
        failed = train(hub, tmp_path, {"tiny-model": ("fr3e",)}, check=False, HF_TOKEN="wrong")
        assert failed.returncode != 0 and "401" in failed.stderr and not hub.repos
        hub.broken = True
        failed = train(hub, tmp_path, {"tiny-model": ("fr3e",)}, check=False)
        assert failed.returncode != 0 and "500" in failed.stderr
        assert len(*load(hub, tmp_path, (str(tmp_path / "tiny-model"), False))) == 1
