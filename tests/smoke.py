"""
What an installed package without extras must do: train a step, and answer at the command line. A script, to be run
where `fr3e_trl` is not in the working directory.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

from models import CPU, make_dataset, make_model, make_tokenizer

import fr3e_trl
from fr3e_trl import FR3EConfig, FR3ETrainer

assert "site-packages" in fr3e_trl.__file__, fr3e_trl.__file__
assert Path(fr3e_trl.__file__).with_name("py.typed").exists()
assert distribution("fr3e-trl").metadata["License-Expression"] == "Apache-2.0"

with tempfile.TemporaryDirectory() as directory:
    args = FR3EConfig(
        directory, **CPU, num_generations=8, per_device_train_batch_size=16, max_completion_length=16, max_steps=1
    )
    trainer = FR3ETrainer(
        make_model(),
        lambda completions, **kwargs: [float(len(set(text))) for text in completions],
        args,
        train_dataset=make_dataset(),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    trainer.save_model()
    assert trainer.state.log_history[0]["fr3e/anchor/count"] > 0
    assert (Path(directory) / "model.safetensors").exists()

# The commands say which extra is missing, or what they do
for command in (["--help"], ["cost", "--help"]):
    subprocess.run([Path(sys.executable).with_name("fr3e"), *command], check=True, capture_output=True)
missing = subprocess.run(
    [Path(sys.executable).with_name("fr3e"), "compare", "--help"], capture_output=True, text=True, check=False
)
assert missing.returncode != 0 and "pip install 'fr3e-trl[bench]'" in missing.stderr, missing.stderr
print("The installed package works.")
