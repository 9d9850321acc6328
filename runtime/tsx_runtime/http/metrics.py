"""`/metrics`: the core's plain integers and the machine's numbers as Prometheus text, put together when somebody reads it.

The names and labels are TorchServe's (contract 1.7) and, for what it has no name for, begin with `tsx_`. What TorchServe
has once for the host and tsx has for each version carries the version in further labels.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import accumulate
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Response
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tsx_runtime.core.metricsconfig import MetricsConfig, read_metrics_config
from tsx_runtime.core.model import Model, ModelVersion
from tsx_runtime.core.registry import Registry
from tsx_runtime.core.stats import BATCH_SIZE_BOUNDS, VALUE_BOUNDS, HandlerMetric, MetricKey
from tsx_runtime.core.worker import WorkerState
from tsx_runtime.http.asgi import Counts
from tsx_runtime.http.gpu import Gpu, gpu_metrics, read_gpus
from tsx_runtime.http.system import System, SystemMetric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MICRO, MILLI = 1e6, 1e3
Labels = dict[str, str]
SYSTEM = frozenset(
    {"CPUUtilization", "MemoryUsed", "MemoryAvailable", "MemoryUtilization", "DiskUsage", "DiskAvailable", "DiskUtilization"}
    | {"GPUUtilization", "GPUMemoryUsed", "GPUMemoryUtilization"}
)


class Reading(NamedTuple):
    """All that one answer is made of."""

    host: str
    models: list[Model]
    counts: Counts
    system: list[SystemMetric]
    gpus: dict[int, Gpu]
    config: MetricsConfig = MetricsConfig()
    all_models: bool = True  # also what handlers report and the configuration does not declare

    @property
    def versions(self) -> list[ModelVersion]:
        return [version for model in self.models for version in model.versions.values()]


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


_COUNTER = re.compile(r"^# (HELP|TYPE) (\S+)_total ", re.MULTILINE)


def build_families(reading: Reading) -> Families:
    families = Families()
    _add_host(families, reading)
    _add_requests(families, reading)
    _add_workers(families, reading)
    _add_batches(families, reading)
    families.keep(reading.config.shows)
    own_names = families.names()
    for version in reading.versions:
        _add_handler_metrics(families, own_names, reading, version)
    return families


def _add_host(families: Families, reading: Reading) -> None:
    host = {"Level": "Host", "Hostname": reading.host}
    for digit in (2, 4, 5):
        text = f"answers with a status of {digit}xx"
        families.add(f"Requests{digit}XX", "counter", text, [(host, reading.counts.classes[digit])])
    for name, unit, value, labels in reading.system:
        if name in SYSTEM or name in (reading.config.server or ()):  # a program of the user's may print what it likes
            families.add(name, "gauge", f"of this machine, in {unit}", [(host | dict(labels), value)])
    for number, gpu in reading.gpus.items():
        for name, unit, value in gpu_metrics(gpu):
            families.add(name, "gauge", f"of a GPU, in {unit}", [(host | {"DeviceId": str(number)}, value)])


def _add_requests(families: Families, reading: Reading) -> None:
    for version in reading.versions:
        stats = version.stats
        model = {"model_name": version.name, "model_version": version.version, "hostname": reading.host}
        families.add("ts_inference_requests_total", "counter", "requests accepted", [(model, stats.requests)])
        text = "from arrival to answer, summed over requests"
        families.add("ts_inference_latency_microseconds", "counter", text, [(model, stats.latency_seconds * MICRO)])
        text = "from arrival to a worker, summed over requests"
        families.add("ts_queue_latency_microseconds", "counter", text, [(model, stats.queue_seconds * MICRO)])
        answers = [(model | {"status": str(status)}, count) for status, count in sorted(stats.answers.items())]
        families.add("tsx_answers_total", "counter", "answers of workers by HTTP status", answers)
        dropped = [(model | {"metric": _text(name)}, count) for name, count in sorted(stats.dropped_metrics.items())]
        text = "values that a handler reported beyond the bounds, by the name of the metric"
        families.add("tsx_handler_metric_drops_total", "counter", text, dropped)
        refusals = [(model | {"reason": reason}, count) for reason, count in sorted(stats.refusals.items())]
        families.add("tsx_refusals_total", "counter", "requests that no worker answered, by the kind of error", refusals)
        families.add("tsx_queue_depth", "gauge", "requests that wait for a worker", [(model, version.pending)])


def _add_workers(families: Families, reading: Reading) -> None:
    for version in reading.versions:
        model = {"model_name": version.name, "model_version": version.version, "hostname": reading.host}
        states = [worker.state for worker in version.workers]
        samples = [(model | {"state": state.value}, states.count(state)) for state in WorkerState]
        families.add("tsx_workers", "gauge", "workers by state", samples)
        families.add("tsx_worker_restarts_total", "counter", "workers started again", [(model, version.stats.restarts)])
        recycled = [(model | {"reason": reason}, version.stats.recycled[reason]) for reason in ("requests", "memory", "age", "cores")]
        families.add("tsx_worker_recycles_total", "counter", "workers replaced for what they had served, held or lived", recycled)
        stuck = [(model | {"reason": reason}, version.stats.stuck[reason]) for reason in ("stopped", "silent")]
        families.add("tsx_worker_stuck_total", "counter", "workers killed because they did not go on", stuck)
        families.add(
            "tsx_worker_busy_seconds_total", "counter", "time in which workers held a batch", [(model, version.stats.inference_seconds)]
        )
        for worker in version.workers:
            memory = [(model | {"worker": worker.id}, worker.memory())]
            families.add("tsx_worker_memory_bytes", "gauge", "resident memory of a worker", memory)
            if worker.load_seconds is not None:
                name = f"W-{worker.id}-{version.name}_{version.version}"
                labels = {"WorkerName": name, "Level": "Host", "Hostname": reading.host}
                families.add(
                    "WorkerLoadTime", "gauge", "of a worker's last start, in Milliseconds", [(labels, worker.load_seconds * MILLI)]
                )


def _add_batches(families: Families, reading: Reading) -> None:
    for version in reading.versions:
        stats = version.stats
        host = {"Level": "Host", "Hostname": reading.host, "ModelName": version.name, "ModelVersion": version.version}
        if stats.batches:
            text = "of the newest batch, in Milliseconds"
            families.add("QueueTime", "gauge", text, [(host, stats.last_queue_seconds * MILLI)])
            families.add("WorkerThreadTime", "gauge", text, [(host, stats.last_worker_seconds * MILLI)])
        model = {"model_name": version.name, "model_version": version.version, "hostname": reading.host}
        metric = families.metric("tsx_batch_size", "histogram", "requests of a batch")
        for bound in BATCH_SIZE_BOUNDS:
            below = sum(count for size, count in stats.batch_sizes.items() if size <= bound)
            metric.add_sample("tsx_batch_size_bucket", model | {"le": str(float(bound))}, below)
        metric.add_sample("tsx_batch_size_bucket", model | {"le": "+Inf"}, stats.batches)
        metric.add_sample("tsx_batch_size_count", model, stats.batches)
        metric.add_sample("tsx_batch_size_sum", model, sum(size * count for size, count in stats.batch_sizes.items()))


def _add_handler_metrics(families: Families, own_names: frozenset[str], reading: Reading, version: ModelVersion) -> None:
    """What handlers reported, under their own names; a name of the server's own gets `model_` before it."""
    further = {"Hostname": reading.host, "ModelVersion": version.version}
    for key, metric in version.stats.handler_metrics.items():
        if reading.all_models or reading.config.declares(key[0], key[1]):
            name = _word(key[0])
            _add_handler_metric(families, f"model_{name}" if name in own_names else name, further, key, metric)


def _add_handler_metric(families: Families, name: str, further: Labels, key: MetricKey, metric: HandlerMetric) -> None:
    _, kind, unit, dimensions = key
    labels = {_word(dimension): _text(value) for dimension, value in dimensions} | further
    text = f"reported by a handler, in {_text(unit)}"
    if kind != "histogram":
        families.add(name, kind, text, [(labels, metric.sum if kind == "counter" else metric.last)])
        return
    family = families.metric(name, "histogram", text)
    for bound, below in zip(VALUE_BOUNDS, accumulate(metric.buckets), strict=False):  # the last bucket is beyond all bounds
        family.add_sample(f"{name}_bucket", labels | {"le": str(bound)}, below)
    family.add_sample(f"{name}_bucket", labels | {"le": "+Inf"}, metric.count)
    family.add_sample(f"{name}_count", labels, metric.count)
    family.add_sample(f"{name}_sum", labels, metric.sum)


def _word(name: str) -> str:
    """A name that Prometheus takes."""
    word = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return f"_{word}" if word[:1].isdigit() or not word else word


def _text(value: str) -> str:
    """Half a surrogate pair, as in the name of a file that is not UTF-8, would fail the whole answer."""
    return value.encode("utf-8", "replace").decode()


def reader(registry: Registry, counts: Counts, system: System) -> Callable[[], Awaitable[Families]]:
    """What reads all metrics as they are when it is called."""
    host = socket.gethostname()
    settings = registry.settings
    config = read_metrics_config(settings.metrics_config)
    all_models = settings.model_metrics_auto_detect or config.model is None

    async def read() -> Families:
        gpus = await read_gpus() if registry.gpus and not system.disabled else {}
        return build_families(Reading(host, list(registry.models.values()), counts, system.read(), gpus, config, all_models))

    return read


def build_router(registry: Registry, counts: Counts, system: System) -> APIRouter:
    router = APIRouter(tags=["metrics"])
    read = reader(registry, counts, system)

    @router.get("/metrics", summary="All metrics as Prometheus text", response_class=Response, responses={200: _DOCUMENTED})
    async def metrics(
        names: Annotated[list[str] | None, Query(alias="name[]", description="only these metrics", examples=["Requests2XX"])] = None,
    ) -> Response:
        families = await read()
        if names:
            families.restrict(names)
        return Response(families.render(), headers={"content-type": CONTENT_TYPE})

    router.add_api_route("/metrics", metrics, methods=["HEAD", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    return router


_DOCUMENTED = {
    "description": "one line a sample",
    "content": {"text/plain": {"schema": {"type": "string"}, "example": 'Requests2XX{Hostname="box",Level="Host"} 8.0\n'}},
}
