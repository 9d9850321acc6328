"""Suggestions for a misspelled name: the most similar known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

MAX_NAME_CHARS = 100  # Longer names, which may have megabytes, get no suggestion.
MAX_COMPARED = 20  # names compared by `suggestion_among_many`, in about a millisecond
MIN_SIMILARITY = 0.75  # the ratio of difflib for names that differ by one or two typos


def nearest(name: str, known_names: Iterable[str]) -> str:
    """Return the most similar name of `known_names`, or an empty string if none is similar."""
    if len(name) > MAX_NAME_CHARS:
        return ""
    matches = difflib.get_close_matches(name, list(known_names), n=1, cutoff=MIN_SIMILARITY)
    return matches[0] if matches else ""


def suggestion(name: str, known_names: Iterable[str]) -> str:
    """Return `; did you mean 'X'?` for the most similar name, or an empty string."""
    similar = nearest(name, known_names)
    return f"; did you mean '{similar}'?" if similar else ""


def suggestion_among_many(name: str, known_names: Iterable[str]) -> str:
    """Return `suggestion` among up to thousands of known names.

    Only names with about the same length and letters are compared.
    """
    letters = set(name)
    candidates = (
        candidate
        for candidate in known_names
        if abs(len(candidate) - len(name)) <= 2
        and len(letters.symmetric_difference(candidate)) <= 4
    )
    return suggestion(name, islice(candidates, MAX_COMPARED))
