"""What a server reports and takes during a load: its metrics before and after, and the cores, memory
and GPU of its processes.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from tsx_cli.bench.load.results import Stages, Usage

_SAMPLE = re.compile(r"^(tsx_[a-z_]+?)_(sum|count|bucket|total)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')
OF_REQUESTS = {"queue": "tsx_queue_seconds", "wait": "tsx_batch_wait_seconds"}
OF_BATCHES = {
    "preprocess": "tsx_preprocess_seconds",
    "inference": "tsx_inference_seconds",
    "postprocess": "tsx_postprocess_seconds",
}
BATCHES = "tsx_batch_size"
REQUESTS = "tsx_request_seconds"
BUSY = "tsx_worker_busy_seconds"


class MetricsSnapshot(NamedTuple):
    sums: Mapping[str, float]
    counts: Mapping[str, float]
    batches: Mapping[float, float]  # up to this size, all smaller ones included


def parse(text: str, model: str) -> MetricsSnapshot:
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    batches: dict[float, float] = defaultdict(float)
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        labels = dict(_LABEL.findall(found[3])) if found else {}
        if found is None or labels.get("model_name") != model:
            continue
        if found[2] == "bucket":
            if found[1] == BATCHES:
                batches[float(labels["le"])] += float(found[4])
        else:
            (counts if found[2] == "count" else sums)[found[1]] += float(found[4])
    return MetricsSnapshot(sums, counts, batches)


def stages(before: MetricsSnapshot, after: MetricsSnapshot, mean_ms: float) -> Stages:
    """Mean milliseconds of a request; `mean_ms` is what its client saw of it. A batch's time is
    that of each request in it.
    """
    times = {name: 1000 * _mean(before, after, metric) for name, metric in OF_REQUESTS.items()}
    weight = _weight(before, after)
    times |= {
        name: 1000 * weight * _mean(before, after, metric) for name, metric in OF_BATCHES.items()
    }
    return Stages(
        queue_ms=times["queue"] + times["wait"],
        preprocess_ms=times["preprocess"],
        inference_ms=times["inference"],
        postprocess_ms=times["postprocess"],
        transport_ms=max(0.0, mean_ms - sum(times.values())),
    )


def busy_ms(before: MetricsSnapshot, after: MetricsSnapshot) -> float | None:
    """Return a worker's mean milliseconds for a request; None where nothing was answered."""
    requests = after.counts.get(REQUESTS, 0.0) - before.counts.get(REQUESTS, 0.0)
    return (
        1000 * (after.sums.get(BUSY, 0.0) - before.sums.get(BUSY, 0.0)) / requests
        if requests > 0
        else None
    )


def batch_sizes(before: MetricsSnapshot, after: MetricsSnapshot) -> dict[int, int]:
    """Batches by size; of sizes that the server counts together it is the largest."""
    below, sizes = 0.0, {}
    bounds = sorted(after.batches)
    for place, bound in enumerate(bounds):
        count = after.batches[bound] - before.batches.get(bound, 0.0)
        if count > below:
            size = bound if bound != float("inf") else 2 * bounds[place - 1] if place else 1
            sizes[int(size)] = round(count - below)
        below = count
    return sizes


def _weight(before: MetricsSnapshot, after: MetricsSnapshot) -> float:
    """How much longer the batch of a request took than a batch: large ones take long, and more
    requests are in them.
    """
    batches = after.counts.get(BATCHES, 0.0) - before.counts.get(BATCHES, 0.0)
    busy = after.sums.get(BUSY, 0.0) - before.sums.get(BUSY, 0.0)
    return max(1.0, _held(before, after) * batches / busy) if busy > 0 else 1.0


def _held(before: MetricsSnapshot, after: MetricsSnapshot) -> float:
    """Seconds of a request in its batch."""
    return _mean(before, after, REQUESTS) - sum(
        _mean(before, after, metric) for metric in OF_REQUESTS.values()
    )


def _mean(before: MetricsSnapshot, after: MetricsSnapshot, metric: str) -> float:
    count = after.counts.get(metric, 0.0) - before.counts.get(metric, 0.0)
    return (
        (after.sums.get(metric, 0.0) - before.sums.get(metric, 0.0)) / count if count > 0 else 0.0
    )


INTERVAL = 0.5  # seconds
MEBI = 1 << 20


class UsageSampler:
    """As long as its context lasts, in a thread: `samples` are in the order of time."""

    def __init__(self, pid: int, *, gpu: bool) -> None:
        self.samples: list[Usage] = []
        self._root = psutil.Process(pid)
        self._gpu = _Gpu() if gpu else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tsx-bench-usage", daemon=True)
        self._before: dict[int, float] = {}
        self._began = 0.0

    def __enter__(self) -> UsageSampler:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def during(self, start: float | None, seconds: float) -> list[Usage]:
        """The samples of a load that began at `start`, by time.monotonic, with times from then on;
        all where its start is not known.

        What lies before and after it, when the server idles, would be a ramp in a chart.
        """
        if start is None:
            return self.samples
        moved = [
            each.model_copy(update={"at_seconds": each.at_seconds - (start - self._began)})
            for each in self.samples
        ]
        return [each for each in moved if INTERVAL <= each.at_seconds <= seconds]

    def _run(self) -> None:
        last = self._began
        self._cpu()
        while not self._over.wait(INTERVAL):
            now = time.monotonic()
            cpu, memory = self._cpu(), memory_of(self._root)
            share, held = self._gpu.read() if self._gpu is not None else (None, None)
            self.samples.append(
                Usage(
                    at_seconds=now - self._began,
                    cpu=cpu / (now - last),
                    memory_mib=memory / MEBI,
                    gpu=share,
                    gpu_memory_mib=held,
                )
            )
            last = now

    def _cpu(self) -> float:
        """Seconds of all processes since it was last asked."""
        now: dict[int, float] = {}
        for process in family_of(self._root):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            now[process.pid] = times.user + times.system
        used = sum(max(0.0, seconds - self._before.get(pid, 0.0)) for pid, seconds in now.items())
        self._before = now
        return used


def family_of(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def memory_of(root: psutil.Process) -> int:
    """Bytes of the process and its children.

    Shared pages count in part (PSS) or, outside Linux, not at all (USS).
    """
    total = 0
    for process in family_of(root):
        try:
            info = process.memory_full_info()
        except psutil.Error:  # it has ended, or is another user's
            continue
        total += getattr(info, "pss", None) or info.uss
    return total


class _Gpu:
    """The busiest GPU's share, and the memory in use of all, by the extra `gpu`; nothing where it
    or the driver is not there.
    """

    def __init__(self) -> None:
        self._library: Any = None
        try:
            import pynvml  # here, because it is an extra

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
        except nvml.NVMLError:  # a part of a GPU (MIG) does not tell its use
            return None, None
        return max(shares, default=None), memory / MEBI
