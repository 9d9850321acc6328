"""The metrics that a replica reports to Ray, and models that are unloaded for others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tsx_runtime.plugins.api import Sample
from tsx_runtime.targets.ray import replica


class RecordedGauge:
    values: dict[tuple[Any, ...], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        # Ray raises if the tags differ from the declared ones.
        assert set(tags) == set(self.keys)
        self.values[(self.name, *tags.values())] = value


def test_every_sample_becomes_a_gauge_with_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedGauge, "values", {}, raising=False)
    monkeypatch.setattr(replica, "Gauge", RecordedGauge)
    sink = replica.RayMetrics()
    labels = {"model": "a", "version": "1"}
    sink([Sample("requests", "counter", labels, 1.0), Sample("up", "gauge", {}, 1.0)])
    sink(
        [
            Sample("requests", "counter", labels, 3.0),
            Sample("requests", "counter", {"model": "b"}, 2.0),
        ]
    )
    assert RecordedGauge.values == {
        ("requests", "a", "1"): 3.0,
        ("requests", "b", ""): 2.0,
        ("up",): 1.0,
    }


def test_a_model_with_an_endless_stream_can_be_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "UNLOADING_S", 0.01)
    removed: list[str] = []

    async def unregister(name: str) -> None:
        removed.append(name)

    async def unload() -> bool:
        registry: Any = SimpleNamespace(unregister=unregister)
        shared_model = replica.SharedModel(registry, "m")

        async def stream() -> None:
            with shared_model.track_request():
                await asyncio.Future()

        streaming = asyncio.create_task(stream())
        await asyncio.sleep(0)
        await shared_model.__del__()
        await asyncio.wait([streaming])
        return streaming.cancelled()

    assert asyncio.run(unload())
    assert removed == ["m"]
