"""`metrics.yaml`: the metrics that TorchServe's users declare (contract 1.7 and 5.6)."""

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
    """None: no file, so everything is shown."""

    server: frozenset[str] | None = (
        None  # names of the server's own metrics that TorchServe has too
    )
    model: tuple[DeclaredMetric, ...] | None = None  # that handlers report

    def shows(self, name: str) -> bool:
        """Whether a metric of the server's own is to be seen; those that only tsx has always
        are.
        """
        return self.server is None or name in self.server or name.startswith(("tsx_", "process_"))

    def declares(self, name: str, kind: str) -> bool:
        return any(one["name"] == name and one["type"] == kind for one in self.model or ())


@lru_cache(maxsize=8)
def read_metrics_config(path: Path | None) -> MetricsConfig:
    """Raises SettingError, which names the entry that is wrong."""
    if path is None:
        return MetricsConfig()
    try:
        document = load_yaml_file(path)
    except InvalidConfig as error:
        raise SettingError(f"metrics_config: {error}") from error
    if not isinstance(document, dict):
        raise _wrong(path, f"it must hold {' and '.join(SECTIONS)}")
    for section in document:
        if section not in SECTIONS:
            raise _wrong(path, f"{section!r} is none of {', '.join(SECTIONS)}")
    server = _read_section(path, "ts_metrics", document.get("ts_metrics"))
    model = _read_section(path, "model_metrics", document.get("model_metrics"))
    return MetricsConfig(frozenset(one["name"] for one in server), tuple(model))


def _read_section(path: Path, section: str, content: Any) -> list[DeclaredMetric]:
    if content is None:
        return []
    if not isinstance(content, dict):
        raise _wrong(
            path, f"{section} must be a mapping from {', '.join(KINDS)} to lists of metrics"
        )
    found: list[DeclaredMetric] = []
    for kind, entries in content.items():
        if kind not in KINDS:
            raise _wrong(path, f"{section} has {kind!r}, which is none of {', '.join(KINDS)}")
        if not isinstance(entries, list | None):
            raise _wrong(path, f"{section}.{kind} must be a list of metrics, not {entries!r}")
        found += [_read_entry(path, f"{section}.{kind}", kind, entry) for entry in entries or []]
    return found


def _read_entry(path: Path, place: str, kind: str, entry: Any) -> DeclaredMetric:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise _wrong(
            path,
            f"{place} has {entry!r}, which is not a mapping with a name, a unit and dimensions",
        )
    dimensions = entry.get("dimensions") or []
    if not isinstance(dimensions, list) or not all(isinstance(one, str) for one in dimensions):
        raise _wrong(
            path,
            f"the dimensions of {place}.{entry['name']} are {dimensions!r}; they must be a list of"
            " names",
        )
    return DeclaredMetric(
        name=entry["name"], type=kind, unit=str(entry.get("unit", "")), dimensions=dimensions
    )


def _wrong(path: Path, why: str) -> SettingError:
    return SettingError(f"metrics_config '{path}' cannot be used: {why}")
