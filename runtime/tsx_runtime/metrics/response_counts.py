"""The counts of responses by class of status."""

from __future__ import annotations


class ResponseCounts:
    """The responses of all listeners, by the first digit of their status."""

    __slots__ = ("_others", "plain")

    def __init__(self) -> None:
        self.plain = 0  # responses with status 200 that need no further accounting: nearly all
        self._others = [0] * 10

    def add(self, status: int) -> None:
        self._others[status // 100] += 1

    @property
    def classes(self) -> list[int]:
        counts = self._others[:]
        counts[2] += self.plain
        return counts
