"""Objects of TorchServe's package `ts` that tsx does not use itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsx_runtime.worker.exceptions import MetricsCacheKeyError
from tsx_runtime.worker.handler_api.metrics import MetricTypes
from tsx_runtime.worker.handler_api.ts_objects import (
    GeneralMetricsCacheError,
    MetricsCacheIOError,
    MetricsCachePyYamlError,
    MetricsCacheYamlImpl,
    PT2Backend,
)


def test_metrics_declared_in_a_file_exist_before_a_handler_reports(tmp_path: Path) -> None:
    path = tmp_path / "metrics.yaml"
    path.write_text(
        "model_metrics:\n  gauge:\n  - {name: HandlerTime, unit: ms, dimensions: [ModelName, Level]}\n"
    )
    metrics = MetricsCacheYamlImpl(config_file_path=str(path))
    metrics.initialize_cache()
    metric = metrics.get_metric("HandlerTime", MetricTypes.GAUGE)
    assert (metric.unit, metric.dimension_names) == ("ms", ["ModelName", "Level"])
    assert metrics.cache_keys()[MetricTypes.GAUGE] == {"HandlerTime": metric}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("a: [", MetricsCachePyYamlError),
        ("other: {}", MetricsCacheKeyError),
        ("model_metrics: {counter: [{name: a}]}", MetricsCacheKeyError),
        ("model_metrics: {timer: [{name: a, unit: ms}]}", GeneralMetricsCacheError),
        ("model_metrics: [a]", GeneralMetricsCacheError),
        ("", GeneralMetricsCacheError),
        (None, MetricsCacheIOError),
    ],
)
def test_a_file_without_metrics_is_an_error(
    tmp_path: Path, content: str | None, error: type[Exception]
) -> None:
    path = tmp_path / "metrics.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error):
        MetricsCacheYamlImpl(path).initialize_cache()


def test_a_backend_equals_its_name() -> None:
    assert PT2Backend("inductor") == "inductor"
