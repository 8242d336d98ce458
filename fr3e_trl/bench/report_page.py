"""The report of a comparison as one HTML file, which needs no network and runs no script."""

import base64
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from . import tables
from .estimates import FEW_SEEDS, at_best, difference, is_aligned, rates, verdict_of
from .plots import Plot
from .results import COSTS, Results, reached
from .tables import Section


def page(results: Results, plots: Sequence[Plot], sections: Sequence[Section], **texts: Any) -> str:
    """
    The page.

    Args:
        results ([`Results`]):
            What the comparison found.
        plots (`Sequence[Plot]`):
            Its figures, the one of the verdict first.
        sections (`Sequence[Section]`):
            What the report says below its verdict.
        **texts (`str`):
            What the template names, with `code` and **bold** as in Markdown.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fr3e_trl.bench", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"rich": rich, "inline": inline}
    return environment.get_template("report.html").render(
        **texts,
        at_best=at_best(results),
        warns=len(results.arguments["seeds"]) < FEW_SEEDS,
        answers=answers(results),
        forest=forest(results),
        reference=results.arguments["reference"],
        table=tables.verdict_table(results),
        plots=plots,
        said=said(results),
        trees=trees(results),
        sections=sections,
        budget=f"{results.amount:,} {COSTS[results.cost]}",
    )


def rich(text: str) -> Markup:
    """`code` and **bold** as HTML, and all else as it is."""
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", marked))


def inline(svg: str) -> str:
    """A figure as an address that holds it whole."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def answers(results: Results) -> list[dict[str, str]]:
    """What a reader asks first, and the answers: who is ahead, by how much, whether that is sure, what it cost."""
    found = verdict_of(results)
    if found is None:
        return []
    arguments = results.arguments
    seeds = len(arguments["seeds"])
    spent = {arm: tables.mean_seconds(results, arm) for arm in (found.leader, found.other)}
    low, high = (f"{end:+.3f}".replace("-", "−") for end in (found.difference.low, found.difference.high))
    if seeds == 1:
        leader, sure, why = found.leader, "Nobody knows", "one seed says nothing of how runs differ"
    elif found.is_sure:
        leader, sure, why = found.leader, "Yes", f"the 95% interval, {low} to {high}, is above 0"
    else:
        leader, sure, why = "undecided", "No", f"the 95% interval, {low} to {high}, holds 0"
    soon = tables.speeds(results, found)
    more = f"{found.other}: {spent[found.other]:,.0f} s. ¾ of the way: "
    if soon:
        more += f"{soon['tokens']} of {found.other}'s tokens, {soon['seconds']} of its seconds"
    else:
        level = results.levels()["¾"]
        came = {
            arm: sum(math.isfinite(reached(run, results.cost, level)) for run in results.of_arm(arm)) for arm in spent
        }
        more += f"{came[found.leader]} of {seeds} runs came there, {came[found.other]} of {found.other}'s"
    return [
        {"ask": "Ahead", "say": leader, "more": f"{found.leader} before {found.other}, by mean pass@1"},
        {
            "ask": "By how much",
            "say": f"{found.difference.mean:+.3f}".replace("-", "−"),
            "more": f"in mean pass@1 along {results.amount:,} {COSTS[results.cost]}",
        },
        {"ask": "Is that sure?", "say": sure, "more": why},
        {"ask": f"What {found.leader} cost", "say": f"{spent[found.leader]:,.0f} s a run", "more": more},
    ]


def forest(results: Results) -> list[dict[str, Any]]:
    """Each arm's difference from the reference, with places in percent for it to be drawn at."""
    others = [arm for arm in results.arms if arm != results.arguments["reference"]]
    if len(results.arguments["seeds"]) == 1 or not others:
        return []
    found = {arm: difference(results, arm) for arm in others}
    low, high = min(0.0, *(of.low for of in found.values())), max(0.0, *(of.high for of in found.values()))
    width = max(high - low, 1e-9)

    def place(value: float) -> float:
        return round(2 + 96 * (value - low) / width, 2)

    return [
        {
            "arm": arm,
            "text": tables.signed_range(of_arm),
            "kind": "better" if of_arm.low > 0 else "worse" if of_arm.high < 0 else "open",
            "zero": place(0.0),
            "low": place(of_arm.low),
            "width": round(place(of_arm.high) - place(of_arm.low), 2),
            "mean": place(of_arm.mean),
        }
        for arm, of_arm in sorted(found.items(), key=lambda item: -item[1].mean)
    ]


def said(results: Results) -> list[dict[str, Any]]:
    """For each held-out prompt that was kept: what the starting policy says, and then each arm, run by run."""
    firsts = {arm: results.of_arm(arm)[0] for arm in results.arms}
    kept = min(len(run["evaluations"][-1].get("shown", [])) for run in results.runs)
    prompts = []
    for i in range(kept):
        start = next(iter(firsts.values()))["evaluations"][0].get("shown", [])
        speakers = [{"name": "before training", "says": [start[i]], "mean": ""}] if i < len(start) else []
        for arm in results.arms:
            runs = results.of_arm(arm)
            of_prompt = [float(rates(run["evaluations"][-1])[i]) for run in runs if is_aligned(run)]
            mean = f"{np.mean(of_prompt):.2f}" if len(of_prompt) == len(runs) else ""
            says = [run["evaluations"][-1]["shown"][i] for run in runs]
            speakers.append({"name": arm, "says": says, "mean": mean})
        prompts.append({"prompt": speakers[-1]["says"][0]["prompt"], "speakers": speakers})
    return prompts


def trees(results: Results) -> list[dict[str, Any]]:
    """A tree of each arm that grows some, of the last batch of its first run."""
    found = []
    for arm in results.arms:
        run = results.of_arm(arm)[0]
        tree = run.get("tree")
        if tree and tree["prompt"]:
            found.append({"arm": arm, "seed": run["seed"], "prompt": "".join(tree["prompt"]), "rows": _rows(tree)})
    return found


def _rows(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """Rollouts from the prompt, each followed by the branches that leave it."""
    rollouts, states = tree["rollouts"], tree["states"]
    roots = [*states[0]["rollouts"], *(base for base in tree["bases"] if base not in states[0]["rollouts"])]
    rows = []
    for root in roots:
        tokens = rollouts[root]["tokens"] or []
        anchors = sorted((state["position"], s) for s, state in enumerate(states) if state["base"] == root)
        cuts = [0, *(position for position, _ in anchors), len(tokens)]
        pieces = ["".join(tokens[start:end]) for start, end in itertools.pairwise(cuts)]
        rows.append({"reward": rollouts[root]["reward"], "pieces": pieces, "anchors": [s for _, s in anchors]})
        rows += [
            {
                "reward": rollouts[branch]["reward"],
                "pieces": ["".join(rollouts[branch]["tokens"] or [])],
                "anchor": s,
                "entropy": states[s]["entropy"],
                "position": position + 1,
            }
            for position, s in anchors
            for branch in states[s]["rollouts"]
        ]
    return rows
