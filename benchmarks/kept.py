"""
A comparison in one small file, from which its report is made anew, and to which further seeds and arms can be added.

It is JSON lines, compressed: first the arguments, the settings of each arm and a table of rewards; then a line for each
run. `zcat` shows it.
"""

import gzip
import json
import math
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fr3e_trl.commands.outputs import damaged

from .outcomes import TUNED, Results, mean_accuracy, pass_rate, taught

KEPT = "kept.jsonl.gz"  # its name beside a report

DIGITS = string.digits + string.ascii_letters + "-_"

# Settings of arms that are gone, and the value with which they changed nothing
GONE = {"distinct_branches": False}


def keep(results: Results) -> bytes:
    """The content of the file of a comparison."""
    table = sorted({tuple(sorted(prompt_rewards)) for run in results.runs for prompt_rewards in _prompts(run)})
    codes = _codes(table)
    head = {
        "arguments": results.arguments,
        "command": results.command,
        "arms": results.arms,
        "tokens_per_prompt": results.tokens_per_prompt,
        "rewards_of_a_prompt": {codes[prompt_rewards]: prompt_rewards for prompt_rewards in table},
    }
    lines = [head, *(_line_of(run, results, codes) for run in results.runs)]
    for stage, runs in (("screening", results.screening), ("tuning", results.tuning)):
        lines += [{"stage": stage} | _tuning_line_of(run) for run in runs]
    text = "".join(json.dumps(_short(line), separators=(",", ":"), default=str) + "\n" for line in lines)
    return gzip.compress(text.encode(), mtime=0)  # the same runs are the same bytes


def read_kept(path: Path) -> Results:
    """
    The comparison of a kept file.

    Raises:
        UsageError: The file is damaged.
    """
    try:
        return restore(path.read_bytes())
    except (OSError, EOFError, KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def restore(content: bytes) -> Results:
    """The comparison of the content of a kept file."""
    text = gzip.decompress(content).decode().replace("fr3e_trl.bench.", "benchmarks.")  # as rewards were called
    head, *lines = (json.loads(line) for line in text.splitlines())
    table = head["rewards_of_a_prompt"]
    arms = head["arms"] = _without_gone(head["arms"])
    if "arms" in head["arguments"]:
        head["arguments"]["arms"] = _without_gone(head["arguments"]["arms"])
    runs: dict[str, list[dict[str, Any]]] = {"runs": [], "screening": [], "tuning": []}
    for line in lines:
        stage = line.pop("stage", "runs")
        runs[stage].append(_restored(line, arms[line["arm"]], table))
    return Results(
        head["arguments"], head["command"], arms, **runs, tokens_per_prompt=head.get("tokens_per_prompt", {})
    )


def _without_gone(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of arms, without those that are gone and changed nothing."""
    return {
        arm: {name: value for name, value in settings.items() if name not in GONE or GONE[name] != value}
        for arm, settings in arms.items()
    }


def _prompts(run: dict[str, Any]) -> Iterable[list[float]]:
    return (prompt_rewards for evaluation in run["evaluations"] for prompt_rewards in evaluation["rewards"])


def _codes(table: list[tuple[float, ...]]) -> dict[tuple[float, ...], str]:
    """A text for each, of one length: one character for up to 64."""
    width = max(1, math.ceil(math.log(max(2, len(table)), len(DIGITS)) - 1e-9))
    return {
        prompt_rewards: "".join(DIGITS[i // len(DIGITS) ** place % len(DIGITS)] for place in reversed(range(width)))
        for i, prompt_rewards in enumerate(table)
    }


def _line_of(run: dict[str, Any], results: Results, codes: dict[tuple[float, ...], str]) -> dict[str, Any]:
    evaluations = run["evaluations"]
    ks = sorted({1, *results.arguments["pass_at"]})
    return {
        **{name: run[name] for name in ("arm", "seed", "cost", "amount")},
        "revision": run.get("revision"),
        "mean": mean_accuracy(run),
        **{f"pass@{k}": [pass_rate(evaluation, k) for evaluation in evaluations] for k in ks},
        "evaluations": {
            name: [evaluation[name] for evaluation in evaluations] for name in evaluations[0] if name != "rewards"
        },
        "rewards": [
            "".join(codes[tuple(sorted(prompt_rewards))] for prompt_rewards in evaluation["rewards"])
            for evaluation in evaluations
        ],
        "evaluation_seconds": run["evaluation_seconds"],
        "taught": taught(run),
    }


def _tuning_line_of(run: dict[str, Any]) -> dict[str, Any]:
    evaluations = run["evaluations"]
    return {
        **{name: run[name] for name in ("arm", "seed", "cost", "amount")},
        "point": {name: run["settings"][name] for name in TUNED if name in run["settings"]},
        "spent": [evaluation[run["cost"]] for evaluation in evaluations],
        "pass@1": [pass_rate(evaluation) for evaluation in evaluations],
    }


def _restored(line: dict[str, Any], settings: dict[str, Any], table: dict[str, list[float]]) -> dict[str, Any]:
    """A run as the report takes it."""
    run = {name: line[name] for name in ("arm", "seed", "cost", "amount")}
    if "point" in line:  # of its tuning
        evaluations = [
            {run["cost"]: spent, "rewards": [[rate]]} for spent, rate in zip(line["spent"], line["pass@1"], strict=True)
        ]
        return run | {"settings": settings | line["point"], "evaluations": evaluations}
    width = len(next(iter(table)))
    evaluations = [
        {name: values[i] for name, values in line["evaluations"].items()}
        | {"rewards": [table[codes[start : start + width]] for start in range(0, len(codes), width)]}
        for i, codes in enumerate(line["rewards"])
    ]
    return run | {
        "settings": settings,
        "evaluations": evaluations,
        **{name: line[name] for name in ("evaluation_seconds", "taught", "revision")},
    }


def _short(value: Any) -> Any:
    """Numbers with seven digits, of which the report shows three."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value
