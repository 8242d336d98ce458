"""A self-contained page that shows the trees and curves of a run."""

import base64
import gzip
import json
import math
import os
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2

from .record import evaluated, is_number, logged_steps, read_metrics, read_step, write_whole

MAX_TREES = 200  # of a page without given steps
MAX_POINTS = 500  # of a curve
MAX_PROMPT = 2000  # searchable characters of a prompt

# Charts: title, metrics, and the metric of the spread around the first one. TRL's `reward` and `entropy` include rows
# that start from selected prefixes, so they are only used if FR3E's metrics were not logged
CHARTS: list[tuple[str, list[str], str | None]] = [
    ("Reward at the prompt", ["fr3e/value/S0 or reward", "eval_reward"], None),
    ("Prompts whose rows all did alike", ["fr3e/prompts/all_right", "fr3e/prompts/all_wrong"], None),
    ("Entropy, in nats", ["fr3e/entropy or entropy", "fr3e/anchor/entropy"], None),
    ("Share of the batch's rows", ["fr3e/rows/informative", "fr3e/rows/copied"], None),
    ("Advantages, mean and spread", ["fr3e/advantage/mean"], "fr3e/advantage/std"),
    ("Length of completions, in tokens", ["completions/mean_length", "completions/max_length"], None),
    ("Prompts rescued, of those that failed", ["fr3e/prompts/rescued"], None),
    ("Branches that begin with another token", ["fr3e/branches/distinct"], None),
]


def make_page(run: Path, output: Path, steps: list[int] | None = None) -> int:
    """
    Make the page of a run from its logs.

    Args:
        run (`Path`):
            Output directory of the run.
        output (`Path`):
            File of the page.
        steps (`list[int]`, *optional*):
            Steps whose trees are shown. If `None`, all steps, or evenly spread ones with about 200 trees together.

    Returns:
        `int`: Number of trees on the page.
    """
    trees, step_of, reward_funcs = [], [], []
    for step in _spread(run) if steps is None else steps:
        record = read_step(run, step)
        trees += record["trees"]
        step_of += [step] * len(record["trees"])
        reward_funcs = record["reward_funcs"]
    index = {
        "rewardFuncs": reward_funcs,
        "trees": _summaries(trees, step_of),
        "isModulated": any(state["modulation"] not in (None, 1) for tree in trees for state in tree["states"]),
        "charts": charts(read_metrics(run)),
    }
    environment = jinja2.Environment(loader=jinja2.PackageLoader("fr3e_trl.tree_log", "."), autoescape=True)
    page = environment.get_template("page.html").render(
        title=Path(os.path.abspath(run)).name, index=index, trees=[_packed(tree) for tree in trees]
    )
    write_whole(output, page.encode())
    return len(trees)


def _spread(run: Path) -> list[int]:
    """Steps of a run, evenly spread from the first to the last, with at most `MAX_TREES` trees together."""
    steps = logged_steps(run)
    if not steps:
        return []
    some = {steps[0], steps[len(steps) // 2], steps[-1]}  # with refill, the number of trees varies
    most = max(MAX_TREES // max(*(len(read_step(run, step)["trees"]) for step in some), 1), 2)
    if len(steps) <= most:
        return steps
    return [steps[i * (len(steps) - 1) // (most - 1)] for i in range(most)]


def _packed(tree: dict[str, Any]) -> str:
    """A compressed tree. The page unpacks it when it is selected."""
    data = json.dumps(tree, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def _summaries(trees: list[dict[str, Any]], step_of: list[int]) -> list[dict[str, Any]]:
    """The entries of the page's list of trees."""
    prompts = ["".join(tree["prompt"] or ["(in another process)"]) for tree in trees]
    # A common beginning of all prompts does not distinguish them
    common = _common_length(prompts) if len(set(prompts)) > 1 else 0
    first_of: dict[str, int] = {}  # the first tree of each prompt
    number_in_step: dict[int, int] = {}
    summaries = []
    for i, (tree, step, prompt) in enumerate(zip(trees, step_of, prompts, strict=True)):
        is_known = tree["prompt"] is not None and not tree.get("has_images")  # prompts may differ in their images
        number = number_in_step[step] = number_in_step.get(step, 0) + 1
        summaries.append(
            {
                "step": step,
                "number": number,
                "prompt": prompt[common:][:MAX_PROMPT],
                "promptOf": first_of.setdefault(prompt, i) if is_known else i,
                "rewards": [
                    tree["rollouts"][rollout]["reward"] for state in tree["states"] for rollout in state["rollouts"]
                ],
                "numBases": len(tree["states"][0]["rollouts"]),
                "copies": sum(rollout.get("copies", 0) for rollout in tree["rollouts"]),
                "credit": max(map(abs, _advantages(tree)), default=0),
            }
        )
    return summaries


def _advantages(tree: dict[str, Any]) -> list[float]:
    advantages = [[r["advantage"], *(advantage for _, _, advantage in r["credit"])] for r in tree["rollouts"]]
    return [advantage for advantage in chain.from_iterable(advantages) if advantage is not None]


def _common_length(texts: list[str]) -> int:
    """Length of the common beginning of all `texts`, such as a system prompt, up to the end of a word."""
    first, last = min(texts), max(texts)
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return max(first.rfind(space, 0, common) for space in " \n") + 1


def charts(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    The curves of a run.

    Args:
        log (`list[dict]`):
            The trainer's logs.

    Returns:
        `list[dict]`: Charts that have a curve. Each has a `title`, `curves` with `name` and `points` [step, value], and
        `spread`: the points of a standard deviation around the first curve, or `None`.
    """
    found = []
    for title, names, spread in CHARTS:
        curves = [curve for name in names for curve in _curves(log, name.split(" or "))]
        if curves:
            found.append({"title": title, "curves": curves, "spread": _points(log, spread) if spread else None})
    return found


def _curves(log: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """The curve of the first metric that was logged, or one for each evaluation set."""
    logs: dict[str | None, list[dict[str, Any]]] = {}  # by evaluation set
    for entry in log:
        logs.setdefault(evaluated(entry), []).append(entry)
    for name in names:
        curves = [
            {"name": name if dataset is None else f"{name} of {dataset}", "points": points}
            for dataset, entries in logs.items()
            if (points := _points(entries, name))
        ]
        if curves:
            return curves
    return []


def _points(log: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Steps and values of a metric. Beyond `MAX_POINTS` entries, each point is the mean over several."""
    points = [(entry["step"], entry[name]) for entry in log if is_number(entry.get(name))]
    size = math.ceil(len(points) / MAX_POINTS) or 1
    windows = [points[start : start + size] for start in range(0, len(points), size)]
    return [[window[-1][0], float(f"{sum(value for _, value in window) / len(window):.4g}")] for window in windows]
