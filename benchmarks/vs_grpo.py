"""
FR3E beside GRPO: what a row costs.

    make bench        (or: python benchmarks/vs_grpo.py --model PATH_OR_ID --num_generations 8)

`FR3ETrainer` and `GRPOTrainer` train the same model on the same prompts, rows and seed, in turns of a few steps, in one
process, so that what else the machine does meanwhile meets both. Printed are ratios, FR3E / GRPO, and where a step's
time goes. Each moment counts once, for the innermost of the parts below that is running:

- generation: transformers' `generate`;
- log-probs: forward passes outside of the loss, for FR3E those that give the entropies;
- rewards: TRL's reward computation, with the reward functions;
- loss: TRL's loss, its forward pass included;
- FR3E: this package. Requests and padding, anchors, values, advantages, rejection, metrics;
- TRL: the rest of the step: assembling the batch, backward pass, optimizer.
"""

import argparse
import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reasoning_gym
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.generation.on_transformers import GenerateSampler
from fr3e_trl.training.trl_seams import RowsGRPOTrainer

PARTS = ["generation", "log-probs", "rewards", "loss", "FR3E", "TRL"]

TIMED = [
    (GenerationMixin, "generate", "generation"),
    (GRPOTrainer, "_get_per_token_logps_and_entropies", "log-probs"),
    (GRPOTrainer, "_calculate_rewards", "rewards"),
    (GRPOTrainer, "_compute_loss", "loss"),
    (GRPOTrainer, "_generate_and_score_completions", "TRL"),
    (GRPOTrainer, "training_step", "TRL"),
    (GenerateSampler, "sample", "FR3E"),
    (RowsGRPOTrainer, "_compute_loss", "FR3E"),
    (RowsGRPOTrainer, "token_statistics", "FR3E"),
    (FR3ETrainer, "_generate_and_score_completions", "FR3E"),
]


class Stopwatch:
    """Time by part, each moment counted for the innermost part that is running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._running: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        # Inside the loss, the forward pass is the loss's
        self._running.append("loss" if name == "log-probs" and "loss" in self._running else name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def time(self, owner: type, method: str, part: str) -> None:
        """Have every call of a method counted for `part`."""
        function: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        setattr(owner, method, timed)


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(f">{a}<" in completion) for completion, a in zip(completions, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_model = Path(__file__).parents[1] / "examples" / "demo_policy"
    parser.add_argument("--model", default=str(default_model), help="path or hub id; the demo's policy by default")
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--num_prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--max_completion_length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="steps of each trainer in a turn")
    parser.add_argument("--turns", type=int, default=6, help="turns of each trainer, the first of them not counted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    stopwatch = Stopwatch()
    for timed in TIMED:
        stopwatch.time(*timed)
    problems = reasoning_gym.create_dataset(
        "chain_sum", min_terms=5, max_terms=6, min_digits=1, max_digits=1, seed=options.seed, size=2000
    )
    dataset = Dataset.from_list([{"prompt": p["question"], "answer": p["answer"]} for p in problems])
    rows = options.num_generations * options.num_prompts
    settings = {
        "num_generations": options.num_generations,
        "per_device_train_batch_size": rows,
        "max_completion_length": options.max_completion_length,
        "max_steps": options.steps,
        "seed": options.seed,
        "learning_rate": 1e-5,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        # What differs between the trainers' defaults, and is not FR3E itself
        "epsilon_high": 0.28,
        "scale_rewards": "none",
    }
    seconds = {name: dict.fromkeys(PARTS, 0.0) for name in ("FR3E", "GRPO")}
    tokens = {"FR3E": 0.0, "GRPO": 0.0}
    pairs: list[tuple[str, type[GRPOTrainer], type[GRPOConfig]]] = [
        ("FR3E", FR3ETrainer, FR3EConfig),
        ("GRPO", GRPOTrainer, GRPOConfig),
    ]
    with tempfile.TemporaryDirectory() as output_dir:
        trainers = {
            name: trainer_class(
                AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
                right,
                config_class(output_dir, **settings),
                train_dataset=dataset,
                processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
            )
            for name, trainer_class, config_class in pairs
        }
        for trainer in trainers.values():
            trainer.remove_callback(PrinterCallback)
        for turn in track(range(options.turns), description="Turns", console=Console(stderr=True)):
            for name, trainer in trainers.items():
                stopwatch.seconds = dict.fromkeys(PARTS, 0.0)
                trainer.train()
                if turn > 0:
                    for part in PARTS:
                        seconds[name][part] += stopwatch.seconds[part]
                    per_row = "fr3e/tokens/per_row" if name == "FR3E" else "completions/mean_length"
                    tokens[name] += sum(entry.get(per_row, 0) for entry in trainer.state.log_history)

    steps = options.steps * (options.turns - 1)
    print(f"{steps} steps each of {options.num_prompts} prompts x {options.num_generations} rows; {options.model}")
    config = trainers["FR3E"].args
    print(f"FR3E: {config.num_bases} base trajectories and {config.num_anchors} anchors a prompt")
    print_ratios(seconds, {name: count / steps for name, count in tokens.items()})
    print_shares(seconds)


def print_ratios(seconds: dict[str, dict[str, float]], tokens_per_row: dict[str, float]) -> None:
    table = Table(title="FR3E / GRPO")
    for column in ("", "ratio", "FR3E", "GRPO"):
        table.add_column(column, justify="left" if column == "" else "right")
    entries = [
        ("generated tokens per row", tokens_per_row["FR3E"], tokens_per_row["GRPO"]),
        ("generation time, s", seconds["FR3E"]["generation"], seconds["GRPO"]["generation"]),
        ("whole step's time, s", sum(seconds["FR3E"].values()), sum(seconds["GRPO"].values())),
    ]
    for what, fr3e, grpo in entries:
        table.add_row(what, f"{fr3e / grpo:.2f}", f"{fr3e:.2f}", f"{grpo:.2f}")
    Console().print(table)


def print_shares(seconds: dict[str, dict[str, float]]) -> None:
    table = Table(title="Share of the step's time")
    for column in ("", *PARTS):
        table.add_column(column, justify="right")
    for name, parts in seconds.items():
        table.add_row(name, *(f"{parts[part] / sum(parts.values()):.1%}" for part in PARTS))
    Console().print(table)


if __name__ == "__main__":
    main()
