"""
Draws the example of tree credit that README and the page of the method show, with the credit that the package computes:

    python docs/assets/draw_tree.py

One prompt, a base trajectory and a branch from each of its three anchors. The prior is .25, and counts as four
rollouts.
"""

from html import escape
from pathlib import Path
from typing import NamedTuple

import torch

from fr3e_trl.method.credit.tree import Paths, root_baselines, tree_credit, tree_values

PICTURE = Path(__file__).with_name("tree.svg")
PRIOR, PRIOR_STRENGTH = 0.25, 4.0


class Row(NamedTuple):
    """A completion: the tokens that it sampled itself, how many it takes over before them, and its reward."""

    tokens: list[str]
    position: int
    reward: float


# The base trajectory multiplies right and adds wrong
ROWS = [
    Row(["3×4", "=", "12", ".", "12+5", "=", "16"], 0, 0.0),
    Row(["14", ".", "14+5", "=", "19"], 2, 0.0),
    Row(["So", "12+5", "=", "17"], 4, 1.0),
    Row(["17"], 6, 1.0),
]


class Stretch(NamedTuple):
    """Tokens of one row with one credit, from `start` up to `end` in the whole completion."""

    row: int
    start: int
    end: int
    credit: float


def credit_of_example() -> list[Stretch]:
    """What `FR3ETrainer` credits the tokens of the example with."""
    lengths = [row.position + len(row.tokens) for row in ROWS]
    paths = Paths(
        rewards=torch.tensor([row.reward for row in ROWS]),
        parents=[None, 0, 0, 0],
        positions=[row.position for row in ROWS],
        lengths=lengths,
        prompts=torch.zeros(len(ROWS), dtype=torch.long),
        counts=[1] * len(ROWS),
        num_written=lengths,
    )
    baselines = root_baselines(tree_values(paths), paths.prompts, torch.tensor([PRIOR]), PRIOR_STRENGTH)
    credit = tree_credit(paths, baselines, PRIOR_STRENGTH)
    columns = (credit.rows, credit.starts, credit.ends, credit.advantages)
    return [Stretch(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


# Sizes in the picture's units. It is narrow, so that its letters can be read on a phone
WIDTH, HEIGHT, LEFT, TOP, LINE, CHIP, GAP, LETTER = 560, 384, 22, 96, 52, 34, 5, 11.2
REWARDS_AT = 494

STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de } text { fill: #1f2328; font: 17px system-ui, sans-serif }
    .token { font: 18.5px ui-monospace, Menlo, Consolas, monospace }
    .small { font-size: 15.5px } .bold { font-weight: 700 }
    .up { fill: #dbeafe; stroke: #2563eb } .down { fill: #fee2e2; stroke: #dc2626 }
    text.up { fill: #1d4ed8; stroke: none } text.down { fill: #b91c1c; stroke: none }
    .line { stroke: #b45309; fill: none; stroke-width: 2 } .anchor { fill: #f59e0b; stroke: none }
    @media (prefers-color-scheme: dark) {
      .card { fill: #14181f; stroke: #3d444d } text { fill: #e6edf3 }
      .up { fill: #16305c; stroke: #60a5fa } .down { fill: #541c1c; stroke: #f87171 }
      text.up { fill: #93c5fd } text.down { fill: #fca5a5 } .line { stroke: #f59e0b }
    }
"""


def draw(stretches: list[Stretch]) -> str:
    """The picture as SVG: the base trajectory above, a line for each branch, the last to leave first."""
    positions = [row.position for row in ROWS[1:]]
    places, x = [], float(LEFT)
    for i, token in enumerate(ROWS[0].tokens):
        x += 3 * GAP if i in positions else 0  # a gap where a branch leaves
        places.append(x)
        x += _width(token) + GAP
    parts = [
        _text(LEFT, 34, "Prompt: what is 3×4 + 5?", "bold"),
        _text(REWARDS_AT, 34, "reward", "small"),
    ]
    for i in [0, *sorted(range(1, len(ROWS)), key=lambda i: -ROWS[i].position)]:
        row, y = ROWS[i], TOP if i == 0 else TOP + LINE * (len(ROWS) - i)
        x = places[row.position]
        if i > 0:
            corner = x - 2 * GAP
            parts.append(f'<path class="line" d="M{corner:g} {TOP + CHIP / 2} V{y + CHIP / 2} H{x:g}"/>')
            parts.append(f'<circle class="anchor" cx="{corner:g}" cy="{TOP + CHIP / 2}" r="6"/>')
        for stretch in (stretch for stretch in stretches if stretch.row == i):
            kind, begins = "up" if stretch.credit > 0 else "down", None
            for position in range(stretch.start, stretch.end):
                token = row.tokens[position - row.position]
                x = places[position] if i == 0 else x
                begins = x if begins is None else begins
                parts.append(
                    f'<rect class="{kind}" x="{x:g}" y="{y}" width="{_width(token):g}" height="{CHIP}" rx="6"/>'
                )
                parts.append(_text(x + 8, y + 23, token, "token"))
                x += _width(token) + GAP
            told = f"{stretch.credit:+.2f}".replace("-", "−")
            at = (begins, y - 9) if i == 0 else (x + 4, y + 23)
            parts.append(_text(*at, told, f"{kind} bold"))
        parts.append(_text(REWARDS_AT, y + 23, "1  ✓" if row.reward else "0  ✗", "bold"))
    y = TOP + LINE * len(ROWS) + 12
    parts += [
        f'<circle class="anchor" cx="{LEFT + 6}" cy="{y - 5}" r="6"/>',
        _text(LEFT + 20, y, "anchor: the policy is uncertain here, so a branch leaves", "small"),
        _text(LEFT, y + 24, "first line: the base trajectory; below it, its three branches", "small"),
        _text(LEFT, y + 48, "numbers: credit, from all rollouts through these tokens", "small"),
    ]
    title = "A tree of four rollouts: a base trajectory, three anchors, a branch from each, and the credit along it"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">\n  <title>{title}</title>\n  <style>{STYLE}  </style>\n'
        f'  <rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>\n  '
        + "\n  ".join(parts)
        + "\n</svg>\n"
    )


def _width(token: str) -> float:
    return LETTER * len(token) + 16


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" xml:space="preserve">{escape(text)}</text>'


if __name__ == "__main__":
    found = credit_of_example()
    PICTURE.write_text(draw(found))
    for stretch in found:
        print(stretch)
