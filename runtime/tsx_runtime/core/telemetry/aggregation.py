"""The sums over the batches of a version.

Batches are appended one by one, but counted many at a time, which takes a third of the time.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, get_args

from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.core.telemetry.histogram import FINE_BOUNDS, Durations

MAX_UNCOUNTED = 16384  # requests that are counted at a time, in about a millisecond
BATCH_COST_IN_REQUESTS = 8  # the work for a batch itself, measured in requests
WIDTH = len(get_args(Batch))


class Totals:
    """Sums over the answered batches of a version."""

    __slots__ = (
        "answers",
        "batch_sizes",
        "batch_wait",
        "batches",
        "busy_seconds",
        "inference",
        "latency",
        "postprocess",
        "preprocess",
        "queue",
        "queue_seconds",
    )

    def __init__(self) -> None:
        self.batches = 0
        self.answers: Counter[int] = Counter()  # number of requests by HTTP status
        self.batch_sizes: Counter[int] = Counter()  # number of batches by their number of requests
        self.latency = Durations(FINE_BOUNDS)  # requests, from arrival to reply
        # Durations of each request; see batch_times.py.
        self.queue = Durations()
        self.batch_wait = Durations()
        # Durations of each batch in the handler's steps.
        self.preprocess = Durations()
        self.inference = Durations()
        self.postprocess = Durations()
        # The sum over requests of the time from arrival to sending. TorchServe calls it queue time.
        self.queue_seconds = 0.0
        # The sum over batches of the time from the worker's start to its reply.
        self.busy_seconds = 0.0


class BatchAggregator:
    """Batches that are not counted yet, and the totals of the counted ones.

    The hot path appends the `WIDTH` values of a batch to `rows` in one step. `rows` always stays
    the same list, since several threads may use it. `room` is roughly the number of requests that
    may follow before `settle` is called. `totals` may be called in any thread.
    """

    __slots__ = ("_lock", "_totals", "room", "rows")

    def __init__(self) -> None:
        self.rows: list[Any] = []  # flattened `batch_times.Batch` tuples
        self.room = MAX_UNCOUNTED
        self._totals = Totals()
        self._lock = threading.Lock()

    def totals(self) -> Totals:
        if self.rows:
            self.settle()
        return self._totals

    def settle(self) -> None:
        with self._lock:
            rows = self.rows[:]
            del self.rows[: len(rows)]
            self.room = MAX_UNCOUNTED
            if rows:
                self._count(rows)

    def _count(self, rows: Sequence[Any]) -> None:
        """Add batches to the totals, by the rules of `batch_times` and `BatchTimes`."""
        import numpy as np

        free_column, sent_column, answered_column, numbers, times, arrivals, failed_statuses = (
            rows[column::WIDTH] for column in range(WIDTH)
        )
        totals, size = self._totals, len(numbers)
        free, sent, answered = np.frombuffer(
            struct.pack(f"{3 * size}d", *free_column, *sent_column, *answered_column)
        ).reshape(3, size)
        began, seconds, *steps = np.frombuffer(b"".join(times), "<f8").reshape(size, -1).T.copy()
        arrived = np.frombuffer(b"".join(arrivals))
        max_seconds = answered - sent
        free = np.minimum(free, sent)
        seconds = np.where((seconds >= 0) & (seconds <= max_seconds), seconds, max_seconds)
        latest = answered - seconds
        began = np.where((began >= sent) & (began <= latest), began, latest)
        totals.batches += size
        totals.busy_seconds += float((answered - began).sum())
        for durations, step in zip(
            (totals.preprocess, totals.inference, totals.postprocess), steps, strict=True
        ):
            known = step >= 0  # NaN is not known.
            if known.any():
                durations.add(np.minimum(step, seconds)[known])
        if len(arrived) == size:
            totals.batch_sizes[1] += size
        else:
            # Repeat the values of each batch for its requests.
            totals.batch_sizes.update(numbers)
            sizes = np.array(numbers)
            free, sent, began, answered = (
                np.repeat(column, sizes) for column in (free, sent, began, answered)
            )
        totals.queue_seconds += float((sent - arrived).sum())
        ready = np.maximum(free, arrived)
        totals.latency.add(answered - arrived)
        totals.queue.add(ready - arrived)
        totals.batch_wait.add(began - ready)
        statuses = [*chain.from_iterable(filter(None, failed_statuses))]
        totals.answers.update(statuses)
        if successes := len(arrived) - len(statuses):
            totals.answers[200] += successes
