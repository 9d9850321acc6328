"""TorchServe's metric logs, ts_metrics.log and model_metrics.log."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from weakref import WeakKeyDictionary

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.telemetry.batch_times import oldest, times_of
from tsx_runtime.core.telemetry.metric_journal import BatchEntry, ValueEntry
from tsx_runtime.core.telemetry.metricsconfig import read_metrics_config
from tsx_runtime.metrics.gpu import gpu_metrics, read_gpus
from tsx_runtime.metrics.host import System
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.shared.line_log import MODEL_METRICS, TS_METRICS, Logbook

_SEPARATOR = re.compile("[:|,#]")

MICRO = 1e6
ENTRIES_PER_TURN = 32  # entries per iteration of the event loop; they take about 0.2 ms
PREDICTION_TIME = "PredictionTime"
SUMS = (
    ("ts_inference_requests_total", "Count"),
    ("ts_inference_latency_microseconds", "Microseconds"),
    ("ts_queue_latency_microseconds", "Microseconds"),
)


class MetricLog:
    """The writer of both logs.

    A counter's line contains its growth since the last one. TorchServe writes a line per request;
    this class writes one line for all requests of half a second.
    """

    def __init__(self, registry: Registry, counts: ResponseCounts, system: System) -> None:
        settings = registry.settings
        self._registry = registry
        self._counts = counts
        self._system = system
        self._config = read_metrics_config(settings.metrics_config)
        self._all_models = settings.model_metrics_auto_detect or self._config.model is None
        self._interval = settings.metric_time_interval
        self._server = Logbook(TS_METRICS)
        self._models = Logbook(MODEL_METRICS)
        self._host = socket.gethostname()
        self._logged_counts = counts.classes
        # The worker id and pid of each start that was logged.
        self._logged_starts: set[tuple[str, int | None]] = set()
        # The values of `SUMS` at the last line.
        self._logged_sums: WeakKeyDictionary[ModelVersion, tuple[float, float, float]] = (
            WeakKeyDictionary()
        )
        self._next_system = 0.0

    async def write(self) -> None:
        now = time.time()
        counts = self._counts.classes
        for digit in (2, 4, 5):
            if growth := counts[digit] - self._logged_counts[digit]:
                self._log(f"Requests{digit}XX", "Count", float(growth), "Level:Host", now)
        self._logged_counts = counts
        versions = [
            version
            for model in self._registry.models.values()
            for version in model.versions.values()
        ]
        for version in versions:
            await self._log_version(version, now)
        self._logged_starts.intersection_update(
            (worker.id, worker.pid) for version in versions for worker in version.workers
        )
        if now >= self._next_system:
            self._next_system = now + self._interval
            await self._log_system(now)
        self._server.flush()
        self._models.flush()

    async def _log_version(self, version: ModelVersion, now: float) -> None:
        for worker in version.workers:
            if (
                worker.load_seconds is not None
                and (worker.id, worker.pid) not in self._logged_starts
            ):
                self._logged_starts.add((worker.id, worker.pid))
                name = f"W-{worker.id}-{version.name}_{version.version}"
                self._log(
                    "WorkerLoadTime",
                    "Milliseconds",
                    _to_ms(worker.load_seconds),
                    f"WorkerName:{name},Level:Host",
                    now,
                )
        self._log_sums(version, now)
        journal = version.stats.journal
        if journal is None:
            return
        for _ in range(0, len(journal), ENTRIES_PER_TURN):
            for entry in journal.take(ENTRIES_PER_TURN):
                if isinstance(entry, BatchEntry):
                    self._log_batch(version.name, entry)
                else:
                    self._log_value(entry)
            await asyncio.sleep(0)

    def _log_batch(self, model: str, entry: BatchEntry) -> None:
        timestamp, request_ids, batch = entry
        times = times_of(batch)
        self._log(
            "QueueTime", "Milliseconds", _to_ms(times.sent - oldest(batch)), "Level:Host", timestamp
        )
        self._log(
            "WorkerThreadTime", "Milliseconds", _to_ms(times.transit), "Level:Host", timestamp
        )
        if self._all_models or self._config.declares(PREDICTION_TIME, "gauge"):
            duration_ms, ids = round(1000 * (times.done - times.began), 2), request_ids.decode()
            dimensions = f"ModelName:{_sanitize(model)},Level:Model"
            self._models.add(
                f"{PREDICTION_TIME}.ms:{duration_ms}|#{dimensions}|#hostname:{self._host},"
                f"requestID:{ids},timestamp:{int(timestamp)}",
                timestamp,
            )

    def _log_value(self, entry: ValueEntry) -> None:
        """Log a value that a handler reported.

        A handler's PredictionTime comes only once a second. It is skipped, because `_log_batch`
        writes a line per batch.
        """
        timestamp, request_ids, value = entry
        if value["name"] != PREDICTION_TIME and (
            self._all_models or self._config.declares(value["name"], value["type"])
        ):
            dimensions = ",".join(
                f"{_sanitize(name)}:{_sanitize(text)}" for name, text in value["dimensions"].items()
            )
            context = (
                f"hostname:{self._host},requestID:{request_ids.decode()},timestamp:{int(timestamp)}"
            )
            self._models.add(
                f"{_sanitize(value['name'])}.{_sanitize(value['unit'])}:{value['value']}"
                f"|#{dimensions}|#{context}",
                timestamp,
            )

    def _log_sums(self, version: ModelVersion, now: float) -> None:
        stats, labels = version.stats, f"model_name:{version.name},model_version:{version.version}"
        sums = (float(stats.requests), MICRO * stats.latency.sum, MICRO * stats.queue_seconds)
        logged_sums = self._logged_sums.get(version, (0.0, 0.0, 0.0))
        self._logged_sums[version] = sums
        for (name, unit), total, previous in zip(SUMS, sums, logged_sums, strict=True):
            if total > previous:
                self._log(name, unit, round(total - previous, 3), labels, now)

    async def _log_system(self, now: float) -> None:
        for name, unit, value, labels in self._system.read():
            dimensions = ",".join(["Level:Host", *(f"{label}:{text}" for label, text in labels)])
            self._log(name, unit, value, dimensions, now)
        if self._registry.resources.gpus and not self._system.disabled:
            for number, gpu in (await read_gpus()).items():
                for name, unit, value in gpu_metrics(gpu):
                    self._log(name, unit, value, f"Level:Host,DeviceId:{number}", now)

    def _log(self, name: str, unit: str, value: float, dimensions: str, timestamp: float) -> None:
        if self._config.shows(name):
            self._server.add(
                f"{name}.{unit}:{value}|#{dimensions}|#hostname:{self._host}"
                f",timestamp:{int(timestamp)}",
                timestamp,
            )


def _to_ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _sanitize(text: str) -> str:
    """Return a handler's text with `_` for each character that separates the fields of a line."""
    if text.isprintable() and not _SEPARATOR.search(text):
        return text
    return "".join(
        "_" if character in ":|,#" or not character.isprintable() else character
        for character in text
    )
