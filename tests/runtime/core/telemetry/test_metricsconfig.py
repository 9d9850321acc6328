"""`metrics.yaml` as TorchServe's users write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsx_runtime.core.telemetry.metricsconfig import MetricsConfig, read_metrics_config
from tsx_runtime.errors import SettingError

TYPICAL_FILE = """
dimensions:
  - &model_name "ModelName"
  - &level "Level"

ts_metrics:
  counter:
    - name: Requests2XX
      unit: Count
      dimensions: [*level, "Hostname"]
  gauge:
    - name: QueueTime
      unit: Milliseconds
      dimensions: [*level]

model_metrics:
  gauge:
    - name: HandlerTime
      unit: ms
      dimensions: [*model_name, *level]
  histogram:
    - name: Size
      unit: count
"""


def write_config(directory: Path, text: str) -> Path:
    file = directory / "metrics.yaml"
    file.write_text(text)
    return file


def test_a_typical_metrics_file_is_read(tmp_path: Path) -> None:
    config = read_metrics_config(write_config(tmp_path, TYPICAL_FILE))
    assert config.shows("QueueTime")
    assert not config.shows("CPUUtilization")
    assert config.shows("tsx_workers")
    assert config.declares("HandlerTime", "gauge")
    assert not config.declares("HandlerTime", "counter")
    assert config.model == (
        {
            "name": "HandlerTime",
            "type": "gauge",
            "unit": "ms",
            "dimensions": ["ModelName", "Level"],
        },
        {"name": "Size", "type": "histogram", "unit": "count", "dimensions": []},
    )


def test_without_a_file_all_metrics_are_shown() -> None:
    config = read_metrics_config(None)
    assert config == MetricsConfig()
    assert config.shows("CPUUtilization")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a", "must hold"),
        ("metrics: {}", "'metrics' is none of"),
        ("ts_metrics: [a]", "ts_metrics must be a mapping"),
        ("ts_metrics: {timer: []}", "'timer', which is none of"),
        ("model_metrics: {gauge: 5}", "model_metrics.gauge must be a list of metrics, not 5"),
        ("model_metrics: {gauge: [{unit: ms}]}", "which is not a mapping with a name,"),
        (
            "model_metrics: {gauge: [{name: A, dimensions: Level}]}",
            "dimensions of model_metrics.gauge.A",
        ),
        ("a: !!python/object/apply:os.system [echo]", "cannot be read as YAML"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_an_invalid_file_is_reported_with_the_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    file = write_config(tmp_path, text)
    with pytest.raises(SettingError, match="metrics_config") as exc_info:
        read_metrics_config(file)
    assert reason in exc_info.value.message
    assert str(file) in exc_info.value.message


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"nothing\.yaml"):
        read_metrics_config(tmp_path / "nothing.yaml")
