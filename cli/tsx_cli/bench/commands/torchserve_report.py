"""The figures of a load in the columns of TorchServe's ab_report.csv.

The times are read from ts_metrics.log and model_metrics.log, which tsx writes like TorchServe.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_cli.bench.commands.torchserve_plan import Case
from tsx_cli.bench.load.results import Point

LOG_FILES = ("ts_metrics.log", "model_metrics.log")
_METRIC_LINE = re.compile(
    r"[ -] ([A-Za-z_0-9]+)\.[A-Za-z/]+:(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\|#([^|]*)"
)
METRICS = {
    *("PredictionTime", "HandlerTime", "QueueTime", "WorkerThreadTime"),
    *("ts_handler_preprocess", "ts_handler_inference", "ts_handler_postprocess"),
    *(
        "CPUUtilization",
        "MemoryUtilization",
        "GPUUtilization",
        "GPUMemoryUtilization",
        "GPUMemoryUsed",
    ),
}


class LogPosition(NamedTuple):
    """The log files, and their lengths at the start of the load."""

    directory: Path
    sizes: Mapping[str, int]


def log_position(directory: Path) -> LogPosition:
    return LogPosition(
        directory,
        {
            name: (directory / name).stat().st_size if (directory / name).is_file() else 0
            for name in LOG_FILES
        },
    )


def values_since(position: LogPosition) -> dict[str, list[float]]:
    """Return the values of each metric that were logged since a position, in order."""
    values: dict[str, list[float]] = defaultdict(list)
    for name in LOG_FILES:
        for metric, value in _read(position.directory / name, position.sizes.get(name, 0)):
            values[metric].append(value)
    return values


def _read(file: Path, start: int) -> list[tuple[str, float]]:
    try:
        if file.stat().st_size < start:  # The log was rotated.
            start = 0
        with file.open("rb") as lines:
            lines.seek(start)
            text = lines.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [
        (match[1], float(match[2]))
        for match in map(_METRIC_LINE.search, text.splitlines())
        if match and match[1] in METRICS
    ]


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return a percentile by TorchServe's rule: a value of the sorted list, not interpolated."""
    sorted_values = sorted(values)
    return (
        sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * fraction))]
        if sorted_values
        else 0.0
    )


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0


Row = dict[str, object]
MEANS = {
    "predict_mean": "PredictionTime",
    "handler_time_mean": "HandlerTime",
    "waiting_time_mean": "QueueTime",
    "worker_thread_mean": "WorkerThreadTime",
    "cpu_percentage_mean": "CPUUtilization",
    "memory_percentage_mean": "MemoryUtilization",
    "gpu_percentage_mean": "GPUUtilization",
    "gpu_memory_percentage_mean": "GPUMemoryUtilization",
    "gpu_memory_used_mean": "GPUMemoryUsed",
}
STEP_MEANS = {
    f"handler_{step}_mean": f"ts_handler_{step}"
    for step in ("preprocess", "inference", "postprocess")
}


def row(case: Case, point: Point, times: Mapping[str, Sequence[float]]) -> Row:
    """Return a row of the report, in milliseconds, percent and requests per second.

    A value that is missing in the logs is 0, as in TorchServe.
    """
    sent_requests = sum(round_.sent for round_ in point.rounds)
    failed_requests = sent_requests - sum(round_.ok for round_ in point.rounds)
    latency = point.latency
    cells: Row = {
        "Benchmark": "AB",
        "TS failed requests": failed_requests,
        "TS throughput": round(point.throughput.value, 2),
        "TS latency P50": round(latency.p50_ms, 3),
        "TS latency P90": round(latency.p90_ms, 3),
        "TS latency P99": round(latency.p99_ms, 3),
        "TS latency mean": round(latency.mean_ms, 3),
        "TS error rate": round(100 * failed_requests / sent_requests, 4) if sent_requests else 0.0,
        "Batch size": case.batch_size,
        "Batch delay": case.batch_delay,
        "Workers": case.workers,
        "Model": f"[.mar]({case.url})",
        "Concurrency": case.concurrency,
        "Input": f"[input]({case.input})",
        "Requests": sent_requests,
    }
    for name, metric in (("Model_p", "PredictionTime"), ("Queue time p", "QueueTime")):
        cells |= {
            f"{name}{percent}": percentile(times.get(metric, ()), percent / 100)
            for percent in (50, 90, 99)
        }
    means = MEANS | (STEP_MEANS if case.profiled else {})
    return cells | {column: mean(times.get(metric, ())) for column, metric in means.items()}


def csv_text(row: Row) -> str:
    """Return two lines of CSV: the names of the columns, and the values."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerows([list(row), list(row.values())])
    return out.getvalue()
