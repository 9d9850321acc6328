"""The entries of one version for the metric log, until they are written."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.wire import MetricDelta

# If the log is written too slowly, its entries must not fill the memory.
MAX_ENTRIES = 20_000


class BatchEntry(NamedTuple):
    at: float  # time.time()
    request_ids: bytes  # separated by commas
    batch: Batch


class ValueEntry(NamedTuple):
    at: float
    request_ids: bytes
    value: MetricDelta


class MetricJournal:
    """Entries that are not written yet; the hot path adds one for each batch."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[BatchEntry | ValueEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add_batch(self, batch: Batch, request_ids: Iterable[bytes]) -> None:
        if len(self._entries) < MAX_ENTRIES:
            self._entries.append(BatchEntry(time.time(), b",".join(request_ids), batch))

    def add_values(self, values: Iterable[MetricDelta], request_ids: Iterable[bytes]) -> None:
        now, ids = time.time(), b",".join(request_ids)
        self._entries += [ValueEntry(now, ids, value) for value in values][
            : MAX_ENTRIES - len(self._entries)
        ]

    def take(self, max_entries: int = MAX_ENTRIES) -> list[BatchEntry | ValueEntry]:
        """Remove and return the oldest entries, in the order of their arrival."""
        entries = self._entries[:max_entries]
        del self._entries[:max_entries]
        return entries
