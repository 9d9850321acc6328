"""The state of the server and its models for the web page, as JSON values.

The page requests it once a second, so one response contains all values that may change.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel

from tsx_archiver import ARCHIVE_SUFFIXES
from tsx_runtime.api.management.describe import Memory, feature_fields
from tsx_runtime.api.management.samples import MAX_SAMPLES, input_of
from tsx_runtime.core.models.model import Model, ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.telemetry.error_log import ErrorLog, LoggedError
from tsx_runtime.core.traffic.routing import version_sort_key
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import shortened
from tsx_runtime.features.ui.time_series import SeriesPoint, TimeSeries
from tsx_runtime.settings.schema import Settings, description_of, displayed
from tsx_runtime.shared.memory import container_memory, free_memory
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.version import __version__

MAX_LINES = 500
MAX_ERROR_CHARS = 200
# limits that the page can change
LIMITS = ("batch_size", "max_batch_delay", "job_queue_size", "response_timeout", "client_timeout")


def describe(
    registry: Registry, series: TimeSeries, since: int, server: Mapping[str, Any], memory: Memory
) -> dict[str, Any]:
    """Return the current state of all models.

    Args:
        registry: The models.
        series: The data of the charts.
        since: The number of the newest point that the page already has.
        server: The result of `describe_server`.
        memory: The bytes that each worker uses.
    """
    points = series.since(since)
    return {
        "server": {**server, "now": time.time(), "stopping": registry.stopping},
        "models": [
            describe_model(model, points, memory)
            for model in sorted(registry.models.values(), key=lambda model: model.name)
        ],
        "opening": [(path.name, *at) for path, at in list(registry.opening.items())],
        "newest": series.number,
    }


def describe_server(settings: Settings, addresses: Mapping[str, str], start: str) -> dict[str, Any]:
    """Return the data of a running server that never changes; `start` identifies the process."""
    return {
        "start": start,
        "version": __version__,
        "began": time.time(),
        "modelApi": settings.enable_model_api,
        "store": None if settings.model_store is None else str(settings.model_store),
        "inference": addresses.get("inference", settings.inference_address),
        "inferenceToken": (
            bool(settings.inference_token or settings.generate_tokens)
            and not settings.disable_token_authorization
        ),
    }


def describe_model(
    model: Model, points: Mapping[tuple[str, str], list[SeriesPoint]], memory: Memory
) -> dict[str, Any]:
    versions = sorted(
        model.versions.values(), key=lambda version: version_sort_key(version.version)
    )
    return {
        "name": model.name,
        "default": model.default,
        "labels": dict(model.labels),
        "workflow": next((version.workflow for version in versions if version.workflow), None),
        "versions": [
            describe_version(version, memory)
            | {"points": points.get((version.name, version.version), [])}
            for version in versions
        ],
    }


def describe_version(version: ModelVersion, memory: Memory) -> dict[str, Any]:
    stats = version.stats
    return {
        "version": version.version,
        "state": state_of(version),
        "url": version.url,
        "handler": version.handler,
        "input": input_of(version),
        "huggingface": version.archive.manifest.data.get("huggingface"),
        "form": ", ".join(version.forms) or None,
        "formsPassedOver": version.forms_passed_over,
        "measured": None if version.benchmark_record is None else str(version.benchmark_record),
        "limits": {name: getattr(version.plan, name) for name in LIMITS} | version.current_limits,
        **{
            name: value.model_dump(by_alias=True) if isinstance(value, BaseModel) else value
            for name, value in feature_fields(version).items()
        },
        "minWorkers": version.min_workers,
        "maxWorkers": version.max_workers,
        "lastScaling": version.last_scaling,
        "workers": [describe_worker(worker, memory.get(worker, 0)) for worker in version.workers],
        "waiting": version.pending,
        "requests": stats.requests,
        "failed": stats.errors,
        "restarts": stats.restarts,
        "errors": stats.error_log.total,
        "lastError": last_error(stats.error_log),
        "failedReplacement": redacted(version.failed_replacement or ""),
    }


def describe_worker(worker: Worker, memory: int) -> dict[str, Any]:
    return {
        "id": worker.id,
        "state": worker.state.value,
        "pid": worker.pid,
        "device": worker.device,
        "memory": memory,
        "started": worker.started.timestamp(),
        "restarts": worker.restarts,
    }


def state_of(version: ModelVersion) -> str:
    """Return the state of a version in one word.

    ready: All workers serve.
    degraded: Some workers serve.
    loading: No worker serves yet.
    failed: No worker will serve.
    idle: There are no workers.
    asleep: There are no workers, and the next request starts one.
    """
    states = [worker.state for worker in version.workers]
    ready = states.count(WorkerState.READY)
    if ready:
        return "ready" if ready >= version.min_workers else "degraded"
    if not states:
        return "asleep" if version.asleep else "idle"
    return (
        "loading"
        if WorkerState.LOADING in states
        else "failed"
        if WorkerState.FAILED in states
        else "loading"
    )


def last_error(log: ErrorLog) -> dict[str, Any] | None:
    """Return the newest error in one line, with the id of a request that failed with it."""
    if not log.errors:
        return None
    error = log.errors[0]
    lines = (error.traceback or error.message).splitlines()
    message_lines = [
        line for line in lines if line[:1].strip()
    ]  # Indented lines are frames of the traceback.
    return {
        "text": shortened(redacted("".join(message_lines[-1:])), MAX_ERROR_CHARS),
        "request": "".join(error.request_ids[-1:]),
    }


def errors_of(versions: Iterable[ModelVersion]) -> list[dict[str, Any]]:
    """Return the errors of the versions, newest first."""
    errors = [
        _error(error, version) for version in versions for error in version.stats.error_log.errors
    ]
    return sorted(errors, key=lambda error: -error["at"])


def _error(error: LoggedError, version: ModelVersion) -> dict[str, Any]:
    """Return an error, with the number of all errors of its kind and the time of the first."""
    kind = version.stats.error_log.kinds[error.kind]
    kind_counts = {"version": version.version, "kind_times": kind.times, "kind_first": kind.first}
    return error._asdict() | {"kind": f"{zlib.crc32(error.kind.encode()):08x}"} | kind_counts


def recent_lines(versions: Iterable[ModelVersion]) -> list[dict[str, Any]]:
    """Return the newest lines of workers' output and of the server's log, oldest first."""
    lines = [(line, version) for version in versions for line in version.stats.error_log.lines]
    newest_lines = sorted(lines, key=lambda pair: pair[0].at)[-MAX_LINES:]
    return [
        line._asdict() | {"model": version.name, "version": version.version}
        for line, version in newest_lines
    ]


def describe_process(settings: Settings) -> dict[str, Any]:
    """Return the memory of this process and of the machine, and the settings."""
    return {
        "memory": psutil.Process().memory_info().rss,
        "free": free_memory(),
        "total": container_memory(),
        "settings": [
            {
                "name": name,
                "value": value,
                "set": "." in name or name in settings.model_fields_set,
                "about": description_of(name),
            }
            for name, value in displayed(settings).items()
        ],
    }


def archives_in(store: Path | None) -> list[str]:
    """Return the first names of archives in the model store."""
    if store is None or not store.is_dir():
        return []
    return sorted(
        path.name
        for path in store.iterdir()
        if not path.name.startswith(".") and path.name.endswith(ARCHIVE_SUFFIXES)
    )[:MAX_SAMPLES]
