"""Metrics that handlers report with `context.metrics`."""

from __future__ import annotations

from typing import Any

import pytest

from tsx_runtime.worker.handler_api.metrics import (
    Dimension,
    Metric,
    Metrics,
    MetricsCacheKeyError,
    MetricTypes,
)

DEFAULTS = {"ModelName": "m", "Level": "Model"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


def pending_values(metrics: Metrics) -> list[Any]:
    return [
        (delta["name"], delta["type"], delta["unit"], delta["value"], delta["dimensions"])
        for delta in metrics.pending.take()
    ]


def test_each_method_has_its_type_and_unit(metrics: Metrics) -> None:
    metrics.add_counter("c", 2)
    metrics.add_time("t", 1.5)
    metrics.add_time("s", 1, None, "s")
    metrics.add_size("z", 3)
    metrics.add_size("k", 3, None, "kB")
    metrics.add_percent("p", 50)
    metrics.add_metric("x", 7, "count", metric_type=MetricTypes.HISTOGRAM)
    assert pending_values(metrics) == [
        ("c", "counter", "count", 2, DEFAULTS),
        ("t", "gauge", "ms", 1.5, DEFAULTS),
        ("s", "gauge", "s", 1, DEFAULTS),
        ("z", "gauge", "MB", 3, DEFAULTS),
        ("k", "gauge", "kB", 3, DEFAULTS),
        ("p", "gauge", "percent", 50, DEFAULTS),
        ("x", "histogram", "count", 7, DEFAULTS),
    ]


def test_counters_add_up_and_gauges_keep_the_last_value(
    metrics: Metrics,
) -> None:
    for value in (1, 2, 3):
        metrics.add_counter("c", value)
        metrics.add_percent("g", value)
        metrics.add_metric("h", value, "ms", metric_type=MetricTypes.HISTOGRAM)
    assert [(name, value) for name, _, _, value, _ in pending_values(metrics)] == [
        ("c", 6),
        ("g", 3),
        ("h", 1),
        ("h", 2),
        ("h", 3),
    ]


def test_dimensions_of_a_call_precede_the_default_ones(metrics: Metrics) -> None:
    for dimensions in ([Dimension("Kind", "a")], [Dimension("Kind", "b")], None):
        metrics.add_counter("c", 1, None, dimensions)
    assert [dimensions for *_, dimensions in pending_values(metrics)] == [
        {"Kind": "a", **DEFAULTS},
        {"Kind": "b", **DEFAULTS},
        DEFAULTS,
    ]


@pytest.mark.parametrize(("method", "unit"), [("add_time", "hours"), ("add_size", "bits")])
def test_the_error_for_an_invalid_unit_lists_the_valid_ones(
    metrics: Metrics, method: str, unit: str
) -> None:
    with pytest.raises(ValueError, match=r"use one of"):
        getattr(metrics, method)("x", 1, None, unit)


def test_a_counter_does_not_shrink(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    metrics.add_counter("c", -1)
    assert pending_values(metrics) == []
    assert "counters only grow" in caplog.text


def test_add_error_counts_an_error_and_logs_its_text(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.add_error("failures", "disk full")
    metrics.add_error("failures", 2)
    assert pending_values(metrics) == [("failures", "counter", "", 3, {"Level": "Error"})]
    assert "disk full" in caplog.text


def test_a_cached_metric_has_two_update_methods(metrics: Metrics) -> None:
    metrics.add_metric_to_cache("jobs", "count", ["queue", "state"], MetricTypes.GAUGE)
    metric = metrics.get_metric("jobs", MetricTypes.GAUGE)
    metric.add_or_update(4, ["fast", "done"])
    metric.update(5, "request-1", [Dimension("queue", "slow")])
    assert [(value, dimensions) for *_, value, dimensions in pending_values(metrics)] == [
        (4, {"queue": "fast", "state": "done"}),
        (5, {"queue": "slow"}),
    ]


def test_missing_dimension_values_are_logged_without_an_error(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    metric = metrics.add_metric_to_cache("jobs", "count", ["queue", "state"])
    metric.add_or_update(1, ["fast"])
    assert pending_values(metrics) == []
    assert "jobs is not updated: its dimensions" in caplog.text


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("jobs", "count", ["queue"], MetricTypes.GAUGE), {}),
        (("jobs",), {"unit": "count", "dimension_names": ["queue"], "metric_type": "gauge"}),
        (
            (),
            {
                "metric_name": "jobs",
                "unit": "count",
                "dimension_names": ["queue"],
                "metric_type": MetricTypes.GAUGE,
            },
        ),
    ],
)
def test_add_metric_of_older_releases_returns_a_metric(
    metrics: Metrics, args: Any, options: Any
) -> None:
    metric = metrics.add_metric(*args, **options)
    assert metric is metrics.get_metric("jobs", MetricTypes.GAUGE)
    metric.add_or_update(4, ["fast"])
    assert pending_values(metrics) == [("jobs", "gauge", "count", 4, {"queue": "fast"})]


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("x", 1, "ms", None, []), {}),
        (("x", 1, "ms", "ALL", None, MetricTypes.COUNTER), {}),
        (("x",), {"value": 1, "unit": "ms", "idx": 0, "dimensions": [], "metric_type": "counter"}),
        ((), {"name": "x", "value": 1, "unit": "ms"}),
    ],
)
def test_add_metric_with_a_value_reports_it_at_once(
    metrics: Metrics, args: Any, options: Any
) -> None:
    assert metrics.add_metric(*args, **options) is None
    assert pending_values(metrics) == [("x", "counter", "ms", 1, DEFAULTS)]


def test_the_error_for_an_unknown_metric_type_lists_the_valid_ones(metrics: Metrics) -> None:
    with pytest.raises(TypeError, match="counter, gauge, histogram"):
        metrics.add_metric("x", 1, "ms", metric_type="summary")


def test_the_error_for_an_unknown_metric_lists_the_known_ones(metrics: Metrics) -> None:
    metrics.add_counter("known", 1)
    with pytest.raises(MetricsCacheKeyError, match="'other'; there is: known"):
        metrics.get_metric("other")
    with pytest.raises(MetricsCacheKeyError):
        metrics.get_metric("known", MetricTypes.GAUGE)


@pytest.mark.parametrize("name", ["", " ", None, 3])
def test_a_metric_needs_a_name(metrics: Metrics, name: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="name of a metric"):
        metrics.add_counter(name, 1)


def test_a_metric_object_prints_as_a_line_of_torchserves_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    monkeypatch.setattr("time.time", lambda: 1717105307.5)
    metric = Metric("n", 1, "ms", [Dimension("a", 1), Dimension("b", 2)], "id", "counter")
    metric.update(2)
    assert str(metric) == "n.Milliseconds:3|#a:1,b:2|#hostname:host,1717105307,id"
    assert str(Metric("n", 1, "own", [])) == "n.own:1|#|#hostname:host,1717105307"
    assert metric.to_dict()["Dimensions"] == [
        {"Name": "a", "Value": "1"},
        {"Name": "b", "Value": "2"},
    ]


def test_the_number_of_pending_values_is_limited(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tsx_runtime.worker.handler_api.metrics.MAX_PENDING", 3)
    for number in range(9):
        metrics.add_counter("requests", 1, dimensions=[Dimension("user", number)])
        metrics.add_metric("sizes", number, "count", metric_type="histogram")
    # The pending value of a counter still grows.
    metrics.add_counter("requests", 1, dimensions=[Dimension("user", 0)])
    assert [(reported["name"], reported["value"]) for reported in metrics.pending.take()] == [
        ("requests", 2.0),
        ("requests", 1.0),
        ("sizes", 0.0),
    ]
    assert len(caplog.records) == 1
    assert "so others are dropped until then" in caplog.text
    metrics.add_counter("requests", 1)
    assert len(metrics.pending.take()) == 1


def test_the_number_of_metric_names_is_limited(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tsx_runtime.worker.handler_api.metrics.MAX_METRICS", 3)
    for number in range(9):
        metrics.add_counter(f"c{number % 6}", 1)
    assert [len(names_of_type) for names_of_type in metrics.cache.values()] == [3, 0, 0]
    assert sum(value for _, _, _, value, _ in pending_values(metrics)) == 9
    assert len(caplog.messages) == 1
    assert "metric c3 is dropped" in caplog.text
