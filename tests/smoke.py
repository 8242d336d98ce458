"""Run where `fr3e_trl` is installed without extras, and not in the working directory: three steps, and commands."""

import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

from factory import make_trainer

import fr3e_trl

assert "site-packages" in fr3e_trl.__file__, fr3e_trl.__file__
assert Path(fr3e_trl.__file__).with_name("py.typed").exists()
assert distribution("fr3e-trl").metadata["License-Expression"] == "Apache-2.0"

with tempfile.TemporaryDirectory() as directory:
    trainer = make_trainer(
        output_dir=directory,
        reward_funcs=lambda completions, **kwargs: [float(len(set(text))) for text in completions],
        max_completion_length=16,
        max_steps=3,
    )
    trainer.train()
    trainer.save_model()
    assert trainer.state.log_history[0]["fr3e/anchor/count"] > 0
    assert (Path(directory) / "model.safetensors").exists()

# The commands say what they do, or where those are that need a clone
for command in (["--help"], ["train", "--help"]):
    subprocess.run([Path(sys.executable).with_name("fr3e"), *command], check=True, capture_output=True)
command = [Path(sys.executable).with_name("fr3e"), "compare", "--help"]
missing = subprocess.run(command, capture_output=True, text=True, check=False)
assert missing.returncode != 0 and "python -m benchmarks compare" in missing.stderr, missing.stderr
print("The installed package works.")
