"""Two generated texts agree where nine tenths of their words do, in order."""

from __future__ import annotations

from difflib import SequenceMatcher

from tsx_runtime.plugins import ComparedAnswer

ENOUGH = 0.9


def nearly_the_same_text(
    request: bytes, answer: ComparedAnswer, shadow: ComparedAnswer
) -> bool | str:
    first, second = (
        response.body.decode("utf-8", "replace").split() for response in (answer, shadow)
    )
    alike = SequenceMatcher(None, first, second).ratio()
    return alike >= ENOUGH or f"only {alike:.0%} of the words agree"
