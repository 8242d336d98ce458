"""
Whether training works on this machine: a small model trained a few steps in every way, line by line.

    fr3e check
    fr3e check --model_name_or_path Qwen/Qwen3-0.6B

Nothing is downloaded, unless --model_name_or_path names a model of the hub: then its configuration, or with
--with_weights all of it. The exit code is 0 if no line failed, 1 if one did, and 2 for wrong arguments.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..revision import revision
from ..usage import Parser, UsageError
from .runner import FAILED, NOT_RUN, PASSED, Line, Result, run_lines


@dataclass(frozen=True)
class Setup:
    """
    What is checked.

    Args:
        directory (`str`):
            Holds the model, if one is made, and what the runs write.
        devices (`str`, *optional*):
            `CUDA_VISIBLE_DEVICES` as it was given. All lines but that of several processes have the first of them: with
            several in one process, transformers would spread each batch over them.

        All others are options of the command.
    """

    directory: str
    model_name_or_path: str | None = None
    with_weights: bool = False
    dtype: str = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    vllm_server_base_url: str | None = None
    num_processes: int | None = None
    devices: str | None = None

    @property
    def policy(self) -> str:
        """Directory or hub id of the model that is trained."""
        made = str(Path(self.directory) / "policy")
        return self.model_name_or_path if self.with_weights and self.model_name_or_path else made

    @property
    def source(self) -> dict[str, Any]:
        return {"trust_remote_code": self.trust_remote_code}


NAMES = {field.name for field in fields(Setup)}

MINE = "Attach this file to an issue of fr3e_trl"
SHARING = f"docs/models.md says which families cannot. Of others: train with share_prefixes=False. {MINE}"

# What to do about a failure, by what is checked
LINES = [
    Line("versions and devices", ".lines:machine", "Install a torch for this GPU and its driver, or use --use_cpu"),
    Line("model", ".lines:make_policy", "Name a model that transformers knows by --model_name_or_path, or none"),
    Line("losses without exploration equal GRPO's", ".lines:losses", MINE),
    Line("shared prefixes equal rows apart", ".lines:sharing", SHARING),
    Line("kernels of attention", ".lines:kernels", "Use --attn_implementation sdpa, or install what it names"),
    Line("trees by generate", ".lines:grow", MINE),
    Line("trees by continuous batching", ".lines:continuous", "Train without use_transformers_continuous_batching"),
    Line("LoRA", ".lines:lora", f"Update peft. {MINE}"),
    Line("QLoRA", ".lines:qlora", f"Update bitsandbytes, or train without load_in_4bit. {MINE}"),
    Line("save and resume", ".lines:resume", f"Look at the room on the disk of TMPDIR. {MINE}"),
    Line("time and memory of a step", ".lines:cost", MINE),
    Line("several processes", ".lines:processes", f"Set NCCL_DEBUG=INFO to see more. {MINE}"),
    Line("vLLM server", ".lines:vllm_server", "Start the server as docs/vllm.md says, and look at its log"),
    Line("vLLM colocate", ".lines:vllm_colocate", f"Use a vLLM server. {MINE}", seconds=120),
]


def main(argv: list[str]) -> None:
    """Run the lines, print the table, and write the file."""
    options = make_parser().parse_args(argv)
    if options.with_weights and options.model_name_or_path is None:
        raise UsageError("--with_weights needs the model: --model_name_or_path MODEL.")
    if options.num_processes is not None and options.num_processes < 1:
        raise UsageError(f"--num_processes {options.num_processes} must be at least 1.")
    if not options.time_limit > 0:
        raise UsageError(f"--time_limit {options.time_limit:g} must be above 0, for example 180.")
    options.devices = "" if options.use_cpu else os.environ.get("CUDA_VISIBLE_DEVICES")
    if options.devices is not None and options.devices.startswith("-"):  # CUDA takes -1 for none
        options.devices = ""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" if options.devices is None else options.devices.split(",")[0]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with which matrices are multiplied alike each time
    results: list[Result] = []
    write(options.output, argv, results)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        setup = Setup(directory, **{name: value for name, value in vars(options).items() if name in NAMES})
        for line in run_lines(LINES, setup, options.time_limit, Path(directory)):
            if isinstance(line, Line):
                print(f"[{len(results) + 1:>2}/{len(LINES)}] {line.name} ... ", end="", file=sys.stderr, flush=True)
                continue
            print(f"{line.outcome} ({line.seconds:.1f} s)", file=sys.stderr)
            results.append(line)
            write(options.output, argv, results)
    print(table(results))
    print(f"\n{summary(results)}. Attach {options.output} to an issue.")
    if any(result.outcome == FAILED for result in results):
        sys.exit(1)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fr3e check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", help="directory or hub id of a model with the architecture (default: a small Qwen3)")
    add("--with_weights", action="store_true", help="take that model as it is, and not a small one like it")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights (default: float32)")
    add("--attn_implementation", help="kernel of attention, such as flash_attention_2 (default: the model's)")
    add("--trust_remote_code", action="store_true", help="whether code of the model's repository may be run")
    add("--vllm_server_base_url", help="address of a vLLM server to ask, such as http://localhost:8000")
    add("--num_processes", type=int, help="processes that train together (default: 2 if there are two GPUs)")
    add("--use_cpu", action="store_true", help="leave the GPUs alone")
    add("--time_limit", type=float, default=180, help="seconds for all lines (default: 180)")
    add("--output", type=Path, default=Path("fr3e_check.md"), help="file to write (default: fr3e_check.md)")
    return parser


def summary(results: list[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, FAILED, NOT_RUN))


def table(results: list[Result]) -> str:
    """The results as a table for a terminal."""
    width = max(len(result.name) for result in results)
    columns = max(shutil.get_terminal_size((120, 24)).columns, width + 60)
    lines = []
    for result in results:
        head = f"{result.outcome:<{len(NOT_RUN)}}  {result.name:<{width}}  "
        wrapper = textwrap.TextWrapper(columns, head, " " * len(head), break_long_words=False, break_on_hyphens=False)
        lines.append(wrapper.fill(result.told))
    return "\n".join(lines)


def write(path: Path, argv: list[str], results: list[Result]) -> None:
    """Write what is known so far: as a table, with the logs of what failed, and in JSON."""
    text = [f"# {shlex.join(['fr3e', 'check', *argv])}", ""]
    text += [f"{time.strftime('%Y-%m-%d %H:%M')}. {', '.join(map(' '.join, revision().items()))}."]
    text += ["", f"{summary(results)}.", "", "| line | outcome | what was found | s |", "|---|---|---|---|"]
    for result in results:
        told = " ".join(result.told.split()).replace("|", "\\|")
        text.append(f"| {result.name} | {result.outcome} | {told} | {result.seconds:.1f} |")
    for result in results:
        if result.log:
            text += ["", f"## {result.name}", "", "```text", result.log.replace("```", "'''").strip(), "```"]
    text += ["", "```json", json.dumps([asdict(result) | {"log": ""} for result in results]), "```", ""]
    path.write_text("\n".join(text))
