"""Files of earlier results that are damaged, or something else, and disks that are full."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .case import EVAL, TRAIN, Case, Setup, case, change, cut, link, replace

FULL, HERE = "No space left on device", f"{EVAL} --output_dir=."
SAVED = f"{TRAIN} --save_strategy=steps --save_steps=1"
LOGGED = f"{TRAIN} --log_trees=1"
NO_LINE = "\n".join(['{"problem": 0}', ""])

BARE = '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'


def copied_model(edit: Callable[[dict[str, Any]], Any]) -> Setup:
    def setup() -> None:
        shutil.copytree("model", "bare")
        config = Path("bare/config.json")
        settings = json.loads(config.read_text())
        edit(settings)
        config.write_text(json.dumps(settings))

    return setup


def logged(name: str, *says: str, setup: Setup | None = None, arguments: str = "") -> Case:
    """A page of the trees that a run logged."""
    return case(name, f"tree out {arguments}", *says, after=LOGGED, setup=setup)


def evaluated(name: str, *says: str, setup: Setup | None = None, arguments: str = "") -> Case:
    return case(name, f"{EVAL} {arguments}", *says, after=EVAL, setup=setup)


def model(name: str, *says: str, content: str = "", setup: Setup | None = None, command: str = TRAIN) -> Case:
    """A directory of a model, whose configuration has this content, or is made by the setup."""
    files = {"bare/config.json": content} if content else {}
    command = f"{command} --model_name_or_path=bare"
    return case(name, command, "model_name_or_path='bare'", *says, files=files, setup=setup)


def with_number(content: bytes) -> bytes:
    return content.split(b"\n")[0] + b"\n3\n"


UNKNOWN = "config.json", "architectures"
GRPO = {"command": f"{TRAIN} --num_anchors=0"}
STEP, METRICS, COMPLETIONS = "out/trees/step-2.json.gz", "out/trees/metrics.jsonl", "out/completions.jsonl"
NO_LOG = f"{STEP} is not a complete tree log"

CASES = [
    evaluated("cut arguments", "out/arguments.json is damaged", setup=cut("out/arguments.json")),
    evaluated("other arguments", "temperature was 1.0 and is 0.5", arguments="--temperature=0.5"),
    evaluated("damaged completion", f"{COMPLETIONS}, line 1, is damaged", setup=change(COMPLETIONS, lambda c: c[9:])),
    evaluated("no sample", f"{COMPLETIONS}, line 1, is damaged", "sample", setup=replace(COMPLETIONS, NO_LINE)),
    evaluated("number for a completion", f"{COMPLETIONS}, line 2, is damaged", setup=change(COMPLETIONS, with_number)),
    # Trees
    logged("cut tree log", NO_LOG, "EOFError", setup=cut(STEP)),
    logged("empty tree log", NO_LOG, setup=replace(STEP, "")),
    logged("tree log of a step", NO_LOG, setup=cut(STEP), arguments="--steps 2"),
    logged("damaged metrics", f"{METRICS}, line 1", setup=change(METRICS, lambda c: c[3:])),
    logged("list of metrics", f"{METRICS}, line 1", setup=change(METRICS, lambda content: b"[1]\n" + content)),
    logged("bytes of metrics", f"{METRICS}, line 1", setup=change(METRICS, lambda content: b"\xff\n" + content)),
    logged("page into no directory", "nowhere/page.html", "--output", arguments="--output nowhere/page.html"),
    logged("page onto a directory", "model", "--output", arguments="--output model"),
    logged("page below a file", "data.jsonl/page.html", "--output", arguments="--output data.jsonl/page.html"),
    # Models
    model("no weights", content=BARE),
    model("no weights of eval", content=BARE, command=EVAL),
    model("cut config", content='{"model_type'),
    model("unknown type", "qwen99", content='{"model_type": "qwen99"}'),
    model("no architectures", *UNKNOWN, setup=copied_model(lambda config: config.pop("architectures"))),
    model("null architectures by grpo", *UNKNOWN, setup=copied_model(lambda c: c.update(architectures=None)), **GRPO),
    case("empty directory", f"{EVAL} --model_name_or_path=bare", "model_name_or_path='bare'", files={"bare/notes": ""}),
    # Disks that are full, and links that lead nowhere. /dev/full takes no byte
    case("no room for a model", TRAIN, "File too large", "room", largest_file=20_000),
    case("no room for a checkpoint", SAVED, "File too large", "room", largest_file=20_000),
    case("no room for completions", f"{EVAL} --num_samples=64", "File too large", "room", largest_file=8000),
    case("no room for results", EVAL, FULL, "room", setup=link("out/results.json", "/dev/full")),
    case("no room for a report", EVAL, FULL, "room", setup=link("out/results.md", "/dev/full")),
    case("a directory for a lock", EVAL, ".lock", "directory", files={"out/.lock/a": ""}),
    case("no room for a dataset", EVAL, "File too large", "room", largest_file=100),
    case("a directory for completions", HERE, "completions.jsonl", files={"completions.jsonl/a": ""}),
    case("a directory for results", HERE, "results.json", files={"results.json/a": ""}),
]
