"""The metrics of each version in `/metrics`: its requests and their times, its workers, its
batches, and its handler's metrics.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.shadowing.mirror import Mirror
from tsx_runtime.core.slo.attainment import SloReport
from tsx_runtime.core.telemetry.generation import read_generation
from tsx_runtime.core.telemetry.metricsconfig import MetricsConfig
from tsx_runtime.core.telemetry.version_stats import BATCH_SIZE_BOUNDS, HandlerMetric, MetricKey
from tsx_runtime.core.workers.instance import ResourceUsage
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.metrics.exposition import PIECE, Families, Labels
from tsx_runtime.metrics.gpu import Gpu

MICRO, MILLI = 1e6, 1e3
RECYCLED = ("requests", "memory", "age", "cores")
# From the start: of a series that begins at 9 no rate counts these
REFUSED = ("AnswerLate", "DeadlinePassed", "NoWorker", "QueueFull", "WorkerDied")
SCALED = (
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
STUCK = ("stopped", "silent")


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
    if (cache := version.cache) is not None:
        families.add(
            "tsx_cache_hits_total",
            "counter",
            "requests answered from the reply cache",
            [(labels, cache.hits)],
        )
        families.add(
            "tsx_cache_misses_total",
            "counter",
            "requests that the reply cache could not answer",
            [(labels, cache.misses)],
        )
        families.add(
            "tsx_cache_evictions_total",
            "counter",
            "answers removed from the reply cache for others",
            [(labels, cache.evictions)],
        )
        families.add(
            "tsx_cache_bytes",
            "gauge",
            "bytes of the answers in the reply cache",
            [(labels, cache.size)],
        )
    _add_workers(families, version, labels)
    if version.slo is not None:
        _add_slo(families, version.slo, labels)
    for worker in version.workers:
        if worker.id in usage:
            _add_usage(families, labels | {"worker": worker.id}, usage[worker.id], gpus)
        if worker.load_seconds is not None:
            own = {
                "WorkerName": f"W-{worker.id}-{version.name}_{version.version}",
                "Level": "Host",
                "Hostname": host,
            }
            families.add(
                "WorkerLoadTime",
                "gauge",
                "of a worker's last start, in Milliseconds",
                [(own, worker.load_seconds * MILLI)],
            )


def _add_requests(families: Families, version: ModelVersion, model: Labels) -> None:
    stats = version.stats
    families.add(
        "ts_inference_requests_total", "counter", "requests accepted", [(model, stats.requests)]
    )
    text = "from arrival to answer, summed over requests"
    families.add(
        "ts_inference_latency_microseconds", "counter", text, [(model, stats.latency.sum * MICRO)]
    )
    text = "from arrival to a worker, summed over requests"
    families.add(
        "ts_queue_latency_microseconds", "counter", text, [(model, stats.queue_seconds * MICRO)]
    )
    answers = [
        (model | {"status": str(status)}, count) for status, count in sorted(stats.answers.items())
    ]
    families.add("tsx_answers_total", "counter", "answers of workers by HTTP status", answers)
    refusals = [
        (model | {"reason": reason}, stats.refusals[reason])
        for reason in sorted({*REFUSED, *stats.refusals})
    ]
    families.add(
        "tsx_refusals_total",
        "counter",
        "requests that no worker answered, by the kind of error",
        refusals,
    )
    finished = sum(stats.answers.values()) + sum(stats.refusals.values())
    families.add(
        "tsx_requests_total",
        "counter",
        "requests that were answered or refused",
        [(model, finished)],
    )
    text = (
        "requests that failed: answers of 500 and above, and refusals that the client did not cause"
    )
    families.add("tsx_errors_total", "counter", text, [(model, stats.errors)])
    dropped = [
        (model | {"metric": plain_text(name)}, count)
        for name, count in sorted(stats.dropped_metrics.items())
    ]
    text = "values that a handler reported beyond the limits, by the name of the metric"
    families.add("tsx_handler_metric_drops_total", "counter", text, dropped)
    families.add(
        "tsx_queue_depth", "gauge", "requests that wait for a worker", [(model, version.pending)]
    )
    text = (
        "requests that wait for a worker, or in one that generates text for room in its engine:"
        " what more servers would begin at once"
    )
    families.add("tsx_requests_waiting", "gauge", text, [(model, _waiting(version))])
    if version.slo is None:  # with a latency target, it is a different one after each batch
        families.add(
            "tsx_queue_capacity",
            "gauge",
            "requests that may wait (jobQueueSize)",
            [(model, version.queue_capacity)],
        )
    families.add(
        "tsx_requests_in_flight",
        "gauge",
        "requests accepted and not answered yet",
        [(model, version.in_flight)],
    )


def _waiting(version: ModelVersion) -> int:
    """What a worker that has died last said of its engine counts for no more than workers have at
    all.
    """
    engines = read_generation(version.stats.handler_metrics)
    return version.pending + (
        0 if engines is None else min(int(engines.waiting), version.in_flight - version.pending)
    )


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
        newest = {
            "Level": "Host",
            "Hostname": host,
            "ModelName": version.name,
            "ModelVersion": version.version,
        }
        text = "of the newest batch, in Milliseconds"
        families.add("QueueTime", "gauge", text, [(newest, stats.last_queue_seconds * MILLI)])
        families.add(
            "WorkerThreadTime", "gauge", text, [(newest, stats.last_worker_seconds * MILLI)]
        )


def _add_batch_sizes(families: Families, version: ModelVersion, model: Labels) -> None:
    stats = version.stats
    metric = families.metric("tsx_batch_size", "histogram", "requests of a batch")
    for bound in BATCH_SIZE_BOUNDS:
        below = sum(count for size, count in stats.batch_sizes.items() if size <= bound)
        metric.add_sample("tsx_batch_size_bucket", model | {"le": str(float(bound))}, below)
    metric.add_sample("tsx_batch_size_bucket", model | {"le": "+Inf"}, stats.batches)
    metric.add_sample("tsx_batch_size_count", model, stats.batches)
    metric.add_sample(
        "tsx_batch_size_sum", model, sum(size * count for size, count in stats.batch_sizes.items())
    )


def _add_workers(families: Families, version: ModelVersion, model: Labels) -> None:
    stats = version.stats
    states = [worker.state for worker in version.workers]
    samples = [(model | {"state": state.value}, states.count(state)) for state in WorkerState]
    families.add("tsx_workers", "gauge", "workers by state", samples)
    forms = [(model | {"form": plain_text(form)}, count) for form, count in version.forms.items()]
    families.add("tsx_model_form", "gauge", "workers by the form of the model that they run", forms)
    if forms:
        fallen_back = sum(bool(worker.forms_passed_over) for worker in version.workers)
        text = "workers that do not run the first form that is configured"
        families.add("tsx_model_form_fallback", "gauge", text, [(model, fallen_back)])
    families.add(
        "tsx_worker_restarts_total", "counter", "worker restarts", [(model, stats.restarts)]
    )
    families.add(
        "tsx_workers_desired",
        "gauge",
        "workers that the load, or minWorkers, asks for",
        [(model, len(version.workers))],
    )
    scaled = [(model | {"reason": reason}, stats.scalings[reason]) for reason in SCALED]
    text = (
        "changes of the number of workers by the server itself, and workers that memory or cores"
        " kept away"
    )
    families.add("tsx_worker_scalings_total", "counter", text, scaled)
    recycled = [(model | {"reason": reason}, stats.recycled[reason]) for reason in RECYCLED]
    families.add(
        "tsx_worker_recycles_total",
        "counter",
        "workers replaced because they reached a limit of requests, memory or age",
        recycled,
    )
    stuck = [(model | {"reason": reason}, stats.stuck[reason]) for reason in STUCK]
    families.add(
        "tsx_worker_stuck_total", "counter", "workers killed because they stopped responding", stuck
    )
    text = "time in which workers processed batches"
    families.add("tsx_worker_busy_seconds_total", "counter", text, [(model, stats.busy_seconds)])


def _add_slo(families: Families, slo: SloReport, model: Labels) -> None:
    for name, kind, text, value in (
        ("tsx_slo_target_seconds", "gauge", "latency target of a version", slo.target.seconds),
        (
            "tsx_slo_target_ratio",
            "gauge",
            "share of the accepted requests that are to be answered within the target",
            slo.target.quantile,
        ),
        (
            "tsx_slo_attained_total",
            "counter",
            "accepted requests that were answered within the latency target",
            slo.attained,
        ),
        (
            "tsx_slo_missed_total",
            "counter",
            "accepted requests that were answered later, or not at all",
            slo.missed,
        ),
        (
            "tsx_slo_refused_total",
            "counter",
            "requests refused on arrival, since they would have been late",
            slo.refused,
        ),
        (
            "tsx_slo_batch_size",
            "gauge",
            "size of the batches that requests are accepted for at present",
            slo.batch_size,
        ),
    ):
        families.add(name, kind, text, [(model, value)])


def _add_usage(
    families: Families, worker: Labels, usage: ResourceUsage, gpus: Mapping[int, Gpu]
) -> None:
    families.add(
        "tsx_worker_memory_bytes", "gauge", "resident memory of a worker", [(worker, usage.memory)]
    )
    families.add(
        "tsx_worker_cpu_seconds_total",
        "counter",
        "processor time of a worker's process",
        [(worker, usage.cpu_seconds)],
    )
    families.add(
        "tsx_worker_open_fds",
        "gauge",
        "files and connections that a worker has open",
        [(worker, usage.descriptors)],
    )
    for number, gpu in gpus.items():
        held = [gpu.processes[pid] for pid in usage.pids if pid in gpu.processes]
        if held:
            text = "memory of a GPU that a worker holds"
            families.add(
                "tsx_worker_gpu_memory_bytes",
                "gauge",
                text,
                [(worker | {"gpu": str(number)}, sum(held))],
            )


def add_handler_metrics(
    families: Families,
    own_names: Collection[str],
    version: ModelVersion,
    host: str,
    config: MetricsConfig | None,
) -> Iterator[None]:
    """What handlers reported, under their own names; a name of the server's own gets `model_`
    before it, one of two kinds its kind behind.

    `config`: only what it declares. In steps, between which the handler may report more.
    """
    further = {"Hostname": host, "ModelVersion": version.version}
    for number, (key, metric) in enumerate(list(version.stats.handler_metrics.items())):
        if config is None or config.declares(key[0], key[1]):
            name = _word(key[0])
            name = f"model_{name}" if name in own_names else name
            name = name if families.kind(name) in (None, key[1]) else f"{name}_{key[1]}"
            _add_handler_metric(families, name, further, key, metric)
        if number % PIECE == PIECE - 1:
            yield
    yield


def _add_handler_metric(
    families: Families, name: str, further: Labels, key: MetricKey, metric: HandlerMetric
) -> None:
    _, kind, unit, dimensions = key
    labels = {_label(dimension): plain_text(value) for dimension, value in dimensions} | further
    text = f"reported by a handler, in {plain_text(unit)}"
    if kind != "histogram":
        families.add(name, kind, text, [(labels, metric.sum if kind == "counter" else metric.last)])
        return
    family = families.metric(name, "histogram", text)
    for bound, below in zip(
        metric.bounds, accumulate(metric.buckets), strict=False
    ):  # the last bucket is beyond all bounds
        family.add_sample(f"{name}_bucket", labels | {"le": str(bound)}, below)
    family.add_sample(f"{name}_bucket", labels | {"le": "+Inf"}, metric.count)
    family.add_sample(f"{name}_count", labels, metric.count)
    family.add_sample(f"{name}_sum", labels, metric.sum)


def _word(name: str) -> str:
    """A name that Prometheus takes."""
    word = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return f"_{word}" if word[:1].isdigit() or not word else word


def _label(name: str) -> str:
    """A name of a label: those that Prometheus, or a histogram, has a meaning for would have it
    refuse all of the answer.
    """
    word = _word(name)
    return f"label_{word.strip('_')}" if word.startswith("__") or word == "le" else word


def plain_text(value: str) -> str:
    """Half a surrogate pair, as in the name of a file that is not UTF-8, would fail the whole
    answer.
    """
    return value.encode("utf-8", "replace").decode()


def add_shadows(families: Families, mirrors: Iterable[Mirror], host: str) -> None:
    """The metrics of shadows."""
    for mirror in mirrors:
        report = mirror.report
        model = {"model_name": mirror.name, "model_version": mirror.number, "hostname": host}
        results = {
            "agreed": report.agreed,
            "disagreed": report.disagreed,
            "uncompared": report.uncompared,
        }
        text = "copies of requests, by what the comparison of the answers said"
        families.add(
            "tsx_shadow_requests_total",
            "counter",
            text,
            [(model | {"result": name}, count) for name, count in results.items()],
        )
        shed = [
            (model | {"reason": reason}, count) for reason, count in sorted(report.shed.items())
        ]
        families.add(
            "tsx_shadow_shed_total",
            "counter",
            "requests of the share that were not copied, or that the shadow refused",
            shed,
        )
        errors = [
            (model | {"side": "primary"}, report.primary_errors),
            (model | {"side": "shadow"}, report.shadow_errors),
        ]
        families.add(
            "tsx_shadow_errors_total",
            "counter",
            "answers of 500 and more, of the requests that were compared",
            errors,
        )
