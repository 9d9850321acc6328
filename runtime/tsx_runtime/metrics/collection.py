"""`/metrics`: the counters of the server and the metrics of the machine, rendered on demand.

Names and labels are TorchServe's; names that TorchServe lacks begin with `tsx_`. Metrics that
TorchServe has per host and tsx per version carry the version in additional labels.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tsx_runtime.core.models.model import Model, ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.core.telemetry.metricsconfig import MetricsConfig, read_metrics_config
from tsx_runtime.core.workers.instance import ResourceUsage
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.metrics.exposition import OPENMETRICS, TEXT, Families, Labels, in_turns
from tsx_runtime.metrics.gpu import Gpu, gpu_metrics, prometheus_gpu_metrics, read_gpus
from tsx_runtime.metrics.host import System, SystemMetric
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.metrics.version_metrics import add_handler_metrics, add_version

SYSTEM = frozenset(
    {
        "CPUUtilization",
        "MemoryUsed",
        "MemoryAvailable",
        "MemoryUtilization",
        "DiskUsage",
        "DiskAvailable",
        "DiskUtilization",
    }
    | {"GPUUtilization", "GPUMemoryUsed", "GPUMemoryUtilization"}
)


class Reading(NamedTuple):
    """The data of one response of `/metrics`."""

    host: str
    models: list[Model]
    counts: ResponseCounts
    system: list[SystemMetric]
    gpus: dict[int, Gpu]
    config: MetricsConfig = MetricsConfig()
    all_models: bool = True  # include handlers' metrics that the configuration does not declare
    usage: Mapping[str, ResourceUsage] = {}  # keys: ids of workers
    process: Sequence[Metric] = ()  # metrics of the front end's process
    # Fractions of the requests without a version, by model and version.
    shares: Mapping[str, Mapping[str, float]] = {}
    in_flight: ByteBudget | None = None

    @property
    def versions(self) -> list[ModelVersion]:
        return [version for model in self.models for version in model.versions.values()]


def fill(families: Families, reading: Reading) -> Iterator[None]:
    """Add the server's metrics, in steps of about a millisecond.

    Models may come and go between steps.
    """
    _add_host(families, reading)
    _add_gpus(families, reading)
    if reading.in_flight is not None:
        _add_in_flight(families, reading.in_flight, {"hostname": reading.host})
    for version in reading.versions:
        add_version(families, version, reading.host, reading.usage, reading.gpus)
        labels = {
            "model_name": version.name,
            "model_version": version.version,
            "hostname": reading.host,
        }
        share = reading.shares.get(version.name, {}).get(version.version, 0.0)
        families.add(
            "tsx_traffic_share",
            "gauge",
            "share of the requests of a model that name no version, from 0 to 1",
            [(labels, share)],
        )
        yield


def fill_handler_metrics(families: Families, reading: Reading) -> Iterator[None]:
    """Drop the metrics that the configuration excludes, and add those of handlers, in steps."""
    families.keep(reading.config.shows)
    server_names = families.names()
    for version in reading.versions:
        yield from add_handler_metrics(
            families,
            server_names,
            version,
            reading.host,
            None if reading.all_models else reading.config,
        )


def _add_host(families: Families, reading: Reading) -> None:
    host = {"Level": "Host", "Hostname": reading.host}
    for digit in (2, 4, 5):
        text = f"answers with a status of {digit}xx"
        families.add(f"Requests{digit}XX", "counter", text, [(host, reading.counts.classes[digit])])
    for name, unit, value, labels in reading.system:
        # Other metrics that the user's program prints are shown only if the configuration declares
        # them.
        if name in SYSTEM or name in (reading.config.server or ()):
            families.add(
                name, "gauge", f"of this machine, in {unit}", [(host | dict(labels), value)]
            )
    for metric in reading.process:
        for sample in metric.samples:
            families.add(
                sample.name,
                metric.type,
                f"of the front end: {metric.documentation}",
                [({"hostname": reading.host}, sample.value)],
            )


def _add_in_flight(families: Families, budget: ByteBudget, labels: Labels) -> None:
    families.add_rows(
        labels,
        (
            "tsx_bytes_in_flight",
            "gauge",
            "bytes that count against max_inflight_bytes: of requests and of answers not read yet",
            budget.used,
        ),
        (
            "tsx_unread_bytes",
            "gauge",
            "of these, bytes of answers that clients have not read",
            budget.unread,
        ),
        (
            "tsx_bodies_refused_total",
            "counter",
            "requests refused because max_inflight_bytes was used up",
            budget.refused,
        ),
        (
            "tsx_clients_cut_off_total",
            "counter",
            "clients disconnected because their unread answers used up max_inflight_bytes",
            budget.cut_off,
        ),
    )


def _add_gpus(families: Families, reading: Reading) -> None:
    for number, gpu in reading.gpus.items():
        labels = {"Level": "Host", "Hostname": reading.host, "DeviceId": str(number)}
        for name, unit, value in gpu_metrics(gpu):
            families.add(name, "gauge", f"of a GPU, in {unit}", [(labels, value)])
        labels = {"hostname": reading.host, "gpu": str(number), "uuid": gpu.uuid}
        for name, text, base_value in prometheus_gpu_metrics(gpu):
            families.add(name, "gauge", text, [(labels, base_value)])


def reader(
    registry: Registry, counts: ResponseCounts, system: System
) -> Callable[[], Awaitable[Families]]:
    """Return a function that reads all metrics when it is called."""
    host = socket.gethostname()
    settings = registry.settings
    config = read_metrics_config(settings.metrics_config)
    all_models = settings.model_metrics_auto_detect or config.model is None
    process_collector = ProcessCollector(registry=None)

    async def read() -> Families:
        gpus = await read_gpus() if registry.resources.gpus and not system.disabled else {}
        workers = registry.workers()
        usage, process = await asyncio.to_thread(
            lambda: (read_usage(workers), process_metrics(process_collector))
        )
        models = list(registry.models.values())
        shares = {model.name: registry.shares(model.name) for model in models}
        families = Families()
        reading = Reading(
            host,
            models,
            counts,
            system.read(),
            gpus,
            config,
            all_models,
            usage,
            process,
            shares,
            registry.bytes_in_flight,
        )
        await in_turns(fill(families, reading))
        for feature in registry.features:
            await feature.add_metrics(families, host)
        await in_turns(fill_handler_metrics(families, reading))
        return families

    return read


def process_metrics(collector: ProcessCollector) -> list[Metric]:
    """Return the metrics of this process.

    Counting the descriptors needs a free descriptor. If that fails, all are reported as in use.
    """
    metrics = list(collector.collect())
    if sys.platform == "linux" and all(metric.name != "process_open_fds" for metric in metrics):
        import resource  # Windows lacks this module.

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        metrics.append(
            GaugeMetricFamily("process_open_fds", "Number of open file descriptors.", limit)
        )
        metrics.append(
            GaugeMetricFamily("process_max_fds", "Maximum number of open file descriptors.", limit)
        )
    return metrics


def read_usage(workers: Iterable[Worker]) -> dict[str, ResourceUsage]:
    """Return the resource usage of workers with a process; this reads system files and blocks."""
    usages = (
        (worker.id, worker.instance.usage()) for worker in workers if worker.instance is not None
    )
    return {id: usage for id, usage in usages if usage is not None}


def build_router(registry: Registry, counts: ResponseCounts, system: System) -> APIRouter:
    router = APIRouter(tags=["metrics"])
    read = reader(registry, counts, system)

    @router.get(
        "/metrics",
        summary="All metrics as Prometheus text",
        response_class=Response,
        responses={200: _RESPONSE},
    )
    async def metrics(
        request: Request,
        names: Annotated[
            list[str] | None,
            Query(alias="name[]", description="only these metrics", examples=["Requests2XX"]),
        ] = None,
    ) -> Response:
        families = await read()
        if names:
            families.restrict(names)
        is_openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
        text = b"".join(
            await in_turns(families.openmetrics() if is_openmetrics else families.text())
        )
        return Response(text, headers={"content-type": OPENMETRICS if is_openmetrics else TEXT})

    router.add_api_route(
        "/metrics",
        metrics,
        methods=["HEAD", "POST", "PUT", "PATCH", "DELETE"],
        include_in_schema=False,
    )
    return router


_RESPONSE = {
    "description": (
        "one line a sample; as OpenMetrics, with exemplars, where `Accept` asks for"
        " `application/openmetrics-text`"
    ),
    "content": {
        "text/plain": {
            "schema": {"type": "string"},
            "example": 'Requests2XX{Hostname="box",Level="Host"} 8.0\n',
        }
    },
}
