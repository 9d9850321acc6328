"""The metrics of a replica, as Ray gets them."""

from __future__ import annotations

from typing import Any

import pytest

from tsx_runtime.plugins.api import Sample
from tsx_runtime.targets.ray import metrics


class RecordedGauge:
    values: dict[tuple[Any, ...], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.keys)  # else Ray raises
        self.values[(self.name, *tags.values())] = value


def test_each_sample_is_a_gauge_with_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedGauge, "values", {}, raising=False)
    monkeypatch.setattr(metrics, "Gauge", RecordedGauge)
    sink = metrics.RayMetrics()
    first = [Sample("requests", "counter", {"model": "a", "version": "1"}, 1.0), Sample("up", "gauge", {}, 1.0)]
    sink(first)
    sink([Sample("requests", "counter", {"model": "a", "version": "1"}, 3.0), Sample("requests", "counter", {"model": "b"}, 2.0)])
    assert RecordedGauge.values == {("requests", "a", "1"): 3.0, ("requests", "b", ""): 2.0, ("up",): 1.0}
