"""Trains tiny models and pushes each, in a process whose hub is the stand-in. Run by test_hub.py."""

import json
import sys

from factory import make_trainer
from models import make_model, make_tokenizer, model_on_disk
from peft import LoraConfig
from trl import GRPOTrainer

from fr3e_trl import FR3ETrainer


def reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def main(output_dir: str, method: str, what: str = "") -> list:
    """Train and push to a repository that is called as the directory. Returns what the model generates."""
    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 2, "max_completion_length": 8}
    if what == "every_save":
        settings |= {"push_to_hub": True, "hub_strategy": "every_save", "save_strategy": "steps", "save_steps": 1}
    lora = None
    if what == "lora":
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        make_model().save_pretrained("base")
        make_tokenizer().save_pretrained("base")
    cls, model = {"fr3e": FR3ETrainer, "grpo": GRPOTrainer}[method], "base" if lora else model_on_disk()
    settings |= {"reward_funcs": reward, "output_dir": output_dir, "learning_rate": 0.01}
    trainer = make_trainer(cls, model=model, peft_config=lora, **settings)  # an adapter names its base
    trainer.train()
    trainer.push_to_hub(dataset_name="sums/of-digits")
    model = trainer.model.eval()
    inputs = trainer.processing_class("12+3=", return_tensors="pt")
    return model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist()


if __name__ == "__main__":
    print(json.dumps([main(*run) for run in json.loads(sys.argv[1])]))
