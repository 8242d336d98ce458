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


CASES = [
    Case(
        "cut arguments of eval", EVAL, ("out/arguments.json is damaged",), after=EVAL, setup=cut("out/arguments.json")
    ),
    Case("other arguments of eval", f"{EVAL} --temperature=0.5", ("temperature was 1.0 and is 0.5",), after=EVAL),
    Case(
        "damaged completion",
        EVAL,
        ("out/completions.jsonl, line 1, is damaged",),
        after=EVAL,
        setup=change("out/completions.jsonl", lambda content: content[9:]),
    ),
    Case(
        "completion without a sample",
        EVAL,
        ("out/completions.jsonl, line 1, is damaged", "sample"),
        after=EVAL,
        setup=replace("out/completions.jsonl", NO_LINE),
    ),
    Case(
        "number for a completion",
        EVAL,
        ("out/completions.jsonl, line 2, is damaged",),
        after=EVAL,
        setup=change("out/completions.jsonl", lambda content: content.split(b"\n")[0] + b"\n3\n"),
    ),
    # Trees
    Case(
        "cut tree log",
        "tree out",
        ("out/trees/step-1.json.gz is not a complete tree log", "EOFError"),
        after=LOGGED,
        setup=cut("out/trees/step-1.json.gz"),
    ),
    Case(
        "empty tree log",
        "tree out",
        ("out/trees/step-2.json.gz is not a complete tree log",),
        after=LOGGED,
        setup=replace("out/trees/step-2.json.gz", ""),
    ),
    Case(
        "text for a tree log",
        "tree out",
        ("out/trees/step-2.json.gz is not a complete tree log",),
        after=LOGGED,
        setup=replace("out/trees/step-2.json.gz", "hello"),
    ),
    Case(
        "tree log of a step",
        "tree out --steps 2",
        ("out/trees/step-2.json.gz is not a complete tree log",),
        after=LOGGED,
        setup=cut("out/trees/step-2.json.gz"),
    ),
    Case(
        "damaged metrics",
        "tree out",
        ("out/trees/metrics.jsonl, line 1",),
        after=LOGGED,
        setup=change("out/trees/metrics.jsonl", lambda content: content[3:]),
    ),
    Case(
        "list of metrics",
        "tree out",
        ("out/trees/metrics.jsonl, line 1",),
        after=LOGGED,
        setup=change("out/trees/metrics.jsonl", lambda content: b"[1]\n" + content),
    ),
    Case(
        "bytes of metrics",
        "tree out",
        ("out/trees/metrics.jsonl, line 1",),
        after=LOGGED,
        setup=change("out/trees/metrics.jsonl", lambda content: b"\xff\n" + content),
    ),
    Case(
        "page into no directory", "tree out --output nowhere/page.html", ("nowhere/page.html", "--output"), after=LOGGED
    ),
    Case("page onto a directory", "tree out --output model", ("model", "--output"), after=LOGGED),
    Case(
        "page below a file",
        "tree out --output data.jsonl/page.html",
        ("data.jsonl/page.html", "--output"),
        after=LOGGED,
    ),
    # Models
    Case(
        "model without weights",
        f"{TRAIN} --model_name_or_path=bare",
        ("model_name_or_path='bare'",),
        files={"bare/config.json": BARE},
    ),
    Case(
        "model without architectures",
        f"{TRAIN} --model_name_or_path=bare",
        ("model_name_or_path='bare'", "config.json", "architectures"),
        setup=copied_model(lambda config: config.pop("architectures")),
    ),
    Case(
        "model with architectures of null, by grpo",
        f"{TRAIN} --model_name_or_path=bare --num_anchors=0",
        ("model_name_or_path='bare'", "config.json", "architectures"),
        setup=copied_model(lambda config: config.update(architectures=None)),
    ),
    Case(
        "model with cut config",
        f"{TRAIN} --model_name_or_path=bare",
        ("model_name_or_path='bare'",),
        files={"bare/config.json": '{"model_type'},
    ),
    Case(
        "model of an unknown type",
        f"{TRAIN} --model_name_or_path=bare",
        ("model_name_or_path='bare'", "qwen99"),
        files={"bare/config.json": '{"model_type": "qwen99"}'},
    ),
    Case(
        "model without weights in eval",
        f"{EVAL} --model_name_or_path=bare",
        ("model_name_or_path='bare'",),
        files={"bare/config.json": BARE},
    ),
    Case(
        "empty directory for a model",
        f"{EVAL} --model_name_or_path=bare",
        ("model_name_or_path='bare'",),
        files={"bare/notes": ""},
    ),
]
