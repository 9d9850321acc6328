"""The measured service rate of a version's workers, for `Retry-After` and deadlines."""

from __future__ import annotations

import math

MEMORY_S = 5.0  # seconds of work after which a measurement has about a third of its weight
# Seconds. In a longer batch, the way to the worker (100 microseconds) is less than a hundredth.
SHORT_S = 0.01
MAX_RETRY_S = 3600  # seconds; a client should give up rather than wait longer


class ServiceRate:
    """Exponentially weighted means over the busy time of workers, updated once per batch."""

    __slots__ = ("_batches", "_busy", "_deviation", "_items", "_spent", "short")

    def __init__(self) -> None:
        self._items = 0.0
        self._batches = 0.0
        self._busy = 0.0
        self._spent = 0.0
        self._deviation = 0.0
        self.short = False  # whether batches take less than `SHORT_S` in the mean

    def add(self, items: int, busy: float, spent: float) -> None:
        """Add a batch.

        Args:
            items: The number of its requests.
            busy: The seconds that its worker was busy with it.
            spent: The seconds from leaving the queue to the reply.
        """
        keep = math.exp(-busy / MEMORY_S)
        self._items = self._items * keep + items
        self._batches = self._batches * keep + 1
        self._busy = self._busy * keep + busy
        self._spent = self._spent * keep + spent
        self._deviation = self._deviation * keep + abs(spent - self._spent / self._batches)
        self.short = self._busy < SHORT_S * self._batches

    @property
    def rate(self) -> float:
        """Requests per second of one busy worker; 0 before the first batch."""
        return self._items / self._busy if self._busy > 0 else 0.0

    @property
    def answer_time(self) -> float:
        """Seconds from the queue to the reply for nearly every request; 0 before the first batch.

        It is the mean and four times the mean deviation, like TCP's timeout (RFC 6298).
        """
        return (self._spent + 4 * self._deviation) / self._batches if self._batches else 0.0


def retry_after(waiting: int, rate: float, before: float = 0.0) -> int:
    """Return the whole seconds until `waiting` requests are done at `rate` a second.

    They begin after `before` seconds. The result is at least 1.
    """
    seconds = before + (waiting / rate if rate > 0 else 0.0)
    return max(1, math.ceil(min(seconds, MAX_RETRY_S)))


def latest_start(arrived: float, deadline: float, answer_time: float) -> float:
    """Return when a request must leave the queue for an answer by its deadline.

    Without this, an overloaded server would begin each request just before its deadline. A request
    may wait half of its time in any case: a worker that was slow once must not shut out all.
    """
    return max(deadline - answer_time, (arrived + deadline) / 2)
