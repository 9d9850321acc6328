"""The stages of a request's time, drawn for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping

WIDTH = 30
PARTS = {
    "queue": "no worker was free",
    "batch": "waited for its batch to begin",
    "preprocess": "the handler's preprocess",
    "inference": "the model, or a handler without steps",
    "postprocess": "the handler's postprocess",
    "other": "reading and writing bodies, the way there and back",
}
LETTERS = {
    "queue": "q",
    "batch": "b",
    "preprocess": "p",
    "inference": "I",
    "postprocess": "a",
    "other": ".",
}


def milliseconds(value: float) -> str:
    return f"{value:,.3f} ms" if value < 100 else f"{value:,.0f} ms"


def bar(part: float, total: float) -> str:
    """Draw a bar in proportion to `part` of `total`, with at least one character."""
    length = round(WIDTH * part / total) if total > 0 else 0
    return ("\u2588" if _draws() else "#") * max(length, int(part > 0))


def strip(spent: Mapping[str, float], width: int = WIDTH) -> str:
    """Draw all stages in one line in proportion, with a letter for each."""
    total = sum(spent.get(part, 0.0) for part in PARTS)
    drawn, reached = "", 0.0
    for part, letter in LETTERS.items():
        reached += spent.get(part, 0.0)
        drawn += letter * (round(width * reached / total) - len(drawn) if total > 0 else 0)
    return drawn


def legend() -> str:
    return "  ".join(f"{letter} {part}" for part, letter in LETTERS.items())


def _draws() -> bool:
    try:
        "\u2588".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
