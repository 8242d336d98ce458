"""What is pushed to the hub: what GRPOTrainer pushes, with a card of FR3E, to be loaded without this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

from factory import letters, make_trainer
from huggingface_hub import ModelCard
from models import make_model, make_tokenizer, model_on_disk
from peft import LoraConfig
from trl import GRPOTrainer

from fr3e_trl import FR3ETrainer

# What a user of the models runs, who has not got fr3e_trl
LOAD = """
import json, sys
sys.modules["fr3e_trl"] = None
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

def load(path, is_adapter):
    model = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(path).eval()
    inputs = AutoTokenizer.from_pretrained(path)("12+3=", return_tensors="pt")
    return model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist()

print(json.dumps([load(path, path == "adapter") for path in sys.argv[1:]]))
"""


def save(cls, name: str, **settings) -> list:
    """Train, and save what a push uploads. Returns what the model generates."""
    trainer = make_trainer(cls, reward_funcs=letters, output_dir=name, learning_rate=0.01, **settings)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(name, "sums/of-digits")
    inputs = trainer.processing_class("12+3=", return_tensors="pt")
    return trainer.model.eval().generate(**inputs, max_new_tokens=8, do_sample=False).tolist()


def test_what_is_pushed_is_what_grpo_trainer_pushes_and_loads_without_this_package():
    make_model().save_pretrained("base")  # an adapter names its base
    make_tokenizer().save_pretrained("base")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    before = [
        save(GRPOTrainer, "grpo", model=model_on_disk()),
        save(FR3ETrainer, "fr3e", model=model_on_disk()),
        save(FR3ETrainer, "adapter", model="base", peft_config=lora),
    ]
    command = [sys.executable, "-c", LOAD, "grpo", "fr3e", "adapter"]
    loaded = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert json.loads(loaded.stdout.splitlines()[-1]) == before
    theirs, ours, adapter = ({path.name for path in Path(name).iterdir()} for name in ("grpo", "fr3e", "adapter"))
    assert ours == theirs >= {"model.safetensors", "tokenizer.json", "README.md"}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= adapter
    assert "model.safetensors" not in adapter
    check_card(ModelCard.load("fr3e/README.md"), ModelCard.load("grpo/README.md"))


def check_card(card: ModelCard, theirs: ModelCard) -> None:
    assert {"trl", "fr3e", "generated_from_trainer"} <= set(card.data.tags) and "grpo" not in card.data.tags
    assert card.data.library_name == "transformers" and card.data.datasets == "sums/of-digits"
    assert card.data.to_dict().keys() == theirs.data.to_dict().keys()
    # TRL's sections, and another
    sections = [[line for line in c.text.splitlines() if line.startswith("#")] for c in (card, theirs)]
    sections[1][0] = sections[1][0].replace("grpo", "fr3e")  # its name, in the title
    assert [section for section in sections[0] if section != "### Training run"] == sections[1]
    assert "[First Return, Entropy-Eliciting Explore](https://huggingface.co/papers/2507.07017)" in card.text
    assert "trained with FR3E" in card.text
    assert "title = {{First Return, Entropy-Eliciting Explore}}" in " ".join(card.text.split())
    assert "[sums/of-digits](https://huggingface.co/datasets/sums/of-digits)" in card.text
