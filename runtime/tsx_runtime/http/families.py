"""Metrics by name, and how they are written: as Prometheus' text, or as OpenMetrics, which can point from a bucket to a trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import Exemplar as Pointer
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from tsx_runtime.core.durations import SHOWN, Durations

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
Labels = dict[str, str]


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

    def add_durations(self, name: str, text: str, labels: Labels, durations: Durations) -> None:
        metric = self.metric(name, "histogram", text)
        pointers = {place: Pointer({"trace_id": one.trace_id}, one.seconds, one.at) for place, one in durations.exemplars.items()}
        for place, (bound, below) in enumerate(zip(SHOWN, durations.shown(), strict=True)):
            metric.add_sample(f"{name}_bucket", labels | {"le": str(bound)}, below, exemplar=pointers.get(place))
        metric.add_sample(f"{name}_bucket", labels | {"le": "+Inf"}, durations.count, exemplar=pointers.get(len(SHOWN)))
        metric.add_sample(f"{name}_count", labels, durations.count)
        metric.add_sample(f"{name}_sum", labels, durations.sum)

    def metric(self, name: str, kind: str, text: str) -> Metric:
        return self._metrics.setdefault(name, Metric(name, text, kind))

    def collect(self) -> Iterator[Metric]:
        yield from (metric for metric in self._metrics.values() if metric.samples)

    def keep(self, shows: Callable[[str], bool]) -> None:
        self._metrics = {name: metric for name, metric in self._metrics.items() if shows(name)}

    def restrict(self, names: list[str]) -> None:
        """Keep only what is asked for by `?name[]=`."""
        self._metrics = {
            name: metric
            for name, metric in self._metrics.items()
            if name in names or any(sample.name in names for sample in metric.samples)
        }

    def render(self) -> bytes:
        """prometheus-client adds `_total` to a counter's name; here it has its full name already."""
        text = generate_latest(self).decode()
        counters = {metric.name for metric in self._metrics.values() if metric.type == "counter"}
        return _COUNTER.sub(lambda line: f"# {line[1]} {line[2] if line[2] in counters else line[2] + '_total'} ", text).encode()

    def render_openmetrics(self) -> bytes:
        text: bytes = generate_openmetrics(_OpenMetrics(self))  # type: ignore[no-untyped-call]  # prometheus-client's
        return text


_COUNTER = re.compile(r"^# (HELP|TYPE) (\S+)_total ", re.MULTILINE)


class _OpenMetrics(Collector):
    """The same samples under the same names. A counter is called without its `_total`; one whose name has none, as TorchServe's,
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
                told = Metric(name if is_one else metric.name, metric.documentation, "counter" if is_one else "unknown")
                told.samples = metric.samples
                yield told
            else:
                yield metric


def accepts_openmetrics(accept: str) -> bool:
    return "application/openmetrics-text" in accept
