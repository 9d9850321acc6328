"""The metrics that a handler reports: `context.metrics`. Contract section 5.6.

Values are added up here between two replies, and leave with the next one; the front end owns the
registry.
"""

from __future__ import annotations

import enum
import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from tsx_runtime.wire import DeclaredMetric, MetricDelta
from tsx_runtime.worker.exceptions import (
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)

logger = logging.getLogger("tsx.worker")

# values: a handler that reports from a thread while no request comes must not fill the memory
MOST_PENDING = 100_000
# of one type: a handler that makes their names of what clients send must not fill the memory either
MOST_METRICS = 10_000
APART = 1.0  # seconds between two reports of `PredictionTime`
TIME_UNITS = ("ms", "s")
SIZE_UNITS = ("MB", "kB", "GB", "B")


class Units:
    """TorchServe's long names of units, as `units`."""

    units: ClassVar[dict[str | None, str]] = {
        "ms": "Milliseconds",
        "s": "Seconds",
        "percent": "Percent",
        "count": "Count",
        "MB": "Megabytes",
        "GB": "Gigabytes",
        "kB": "Kilobytes",
        "B": "Bytes",
        "": "unit",
        None: "unit",
    }


MetricUnit = Units()


class MetricTypes(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Dimension:
    """A label: what a metric's value belongs to."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = str(name)
        self.value = str(value)

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dimension) and (self.name, self.value) == (other.name, other.value)

    def __hash__(self) -> int:
        return hash((self.name, self.value))


class CachingMetric:
    """One metric with all its label values."""

    def __init__(
        self,
        pending: PendingMetrics,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str],
        metric_type: MetricTypes,
    ) -> None:
        self.metric_name = metric_name
        self.unit = unit
        self.dimension_names = list(dimension_names)
        self.metric_type = metric_type
        self._pending = pending

    def add_or_update(
        self, value: float, dimension_values: Sequence[Any] = (), request_id: str = ""
    ) -> None:
        """A counter grows by `value`, a gauge is set to it, a histogram observes it.

        Too few or too many dimension values are logged, as in TorchServe: a wrong metric is no
        reason to fail a request.
        """
        if len(dimension_values) != len(self.dimension_names):
            given = ", ".join(map(str, dimension_values)) or "none"
            logger.error(
                "metric %s is not updated: its dimensions are %s, the values: %s",
                self.metric_name,
                self.dimension_names,
                given,
            )
            return
        self._pending.add(
            self, value, tuple(zip(self.dimension_names, map(str, dimension_values), strict=True))
        )

    def update(
        self, value: float, request_id: str = "", dimensions: Sequence[Dimension] = ()
    ) -> None:
        self._pending.add(
            self, value, tuple((dimension.name, dimension.value) for dimension in dimensions)
        )


class PendingMetrics:
    """The values since the last reply. Handlers may report from threads of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[tuple[CachingMetric, tuple[tuple[str, str], ...]], float] = {}
        self._observed: list[tuple[CachingMetric, tuple[tuple[str, str], ...], float]] = []
        self._is_warned = False  # that some are dropped

    def __bool__(self) -> bool:
        return bool(self._latest or self._observed)

    def add(self, metric: CachingMetric, value: float, labels: tuple[tuple[str, str], ...]) -> None:
        value = float(value)
        with self._lock:
            if (
                len(self._observed) + len(self._latest) >= MOST_PENDING
                and (metric, labels) not in self._latest
            ):
                self._drop(metric)
            elif metric.metric_type is MetricTypes.HISTOGRAM:
                self._observed.append((metric, labels, value))
            elif metric.metric_type is MetricTypes.GAUGE:
                self._latest[metric, labels] = value
            elif value >= 0:
                self._latest[metric, labels] = self._latest.get((metric, labels), 0.0) + value
            else:
                logger.warning(
                    "counter %s cannot take the value %s: counters only grow; use a gauge",
                    metric.metric_name,
                    value,
                )

    def take(self) -> list[MetricDelta]:
        with self._lock:
            latest, self._latest = self._latest, {}
            observed, self._observed = self._observed, []
            self._is_warned = False
        return [
            MetricDelta(
                name=metric.metric_name,
                type=metric.metric_type.value,
                unit=metric.unit,
                value=value,
                dimensions=dict(labels),
            )
            for metric, labels, value in [
                *((*key, value) for key, value in latest.items()),
                *observed,
            ]
        ]

    def _drop(self, metric: CachingMetric) -> None:
        if not self._is_warned:
            self._is_warned = True
            text = (
                "metric %s: %d values wait for the next answer, so others are dropped until then:"
                " report less often, or fewer labels"
            )
            logger.warning(text, metric.metric_name, MOST_PENDING)


class Metrics:
    """`context.metrics`. Every metric also carries the dimensions `ModelName` and `Level=Model`."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self.request_ids: dict[int, str] | str | None = None
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {kind: {} for kind in MetricTypes}
        self.pending = PendingMetrics()
        self._full = False
        self._defaults = [Dimension("ModelName", model_name), Dimension("Level", "Model")]

    def add_metric(
        self,
        name: Any = None,
        value: Any = None,
        unit: Any = None,
        idx: Any = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes | str = MetricTypes.COUNTER,
        *,
        metric_name: str | None = None,
        dimension_names: Sequence[str] | None = None,
    ) -> CachingMetric | None:
        """`add_metric(name, value, unit)`; or, as TorchServe 0.6.1 to 0.8.1 had it, what is now
        `add_metric_to_cache`: `add_metric(metric_name, unit, dimension_names, metric_type)`, by
        position or by name.
        """
        if value is None or (isinstance(value, str) and not isinstance(unit, str)):
            name = name if metric_name is None else metric_name
            if value is None:
                return self.add_metric_to_cache(name, unit, dimension_names, metric_type)
            names = dimension_names if unit is None else unit
            return self.add_metric_to_cache(name, value, names, metric_type if idx is None else idx)
        self._add(name, value, unit, [*(dimensions or ()), *self._defaults], metric_type)
        return None

    def _add(
        self,
        name: str,
        value: float,
        unit: str,
        labels: Sequence[Dimension],
        metric_type: MetricTypes | str,
    ) -> None:
        kind = _type_of(metric_type)
        metric = self.cache[kind].get(name)
        if metric is None:
            metric = self.add_metric_to_cache(name, unit, [label.name for label in labels], kind)
        metric.update(value, dimensions=labels)

    def add_counter(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        self.add_metric(name, value, "count", idx, dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes | str = MetricTypes.GAUGE,
    ) -> None:
        if unit not in TIME_UNITS:
            raise MetricsCacheValueError(
                f"metric {name}: {unit!r} is not a unit of time; use one of {', '.join(TIME_UNITS)}"
            )
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes | str = MetricTypes.GAUGE,
    ) -> None:
        if unit not in SIZE_UNITS:
            raise MetricsCacheValueError(
                f"metric {name}: {unit!r} is not a unit of size; use one of {', '.join(SIZE_UNITS)}"
            )
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes | str = MetricTypes.GAUGE,
    ) -> None:
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(
        self, name: str, value: float | str, dimensions: Sequence[Dimension] | None = None
    ) -> None:
        """A metric of level `Error`, for all models. An error's text is logged, and counted as
        one.
        """
        if isinstance(value, str):
            logger.error("%s: %s", name, value)
            value = 1
        self._add(
            name, value, "", [*(dimensions or ()), Dimension("Level", "Error")], MetricTypes.COUNTER
        )

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes | str = MetricTypes.COUNTER,
    ) -> CachingMetric:
        _check_name(metric_name)
        metric = CachingMetric(
            self.pending, metric_name, str(unit), dimension_names or (), _type_of(metric_type)
        )
        known = self.cache[metric.metric_type]
        if metric_name in known or len(known) < MOST_METRICS:
            known[metric_name] = metric
        elif not self._full:
            self._full = True
            logger.warning(
                "metric %s is dropped, like further new metrics: there are already %d names; use"
                " dimensions",
                metric_name,
                MOST_METRICS,
            )
        return metric

    def get_metric(
        self, metric_name: str, metric_type: MetricTypes | str = MetricTypes.COUNTER
    ) -> CachingMetric:
        kind = _type_of(metric_type)
        try:
            return self.cache[kind][metric_name]
        except KeyError:
            known = ", ".join(sorted(self.cache[kind])) or "none"
            raise MetricsCacheKeyError(
                f"there is no {kind.value} called {metric_name!r}; there is: {known}"
            ) from None

    def declare(self, declared: Iterable[DeclaredMetric]) -> None:
        """Add the metrics of `metrics.yaml`, so that `get_metric` finds them before the handler
        reports anything.
        """
        for one in declared:
            self.add_metric_to_cache(
                one["name"], one["unit"], one["dimensions"], MetricTypes(one["type"])
            )

    def set_request_ids(self, request_ids: dict[int, str] | str | None) -> None:
        self.request_ids = request_ids


class PredictionTime:
    """TorchServe's metric of the time that a batch takes in the worker.

    One value a second is enough, since only the last one is read.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.due = 0.0  # time.monotonic() from which on a batch is reported

    def report(self, began: float, done: float) -> None:
        """Both are time.monotonic()."""
        self.due = done + APART
        self._metrics.add_time("PredictionTime", round(1000 * (done - began), 2), None, "ms")


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise MetricsCacheTypeError(f"{name!r} cannot be the name of a metric: it is not a str")
    if not name.strip():
        raise MetricsCacheValueError(f"{name!r} cannot be the name of a metric")


def _type_of(value: MetricTypes | str) -> MetricTypes:
    if isinstance(value, MetricTypes):
        return value
    try:
        return MetricTypes(value)
    except ValueError:
        kinds = ", ".join(kind.value for kind in MetricTypes)
        raise MetricsCacheTypeError(
            f"{value!r} is not a metric type; use one of MetricTypes: {kinds}"
        ) from None


class Metric:
    """One value with its labels, as older handlers make them."""

    def __init__(
        self,
        name: str,
        value: float,
        unit: str,
        dimensions: Sequence[Dimension] = (),
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        _check_name(name)
        self.name = name
        self.value = value
        self.unit = Units.units.get(unit, unit)
        self.dimensions = list(dimensions)
        self.request_id = request_id
        self.metric_method = metric_method

    def update(self, value: float) -> None:
        """A counter's value grows, any other is replaced."""
        self.value = self.value + value if self.metric_method == "counter" else value

    def __str__(self) -> str:
        """Return the metric as a line of TorchServe's metric log."""
        end = f"hostname:{socket.gethostname()},{int(time.time())}{f',{self.request_id}' if self.request_id else ''}"
        return f"{self.name}.{self.unit}:{self.value}|#{','.join(map(str, self.dimensions))}|#{end}"

    def to_dict(self) -> dict[str, Any]:
        labels = [
            {"Name": dimension.name, "Value": dimension.value} for dimension in self.dimensions
        ]
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": labels,
            "RequestId": self.request_id,
        }
