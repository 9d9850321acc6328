"""The metrics that a handler reports by `context.metrics`.

A worker collects values and sends them with its next reply. The front end owns the registry.
"""

from __future__ import annotations

import enum
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from tsx_runtime.wire import DeclaredMetric, Kind, MetricDelta
from tsx_runtime.worker.channel import OutFrame
from tsx_runtime.worker.exceptions import (
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)

logger = logging.getLogger("tsx.worker")

MAX_PENDING = 100_000  # the limit of values while no reply can send them
MAX_METRICS = 10_000  # the limit of names per type, since a handler may build names from requests
PREDICTION_TIME_INTERVAL_S = 1.0
TIME_UNITS = ("ms", "s")
SIZE_UNITS = ("MB", "kB", "GB", "B")


class Units:
    """TorchServe's long names of units."""

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
    """The types of metrics: counters add values, gauges keep the last one, histograms keep all."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Dimension:
    """A label of a metric.

    Examples:
        >>> str(Dimension("Level", "Host"))
        'Level:Host'
    """

    def __init__(self, name: str, value: Any) -> None:
        """Create a label; both arguments are converted to text."""
        self.name = str(name)
        self.value = str(value)

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dimension) and (self.name, self.value) == (other.name, other.value)

    def __hash__(self) -> int:
        return hash((self.name, self.value))


class CachingMetric:
    """A metric with all its label values, created by `Metrics.add_metric_to_cache`.

    Attributes:
        metric_name: The name.
        unit: The unit, such as `ms`.
        dimension_names: The names of its labels.
        metric_type: The type.
    """

    def __init__(
        self,
        pending: PendingMetrics,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str],
        metric_type: MetricTypes,
    ) -> None:
        """Describe a metric whose values go to `pending`."""
        self.metric_name = metric_name
        self.unit = unit
        self.dimension_names = list(dimension_names)
        self.metric_type = metric_type
        self._pending = pending

    def add_or_update(
        self, value: float, dimension_values: Sequence[Any] = (), request_id: str = ""
    ) -> None:
        """Add a value to a counter or histogram, or set a gauge.

        As in TorchServe, a value with a wrong number of dimension values is logged and ignored, so
        that the request does not fail.

        Args:
            value: The value, in the unit of the metric.
            dimension_values: A value for each of `dimension_names`.
            request_id: Ignored; TorchServe's handlers pass it.
        """
        if len(dimension_values) != len(self.dimension_names):
            values = ", ".join(map(str, dimension_values)) or "none"
            logger.error(
                "metric %s is not updated: its dimensions are %s, the values: %s",
                self.metric_name,
                self.dimension_names,
                values,
            )
            return
        self._pending.add(
            self, value, tuple(zip(self.dimension_names, map(str, dimension_values), strict=True))
        )

    def update(
        self, value: float, request_id: str = "", dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Add a value with its labels, like `add_or_update`."""
        self._pending.add(
            self, value, tuple((dimension.name, dimension.value) for dimension in dimensions)
        )


class PendingMetrics:
    """The values that were reported since the last reply, also by threads of the handler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest_values: dict[tuple[CachingMetric, tuple[tuple[str, str], ...]], float] = {}
        self._observations: list[tuple[CachingMetric, tuple[tuple[str, str], ...], float]] = []
        self._is_drop_logged = False

    def __bool__(self) -> bool:
        return bool(self._latest_values or self._observations)

    def add(self, metric: CachingMetric, value: float, labels: tuple[tuple[str, str], ...]) -> None:
        """Add a value of a metric."""
        value = float(value)
        with self._lock:
            if (
                len(self._observations) + len(self._latest_values) >= MAX_PENDING
                and (metric, labels) not in self._latest_values
            ):
                self._drop(metric)
            elif metric.metric_type is MetricTypes.HISTOGRAM:
                self._observations.append((metric, labels, value))
            elif metric.metric_type is MetricTypes.GAUGE:
                self._latest_values[metric, labels] = value
            elif value >= 0:
                self._latest_values[metric, labels] = (
                    self._latest_values.get((metric, labels), 0.0) + value
                )
            else:
                logger.warning(
                    "counter %s cannot take the value %s: counters only grow; use a gauge",
                    metric.metric_name,
                    value,
                )

    def take(self) -> list[MetricDelta]:
        """Remove and return all values."""
        with self._lock:
            latest_values, self._latest_values = self._latest_values, {}
            observations, self._observations = self._observations, []
            self._is_drop_logged = False
        return [
            MetricDelta(
                name=metric.metric_name,
                type=metric.metric_type.value,
                unit=metric.unit,
                value=value,
                dimensions=dict(labels),
            )
            for metric, labels, value in [
                *((*key, value) for key, value in latest_values.items()),
                *observations,
            ]
        ]

    def add_to(self, frames: Sequence[OutFrame]) -> list[OutFrame]:
        """Take all values, and add them to the first reply among the frames, if there is one."""
        frames_with_metrics = list(frames)
        for idx, (kind, batch, items, times) in enumerate(frames_with_metrics):
            if kind is Kind.REPLY and times and self:
                extra = bytes(times) + json.dumps(self.take()).encode()
                frames_with_metrics[idx] = (kind, batch, items, extra)
                break
        return frames_with_metrics

    def _drop(self, metric: CachingMetric) -> None:
        if not self._is_drop_logged:
            self._is_drop_logged = True
            text = (
                "metric %s: %d values wait for the next answer, so others are dropped until then:"
                " report less often, or fewer labels"
            )
            logger.warning(text, metric.metric_name, MAX_PENDING)


class Metrics:
    """The metrics of a handler (`context.metrics`).

    Every metric also has the labels `ModelName` and `Level=Model`. It appears on /metrics under
    its own name.

    Examples:
        >>> metrics = Metrics("digits")
        >>> metrics.add_counter("Rejected", 1)
        >>> metrics.get_metric("Rejected").dimension_names
        ['ModelName', 'Level']
    """

    def __init__(self, model_name: str = "") -> None:
        """Create an empty collection of metrics.

        Args:
            model_name: The value of the label `ModelName`.
        """
        self.model_name = model_name
        self.request_ids: dict[int, str] | str | None = None
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {kind: {} for kind in MetricTypes}
        self.pending = PendingMetrics()
        self._is_full = False
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
        """Add a value of a metric, which is created if it is new.

        The other form is that of TorchServe 0.6.1 to 0.8.1, `add_metric(metric_name, unit,
        dimension_names, metric_type)`. It does what `add_metric_to_cache` does.

        Args:
            name: The name of the metric.
            value: The value.
            unit: The unit, such as `ms` or `count`.
            idx: Ignored; TorchServe's handlers pass the position of the request.
            dimensions: Further labels.
            metric_type: The type, or its name.
            metric_name: The name, in the other form.
            dimension_names: The names of labels, in the other form.

        Returns:
            The metric in the other form, otherwise None.

        Raises:
            MetricsCacheTypeError: The name is not a str, or the type is unknown.
            MetricsCacheValueError: The name is empty.
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
        kind = _parse_type(metric_type)
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
        """Add `value` to a counter."""
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
        """Report a time.

        Raises:
            MetricsCacheValueError: `unit` is neither ms nor s.
        """
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
        """Report a size.

        Raises:
            MetricsCacheValueError: `unit` is not MB, kB, GB or B.
        """
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
        """Report a percentage."""
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(
        self, name: str, value: float | str, dimensions: Sequence[Dimension] | None = None
    ) -> None:
        """Count errors with the label `Level=Error`; a text is logged and counts as one error."""
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
        """Create a metric.

        Args:
            metric_name: The name.
            unit: The unit, such as `ms`.
            dimension_names: The names of its labels.
            metric_type: The type, or its name.

        Raises:
            MetricsCacheTypeError: The name is not a str, or the type is unknown.
            MetricsCacheValueError: The name is empty.
        """
        _check_name(metric_name)
        metric = CachingMetric(
            self.pending, metric_name, str(unit), dimension_names or (), _parse_type(metric_type)
        )
        known = self.cache[metric.metric_type]
        if metric_name in known or len(known) < MAX_METRICS:
            known[metric_name] = metric
        elif not self._is_full:
            self._is_full = True
            logger.warning(
                "metric %s is dropped, like further new metrics: there are already %d names; use"
                " dimensions",
                metric_name,
                MAX_METRICS,
            )
        return metric

    def get_metric(
        self, metric_name: str, metric_type: MetricTypes | str = MetricTypes.COUNTER
    ) -> CachingMetric:
        """Return a metric that was created before.

        Raises:
            MetricsCacheKeyError: There is no such metric.
        """
        kind = _parse_type(metric_type)
        try:
            return self.cache[kind][metric_name]
        except KeyError:
            known = ", ".join(sorted(self.cache[kind])) or "none"
            raise MetricsCacheKeyError(
                f"there is no {kind.value} called {metric_name!r}; there is: {known}"
            ) from None

    def declare(self, definitions: Iterable[DeclaredMetric]) -> None:
        """Create the metrics of `metrics.yaml`."""
        for metric in definitions:
            self.add_metric_to_cache(
                metric["name"], metric["unit"], metric["dimensions"], MetricTypes(metric["type"])
            )

    def set_request_ids(self, request_ids: dict[int, str] | str | None) -> None:
        """Set `request_ids`, as in TorchServe's service."""
        self.request_ids = request_ids


class PredictionTime:
    """TorchServe's metric of the time that a batch takes in the worker.

    One value per second is enough, since the metric shows only the last one.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.next_report_at = 0.0  # time.monotonic() of the next report

    def report(self, start: float, end: float) -> None:
        """Report a batch; `start` and `end` are time.monotonic()."""
        self.next_report_at = end + PREDICTION_TIME_INTERVAL_S
        self._metrics.add_time("PredictionTime", round(1000 * (end - start), 2), None, "ms")


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise MetricsCacheTypeError(f"{name!r} cannot be the name of a metric: it is not a str")
    if not name.strip():
        raise MetricsCacheValueError(f"{name!r} cannot be the name of a metric")


def _parse_type(value: MetricTypes | str) -> MetricTypes:
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
    """A value with its labels, for older handlers."""

    def __init__(
        self,
        name: str,
        value: float,
        unit: str,
        dimensions: Sequence[Dimension] = (),
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        """Describe a value.

        Raises:
            MetricsCacheTypeError: The name is not a str.
            MetricsCacheValueError: The name is empty.
        """
        _check_name(name)
        self.name = name
        self.value = value
        self.unit = Units.units.get(unit, unit)
        self.dimensions = list(dimensions)
        self.request_id = request_id
        self.metric_method = metric_method

    def update(self, value: float) -> None:
        """Add to the value of a counter, or replace another value."""
        self.value = self.value + value if self.metric_method == "counter" else value

    def __str__(self) -> str:
        """Return the metric as a line of TorchServe's metric log."""
        end = f"hostname:{socket.gethostname()},{int(time.time())}{f',{self.request_id}' if self.request_id else ''}"
        return f"{self.name}.{self.unit}:{self.value}|#{','.join(map(str, self.dimensions))}|#{end}"

    def to_dict(self) -> dict[str, Any]:
        """Return the value with the field names of CloudWatch."""
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
