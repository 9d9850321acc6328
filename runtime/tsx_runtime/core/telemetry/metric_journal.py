"""Entries of the metric log for one version's batches, kept until they are written."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.wire import MetricDelta

MOST = 10_000  # entries of each kind between two writes; a log that could not follow must not fill the memory


class BatchEntry(NamedTuple):
    at: float  # time.time()
    queue_seconds: float  # of its oldest request
    worker_seconds: float


class ValueEntry(NamedTuple):
    at: float
    value: MetricDelta
    request_ids: str  # of the batch, separated by commas


class MetricJournal:
    """The hot path adds to it once a batch, and only where a log is written."""

    __slots__ = ("_batches", "_values")

    def __init__(self) -> None:
        self._batches: list[BatchEntry] = []
        self._values: list[ValueEntry] = []

    def add_batch(self, queue_seconds: float, worker_seconds: float) -> None:
        if len(self._batches) < MOST:
            self._batches.append(BatchEntry(time.time(), queue_seconds, worker_seconds))

    def add_values(self, values: Iterable[MetricDelta], request_ids: str) -> None:
        now = time.time()
        self._values += [ValueEntry(now, value, request_ids) for value in values][: MOST - len(self._values)]

    def take(self) -> tuple[list[BatchEntry], list[ValueEntry]]:
        taken = self._batches, self._values
        self._batches, self._values = [], []
        return taken
