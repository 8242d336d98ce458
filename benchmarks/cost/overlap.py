"""
What it saves to draw the next batch's rollouts while this one is trained on (max_staleness).

    python -m benchmarks cost overlap
    accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes 2 -m benchmarks cost overlap

A stand-in for the server takes two seconds for a batch's rollouts, and each update takes one: both only sleep, so that
the order of events shows without noise. With a server that computes, as `make serve` starts one, and a core for each:

    taskset -c 0 make serve
    taskset -c 1 python -m benchmarks cost overlap --vllm_server_base_url http://127.0.0.1:8000

A run without overlap, one with half and one with all of a batch's updates overlapped, in turns. Printed are seconds a
batch, as shares of those without overlap and of the longer of its two parts, generation and updates, which no order of
events can beat. GRPO is `num_anchors=0`, without overlap, with the same server and as many rows.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from matplotlib import pyplot
from peft import LoraConfig
from rich.console import Console
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, set_seed

from fr3e_trl.fr3e_config import FR3EConfig
from fr3e_trl.fr3e_trainer import FR3ETrainer

from ..runs import be_quiet
from .common import count, followed, make_parser, make_table
from .stand_in import StandIn

POLICY = Path(__file__).parents[2] / "examples" / "demo_policy"
NUM_GENERATIONS = 4
GENERATION_SECONDS, UPDATE_SECONDS = 2.0, 1.0  # of the stand-in's batch, and of an update beside it

# Batches of a run: the first have nothing to hide behind
NUM_WARM, NUM_COUNTED = 2, 3

WAITED = "fr3e/overlap/seconds_waited"


class Timed(FR3ETrainer):
    """
    A trainer that notes when its batches begin and when it updates.

    Attributes:
        seconds (`float`):
            How much longer each update takes than it does.
    """

    seconds = 0.0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.batches: list[float] = []
        self.generation: list[float] = []  # seconds of it, before each batch and at the end
        self.updates: list[tuple[float, float]] = []
        self.add_callback(NoteBatches(self))

    def _compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        began = time.monotonic()
        loss = super()._compute_loss(*args, **kwargs)
        time.sleep(self.seconds)
        self.updates.append((began, time.monotonic()))
        return loss

    def note(self) -> None:
        self.batches.append(time.monotonic())
        self.generation.append(self.stopwatch.seconds.get("generation", 0.0))


class NoteBatches(TrainerCallback):
    """Notes when a batch begins, and when the run ends."""

    def __init__(self, trainer: Timed):
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.trainer.num_iterations == 0:
            self.trainer.note()

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self.trainer.note()


def main(argv: list[str]) -> None:
    """Measure, and print the shares."""
    parser = make_parser(
        __doc__,
        num_turns=(2, "runs of each"),
        num_prompts=(8, "prompts of a batch"),
        max_completion_length=(48, "tokens of a completion"),
    )
    parser.add_argument("--num_iterations", type=count, nargs="+", default=[1, 2, 4], help="updates of a batch")
    parser.add_argument("--vllm_server_base_url", help="a server of examples/demo_policy (default: a stand-in)")
    parser.add_argument("--plot", type=Path, help="file for a timeline of runs with two updates, such as overlap.svg")
    options = parser.parse_args(argv)
    be_quiet()
    state: Any = PartialState()
    table = make_table("Seconds a batch", "updates", "gen. / updates", "/ without", "/ longer part", "waited")
    timelines = {}
    with tempfile.TemporaryDirectory() as output_dir, served(options, state) as (url, stand_in):
        for n in options.num_iterations:
            arms = {"GRPO": {"num_anchors": 0}, "FR3E": {}}
            arms |= {f"FR3E, max_staleness={m}": {"max_staleness": m} for m in sorted({(n + 1) // 2, n})}
            found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
            for _ in followed(range(options.num_turns), f"{n} updates a batch: turn"):
                for name, settings in arms.items():
                    trainer = make_trainer(options, state, url, output_dir, settings | {"num_iterations": n})
                    trainer.seconds = UPDATE_SECONDS if options.vllm_server_base_url is None else 0.0
                    found[name].append(run(trainer))
                    if stand_in is not None and n == 2 and name != "GRPO":
                        timelines[name] = stand_in.events[:], trainer.updates, trainer.batches
            means = {
                name: {part: median(run[part] for run in runs) for part in runs[0]} for name, runs in found.items()
            }
            without = means["FR3E"]
            for name, mean in means.items():
                table.add_row(
                    *(name, str(n), f"{without['generation'] / without['updates']:.2f}"),
                    f"{mean['batch'] / without['batch']:.2f}",
                    f"{mean['batch'] / max(without['generation'], without['updates']):.2f}",
                    "" if name == "GRPO" else f"{mean['waited']:.2f} s",
                )
            table.add_section()
    if state.is_main_process:
        Console().print(table)
        if options.plot is not None and timelines:
            draw(timelines, options.plot)


@contextlib.contextmanager
def served(options: argparse.Namespace, state: Any) -> Iterator[tuple[str, StandIn | None]]:
    """The address of the server, and the main process's stand-in if it is one."""
    if options.vllm_server_base_url is not None:
        yield options.vllm_server_base_url, None
        return
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    with contextlib.ExitStack() as stack:
        stand_in, url = None, [""]
        if state.is_main_process:
            stand_in = StandIn(
                lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
                len(tokenizer),
                tokenizer.eos_token_id,
                GENERATION_SECONDS / options.max_completion_length,
            )
            url = [stack.enter_context(stand_in).url]
        broadcast_object_list(url)
        yield url[0], stand_in


def make_trainer(options: argparse.Namespace, state: Any, url: str, output_dir: str, settings: dict[str, Any]) -> Timed:
    """A trainer of the server's policy, or of a fresh one of its vocabulary, which hardly ever ends a completion."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    set_seed(0)
    policy: Any = str(POLICY)
    if options.vllm_server_base_url is None:
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), head_dim=16, num_key_value_heads=2, **sizes))
    num_rows = options.num_prompts * NUM_GENERATIONS
    args = FR3EConfig(
        output_dir,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=num_rows // state.num_processes,
        max_completion_length=options.max_completion_length,
        max_steps=settings["num_iterations"] * (NUM_WARM + NUM_COUNTED),
        learning_rate=1e-3,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        share_prefixes=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        **settings,
    )
    sums = [f"State the final answer to the following arithmetic problem: {i} + {7 * i % 90} =" for i in range(10, 522)]
    return Timed(
        policy,
        lambda completion_ids, **kwargs: [float(sum(ids) % 2) for ids in completion_ids],
        args,
        train_dataset=Dataset.from_dict({"prompt": sums}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )


def run(trainer: Timed) -> dict[str, float]:
    """Seconds of a batch, of its generation and of its updates, and those that rollouts were waited for."""
    with contextlib.redirect_stdout(None):
        trainer.train()
    batch, generation = (
        (series[-1] - series[NUM_WARM]) / NUM_COUNTED for series in (trainer.batches, trainer.generation)
    )
    waited = [entry[WAITED] for entry in trainer.state.log_history if WAITED in entry][NUM_WARM:]
    return {
        "batch": batch,
        "generation": generation,
        "updates": batch - generation,
        "waited": fmean(waited) if waited else generation,
    }


def draw(timelines: dict[str, Any], file: Path) -> None:
    """Draw when the server draws and when the trainer updates, of a run without overlap and of others."""
    figure, panels = pyplot.subplots(len(timelines), sharex=True, figsize=(8, 1.1 * len(timelines) + 0.8))
    for panel, (name, (events, updates, batches)) in zip(panels, timelines.items(), strict=True):
        start = batches[0]
        drawn, num_open = [], 0
        for when, what, _ in events:
            if what not in ("begin", "end") or not start <= when <= batches[-1]:
                continue
            if num_open == 0:
                began = when
            num_open += 1 if what == "begin" else -1
            if num_open == 0:
                drawn.append((began, when))
        panel.broken_barh([(a - start, b - a) for a, b in drawn], (1.1, 0.8), color="tab:blue")
        panel.broken_barh([(a - start, (b - a) * 0.97) for a, b in updates], (0.1, 0.8), color="tab:orange")
        panel.set_yticks([0.5, 1.5], ["updates", "server"])
        panel.set_title(name, fontsize=10, loc="left")
        for when in batches:
            panel.axvline(when - start, color="gray", linewidth=0.6)
    panels[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
