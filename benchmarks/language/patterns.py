"""Sentences of the families in English, which `patterns.yaml` has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_sentences: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@dataclass(frozen=True, eq=False)
class Pattern:
    """A scene: what is counted, how many there are at first, the question, and sentences for each kind of event."""

    things: str
    start: str
    question: str
    events: dict[str, list[str]]


@dataclass(frozen=True, eq=False)
class Stock:
    """A place with four kinds of things: what there is at first, and that some of a kind come or go."""

    things: list[str]
    start: str
    more: str
    fewer: str


def _stocks(name: str) -> list[Stock]:
    return [Stock(**stock | {"things": stock["things"].split()}) for stock in _sentences[name]]


def _patterns(name: str, events: str) -> list[Pattern]:
    return [Pattern(things, start, question, _sentences[events]) for things, start, question in _sentences[name]]


PATTERNS, HELDOUT_PATTERNS = _patterns("patterns", "events"), _patterns("heldout_patterns", "heldout_events")
STOCKS, HELDOUT_STOCKS = _stocks("stocks"), _stocks("heldout_stocks")

NAMES, STEPS, OPENINGS, ENDINGS, ASIDES, REMARKS, LINES = (
    _sentences[name] for name in ("names", "steps", "openings", "endings", "asides", "remarks", "lines")
)
