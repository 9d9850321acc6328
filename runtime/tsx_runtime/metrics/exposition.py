"""Metric families, rendered as Prometheus text, or as OpenMetrics, whose exemplars point from a
bucket to a trace.

Of hundreds of models that is a second's work. It comes in pieces of a millisecond or two, so that
the event loop can answer others between them (`in_turns`); a thread would take from it more than
that, since both need Python's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import Exemplar as Pointer
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from tsx_runtime.core.telemetry.histogram import SHOWN_BOUNDS, Durations

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PIECE = 100  # samples
Labels = dict[str, str]
T = TypeVar("T")


class Families(Collector):
    """What prometheus-client renders: metrics, each with its samples, by name."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._metrics)

    def add(self, name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        metric = self.metric(name, kind, text)
        for labels, value in samples:
            metric.add_sample(name, labels, value)

    def add_rows(self, labels: Labels, *rows: tuple[str, str, str, float]) -> None:
        """Add a sample each: name, kind, text, value."""
        for name, kind, text, value in rows:
            self.add(name, kind, text, [(labels, value)])

    def add_by(
        self, key: str, name: str, text: str, labels: Labels, counts: Mapping[str, float]
    ) -> None:
        """Add a sample for each value of the label `key`."""
        kind = "counter" if name.endswith("_total") else "gauge"
        self.add(name, kind, text, [(labels | {key: each}, counts[each]) for each in counts])

    def add_durations(self, name: str, text: str, labels: Labels, durations: Durations) -> None:
        metric = self.metric(name, "histogram", text)
        pointers = {
            place: Pointer({"trace_id": one.trace_id}, one.seconds, one.at)
            for place, one in durations.exemplars.items()
        }
        for place, (bound, below) in enumerate(
            zip(SHOWN_BOUNDS, durations.cumulative_counts(), strict=True)
        ):
            metric.add_sample(
                f"{name}_bucket", labels | {"le": str(bound)}, below, exemplar=pointers.get(place)
            )
        metric.add_sample(
            f"{name}_bucket",
            labels | {"le": "+Inf"},
            durations.count,
            exemplar=pointers.get(len(SHOWN_BOUNDS)),
        )
        metric.add_sample(f"{name}_count", labels, durations.count)
        metric.add_sample(f"{name}_sum", labels, durations.sum)

    def metric(self, name: str, kind: str, text: str) -> Metric:
        return self._metrics.setdefault(name, Metric(name, text, kind))

    def collect(self) -> Iterator[Metric]:
        yield from (metric for metric in self._metrics.values() if metric.samples)

    def keep(self, shows: Callable[[str], bool]) -> None:
        self._metrics = {name: metric for name, metric in self._metrics.items() if shows(name)}

    def restrict(self, names: list[str]) -> None:
        """Keep only the families that `?name[]=` names."""
        self._metrics = {
            name: metric
            for name, metric in self._metrics.items()
            if name in names or any(sample.name in names for sample in metric.samples)
        }

    def kind(self, name: str) -> str | None:
        return self._metrics[name].type if name in self._metrics else None

    def text(self) -> Iterator[bytes]:
        """prometheus-client adds `_total` to a counter's name; here it has its full name
        already.
        """
        for metric in self.collect():
            for piece in _pieces(metric):
                written = generate_latest(piece)
                if metric.type == "counter":
                    for word in (b"HELP", b"TYPE"):
                        header = b"# %b %b" % (word, metric.name.encode())
                        written = written.replace(header + b"_total ", header + b" ", 1)
                yield written if piece.is_first else _without_head(written)

    def openmetrics(self) -> Iterator[bytes]:
        for metric in _OpenMetrics(self).collect():
            for piece in _pieces(metric):
                written: bytes = generate_openmetrics(piece)  # type: ignore[no-untyped-call]  # prometheus-client's
                written = written.removesuffix(_END)
                yield written if piece.is_first else _without_head(written)
        yield _END


_END = b"# EOF\n"


class _Piece(Collector):
    """Some samples of one metric, which prometheus-client takes for all that there is."""

    def __init__(self, metric: Metric, begin: int) -> None:
        self.is_first = begin == 0
        self._metric = Metric(metric.name, metric.documentation, metric.type)
        self._metric.samples = metric.samples[begin : begin + PIECE]

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _pieces(metric: Metric) -> Iterator[_Piece]:
    return (_Piece(metric, begin) for begin in range(0, len(metric.samples), PIECE))


def _without_head(written: bytes) -> bytes:
    """Its HELP and its TYPE stand before the first piece."""
    return written.split(b"\n", 2)[2]


async def in_turns(steps: Iterable[T]) -> list[T]:
    """All of them, with a turn of the event loop behind each."""
    done = []
    for step in steps:
        done.append(step)
        await asyncio.sleep(0)
    return done


class _OpenMetrics(Collector):
    """The same samples under the same names.

    A counter is called without its `_total`; one whose name has none, as TorchServe's,
    may not be called a counter there.
    """

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        taken = self._families.names()
        for metric in self._families.collect():
            if metric.type == "counter":
                name = metric.name.removesuffix("_total")
                is_one = name != metric.name and name not in taken
                shown = Metric(
                    name if is_one else metric.name,
                    metric.documentation,
                    "counter" if is_one else "unknown",
                )
                shown.samples = metric.samples
                yield shown
            else:
                yield metric
