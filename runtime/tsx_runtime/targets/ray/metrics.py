"""Hands the metrics of a replica to Ray, whose nodes show them to Prometheus as `ray_NAME`, with the application and the replica."""

from __future__ import annotations

from typing import Any

from ray.serve.metrics import Gauge

from tsx_runtime.plugins.api import Sample


class RayMetrics:
    """A metrics sink. Ray's own counters and histograms only grow by steps, so all samples are gauges there, with the totals."""

    def __init__(self) -> None:
        self._gauges: dict[str, tuple[Gauge, tuple[str, ...]]] = {}

    def __call__(self, samples: list[Sample]) -> None:
        for sample in samples:
            if sample.name not in self._gauges:
                keys: Any = tuple(sample.labels)  # of any length, whatever Ray's annotation says
                self._gauges[sample.name] = Gauge(sample.name, f"a {sample.kind} of tsx", keys), keys
            gauge, keys = self._gauges[sample.name]
            gauge.set(sample.value, {key: sample.labels.get(key, "") for key in keys})
