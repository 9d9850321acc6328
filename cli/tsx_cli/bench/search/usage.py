"""A server during a load: its metrics before and after it, and the usage of its processes."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil

from tsx_cli.bench.load.results import Stages, Usage

_SAMPLE = re.compile(r"^(tsx_[a-z_]+?)_(sum|count|bucket|total)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')
REQUEST_METRICS = {"queue": "tsx_queue_seconds", "wait": "tsx_batch_wait_seconds"}
BATCH_METRICS = {
    "preprocess": "tsx_preprocess_seconds",
    "inference": "tsx_inference_seconds",
    "postprocess": "tsx_postprocess_seconds",
}
BATCH_SIZE_METRIC = "tsx_batch_size"
REQUEST_METRIC = "tsx_request_seconds"
BUSY_METRIC = "tsx_worker_busy_seconds"


class MetricsSnapshot(NamedTuple):
    sums: Mapping[str, float]
    counts: Mapping[str, float]
    batches: Mapping[float, float]  # cumulative batches up to each size


def parse(text: str, model: str) -> MetricsSnapshot:
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    batches: dict[float, float] = defaultdict(float)
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        labels = dict(_LABEL.findall(match[3])) if match else {}
        if match is None or labels.get("model_name") != model:
            continue
        if match[2] == "bucket":
            if match[1] == BATCH_SIZE_METRIC:
                batches[float(labels["le"])] += float(match[4])
        else:
            (counts if match[2] == "count" else sums)[match[1]] += float(match[4])
    return MetricsSnapshot(sums, counts, batches)


def stages(before: MetricsSnapshot, after: MetricsSnapshot, mean_ms: float) -> Stages:
    """Divide the mean time of a request into stages; `mean_ms` is the time that clients measured.

    Each request in a batch takes the time of the whole batch.
    """
    times = {name: 1000 * _mean(before, after, metric) for name, metric in REQUEST_METRICS.items()}
    weight = _weight(before, after)
    times |= {
        name: 1000 * weight * _mean(before, after, metric) for name, metric in BATCH_METRICS.items()
    }
    return Stages(
        queue_ms=times["queue"] + times["wait"],
        preprocess_ms=times["preprocess"],
        inference_ms=times["inference"],
        postprocess_ms=times["postprocess"],
        transport_ms=max(0.0, mean_ms - sum(times.values())),
    )


def busy_ms(before: MetricsSnapshot, after: MetricsSnapshot) -> float | None:
    """Return a worker's mean milliseconds for a request, or None if there were no requests."""
    requests = after.counts.get(REQUEST_METRIC, 0.0) - before.counts.get(REQUEST_METRIC, 0.0)
    return (
        1000 * (after.sums.get(BUSY_METRIC, 0.0) - before.sums.get(BUSY_METRIC, 0.0)) / requests
        if requests > 0
        else None
    )


def batch_sizes(before: MetricsSnapshot, after: MetricsSnapshot) -> dict[int, int]:
    """Return the number of batches by size.

    The server counts some sizes together; these count as the largest of them.
    """
    smaller_batches, sizes = 0.0, {}
    bounds = sorted(after.batches)
    for index, bound in enumerate(bounds):
        count = after.batches[bound] - before.batches.get(bound, 0.0)
        if count > smaller_batches:
            size = bound if bound != float("inf") else 2 * bounds[index - 1] if index else 1
            sizes[int(size)] = round(count - smaller_batches)
        smaller_batches = count
    return sizes


def _weight(before: MetricsSnapshot, after: MetricsSnapshot) -> float:
    """Return by how much a request's batch took longer than the average batch.

    Large batches take longer and contain more requests, so requests see longer batches.
    """
    batches = after.counts.get(BATCH_SIZE_METRIC, 0.0) - before.counts.get(BATCH_SIZE_METRIC, 0.0)
    busy = after.sums.get(BUSY_METRIC, 0.0) - before.sums.get(BUSY_METRIC, 0.0)
    return max(1.0, _batch_seconds(before, after) * batches / busy) if busy > 0 else 1.0


def _batch_seconds(before: MetricsSnapshot, after: MetricsSnapshot) -> float:
    """Return the mean time that a request spent in its batch, in seconds."""
    return _mean(before, after, REQUEST_METRIC) - sum(
        _mean(before, after, metric) for metric in REQUEST_METRICS.values()
    )


def _mean(before: MetricsSnapshot, after: MetricsSnapshot, metric: str) -> float:
    count = after.counts.get(metric, 0.0) - before.counts.get(metric, 0.0)
    return (
        (after.sums.get(metric, 0.0) - before.sums.get(metric, 0.0)) / count if count > 0 else 0.0
    )


SAMPLE_INTERVAL_S = 0.5
MEBI = 1 << 20


class UsageSampler:
    """A thread that samples the usage during its context; `samples` are ordered by time."""

    def __init__(self, pid: int, *, gpu: bool) -> None:
        self.samples: list[Usage] = []
        self._root = psutil.Process(pid)
        self._gpu = _Gpu() if gpu else None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tsx-bench-usage", daemon=True)
        self._before: dict[int, float] = {}
        self._start_time = 0.0

    def __enter__(self) -> UsageSampler:
        self._start_time = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopped.set()
        self._thread.join()

    def during(self, start: float | None, seconds: float) -> list[Usage]:
        """Return the samples of a load, with times relative to its start.

        `start` is a value of time.monotonic; if it is None, all samples are returned. Samples of
        the idle time before and after the load are left out: a chart would show them as a ramp.
        """
        if start is None:
            return self.samples
        shifted = [
            sample.model_copy(update={"at_seconds": sample.at_seconds - (start - self._start_time)})
            for sample in self.samples
        ]
        return [sample for sample in shifted if SAMPLE_INTERVAL_S <= sample.at_seconds <= seconds]

    def _run(self) -> None:
        previous_time = self._start_time
        self._cpu()
        while not self._is_stopped.wait(SAMPLE_INTERVAL_S):
            sample_time = time.monotonic()
            cpu, memory = self._cpu(), memory_of(self._root)
            gpu_use, gpu_memory_mib = self._gpu.read() if self._gpu is not None else (None, None)
            self.samples.append(
                Usage(
                    at_seconds=sample_time - self._start_time,
                    cpu=cpu / (sample_time - previous_time),
                    memory_mib=memory / MEBI,
                    gpu=gpu_use,
                    gpu_memory_mib=gpu_memory_mib,
                )
            )
            previous_time = sample_time

    def _cpu(self) -> float:
        """Return the CPU seconds of all processes since the previous call."""
        seconds_by_pid: dict[int, float] = {}
        for process in process_tree(self._root):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds_by_pid[process.pid] = times.user + times.system
        used_s = sum(
            max(0.0, seconds - self._before.get(pid, 0.0))
            for pid, seconds in seconds_by_pid.items()
        )
        self._before = seconds_by_pid
        return used_s


def process_tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def memory_of(root: psutil.Process) -> int:
    """Return the memory of a process and its descendants, in bytes.

    Shared pages count in proportion (PSS); on systems other than Linux they do not count (USS).
    """
    total = 0
    for process in process_tree(root):
        try:
            info = process.memory_full_info()
        except psutil.Error:  # The process has ended, or belongs to another user.
            continue
        total += getattr(info, "pss", None) or info.uss
    return total


class _Gpu:
    """The use of the busiest GPU and the memory of all GPUs; None without the extra `gpu`."""

    def __init__(self) -> None:
        self._library: Any = None
        try:
            import pynvml  # an extra

            pynvml.nvmlInit()
            self._library = pynvml
        except ImportError:
            pass
        except pynvml.NVMLError:
            pass

    def read(self) -> tuple[float | None, float | None]:
        nvml = self._library
        if nvml is None:
            return None, None
        try:
            devices = [
                nvml.nvmlDeviceGetHandleByIndex(number)
                for number in range(nvml.nvmlDeviceGetCount())
            ]
            shares = [nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100 for device in devices]
            memory = sum(nvml.nvmlDeviceGetMemoryInfo(device).used for device in devices)
        except nvml.NVMLError:  # A MIG instance does not report its use.
            return None, None
        return max(shares, default=None), memory / MEBI
