"""What happened to a version's requests, as plain integers and floats that `/metrics` renders when it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tsx_runtime.wire import MetricDelta

BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

MetricKey = tuple[str, str, str, tuple[tuple[str, str], ...]]  # name, type, unit, dimensions


class HandlerMetric:
    """A metric that a handler reported. A gauge keeps the last value, a counter the sum, a histogram sum and count."""

    __slots__ = ("count", "last", "sum")

    def __init__(self) -> None:
        self.last = 0.0
        self.sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.last = value
        self.sum += value
        self.count += 1


class Stats:
    """One version's numbers. The hot path updates them once a batch."""

    __slots__ = (
        "answers",
        "batch_sizes",
        "batches",
        "handler_metrics",
        "inference_seconds",
        "last_queue_seconds",
        "last_worker_seconds",
        "latency_seconds",
        "queue_seconds",
        "recycled",
        "refusals",
        "requests",
        "restarts",
        "stuck",
    )

    def __init__(self) -> None:
        self.requests = 0  # accepted
        self.batches = 0  # answered by a worker
        self.answers: Counter[int] = Counter()  # by HTTP status
        self.refusals: Counter[str] = Counter()  # by the name of the error class
        self.batch_sizes: Counter[int] = Counter()  # batches by the number of their items
        self.queue_seconds = 0.0  # sum over requests: arrival to the frame's leaving
        self.inference_seconds = 0.0  # sum over batches: the frame's leaving to its reply
        self.latency_seconds = 0.0  # sum over requests: arrival to reply
        self.last_queue_seconds = 0.0  # of the newest batch: its oldest request's wait
        self.last_worker_seconds = 0.0  # of the newest batch
        self.restarts = 0
        self.recycled: Counter[str] = Counter()  # workers that were replaced for their requests, memory or age
        self.stuck: Counter[str] = Counter()  # workers that were killed because they were stopped or silent
        self.handler_metrics: dict[MetricKey, HandlerMetric] = {}

    def add_handler_metrics(self, deltas: Iterable[MetricDelta]) -> None:
        for delta in deltas:
            key = (delta["name"], delta["type"], delta["unit"], tuple(sorted(delta["dimensions"].items())))
            self.handler_metrics.setdefault(key, HandlerMetric()).add(delta["value"])
