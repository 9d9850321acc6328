"""Suggestions for a misspelt name: the most similar known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

MAX_NAME_CHARS = 100  # a client may send megabytes
MAX_COMPARED = 20  # names compared by `suggestion_among_many`, in about a millisecond
MIN_SIMILARITY = 0.75  # difflib's ratio for a typo or two


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the most similar name of `known`, or an empty string if none is similar."""
    if len(name) > MAX_NAME_CHARS:
        return ""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=MIN_SIMILARITY)
    return matches[0] if matches else ""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'X'?` for the most similar name, or an empty string."""
    similar = nearest(name, known)
    return f"; did you mean '{similar}'?" if similar else ""


def suggestion_among_many(name: str, known: Iterable[str]) -> str:
    """Return `suggestion` where there may be thousands of known names.

    Only names of about the same length and letters are compared.
    """
    letters = set(name)
    candidates = (
        candidate
        for candidate in known
        if abs(len(candidate) - len(name)) <= 2
        and len(letters.symmetric_difference(candidate)) <= 4
    )
    return suggestion(name, islice(candidates, MAX_COMPARED))
