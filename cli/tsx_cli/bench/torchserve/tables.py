"""ab_report.csv, with the columns of TorchServe's scripts."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from tsx_cli.bench.model.results import Point
from tsx_cli.bench.torchserve.logs import at, mean
from tsx_cli.bench.torchserve.plan import Case

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
PROFILED = {
    f"handler_{step}_mean": f"ts_handler_{step}"
    for step in ("preprocess", "inference", "postprocess")
}


def row(case: Case, point: Point, times: Mapping[str, Sequence[float]]) -> Row:
    """Milliseconds, percent and requests per second.

    A value that is in no log is 0, as in TorchServe.
    """
    sent = sum(each.sent for each in point.rounds)
    failed = sent - sum(each.ok for each in point.rounds)
    latency = point.latency
    found: Row = {
        "Benchmark": "AB",
        "TS failed requests": failed,
        "TS throughput": round(point.throughput.value, 2),
        "TS latency P50": round(latency.p50_ms, 3),
        "TS latency P90": round(latency.p90_ms, 3),
        "TS latency P99": round(latency.p99_ms, 3),
        "TS latency mean": round(latency.mean_ms, 3),
        "TS error rate": round(100 * failed / sent, 4) if sent else 0.0,
        "Batch size": case.batch_size,
        "Batch delay": case.batch_delay,
        "Workers": case.workers,
        "Model": f"[.mar]({case.url})",
        "Concurrency": case.concurrency,
        "Input": f"[input]({case.input})",
        "Requests": sent,
    }
    for name, metric in (("Model_p", "PredictionTime"), ("Queue time p", "QueueTime")):
        found |= {
            f"{name}{percent}": at(times.get(metric, ()), percent / 100) for percent in (50, 90, 99)
        }
    columns = MEANS | (PROFILED if case.profiled else {})
    return found | {column: mean(times.get(metric, ())) for column, metric in columns.items()}


def csv_text(row: Row) -> str:
    """Two lines: what the columns are, and what they hold."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerows([list(row), list(row.values())])
    return out.getvalue()
