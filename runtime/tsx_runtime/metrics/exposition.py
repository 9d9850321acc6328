"""Metric families as Prometheus text, or as OpenMetrics with exemplars that point to traces.

Rendering the metrics of hundreds of models takes a second. Therefore it is done in pieces of one or
two milliseconds, between which the event loop handles other work (`in_turns`). A thread would delay
the event loop more, because both need Python's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import Exemplar as PrometheusExemplar
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from tsx_runtime.core.telemetry.histogram import SHOWN_BOUNDS, Durations

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PIECE_SAMPLES = 100
Labels = dict[str, str]
T = TypeVar("T")


class Families(Collector):
    """A collection of metrics by name, which prometheus-client renders."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._metrics)

    def add(self, name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        metric = self.metric(name, kind, text)
        for labels, value in samples:
            metric.add_sample(name, labels, value)

    def add_rows(self, labels: Labels, *rows: tuple[str, str, str, float]) -> None:
        """Add one sample per row: name, kind, text, value."""
        for name, kind, text, value in rows:
            self.add(name, kind, text, [(labels, value)])

    def add_by(
        self, key: str, name: str, text: str, labels: Labels, counts: Mapping[str, float]
    ) -> None:
        """Add a sample for each count, whose key becomes the value of the label `key`."""
        kind = "counter" if name.endswith("_total") else "gauge"
        self.add(name, kind, text, [(labels | {key: value}, counts[value]) for value in counts])

    def add_durations(self, name: str, text: str, labels: Labels, durations: Durations) -> None:
        metric = self.metric(name, "histogram", text)
        exemplars = {
            index: PrometheusExemplar(
                {"trace_id": exemplar.trace_id}, exemplar.seconds, exemplar.at
            )
            for index, exemplar in durations.exemplars.items()
        }
        for index, (bound, cumulative_count) in enumerate(
            zip(SHOWN_BOUNDS, durations.cumulative_counts(), strict=True)
        ):
            metric.add_sample(
                f"{name}_bucket",
                labels | {"le": str(bound)},
                cumulative_count,
                exemplar=exemplars.get(index),
            )
        metric.add_sample(
            f"{name}_bucket",
            labels | {"le": "+Inf"},
            durations.count,
            exemplar=exemplars.get(len(SHOWN_BOUNDS)),
        )
        metric.add_sample(f"{name}_count", labels, durations.count)
        metric.add_sample(f"{name}_sum", labels, durations.sum)

    def metric(self, name: str, kind: str, text: str) -> Metric:
        return self._metrics.setdefault(name, Metric(name, text, kind))

    def collect(self) -> Iterator[Metric]:
        yield from (metric for metric in self._metrics.values() if metric.samples)

    def keep(self, is_shown: Callable[[str], bool]) -> None:
        """Keep only the families whose name `is_shown` accepts."""
        self._metrics = {name: metric for name, metric in self._metrics.items() if is_shown(name)}

    def restrict(self, names: list[str]) -> None:
        """Keep only the families with one of `names`, or a sample of that name."""
        self._metrics = {
            name: metric
            for name, metric in self._metrics.items()
            if name in names or any(sample.name in names for sample in metric.samples)
        }

    def kind(self, name: str) -> str | None:
        return self._metrics[name].type if name in self._metrics else None

    def text(self) -> Iterator[bytes]:
        """Render Prometheus text.

        prometheus-client appends `_total` to the names of counters in the headers. The names here
        are already complete, so the suffix is removed.
        """
        for metric in self.collect():
            for piece in _pieces(metric):
                rendered = generate_latest(piece)
                if metric.type == "counter":
                    for keyword in (b"HELP", b"TYPE"):
                        header = b"# %b %b" % (keyword, metric.name.encode())
                        rendered = rendered.replace(header + b"_total ", header + b" ", 1)
                yield rendered if piece.is_first else _without_head(rendered)

    def openmetrics(self) -> Iterator[bytes]:
        for metric in _OpenMetrics(self).collect():
            for piece in _pieces(metric):
                # prometheus-client has no type annotations for this function.
                rendered: bytes = generate_openmetrics(piece)  # type: ignore[no-untyped-call]
                rendered = rendered.removesuffix(_END)
                yield rendered if piece.is_first else _without_head(rendered)
        yield _END


_END = b"# EOF\n"


class _Piece(Collector):
    """A few samples of one metric, which prometheus-client renders like a whole metric."""

    def __init__(self, metric: Metric, begin: int) -> None:
        self.is_first = begin == 0
        self._metric = Metric(metric.name, metric.documentation, metric.type)
        self._metric.samples = metric.samples[begin : begin + PIECE_SAMPLES]

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _pieces(metric: Metric) -> Iterator[_Piece]:
    return (_Piece(metric, begin) for begin in range(0, len(metric.samples), PIECE_SAMPLES))


def _without_head(rendered: bytes) -> bytes:
    """Remove the HELP and TYPE lines, which only the first piece needs."""
    return rendered.split(b"\n", 2)[2]


async def in_turns(steps: Iterable[T]) -> list[T]:
    """Return the results of all steps, and let the event loop run after each one."""
    results = []
    for step in steps:
        results.append(step)
        await asyncio.sleep(0)
    return results


class _OpenMetrics(Collector):
    """The same samples under the same names, with the types that OpenMetrics allows.

    In OpenMetrics, a counter's samples end in `_total` and its family is named without that suffix.
    TorchServe's counters lack the suffix, so their type becomes unknown.
    """

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        names = self._families.names()
        for metric in self._families.collect():
            if metric.type == "counter":
                name = metric.name.removesuffix("_total")
                is_counter = name != metric.name and name not in names
                family = Metric(
                    name if is_counter else metric.name,
                    metric.documentation,
                    "counter" if is_counter else "unknown",
                )
                family.samples = metric.samples
                yield family
            else:
                yield metric
