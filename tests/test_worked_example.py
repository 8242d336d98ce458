"""The example of tree credit in README and the page of the method: its numbers and its picture are the package's."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "assets" / "draw_tree.py"


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw_tree", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_worked_out_by_hand(drawing):
    """|T| (mean reward of T - (4 * .25 + rewards of U) / (4 + |U|)), in order of row and position."""
    expected = [
        4 * (2 / 4 - 1 / 4),
        3 * (2 / 3 - (1 + 0) / 5),
        2 * (1 / 2 - (1 + 0 + 1) / 6),
        1 * (0 - (1 + 0 + 1 + 1) / 7),
        1 * (0 - (1 + 0 + 1 + 1) / 7),
        1 * (1 - (1 + 0 + 0 + 1) / 7),
        1 * (1 - (1 + 0 + 0 + 1) / 7),
    ]
    assert [stretch.credit for stretch in drawing.credit_of_example()] == pytest.approx(expected)


def test_the_picture_and_the_page_have_these_numbers(drawing):
    assert drawing.PICTURE.read_text() == drawing.draw(drawing.credit_of_example())
    page = (ROOT / "docs" / "concepts" / "method.md").read_text()
    rows = [line for line in page.splitlines() if re.search(r"= \*\*[+−]\d\.\d\d\*\* \|$", line)]
    told = [float(line.rsplit("**", 2)[1].replace("−", "-")) for line in rows]
    assert told == [round(stretch.credit, 2) for stretch in drawing.credit_of_example()]
    for line, stretch in zip(rows, drawing.credit_of_example(), strict=True):
        row = drawing.ROWS[stretch.row]
        tokens = row.tokens[stretch.start - row.position : stretch.end - row.position]
        assert f"`{' '.join(tokens)}`" in line
