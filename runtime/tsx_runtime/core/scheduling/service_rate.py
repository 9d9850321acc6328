"""The measured service rate of a version's workers: the basis of `Retry-After` and of deadlines."""

from __future__ import annotations

import math

MEMORY = 5.0  # seconds of work after which a measurement weighs about a third of what it did
# seconds; of a longer batch the way to the worker, some 100 microseconds, is less than a hundredth
SHORT = 0.01
LONGEST = 3600  # seconds; a client should give up rather than wait longer than this


class ServiceRate:
    """Exponentially weighted means over the time that workers were busy, updated once a batch."""

    __slots__ = ("_batches", "_busy", "_deviation", "_items", "_spent", "short")

    def __init__(self) -> None:
        self._items = 0.0
        self._batches = 0.0
        self._busy = 0.0
        self._spent = 0.0
        self._deviation = 0.0
        self.short = False  # whether a batch is known to take less than `SHORT`

    def add(self, items: int, busy: float, spent: float) -> None:
        """A batch of `items` kept its worker busy for `busy` seconds, and was answered `spent`
        seconds after it had left the queue.
        """
        keep = math.exp(-busy / MEMORY)
        self._items = self._items * keep + items
        self._batches = self._batches * keep + 1
        self._busy = self._busy * keep + busy
        self._spent = self._spent * keep + spent
        self._deviation = self._deviation * keep + abs(spent - self._spent / self._batches)
        self.short = self._busy < SHORT * self._batches

    @property
    def rate(self) -> float:
        """Requests per second of one busy worker; 0 before the first batch."""
        return self._items / self._busy if self._busy > 0 else 0.0

    @property
    def answer_time(self) -> float:
        """Seconds from leaving the queue within which nearly every answer came; 0 before the first
        batch.

        The mean and four times the mean deviation, which is what TCP waits for an acknowledgement
        (RFC 6298).
        """
        return (self._spent + 4 * self._deviation) / self._batches if self._batches else 0.0


def retry_after(waiting: int, rate: float, before: float = 0.0) -> int:
    """Whole seconds, at least one, until `waiting` requests are done at `rate` a second, begun
    after `before` seconds.
    """
    seconds = before + (waiting / rate if rate > 0 else 0.0)
    return max(1, math.ceil(min(seconds, LONGEST)))


def latest_start(arrived: float, deadline: float, answer_time: float) -> float:
    """When a request must have left the queue, so that its answer is there by the deadline.

    Without this, in overload, each request would be begun just before its deadline and answered
    after it. A worker that was slow once must not shut out all others: half of the time that a
    request has it may wait in any case.
    """
    return max(deadline - answer_time, (arrived + deadline) / 2)
