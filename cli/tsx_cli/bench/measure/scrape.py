"""Reads a server's metrics before and after a load: where the time went, and how large the batches
were.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tsx_cli.bench.model.results import Stages

_SAMPLE = re.compile(r"^(tsx_[a-z_]+?)_(sum|count|bucket|total)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')
OF_REQUESTS = {"queue": "tsx_queue_seconds", "wait": "tsx_batch_wait_seconds"}
OF_BATCHES = {
    "preprocess": "tsx_preprocess_seconds",
    "inference": "tsx_inference_seconds",
    "postprocess": "tsx_postprocess_seconds",
}
BATCHES = "tsx_batch_size"
REQUESTS = "tsx_request_seconds"
BUSY = "tsx_worker_busy_seconds"


class MetricsSnapshot(NamedTuple):
    sums: Mapping[str, float]
    counts: Mapping[str, float]
    batches: Mapping[float, float]  # up to this size, all smaller ones included


def parse(text: str, model: str) -> MetricsSnapshot:
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    batches: dict[float, float] = defaultdict(float)
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        labels = dict(_LABEL.findall(found[3])) if found else {}
        if found is None or labels.get("model_name") != model:
            continue
        if found[2] == "bucket":
            if found[1] == BATCHES:
                batches[float(labels["le"])] += float(found[4])
        else:
            (counts if found[2] == "count" else sums)[found[1]] += float(found[4])
    return MetricsSnapshot(sums, counts, batches)


def stages(before: MetricsSnapshot, after: MetricsSnapshot, mean_ms: float) -> Stages:
    """Mean milliseconds of a request; `mean_ms` is what its client saw of it. A batch's time is
    that of each request in it.
    """
    times = {name: 1000 * _mean(before, after, metric) for name, metric in OF_REQUESTS.items()}
    weight = _weight(before, after)
    times |= {
        name: 1000 * weight * _mean(before, after, metric) for name, metric in OF_BATCHES.items()
    }
    return Stages(
        queue_ms=times["queue"] + times["wait"],
        preprocess_ms=times["preprocess"],
        inference_ms=times["inference"],
        postprocess_ms=times["postprocess"],
        transport_ms=max(0.0, mean_ms - sum(times.values())),
    )


def busy_ms(before: MetricsSnapshot, after: MetricsSnapshot) -> float | None:
    """Return a worker's mean milliseconds for a request; None where nothing was answered."""
    requests = after.counts.get(REQUESTS, 0.0) - before.counts.get(REQUESTS, 0.0)
    return (
        1000 * (after.sums.get(BUSY, 0.0) - before.sums.get(BUSY, 0.0)) / requests
        if requests > 0
        else None
    )


def batch_sizes(before: MetricsSnapshot, after: MetricsSnapshot) -> dict[int, int]:
    """Batches by size; of sizes that the server counts together it is the largest."""
    below, sizes = 0.0, {}
    bounds = sorted(after.batches)
    for place, bound in enumerate(bounds):
        count = after.batches[bound] - before.batches.get(bound, 0.0)
        if count > below:
            size = bound if bound != float("inf") else 2 * bounds[place - 1] if place else 1
            sizes[int(size)] = round(count - below)
        below = count
    return sizes


def _weight(before: MetricsSnapshot, after: MetricsSnapshot) -> float:
    """How much longer the batch of a request took than a batch: large ones take long, and more
    requests are in them.
    """
    batches = after.counts.get(BATCHES, 0.0) - before.counts.get(BATCHES, 0.0)
    busy = after.sums.get(BUSY, 0.0) - before.sums.get(BUSY, 0.0)
    return max(1.0, _held(before, after) * batches / busy) if busy > 0 else 1.0


def _held(before: MetricsSnapshot, after: MetricsSnapshot) -> float:
    """Seconds of a request in its batch."""
    return _mean(before, after, REQUESTS) - sum(
        _mean(before, after, metric) for metric in OF_REQUESTS.values()
    )


def _mean(before: MetricsSnapshot, after: MetricsSnapshot, metric: str) -> float:
    count = after.counts.get(metric, 0.0) - before.counts.get(metric, 0.0)
    return (
        (after.sums.get(metric, 0.0) - before.sums.get(metric, 0.0)) / count if count > 0 else 0.0
    )
