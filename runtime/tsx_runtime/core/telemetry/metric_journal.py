"""Entries of the metric log for one version's batches, kept until they are written."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.wire import MetricDelta

MOST = 20_000  # entries between two writes; a log that could not follow must not fill the memory


class BatchEntry(NamedTuple):
    at: float  # time.time()
    request_ids: bytes  # of the batch, separated by commas
    batch: Batch


class ValueEntry(NamedTuple):
    at: float
    request_ids: bytes
    value: MetricDelta


class MetricJournal:
    """The hot path adds to it once a batch, and only where a log is written."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[BatchEntry | ValueEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add_batch(self, batch: Batch, request_ids: Iterable[bytes]) -> None:
        if len(self._entries) < MOST:
            self._entries.append(BatchEntry(time.time(), b",".join(request_ids), batch))

    def add_values(self, values: Iterable[MetricDelta], request_ids: Iterable[bytes]) -> None:
        now, ids = time.time(), b",".join(request_ids)
        self._entries += [ValueEntry(now, ids, value) for value in values][
            : MOST - len(self._entries)
        ]

    def take(self, most: int = MOST) -> list[BatchEntry | ValueEntry]:
        """The oldest, in the order in which they came."""
        taken = self._entries[:most]
        del self._entries[:most]
        return taken
