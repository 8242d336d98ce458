"""The policies that training starts from, made here: nothing is downloaded."""

import functools
import hashlib
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from fr3e_trl.commands.outputs import check_directory, differing, read_object, write_json
from fr3e_trl.commands.usage import UsageError

from .tasks import Task

SEED = 0  # of the problems, the demonstrator's slips and the training
MADE_OF = "made_of.json"  # in a policy's directory: the arguments that it was made by
NUM_DIGESTED = 64  # demonstrations that the name of a directory depends on


def small_config(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, hidden_size: int, num_layers: int, **settings: Any
) -> Qwen3Config:
    """A model of four heads."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden_size // 4,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )


def starting_policy(task: Task, directory: Path | None = None) -> Path:
    """
    The directory of a task's starting policy and its tokenizer, made first if it is not there.

    By default it is in the user's cache. Its name depends on everything that makes the policy, so that it is made anew
    when any of that changes.
    """
    return made_once(directory or _cached(task), functools.partial(_make, task), {"task": task.name})


def made_once(directory: Path, make: Callable[[Path], None], made_of: dict[str, Any]) -> Path:
    """
    The directory of a model. If it is not there, `make` puts it into a directory of another name, so that it is there
    whole or not at all. It depends on the arguments `made_of`: those that are `None` are whatever they were.

    Raises:
        UsageError: There is something else: a file, another directory, or a model of other arguments.
    """
    check_directory(directory)
    if (directory / "config.json").is_file():
        record = directory / MADE_OF
        asked = {name: value for name, value in made_of.items() if value is not None}
        differences = differing(read_object(record), asked) if record.exists() else ""
        if differences:
            raise UsageError(
                f"output_dir={str(directory)!r} has a policy that was made with other arguments: {differences}. Choose "
                "another directory."
            )
        return directory
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(
            f"output_dir={str(directory)!r} is not empty, and has no config.json of a policy. Choose an empty or new "
            "directory."
        )
    place = directory.resolve()  # a link stays where it is
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as partial:
        made = Path(partial) / "policy"
        make(made)
        write_json(made / MADE_OF, made_of)
        try:
            made.rename(place)
        except OSError:
            if not (place / "config.json").is_file():  # else another process was faster: its policy is the same
                raise
    return directory


def cache_dir() -> Path:
    """What can be made again, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fr3e_trl"


def _cached(task: Task) -> Path:
    made_of = [SEED, sorted(asdict(task).items()), list(demonstrations(task, NUM_DIGESTED))]
    if task.tools:
        made_of.append(task.make_tokenizer().chat_template)
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]
    return cache_dir() / "policies" / f"{task.name}-{digest}"


def demonstrations(task: Task, size: int) -> Dataset:
    """Prompts and what the demonstrator writes, the first `size` of an endless sequence."""
    rng = random.Random(SEED)
    rows = []
    for problem in task.examples("policy", SEED, size):
        completion = task.demonstrate(problem, rng)
        text = f" {completion}" if isinstance(completion, str) else completion
        rows.append({"prompt": problem["prompt"], "completion": text})
    return Dataset.from_list(rows)


def _make(task: Task, directory: Path) -> None:
    """Train a small Qwen3 from nothing on the task's demonstrations."""
    set_seed(SEED)
    tokenizer = task.make_tokenizer()
    model = Qwen3ForCausalLM(
        small_config(tokenizer, len(tokenizer), task.hidden_size, task.num_layers, max_position_embeddings=1024)
    )
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=output_dir,
                seed=SEED,
                max_steps=task.policy_steps,
                per_device_train_batch_size=task.policy_batch_size,
                learning_rate=task.policy_learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=task.policy_steps // 10,
                max_grad_norm=1.0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                report_to=[],
                logging_strategy="steps",
                logging_steps=100,
            ),
            train_dataset=demonstrations(task, task.policy_steps * task.policy_batch_size),
            processing_class=tokenizer,
        )
        trainer.train()
    assert isinstance(trainer.model, PreTrainedModel)
    trainer.model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
