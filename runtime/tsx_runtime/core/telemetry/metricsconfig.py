"""`metrics.yaml`: the metrics that TorchServe's users declare (docs/reference/torchserve.md)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver import InvalidConfig, load_yaml_file
from tsx_runtime.errors import SettingError
from tsx_runtime.wire import DeclaredMetric

KINDS = ("counter", "gauge", "histogram")
SECTIONS = ("dimensions", "ts_metrics", "model_metrics")


class MetricsConfig(NamedTuple):
    """The declared metrics. None means that there is no file, so all metrics are shown."""

    # The names of TorchServe's own metrics.
    server: frozenset[str] | None = None
    # The metrics that handlers report.
    model: tuple[DeclaredMetric, ...] | None = None

    def shows(self, name: str) -> bool:
        """Tell whether a metric of the server is shown.

        Metrics that TorchServe does not have are always shown.
        """
        return self.server is None or name in self.server or name.startswith(("tsx_", "process_"))

    def declares(self, name: str, kind: str) -> bool:
        return any(metric["name"] == name and metric["type"] == kind for metric in self.model or ())


@lru_cache(maxsize=8)
def read_metrics_config(path: Path | None) -> MetricsConfig:
    """Read the file, or return an empty configuration if the path is None.

    Raises:
        SettingError: The file has a wrong entry.
    """
    if path is None:
        return MetricsConfig()
    try:
        document = load_yaml_file(path)
    except InvalidConfig as error:
        raise SettingError(f"metrics_config: {error}") from error
    if not isinstance(document, dict):
        raise _error(path, f"it must hold {' and '.join(SECTIONS)}")
    for section in document:
        if section not in SECTIONS:
            raise _error(path, f"{section!r} is none of {', '.join(SECTIONS)}")
    server = _read_section(path, "ts_metrics", document.get("ts_metrics"))
    model = _read_section(path, "model_metrics", document.get("model_metrics"))
    return MetricsConfig(frozenset(metric["name"] for metric in server), tuple(model))


def _read_section(path: Path, section: str, content: Any) -> list[DeclaredMetric]:
    if content is None:
        return []
    if not isinstance(content, dict):
        raise _error(
            path, f"{section} must be a mapping from {', '.join(KINDS)} to lists of metrics"
        )
    metrics: list[DeclaredMetric] = []
    for kind, entries in content.items():
        if kind not in KINDS:
            raise _error(path, f"{section} has {kind!r}, which is none of {', '.join(KINDS)}")
        if not isinstance(entries, list | None):
            raise _error(path, f"{section}.{kind} must be a list of metrics, not {entries!r}")
        metrics += [_read_entry(path, f"{section}.{kind}", kind, entry) for entry in entries or []]
    return metrics


def _read_entry(path: Path, group: str, kind: str, entry: Any) -> DeclaredMetric:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise _error(
            path,
            f"{group} has {entry!r}, which is not a mapping with a name, a unit and dimensions",
        )
    dimensions = entry.get("dimensions") or []
    if not isinstance(dimensions, list) or not all(
        isinstance(dimension, str) for dimension in dimensions
    ):
        raise _error(
            path,
            f"the dimensions of {group}.{entry['name']} are {dimensions!r}; they must be a list of"
            " names",
        )
    return DeclaredMetric(
        name=entry["name"], type=kind, unit=str(entry.get("unit", "")), dimensions=dimensions
    )


def _error(path: Path, reason: str) -> SettingError:
    return SettingError(f"metrics_config '{path}' cannot be used: {reason}")
