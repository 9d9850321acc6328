"""Suggests the known word that is nearest to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

LONGEST = 100  # characters of a word that is compared: a client may send megabytes of them
MOST = 20  # words that are compared where there may be thousands: it takes a millisecond
CLOSE = 0.75  # of difflib's ratio: a typo or two, not a word that happens to share letters


def nearest(word: str, known: Iterable[str]) -> str:
    """The nearest of `known`, or nothing when none is near."""
    near = (
        difflib.get_close_matches(word, list(known), n=1, cutoff=CLOSE)
        if len(word) <= LONGEST
        else []
    )
    return near[0] if near else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'X'?` for the nearest of `known`, or nothing when none is near."""
    near = nearest(word, known)
    return f"; did you mean '{near}'?" if near else ""


def suggestion_among_many(word: str, known: Iterable[str]) -> str:
    """As `suggestion`, for names of which there may be thousands: only those of about the same
    length and letters are compared.
    """
    letters = set(word)
    similar = (
        each
        for each in known
        if abs(len(each) - len(word)) <= 2 and len(letters.symmetric_difference(each)) <= 4
    )
    return suggestion(word, islice(similar, MOST))
