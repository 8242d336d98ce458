"""
Show that a refactor changed nothing: train the same tiny models at two revisions, and compare bit for bit.

    python tests/unchanged.py save DIR [--only NAME ...]    # five steps of each configuration, into DIR/NAME.json
    python tests/unchanged.py compare DIR_A DIR_B           # a table; exits with 1 if anything differs
    python tests/unchanged.py resume DIR                    # train on from the checkpoint in DIR, compare with DIR

For an old revision, check it out elsewhere and set PYTHONPATH to it: this file, and those beside it that it imports,
need nothing of the package but what is public. "vllm" runs where vLLM is installed (.venv-vllm). The same machine and
libraries are taken for granted.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # before any import

import argparse
import functools
import hashlib
import importlib.util
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from models import CPU, make_dataset, make_model, make_tokenizer
from peft import LoraConfig
from tool_policy import Walk, make_tool_dataset, make_tool_policy, make_tool_tokenizer
from transformers import AutoTokenizer, set_seed
from vision_models import make_image_dataset, make_processor, make_vision_model
from vllm_on_cpu import keep_weights_plain

import fr3e_trl
from fr3e_trl import FR3EConfig, FR3ETrainer, Sample

CHECKPOINT_STEP = 3
POLICY = Path(fr3e_trl.__file__).parents[1] / "examples" / "demo_policy"


def text_of(completion: str | list[dict]) -> str:
    return completion if isinstance(completion, str) else json.dumps(completion, sort_keys=True)


def letters(completions, **kwargs):
    return [sum(math.sin(i * ord(char)) for i, char in enumerate(text_of(c), 1)) for c in completions]


def one_in(n: int):
    """A reward that one completion in n gets: of few, states are rejected, and of fewer also in spite of a prior."""
    return lambda completions: [float(sum(map(ord, text_of(c))) % n == 0) for c in completions]


class DigitSampler:
    """Draws digits by the seed, with an EOS at the end of the budget."""

    def __init__(self, trainer):
        self.rng = random.Random(trainer.args.seed)

    def sample(self, requests):
        return [[self.draw(request.max_new_tokens) for _ in range(request.num_samples)] for request in requests]

    def draw(self, num_tokens: int) -> Sample:
        return Sample([*(self.rng.randrange(5, 15) for _ in range(num_tokens - 1)), 1], [-math.log(10)] * num_tokens)


# Configurations: settings, and what else the trainer takes

SIZES = {"num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 16, "learning_rate": 1e-3}
TWICE = {"steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 8}
PRESET = {"num_generations": 16, "num_anchors": 3, "learning_rate": 1e-3}
# Of REFILL with the seeds below: some rows are rejected, and some are left over for the next batch
REFILL = {"max_refills": 2, "per_device_train_batch_size": 8, "steps_per_generation": 2}
CHECKPOINTS = {"save_strategy": "steps", "save_steps": CHECKPOINT_STEP}
RECIPES = Path(__file__).parents[1] / "recipes" / "accelerate"
SHARDED = ("fsdp2", "zero3")  # in two processes, by the recipe of that name

DIALOGUES = {"model": make_tool_policy, "processing_class": make_tool_tokenizer, "train_dataset": make_tool_dataset()}
DIALOGUES |= {"reward_funcs": None}
LLAVA = {"model": functools.partial(make_vision_model, "llava"), "train_dataset": make_image_dataset()}
COLOCATED = {"model": lambda: str(POLICY), "processing_class": lambda: AutoTokenizer.from_pretrained(POLICY)}
COLOCATED |= {"use_vllm": True, "vllm_mode": "colocate"}

CONFIGURATIONS = {
    "grpo": {"num_anchors": 0},
    "rollout": {"credit": "rollout", "negative_advantage_scale": 0.5, "anchor_min_gap": 2} | TWICE,
    "tree": TWICE,
    "paper": {"preset": FR3EConfig.paper} | PRESET,
    "released": {"preset": FR3EConfig.released, "num_base_trajectories": 4} | PRESET,
    "refill": {"value_prior_strength": 0, "reward_funcs": one_in(5), "seed": 7} | REFILL,
    # Digits are above the threshold, other words below
    "environment": {"environment_factory": Walk, "max_completion_length": 40, "anchor_threshold": 1.0} | DIALOGUES,
    "images": {"processing_class": functools.partial(make_processor, "llava")} | LLAVA,
    "lora": {"peft_config": LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"), "beta": 0.05} | TWICE,
    "sampler": {"sampler": DigitSampler} | TWICE,
    "fsdp2": {"per_device_train_batch_size": 8},
    "zero3": {"per_device_train_batch_size": 8},
    "vllm": {"peft_config": LoraConfig(r=4, target_modules="all-linear")} | COLOCATED,
    "resume": {"value_tracker": True, "reward_funcs": one_in(41), "seed": 3} | REFILL | CHECKPOINTS,
}
TIMES = ("_time", "_runtime", "_per_second", "train_loss", "total_flos")
OF_TRAINER = "model reward_funcs train_dataset processing_class peft_config environment_factory sampler".split()


def make_trainer(name: str, output_dir: str, texts: list[str]) -> FR3ETrainer:
    """The trainer of a configuration, which adds to `texts` all completions that it scores."""
    settings = SIZES | CPU | {"output_dir": output_dir, "max_steps": 5} | CONFIGURATIONS[name]
    arguments = {key: settings.pop(key) for key in OF_TRAINER if key in settings}
    reward = arguments.pop("reward_funcs", letters)

    def reward_and_keep(completions, **kwargs):
        texts.extend(map(text_of, completions))
        return reward(completions) if reward else [0.0] * len(completions)

    model, processing_class = arguments.pop("model", make_model)(), arguments.pop("processing_class", make_tokenizer)()
    arguments = {"train_dataset": make_dataset(6 if "max_refills" in settings else 16)} | arguments
    config = settings.pop("preset", FR3EConfig)(**settings)
    return FR3ETrainer(model, reward_and_keep, config, processing_class=processing_class, **arguments)


def digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def train(name: str, directory: Path, checkpoint: str | None = None) -> None:
    """Train a configuration, and write what came of it to `directory`."""
    torch.set_num_threads(1)
    if name in SHARDED:  # accelerate asks for a device other than the CPU before it shards
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if name == "vllm":
        keep_weights_plain()
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    texts: list[str] = []
    trainer = make_trainer(name, str(directory / f"output_{name}"), texts)
    set_seed(1)
    trainer.train(checkpoint)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.accelerator.is_main_process:  # with ZeRO the state is its alone
        parts = [state[key].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for key in sorted(state)]
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        steps = [{key: repr(value) for key, value in entry.items() if not key.endswith(TIMES)} for entry in logs]
        result = {"weights": digest(parts), "completions": digest([text.encode() for text in sorted(texts)])}
        result |= {"package": str(Path(fr3e_trl.__file__).parent), "steps": steps}
        (directory / f"{name}.json").write_text(json.dumps(result, indent=1))
    if name in SHARDED:
        torch.distributed.destroy_process_group()


def run(name: str, directory: Path, checkpoint: str | None = None) -> str:
    """Train a configuration in a process of its own, or in two. Returns what to say of it."""
    needed = {"vllm": "vllm", "zero3": "deepspeed"}.get(name)
    if needed and importlib.util.find_spec(needed) is None:
        return f"not run here: {needed} is not installed"
    log = directory / f"{name}.log"
    (directory / f"{name}.json").unlink(missing_ok=True)
    command = [sys.executable]
    if name in SHARDED:
        command += ["-m", "accelerate.commands.launch", "--config_file", RECIPES / f"{name}.yaml"]
        command += ["--num_processes=2", "--mixed_precision=no", "--main_process_port=0"]
    command += [__file__, "train", directory, *filter(None, [checkpoint]), "--only", name]
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=file)
    return "saved" if (directory / f"{name}.json").exists() else f"failed, see {log}"


def save(directory: Path, names: list[str]) -> bool:
    said = {}
    for name in names:
        said[name] = run(name, directory)
        print(f"{name:12} {said[name]}", flush=True)
    return not any(text.startswith("failed") for text in said.values())


def first_difference(a: dict, b: dict, first_step: int = 1) -> str | None:
    """Where two results part; metrics that only one of them has are passed over."""
    if len(a["steps"]) != len(b["steps"]):
        return f"{len(a['steps'])} steps, {len(b['steps'])} steps"
    for x, y in zip(a["steps"], b["steps"], strict=True):
        for key in [key for key in x if key in y]:
            if x[key] != y[key] and float(x["step"]) >= first_step:
                return f"step {x['step']}: {key} {x[key]}, {y[key]}"
    for key in ("completions", "weights"):
        if a[key] != b[key] and not (key == "completions" and first_step > 1):
            return f"{key} {a[key][:8]}, {b[key][:8]}"
    return None


def metrics_of_one(a: dict, b: dict) -> str:
    names_a, names_b = ({key for step in result["steps"] for key in step} for result in (a, b))
    only = sorted(names_a - names_b), sorted(names_b - names_a)
    return "".join(f"; only in {side}: {' '.join(names)}" for side, names in zip("AB", only, strict=True) if names)


def compare(directory_a: Path, directory_b: Path, names: list[str]) -> bool:
    is_same = True
    print(f"{'name':12} {'same':5} first difference (A, B)")
    for name in names:
        files = [directory / f"{name}.json" for directory in (directory_a, directory_b)]
        missing = [side for side, file in zip("AB", files, strict=True) if not file.exists()]
        if missing:
            print(f"{name:12} {'-':5} not run in {' and '.join(missing)}")
            is_same &= len(missing) == 2
            continue
        a, b = (json.loads(file.read_text()) for file in files)
        difference = first_difference(a, b)
        print(f"{name:12} {'no' if difference else 'yes':5} {difference or ''}{metrics_of_one(a, b)}")
        is_same &= difference is None
    return is_same


def resume(directory: Path) -> bool:
    """Train on from the checkpoint in a directory that another revision may have written."""
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = f"output_resume/checkpoint-{CHECKPOINT_STEP}"
        shutil.copytree(directory / checkpoint, Path(temporary, checkpoint))
        said = run("resume", Path(temporary), str(Path(temporary, checkpoint)))
        if said != "saved":
            print(Path(temporary, "resume.log").read_text())
            return False
        whole, resumed = (json.loads((path / "resume.json").read_text()) for path in (directory, Path(temporary)))
    difference = first_difference(whole, resumed, first_step=CHECKPOINT_STEP + 1)
    print(difference or f"steps {CHECKPOINT_STEP + 1} to {len(whole['steps'])} and the weights are the same")
    return difference is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["save", "compare", "resume", "train"])
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), metavar="NAME")
    options = parser.parse_args()
    directory, *others = (path.absolute() for path in options.directories)
    if len(others) != (options.command == "compare") and options.command != "train":
        parser.error("compare takes two directories, the other commands one")
    if options.command == "compare":
        sys.exit(not compare(directory, *others, options.only))
    if options.command == "resume":
        sys.exit(not resume(directory))
    directory.mkdir(parents=True, exist_ok=True)
    if options.command == "train":  # in a process that was started here, perhaps from a checkpoint
        train(*options.only, directory, *map(str, others))
    else:
        sys.exit(not save(directory, options.only))


if __name__ == "__main__":
    main()
