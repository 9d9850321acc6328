"""Counts of responses by the first digit of their status."""

from __future__ import annotations


class ResponseCounts:
    """The counts of all listeners' responses."""

    __slots__ = ("_others", "plain")

    def __init__(self) -> None:
        self.plain = 0  # most responses: status 200, and nothing else to count
        self._others = [0] * 10

    def add(self, status: int) -> None:
        self._others[status // 100] += 1

    @property
    def classes(self) -> list[int]:
        counts = self._others[:]
        counts[2] += self.plain
        return counts
