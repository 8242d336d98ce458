"""What a recipe says of itself, in the comments that it begins with."""

from itertools import takewhile
from pathlib import Path


def header(recipe: Path) -> list[str]:
    """The lines of the comments before the first setting, without what marks and indents them."""
    lines = takewhile(lambda line: not line or line.startswith("#"), map(str.strip, recipe.read_text().splitlines()))
    return [line.lstrip("#").strip() for line in lines]
