"""Files of earlier results that are damaged, or something else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .case import EVAL, TRAIN, Case, Setup, change, cut, replace

LOGGED = f"{TRAIN} --log_trees=1"
NO_LINE = "\n".join(['{"problem": 0}', ""])

BARE = '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'


def copied_model(edit: Callable[[dict[str, Any]], Any]) -> Setup:
    """A setup that makes a copy of the model, with another configuration."""

    def setup() -> None:
        shutil.copytree("model", "bare")
        config = Path("bare/config.json")
        settings = json.loads(config.read_text())
        edit(settings)
        config.write_text(json.dumps(settings))

    return setup


def logged(name: str, *says: str, setup: Setup | None = None, arguments: str = "") -> Case:
    """A page of the trees that a run logged."""
    return Case(name, f"tree out {arguments}", says, after=LOGGED, setup=setup)


def evaluated(name: str, *says: str, setup: Setup | None = None, arguments: str = "") -> Case:
    """An evaluation that goes on from another."""
    return Case(name, f"{EVAL} {arguments}", says, after=EVAL, setup=setup)


def model(name: str, *says: str, content: str = "", setup: Setup | None = None, command: str = TRAIN) -> Case:
    """A directory of a model, whose configuration has this content, or is made by the setup."""
    files = {"bare/config.json": content} if content else {}
    return Case(name, f"{command} --model_name_or_path=bare", ("model_name_or_path='bare'", *says), files, setup=setup)


UNKNOWN = "config.json", "architectures"
STEP, METRICS, COMPLETIONS = "out/trees/step-2.json.gz", "out/trees/metrics.jsonl", "out/completions.jsonl"
NO_LOG = f"{STEP} is not a complete tree log"

CASES = [
    evaluated("cut arguments", "out/arguments.json is damaged", setup=cut("out/arguments.json")),
    evaluated("other arguments", "temperature was 1.0 and is 0.5", arguments="--temperature=0.5"),
    evaluated("damaged completion", f"{COMPLETIONS}, line 1, is damaged", setup=change(COMPLETIONS, lambda c: c[9:])),
    evaluated("no sample", f"{COMPLETIONS}, line 1, is damaged", "sample", setup=replace(COMPLETIONS, NO_LINE)),
    evaluated(
        "number for a completion",
        f"{COMPLETIONS}, line 2, is damaged",
        setup=change(COMPLETIONS, lambda content: content.split(b"\n")[0] + b"\n3\n"),
    ),
    # Trees
    logged("cut tree log", NO_LOG, "EOFError", setup=cut(STEP)),
    logged("empty tree log", NO_LOG, setup=replace(STEP, "")),
    logged("text for a tree log", NO_LOG, setup=replace(STEP, "hello")),
    logged("tree log of a step", NO_LOG, setup=cut(STEP), arguments="--steps 2"),
    logged("damaged metrics", f"{METRICS}, line 1", setup=change(METRICS, lambda content: content[3:])),
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
    model(
        "architectures of null, by grpo",
        *UNKNOWN,
        setup=copied_model(lambda config: config.update(architectures=None)),
        command=f"{TRAIN} --num_anchors=0",
    ),
    Case(
        "empty directory", f"{EVAL} --model_name_or_path=bare", ("model_name_or_path='bare'",), files={"bare/notes": ""}
    ),
]
