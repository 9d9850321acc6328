"""The charts of text generation, computed from a handler's metrics."""

from __future__ import annotations

import pytest

from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.features.ui.generation import (
    GenerationPoint,
    generation_between,
    read_generation,
)


def add_metric(stats: Stats, name: str, kind: str, value: float, **dimensions: str) -> None:
    name = f"tsx_generation_{name}"
    metric = {"name": name, "type": kind, "unit": "", "value": value, "dimensions": dimensions}
    stats.add_handler_metrics([metric])


def test_a_point_sums_one_second_over_all_adapters() -> None:
    stats = Stats()
    assert read_generation(stats.handler_metrics) is None
    assert generation_between(None, None, 1.0) is None
    add_metric(stats, "time_to_first_token_seconds", "histogram", 9.0)
    add_metric(stats, "tokens_total", "counter", 1000)
    earlier_snapshot = read_generation(stats.handler_metrics)
    for adapter in ("", "pirate"):
        add_metric(stats, "time_to_first_token_seconds", "histogram", 0.2, adapter=adapter)
        add_metric(stats, "tokens_total", "counter", 30, adapter=adapter)
        add_metric(stats, "prompt_tokens_total", "counter", 7, adapter=adapter)
    add_metric(stats, "running_sequences", "gauge", 2)
    add_metric(stats, "cache_use_ratio", "gauge", 0.25)
    later_snapshot = read_generation(stats.handler_metrics)
    assert generation_between(earlier_snapshot, later_snapshot, 2.0) == GenerationPoint(
        pytest.approx(0.175),
        pytest.approx(0.2485),
        None,
        None,
        prompt_tokens=7.0,
        tokens=30.0,
        running=2,
        waiting=0,
        cache_use=0.25,
    )
    # The metrics of the first answer count in the second in which they arrive.
    first = generation_between(None, later_snapshot, 1.0)
    assert first is not None
    assert first.tokens == 1060


def test_each_worker_reports_its_own_engine() -> None:
    stats = Stats()
    for worker, value in (("9000", 3), ("9001", 2)):
        add_metric(stats, "running_sequences", "gauge", value, worker=worker)
        add_metric(stats, "cache_use_ratio", "gauge", value / 10, worker=worker)
    generation = read_generation(stats.handler_metrics)
    assert generation is not None
    assert (generation.running, generation.waiting, generation.cache_use) == (5, 0, 0.3)
