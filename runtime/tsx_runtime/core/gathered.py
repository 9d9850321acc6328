"""What batches add to a version's numbers: gathered as it comes, and counted many batches at a time, which costs a third."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

from tsx_runtime.core.durations import FINE, Durations

BATCHES = 128  # that are counted together: about a tenth of a millisecond, which no client feels

Batch: TypeAlias = tuple[
    float, float, float, int, bytes
]  # free, sent, answered (see times.py), requests, what the worker told (`wire.TIMES`)
Row: TypeAlias = tuple[Batch, Sequence[float], Sequence[int] | None]  # and when each request arrived, and the statuses that are not 200


class Counted:
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
        self.queue = Durations()  # of requests: see times.py
        self.batch_wait = Durations()  # of requests, too
        self.preprocess = Durations()  # of batches, as are those that follow: in the worker
        self.inference = Durations()
        self.postprocess = Durations()
        self.queue_seconds = 0.0  # sum over requests: arrival to the frame's leaving, which is TorchServe's queue time
        self.busy_seconds = 0.0  # sum over batches: the frame's leaving to its reply


class Gathered:
    """`rows` grows on the hot path, once a batch, and is settled when it has `BATCHES`; who reads asks for `counted()`, from any thread."""

    __slots__ = ("_counted", "_lock", "rows")

    def __init__(self) -> None:
        self.rows: list[Row] = []  # always the same list: another thread may be about to add to it
        self._counted = Counted()
        self._lock = threading.Lock()

    def counted(self) -> Counted:
        if self.rows:
            self.settle()
        return self._counted

    def settle(self) -> None:
        with self._lock:
            taken = self.rows[:]
            del self.rows[: len(taken)]
            if taken:
                self._count(taken)

    def _count(self, rows: Sequence[Row]) -> None:
        """As `batch_times` and `BatchTimes` have it for one."""
        import numpy as np

        counted = self._counted
        batches, arrivals, odd = zip(*rows, strict=True)
        frees, sents, answereds, numbers, told = zip(*batches, strict=True)
        free, sent, answered = np.array((frees, sents, answereds))
        began, seconds, *steps = np.frombuffer(b"".join(told), "<f8").reshape(len(rows), -1).T
        most = answered - sent
        free = np.minimum(free, sent)
        seconds = np.where((seconds >= 0) & (seconds <= most), seconds, most)
        latest = answered - seconds
        began = np.where((began >= sent) & (began <= latest), began, latest)
        counted.batches += len(rows)
        counted.batch_sizes.update(numbers)
        counted.busy_seconds += float(most.sum())
        for durations, step in zip((counted.preprocess, counted.inference, counted.postprocess), steps, strict=True):
            known = step >= 0  # NaN is not
            if known.any():
                durations.add(np.minimum(step, seconds)[known])
        arrived = np.array(list(chain.from_iterable(arrivals)))
        if len(arrived) != len(rows):  # from here on: by request
            free, sent, began, answered = (np.repeat(each, numbers) for each in (free, sent, began, answered))
        counted.queue_seconds += float((sent - arrived).sum())
        ready = np.maximum(free, arrived)
        counted.latency.add(answered - arrived)
        counted.queue.add(ready - arrived)
        counted.batch_wait.add(began - ready)
        others = list(chain.from_iterable(filter(None, odd)))
        counted.answers.update(others)
        if len(arrived) > len(others):
            counted.answers[200] += len(arrived) - len(others)
