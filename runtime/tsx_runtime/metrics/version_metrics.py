"""The metrics of each version in `/metrics`.

They cover requests and their times, workers, batches, and the handler's metrics.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.telemetry.metricsconfig import MetricsConfig
from tsx_runtime.core.telemetry.version_stats import (
    BATCH_SIZE_BOUNDS,
    WAITING_IN_WORKERS,
    HandlerMetric,
    MetricKey,
)
from tsx_runtime.core.workers.instance import ResourceUsage
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.metrics.exposition import PIECE_SAMPLES, Families, Labels
from tsx_runtime.metrics.gpu import Gpu

MICRO, MILLI = 1e6, 1e3
RECYCLE_REASONS = ("requests", "memory", "age", "cores")
# These series exist from the start with 0, because Prometheus's rate() ignores the first value of a
# series.
REFUSAL_REASONS = ("AnswerLate", "DeadlinePassed", "NoWorker", "QueueFull", "WorkerDied")
SCALING_REASONS = (
    "queue",
    "refused",
    "slo",
    "quiet",
    "unused",
    "request",
    "model_memory",
    "model_gpu_memory",
    "memory",
    "cores",
)
STUCK_REASONS = ("stopped", "silent")


def add_version(
    families: Families,
    version: ModelVersion,
    host: str,
    usage: Mapping[str, ResourceUsage],
    gpus: Mapping[int, Gpu],
) -> None:
    labels = {"model_name": version.name, "model_version": version.version, "hostname": host}
    _add_requests(families, version, labels)
    _add_times(families, version, labels, host)
    _add_batch_sizes(families, version, labels)
    for feature in version.features:
        feature.add_version_metrics(families, version, labels)
    _add_workers(families, version, labels)
    for worker in version.workers:
        if worker.id in usage:
            _add_usage(families, labels | {"worker": worker.id}, usage[worker.id], gpus)
        if worker.load_seconds is not None:
            load_labels = {
                "WorkerName": f"W-{worker.id}-{version.name}_{version.version}",
                "Level": "Host",
                "Hostname": host,
            }
            families.add(
                "WorkerLoadTime",
                "gauge",
                "of a worker's last start, in Milliseconds",
                [(load_labels, worker.load_seconds * MILLI)],
            )


def _add_requests(families: Families, version: ModelVersion, model: Labels) -> None:
    stats = version.stats
    finished = sum(stats.answers.values()) + sum(stats.refusals.values())
    families.add_rows(
        model,
        ("ts_inference_requests_total", "counter", "requests accepted", stats.requests),
        (
            "ts_inference_latency_microseconds",
            "counter",
            "from arrival to answer, summed over requests",
            stats.latency.sum * MICRO,
        ),
        (
            "ts_queue_latency_microseconds",
            "counter",
            "from arrival to a worker, summed over requests",
            stats.queue_seconds * MICRO,
        ),
        ("tsx_requests_total", "counter", "requests that were answered or refused", finished),
        (
            "tsx_errors_total",
            "counter",
            "requests that failed: answers of 500 and above, and refusals that the client did not"
            " cause",
            stats.errors,
        ),
        ("tsx_queue_depth", "gauge", "requests that wait for a worker", version.pending),
        (
            "tsx_requests_waiting",
            "gauge",
            "requests that wait for a worker, or in one that generates text for room in its engine:"
            " what more servers would begin at once",
            _waiting(version),
        ),
        (
            "tsx_requests_in_flight",
            "gauge",
            "requests accepted and not answered yet",
            version.in_flight,
        ),
    )
    answers = {str(status): count for status, count in sorted(stats.answers.items())}
    families.add_by(
        "status", "tsx_answers_total", "answers of workers by HTTP status", model, answers
    )
    families.add_by(
        "reason",
        "tsx_refusals_total",
        "requests that no worker answered, by the kind of error",
        model,
        {reason: stats.refusals[reason] for reason in sorted({*REFUSAL_REASONS, *stats.refusals})},
    )
    families.add_by(
        "metric",
        "tsx_handler_metric_drops_total",
        "values that a handler reported beyond the limits, by the name of the metric",
        model,
        {plain_text(name): count for name, count in sorted(stats.dropped_metrics.items())},
    )
    if "job_queue_size" not in version.current_limits:  # Otherwise it changes after each batch.
        text = "requests that may wait (jobQueueSize)"
        families.add_rows(model, ("tsx_queue_capacity", "gauge", text, version.queue_capacity))


def _waiting(version: ModelVersion) -> int:
    """Return the number of requests that wait in the queue and inside workers.

    The last report may come from a worker that has died, so its number is limited to the requests
    that are with workers.
    """
    inside = sum(
        metric.last
        for (name, *_), metric in version.stats.handler_metrics.items()
        if name == WAITING_IN_WORKERS
    )
    return version.pending + min(int(inside), version.in_flight - version.pending)


def _add_times(families: Families, version: ModelVersion, model: Labels, host: str) -> None:
    stats = version.stats
    for name, text, durations in (
        ("request", "of a request, from its arrival to its answer", stats.latency),
        ("queue", "in which no worker was free for a request", stats.queue),
        (
            "batch_wait",
            "in which a request waited for its batch to begin although a worker was there for it",
            stats.batch_wait,
        ),
        ("preprocess", "of a batch in the handler's preprocess", stats.preprocess),
        (
            "inference",
            "of a batch in the handler's inference; of a handler without steps, all of its time",
            stats.inference,
        ),
        ("postprocess", "of a batch in the handler's postprocess", stats.postprocess),
    ):
        families.add_durations(f"tsx_{name}_seconds", f"seconds {text}", model, durations)
    if stats.batches:
        batch_labels = {
            "Level": "Host",
            "Hostname": host,
            "ModelName": version.name,
            "ModelVersion": version.version,
        }
        text = "of the newest batch, in Milliseconds"
        families.add("QueueTime", "gauge", text, [(batch_labels, stats.last_queue_seconds * MILLI)])
        families.add(
            "WorkerThreadTime", "gauge", text, [(batch_labels, stats.last_worker_seconds * MILLI)]
        )


def _add_batch_sizes(families: Families, version: ModelVersion, model: Labels) -> None:
    stats = version.stats
    metric = families.metric("tsx_batch_size", "histogram", "requests of a batch")
    for bound in BATCH_SIZE_BOUNDS:
        cumulative_count = sum(count for size, count in stats.batch_sizes.items() if size <= bound)
        metric.add_sample(
            "tsx_batch_size_bucket", model | {"le": str(float(bound))}, cumulative_count
        )
    metric.add_sample("tsx_batch_size_bucket", model | {"le": "+Inf"}, stats.batches)
    metric.add_sample("tsx_batch_size_count", model, stats.batches)
    metric.add_sample(
        "tsx_batch_size_sum", model, sum(size * count for size, count in stats.batch_sizes.items())
    )


def _add_workers(families: Families, version: ModelVersion, model: Labels) -> None:
    stats = version.stats
    states = Counter(worker.state for worker in version.workers)
    families.add_by(
        "state",
        "tsx_workers",
        "workers by state",
        model,
        {state.value: states[state] for state in WorkerState},
    )
    forms = {plain_text(form): count for form, count in version.forms.items()}
    text = "workers by the form of the model that they run"
    families.add_by("form", "tsx_model_form", text, model, forms)
    if forms:
        fallback_count = sum(bool(worker.forms_passed_over) for worker in version.workers)
        text = "workers that do not run the first form that is configured"
        families.add_rows(model, ("tsx_model_form_fallback", "gauge", text, fallback_count))
    families.add_rows(
        model,
        ("tsx_worker_restarts_total", "counter", "worker restarts", stats.restarts),
        (
            "tsx_workers_desired",
            "gauge",
            "workers that the load, or minWorkers, asks for",
            len(version.workers),
        ),
        (
            "tsx_worker_busy_seconds_total",
            "counter",
            "time in which workers processed batches",
            stats.busy_seconds,
        ),
    )
    for name, text, reasons, counts in (
        (
            "tsx_worker_scalings_total",
            "changes of the number of workers by the server itself, and workers that memory or"
            " cores kept away",
            SCALING_REASONS,
            stats.scalings,
        ),
        (
            "tsx_worker_recycles_total",
            "workers replaced because they reached a limit of requests, memory or age",
            RECYCLE_REASONS,
            stats.recycled,
        ),
        (
            "tsx_worker_stuck_total",
            "workers killed because they stopped responding",
            STUCK_REASONS,
            stats.stuck,
        ),
    ):
        families.add_by("reason", name, text, model, {reason: counts[reason] for reason in reasons})


def _add_usage(
    families: Families, worker: Labels, usage: ResourceUsage, gpus: Mapping[int, Gpu]
) -> None:
    families.add_rows(
        worker,
        ("tsx_worker_memory_bytes", "gauge", "resident memory of a worker", usage.memory),
        (
            "tsx_worker_cpu_seconds_total",
            "counter",
            "processor time of a worker's process",
            usage.cpu_seconds,
        ),
        (
            "tsx_worker_open_fds",
            "gauge",
            "files and connections that a worker has open",
            usage.descriptors,
        ),
    )
    gpu_bytes = {
        str(number): sum(sizes)
        for number, gpu in gpus.items()
        if (sizes := [gpu.processes[pid] for pid in usage.pids if pid in gpu.processes])
    }
    text = "memory of a GPU that a worker holds"
    families.add_by("gpu", "tsx_worker_gpu_memory_bytes", text, worker, gpu_bytes)


def add_handler_metrics(
    families: Families,
    server_names: Collection[str],
    version: ModelVersion,
    host: str,
    config: MetricsConfig | None,
) -> Iterator[None]:
    """Add the metrics that handlers reported, under the names that they gave.

    A name that the server uses gets the prefix `model_`. If a name was reported with two kinds, the
    second one gets its kind as a suffix. With `config`, only metrics that it declares are added.
    Handlers may report more metrics between two steps.
    """
    extra_labels = {"Hostname": host, "ModelVersion": version.version}
    for number, (key, metric) in enumerate(list(version.stats.handler_metrics.items())):
        if config is None or config.declares(key[0], key[1]):
            name = _metric_name(key[0])
            name = f"model_{name}" if name in server_names else name
            name = name if families.kind(name) in (None, key[1]) else f"{name}_{key[1]}"
            _add_handler_metric(families, name, extra_labels, key, metric)
        if number % PIECE_SAMPLES == PIECE_SAMPLES - 1:
            yield
    yield


def _add_handler_metric(
    families: Families, name: str, extra_labels: Labels, key: MetricKey, metric: HandlerMetric
) -> None:
    _, kind, unit, dimensions = key
    labels = {
        _label_name(dimension): plain_text(value) for dimension, value in dimensions
    } | extra_labels
    text = f"reported by a handler, in {plain_text(unit)}"
    if kind != "histogram":
        families.add(name, kind, text, [(labels, metric.sum if kind == "counter" else metric.last)])
        return
    family = families.metric(name, "histogram", text)
    # The last bucket has no bound, so `zip` leaves it out; `+Inf` below includes it.
    for bound, cumulative_count in zip(metric.bounds, accumulate(metric.buckets), strict=False):
        family.add_sample(f"{name}_bucket", labels | {"le": str(bound)}, cumulative_count)
    family.add_sample(f"{name}_bucket", labels | {"le": "+Inf"}, metric.count)
    family.add_sample(f"{name}_count", labels, metric.count)
    family.add_sample(f"{name}_sum", labels, metric.sum)


def _metric_name(name: str) -> str:
    """Return a name that Prometheus accepts."""
    clean_name = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return f"_{clean_name}" if clean_name[:1].isdigit() or not clean_name else clean_name


def _label_name(name: str) -> str:
    """Return the name of a label that Prometheus accepts.

    Prometheus refuses a response that uses a name with a special meaning.
    """
    clean_name = _metric_name(name)
    return (
        f"label_{clean_name.strip('_')}"
        if clean_name.startswith("__") or clean_name == "le"
        else clean_name
    )


def plain_text(value: str) -> str:
    """Replace lone surrogates (a file's name may contain them), which cannot be encoded."""
    return value.encode("utf-8", "replace").decode()
