"""Aggregates the statistics of batches: appended one by one, and counted many at a time, which
costs a third.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, get_args

from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.core.telemetry.histogram import FINE, Durations

ROOM, OF_A_BATCH = (
    16384,
    8,
)  # requests that are counted at a time, less so many for each batch: about a millisecond's work
WIDTH = len(get_args(Batch))


class Totals:
    """Sums over the batches of a version that its workers have answered."""

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
        self.answers: Counter[int] = Counter()  # by HTTP status
        self.batch_sizes: Counter[int] = Counter()  # batches by the number of their items
        self.latency = Durations(FINE)  # of requests: arrival to reply
        self.queue = Durations()  # of requests: see batch_times.py
        self.batch_wait = Durations()  # of requests, too
        self.preprocess = Durations()  # of batches, as are those that follow: in the worker
        self.inference = Durations()
        self.postprocess = Durations()
        # sum over requests: arrival to the frame's leaving, which is TorchServe's queue time
        self.queue_seconds = 0.0
        # sum over batches: from where the worker began to its reply; not what it waited for there
        self.busy_seconds = 0.0


class BatchAggregator:
    """Grows on the hot path, once a batch, and is settled at intervals; readers call `totals()`,
    from any thread.

    `rows` is always the same list, since another thread may be about to add to it, and flat:
    `WIDTH` entries for each batch, which is added at once. `room` is about what is left until it is
    to be settled.
    """

    __slots__ = ("_lock", "_totals", "room", "rows")

    def __init__(self) -> None:
        self.rows: list[Any] = []  # of `times.Batch`
        self.room = ROOM
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
            self.room = ROOM
            if rows:
                self._count(rows)

    def _count(self, rows: Sequence[Any]) -> None:
        """As `batch_times` and `BatchTimes` have it for one."""
        import numpy as np

        of_free, of_sent, of_answered, numbers, times, arrivals, odd = (
            rows[place::WIDTH] for place in range(WIDTH)
        )
        counted, size = self._totals, len(numbers)
        free, sent, answered = np.frombuffer(
            struct.pack(f"{3 * size}d", *of_free, *of_sent, *of_answered)
        ).reshape(3, size)
        began, seconds, *steps = np.frombuffer(b"".join(times), "<f8").reshape(size, -1).T.copy()
        arrived = np.frombuffer(b"".join(arrivals))
        most = answered - sent
        free = np.minimum(free, sent)
        seconds = np.where((seconds >= 0) & (seconds <= most), seconds, most)
        latest = answered - seconds
        began = np.where((began >= sent) & (began <= latest), began, latest)
        counted.batches += size
        counted.busy_seconds += float((answered - began).sum())
        for durations, step in zip(
            (counted.preprocess, counted.inference, counted.postprocess), steps, strict=True
        ):
            known = step >= 0  # NaN is not
            if known.any():
                durations.add(np.minimum(step, seconds)[known])
        if len(arrived) == size:
            counted.batch_sizes[1] += size
        else:  # from here on: by request
            counted.batch_sizes.update(numbers)
            sizes = np.array(numbers)
            free, sent, began, answered = (
                np.repeat(each, sizes) for each in (free, sent, began, answered)
            )
        counted.queue_seconds += float((sent - arrived).sum())
        ready = np.maximum(free, arrived)
        counted.latency.add(answered - arrived)
        counted.queue.add(ready - arrived)
        counted.batch_wait.add(began - ready)
        statuses = [*chain.from_iterable(filter(None, odd))]
        counted.answers.update(statuses)
        if others := len(arrived) - len(statuses):
            counted.answers[200] += others
