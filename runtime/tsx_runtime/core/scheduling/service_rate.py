"""The measured service rate of a version's workers, for `Retry-After`, deadlines and scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tsx_archiver.metadata.slo import LatencyTarget

MEMORY_S = 5.0  # seconds of work after which a measurement counts about a third
# Seconds. In a longer batch, less than a hundredth is the way to the worker (100 microseconds).
SHORT_S = 0.01
MAX_RETRY_S = 3600  # seconds; a client should give up rather than wait longer


class ServiceRate:
    """Exponentially weighted means over the busy time of workers, updated once per batch."""

    __slots__ = ("_batches", "_busy", "_deviation", "_items", "_seconds", "has_short_batches")

    def __init__(self) -> None:
        self._items = 0.0
        self._batches = 0.0
        self._busy = 0.0
        self._seconds = 0.0
        self._deviation = 0.0
        self.has_short_batches = False  # whether batches take less than `SHORT_S` on average

    def add(self, items: int, busy_seconds: float, seconds: float) -> None:
        """Add a batch.

        Args:
            items: The number of its requests.
            busy_seconds: The seconds in which its worker was busy with it.
            seconds: The seconds from its departure from the queue to the reply.
        """
        decay = math.exp(-busy_seconds / MEMORY_S)
        self._items = self._items * decay + items
        self._batches = self._batches * decay + 1
        self._busy = self._busy * decay + busy_seconds
        self._seconds = self._seconds * decay + seconds
        self._deviation = self._deviation * decay + abs(seconds - self._seconds / self._batches)
        self.has_short_batches = self._busy < SHORT_S * self._batches

    @property
    def rate(self) -> float:
        """The requests per second of one busy worker; 0 before the first batch."""
        return self._items / self._busy if self._busy > 0 else 0.0

    @property
    def answer_time(self) -> float:
        """The seconds from the queue to the reply that suffice for nearly all requests.

        It is the mean plus four times the mean deviation, like TCP's timeout (RFC 6298). It is 0
        before the first batch.
        """
        return (self._seconds + 4 * self._deviation) / self._batches if self._batches else 0.0


class LatencyCapacity(NamedTuple):
    """The measured capacity of workers within a latency target.

    Attributes:
        target: The latency target.
        throughput: Returns how many requests per second some workers answer in time, and in which
            batch size, if `rate` requests per second arrive: `throughput(rate, workers)`.
    """

    target: LatencyTarget
    throughput: Callable[[float, int], tuple[float, int]]

    def min_workers(self, rate: float, utilization: float, limit: int) -> int:
        """Return the smallest number of workers that answer `rate` requests per second in time.

        They are busy for at most the fraction `utilization` of the time. The result is at most
        `limit`.
        """
        return next(
            (
                count
                for count in range(1, limit)
                if rate <= utilization * self.throughput(rate, count)[0]
            ),
            limit,
        )


def retry_after(waiting: int, rate: float, delay: float = 0.0) -> int:
    """Return the whole seconds until `waiting` requests are done at `rate` a second.

    They begin after `delay` seconds. The result is at least 1.
    """
    seconds = delay + (waiting / rate if rate > 0 else 0.0)
    return max(1, math.ceil(min(seconds, MAX_RETRY_S)))


def latest_start(arrived: float, deadline: float, answer_time: float) -> float:
    """Return when a request must leave the queue for an answer by its deadline.

    Otherwise an overloaded server would begin each request just before its deadline. A request may
    wait for half of its time in any case; otherwise one slow batch could exclude all requests.
    """
    return max(deadline - answer_time, (arrived + deadline) / 2)
