"""The resource usage of a server's processes during a measurement: cores, memory and GPU."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

import psutil

from tsx_cli.bench.model.results import Usage

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
