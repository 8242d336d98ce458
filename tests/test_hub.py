"""Pushing to the hub, the model card, and loading what was pushed without this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

from hub_stand_in import running_hub
from huggingface_hub import ModelCard

REPO = "someone/tiny-model"

# What a user of the model runs, who has not got fr3e_trl
LOAD = """
import contextlib, io, json, re, sys
sys.modules["fr3e_trl"] = None
if {card}:
    from huggingface_hub import ModelCard
    with contextlib.redirect_stdout(io.StringIO()):
        exec(*re.findall(r"```python\\n(.*?)```", ModelCard.load({repo!r}).text, flags=re.DOTALL))
from transformers import AutoModelForCausalLM, AutoTokenizer
if {lora}:
    from peft import AutoPeftModelForCausalLM as AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({repo!r}).eval()
inputs = AutoTokenizer.from_pretrained({repo!r})("12+3=", return_tensors="pt")
print(json.dumps(model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist()))
"""


def run(hub, directory: Path, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """Run Python in `directory`, with `hub` as its hub and a cache of its own."""
    variables = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": "token-of-someone",
        "HF_HOME": str(directory / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    completed = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
    )
    assert not check or completed.returncode == 0, completed.stderr[-3000:]
    return completed


def train(hub, directory: Path, method: str, what: str = "", **options) -> subprocess.CompletedProcess:
    return run(hub, directory, str(Path(__file__).with_name("hub_train.py")), method, what, **options)


def last_line(completed: subprocess.CompletedProcess) -> list:
    return json.loads(completed.stdout.splitlines()[-1])


def test_what_is_pushed_is_what_grpo_trainer_pushes_and_loads_without_this_package(tmp_path):
    pushed = {}
    for method in ("grpo", "fr3e"):
        (tmp_path / method).mkdir()
        has_own_card = method == "fr3e"  # TRL's asks the pipeline for a chat
        with running_hub() as hub:
            trained = last_line(train(hub, tmp_path / method, method))
            pushed[method] = hub.repos[REPO]
            assert hub.commits[REPO] == ["End of training"]
            loaded = last_line(
                run(
                    hub,
                    tmp_path,
                    "-c",
                    LOAD.format(lora=False, card=has_own_card, repo=REPO),
                    HF_HOME=str(tmp_path / method),
                )
            )
            assert loaded == trained
    assert pushed["fr3e"].keys() == pushed["grpo"].keys() >= {"model.safetensors", "tokenizer.json", "README.md"}
    assert pushed["fr3e"]["model.safetensors"] != pushed["grpo"]["model.safetensors"]
    check_card(pushed["fr3e"]["README.md"].decode(), pushed["grpo"]["README.md"].decode())


def check_card(text: str, of_grpo: str) -> None:
    card, theirs = ModelCard(text), ModelCard(of_grpo)
    assert {"trl", "fr3e", "generated_from_trainer"} <= set(card.data.tags) and "grpo" not in card.data.tags
    assert card.data.library_name == "transformers" and card.data.datasets == "sums/of-digits"
    assert card.data.to_dict().keys() == theirs.data.to_dict().keys()
    # TRL's sections, and three more
    ours = ("### Result", "### Training run", "### FR3E settings")
    sections = [[line for line in c.text.splitlines() if line.startswith("#")] for c in (card, theirs)]
    assert [section for section in sections[0] if section not in ours] == sections[1]
    assert "[First Return, Entropy-Eliciting Explore](https://huggingface.co/papers/2507.07017)" in card.text
    assert "trained with FR3E" in card.text
    assert "title = {{First Return, Entropy-Eliciting Explore}}" in " ".join(card.text.split())
    assert "prompts of [sums/of-digits](https://huggingface.co/datasets/sums/of-digits)" in " ".join(card.text.split())
    assert f'pipeline("text-generation", model="{REPO}", device_map="auto")' in card.text


def test_every_save_is_pushed(tmp_path):
    with running_hub() as hub:
        train(hub, tmp_path, "fr3e", "every_save")
        assert any("step" in message for message in hub.commits[REPO])
        assert "fr3e" in ModelCard(hub.repos[REPO]["README.md"].decode()).data.tags


def test_an_adapter_loads_with_plain_peft(tmp_path):
    with running_hub() as hub:
        trained = last_line(train(hub, tmp_path, "fr3e", "lora"))
        assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= hub.repos[REPO].keys()
        assert "model.safetensors" not in hub.repos[REPO]
        assert last_line(run(hub, tmp_path, "-c", LOAD.format(lora=True, card=True, repo=REPO))) == trained


def test_a_hub_that_fails_says_so_and_the_model_is_kept(tmp_path):
    with running_hub() as hub:
        hub.broken = True
        failed = train(hub, tmp_path, "fr3e", check=False)
        assert failed.returncode != 0 and "500" in failed.stderr
        loaded = run(hub, tmp_path, "-c", LOAD.format(lora=False, card=False, repo=str(tmp_path / "tiny-model")))
        assert len(last_line(loaded)) == 1


def test_a_wrong_token_is_refused(tmp_path):
    with running_hub() as hub:
        failed = train(hub, tmp_path, "fr3e", check=False, HF_TOKEN="wrong")
        assert failed.returncode != 0 and "401" in failed.stderr and not hub.repos
