"""The stages of a request's time as bars in a terminal."""

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
    """Draw a bar proportional to `part` of `total`, with at least one character."""
    length = round(WIDTH * part / total) if total > 0 else 0
    return ("\u2588" if _supports_blocks() else "#") * max(length, int(part > 0))


def strip(stage_times: Mapping[str, float], width: int = WIDTH) -> str:
    """Draw all stages to scale in one line, with a letter for each stage."""
    total = sum(stage_times.get(part, 0.0) for part in PARTS)
    letters, elapsed = "", 0.0
    for part, letter in LETTERS.items():
        elapsed += stage_times.get(part, 0.0)
        letters += letter * (round(width * elapsed / total) - len(letters) if total > 0 else 0)
    return letters


def legend() -> str:
    return "  ".join(f"{letter} {part}" for part, letter in LETTERS.items())


def _supports_blocks() -> bool:
    try:
        "\u2588".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
