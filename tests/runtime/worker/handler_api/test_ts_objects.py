"""Objects of TorchServe's `ts` that tsx itself does not use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tsx_runtime.worker.exceptions import MetricsCacheKeyError
from tsx_runtime.worker.handler_api.metrics import Dimension, Metric, MetricTypes
from tsx_runtime.worker.handler_api.ts_objects import (
    GeneralMetricsCacheError,
    MetricEncoder,
    MetricsCacheIOError,
    MetricsCachePyYamlError,
    MetricsCacheYamlImpl,
    MetricsStore,
    MetricUnit,
    PT2Backend,
    deprecated,
    download_model,
)


def test_metrics_of_a_file_are_there_before_a_handler_reports(tmp_path: Path) -> None:
    path = tmp_path / "metrics.yaml"
    path.write_text("model_metrics:\n  gauge:\n  - {name: HandlerTime, unit: ms, dimensions: [ModelName, Level]}\n")
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
def test_a_file_that_declares_no_metrics_is_an_error_of_its_kind(tmp_path: Path, content: str | None, error: type[Exception]) -> None:
    path = tmp_path / "metrics.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error):
        MetricsCacheYamlImpl(path).initialize_cache()


def test_an_old_store_takes_metrics_for_its_model() -> None:
    store = MetricsStore({0: "id"}, "m")
    store.add_counter("Requests", 2, 0)
    (delta,) = store.pending.take()
    assert (delta["name"], delta["value"], delta["dimensions"]["ModelName"]) == ("Requests", 2.0, "m")
    assert store.request_ids == {0: "id"}


def test_metrics_are_encoded_as_json() -> None:
    metric = Metric("a", 1, "ms", [Dimension("b", "c")])
    assert json.loads(json.dumps([metric], cls=MetricEncoder)) == [metric.to_dict()]
    with pytest.raises(TypeError):
        json.dumps(object(), cls=MetricEncoder)
    assert MetricUnit.units["ms"] == "Milliseconds"


def test_a_backend_is_its_name() -> None:
    assert PT2Backend("inductor") == "inductor"


def test_a_deprecated_function_warns_and_works() -> None:
    @deprecated(version="1.0", replacement="new", klass=DeprecationWarning)
    def old(value: int) -> int:
        return value + 1

    with pytest.warns(DeprecationWarning, match="old is deprecated from version 1.0; use new"):
        assert old(1) == 2


def test_a_model_is_downloaded_into_a_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(name: str, **arguments: object) -> str:
        asked.update({"name": name, **arguments})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert download_model("org/model", "v1", str(tmp_path), use_auth_token=False) == str(tmp_path)
    assert (asked["name"], asked["revision"], asked["cache_dir"], asked["token"]) == ("org/model", "v1", str(tmp_path), None)
