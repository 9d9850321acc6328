"""What happened to a version's requests, as plain integers and floats that `/metrics` renders when it is read."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from tsx_runtime.core.durations import FINE, Durations, Exemplar
from tsx_runtime.core.jobs import Job
from tsx_runtime.core.journal import Journal
from tsx_runtime.core.recent import Recent, Seen
from tsx_runtime.core.times import BatchTimes
from tsx_runtime.core.told import Told
from tsx_runtime.errors import TsxError, is_failure
from tsx_runtime.wire import Item, MetricDelta

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
        "batch",
        "batch_sizes",
        "batch_wait",
        "batches",
        "busy_seconds",
        "dropped_metrics",
        "failed_refusals",
        "handler_metrics",
        "inference",
        "journal",
        "label",
        "last_queue_seconds",
        "last_worker_seconds",
        "latency",
        "postprocess",
        "preprocess",
        "queue",
        "queue_seconds",
        "recent",
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
        self.failed_refusals = 0  # see `is_failure`
        self.latency = Durations(FINE)  # of requests: arrival to reply
        self.queue = Durations()  # of requests: see times.py
        self.batch_wait = Durations()  # of requests, too
        self.preprocess = Durations()  # of batches, as are those that follow: in the worker
        self.inference = Durations()
        self.postprocess = Durations()
        self.queue_seconds = 0.0  # sum over requests: arrival to the frame's leaving, which is TorchServe's queue time
        self.busy_seconds = 0.0  # sum over batches: the frame's leaving to its reply
        self.batch: BatchTimes | None = None  # the newest, there before its requests are answered
        self.recent = Recent()
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

    @property
    def errors(self) -> int:
        """Requests that failed, as `is_failure` says."""
        return self.failed_refusals + sum(count for status, count in self.answers.items() if is_failure(status))

    def add_batch(self, jobs: Sequence[Job], items: Sequence[Item], times: BatchTimes) -> None:
        """Once a batch, on the hot path: after its answers are written, in the same turn. Of a request as little as can be is read."""
        if len(jobs) == 1:
            self._add_single(jobs[0], items[0][0], times)
            return
        free, sent, began, _, answered, size, preprocess, inference, postprocess = times
        arrived, statuses = [job.arrived for job in jobs], [item[0] for item in items]
        ordered, total = sorted(arrived), sum(arrived)  # they nearly always are in order
        self.batches += 1
        self.batch_sizes[size] += 1
        self.last_worker_seconds = worker_seconds = answered - sent
        self.busy_seconds += worker_seconds
        self.last_queue_seconds = sent - arrived[0]
        self.queue_seconds += size * sent - total
        good = statuses.count(200) == size
        if good:
            self.answers[200] += size
        else:
            self.answers.update(statuses)
        self.latency.add_since(ordered, answered, total)
        if ordered[0] > free:  # a worker was there for all
            self.queue.add_none(size)
            self.batch_wait.add_since(ordered, began, total)
        elif ordered[-1] <= free:  # for none
            self.queue.add_since(ordered, free, total)
            self.batch_wait.add(began - free, size)
        else:
            waited = bisect_right(ordered, free)
            early, late = ordered[:waited], ordered[waited:]
            self.queue.add_since(early, free, sum(early))
            self.queue.add_none(size - waited)
            self.batch_wait.add(began - free, waited)
            self.batch_wait.add_since(late, began, sum(late))
        self._add_steps(preprocess, inference, postprocess)
        recent = self.recent
        if answered >= recent.due or answered - ordered[0] > recent.threshold:
            recent.add(times, [job.request_id for job in jobs], arrived, None if good else statuses)
        if self.journal is not None:
            self.journal.add_batch(self.last_queue_seconds, worker_seconds)

    def _add_single(self, job: Job, status: int, times: BatchTimes) -> None:
        """The same for a batch of one."""
        free, sent, began, _, answered, _, preprocess, inference, postprocess = times
        arrived, recent = job.arrived, self.recent
        took = answered - arrived
        self.batches += 1
        self.batch_sizes[1] += 1
        self.answers[status] += 1
        self.last_worker_seconds = worker_seconds = answered - sent
        self.busy_seconds += worker_seconds
        self.last_queue_seconds = queued = sent - arrived
        self.queue_seconds += queued
        self.latency.add(took)
        if arrived > free:
            self.queue.add_none(1)
            self.batch_wait.add(began - arrived)
        else:
            self.queue.add(free - arrived)
            self.batch_wait.add(began - free)
        self._add_steps(preprocess, inference, postprocess)
        if answered >= recent.due or took > recent.threshold:
            recent.add(times, [job.request_id], [arrived], None if status == 200 else [status])
        if self.journal is not None:
            self.journal.add_batch(queued, worker_seconds)

    def _add_steps(self, preprocess: float, inference: float, postprocess: float) -> None:
        if preprocess >= 0.0:  # NaN is not
            self.preprocess.add(preprocess)
        if inference >= 0.0:
            self.inference.add(inference)
        if postprocess >= 0.0:
            self.postprocess.add(postprocess)

    def keep(self, request_id: bytes, arrived: float, status: int) -> None:
        """Remember this request of the newest batch, however many others there are."""
        if self.batch is not None:
            self.recent.asked.append(Seen(request_id, arrived, status, self.batch.total(arrived), self.batch))

    def point_out(self, trace_id: str, arrived: float) -> None:
        """A request of the newest batch belongs to a trace that somebody keeps."""
        times, now = self.batch, time.time()
        if times is None:
            return
        for durations, seconds in (
            (self.latency, times.total(arrived)),
            (self.queue, times.queue(arrived)),
            (self.batch_wait, times.wait(arrived)),
            (self.preprocess, times.preprocess),
            (self.inference, times.inference),
            (self.postprocess, times.postprocess),
        ):
            if seconds >= 0.0:  # NaN is not
                durations.point_out(Exemplar(trace_id, seconds, now))

    def add_refusal(self, job: Job, error: TsxError, now: float) -> None:
        name = type(error).__name__
        self.refusals[name] += 1
        if is_failure(error):
            self.failed_refusals += 1
        self.recent.refused(Seen(job.request_id, job.arrived, error.status, now - job.arrived, None, name))

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
