"""Suggests the known word that is nearest to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 100  # characters of a word that is compared: a client may send megabytes of them
CLOSE = 0.75  # of difflib's ratio: a typo or two, not a word that happens to share letters


def nearest(word: str, known: Iterable[str]) -> str:
    """The nearest of `known`, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=CLOSE) if len(word) <= LONGEST else []
    return near[0] if near else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'X'?` for the nearest of `known`, or nothing when none is near."""
    near = nearest(word, known)
    return f"; did you mean '{near}'?" if near else ""
