"""What happened to a version's requests, as plain integers and floats that `/metrics` renders when it is read."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from tsx_runtime.core.journal import Journal
from tsx_runtime.core.told import Told
from tsx_runtime.wire import MetricDelta

MOST_LABEL_SETS = 1000  # of one metric that a handler reports
MOST_METRICS = 1000  # that the handler of one version reports
OTHERS = ""  # stands for the names of those beyond
BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

VALUE_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)  # of handlers' histograms, as TorchServe's

MetricKey = tuple[str, str, str, tuple[tuple[str, str], ...]]  # name, type, unit, dimensions


logger = logging.getLogger("tsx.metrics")


class HandlerMetric:
    """A metric that a handler reported. A gauge keeps the last value, a counter the sum, a histogram sum, count and buckets."""

    __slots__ = ("buckets", "count", "last", "sum")

    def __init__(self, kind: str = "gauge") -> None:
        self.buckets = [0] * (len(VALUE_BOUNDS) + 1) if kind == "histogram" else []  # each for itself
        self.last = 0.0
        self.sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.last = value
        self.sum += value
        self.count += 1
        if self.buckets:
            self.buckets[bisect_left(VALUE_BOUNDS, value)] += 1


class Stats:
    """One version's numbers. The hot path updates them once a batch."""

    __slots__ = (
        "_label_sets",
        "answers",
        "batch_sizes",
        "batches",
        "dropped_metrics",
        "handler_metrics",
        "inference_seconds",
        "journal",
        "label",
        "last_queue_seconds",
        "last_worker_seconds",
        "latency_seconds",
        "queue_seconds",
        "recycled",
        "refusals",
        "requests",
        "restarts",
        "stuck",
        "told",
    )

    def __init__(self, label: str = "") -> None:
        self.label = label  # as the log names it
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
        self.recycled: Counter[str] = Counter()  # workers that were replaced for their requests, memory, age or cores
        self.stuck: Counter[str] = Counter()  # workers that were killed because they were stopped or silent
        self.handler_metrics: dict[MetricKey, HandlerMetric] = {}
        self.dropped_metrics: Counter[str] = Counter()  # values that handlers reported and nobody sees, by the name of the metric
        self._label_sets: Counter[str] = Counter()  # in `handler_metrics`, by the name of the metric
        self.journal: Journal | None = None  # where a metric log is written
        self.told = Told()  # what handlers raised and printed, and how workers ended

    def add_handler_metrics(self, deltas: Iterable[MetricDelta]) -> None:
        for delta in deltas:
            key = (delta["name"], delta["type"], delta["unit"], tuple(sorted(delta["dimensions"].items())))
            metric = self.handler_metrics.get(key) or self._begin_metric(key)
            if metric is not None:
                metric.add(delta["value"])

    def _begin_metric(self, key: MetricKey) -> HandlerMetric | None:
        """None where a handler reports without bound, as one does whose labels hold ids: each would be kept for good."""
        name = key[0]
        if self._label_sets[name] < MOST_LABEL_SETS and (name in self._label_sets or len(self._label_sets) < MOST_METRICS):
            self._label_sets[name] += 1
            metric = self.handler_metrics[key] = HandlerMetric(key[1])
            return metric
        shown = name if name in self._label_sets else OTHERS
        if not self.dropped_metrics[shown]:
            many = f"the metric {name} with more than {MOST_LABEL_SETS} sets of labels" if shown else f"more than {MOST_METRICS} metrics"
            text = "%s: its handler reports %s; further ones are dropped, and tsx_handler_metric_drops_total counts them"
            logger.warning(text, self.label or "a model", many)
        self.dropped_metrics[shown] += 1
        return None
