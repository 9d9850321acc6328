"""GPU usage, read on demand: from NVML (the extra `gpu`) in a millisecond, else from `nvidia-smi`,
which takes hundreds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.metrics.host import MEGA, output_of

QUERY = "index,uuid,utilization.gpu,utilization.memory,memory.used,memory.total"
TIMEOUT = 5.0  # seconds; a hung driver must not hang the answer


class Gpu(NamedTuple):
    number: str  # in nvidia-smi's counting
    uuid: str
    utilization: float | None  # percent; None where the device does not report it
    memory_utilization: float | None  # percent of the time that memory was read or written
    memory_used: float | None  # MiB
    memory_total: float | None  # MiB
    processes: Mapping[
        int, int
    ] = {}  # bytes that each process holds, by its pid; only NVML reports it

    def usage(self, gpu_id: int) -> str:
        """In the words of TorchServe's description of a worker."""
        return (
            f"gpuId::{gpu_id} utilization.gpu [%]::{_whole(self.utilization)} % utilization.memory"
            f" [%]::{_whole(self.memory_utilization)} % memory.used"
            f" [MiB]::{_whole(self.memory_used)} MiB"
        )


async def read_gpus(timeout: float = TIMEOUT) -> dict[int, Gpu]:
    """The visible GPUs by the number that a worker knows them under; empty where neither NVML nor
    `nvidia-smi` is there.
    """
    library = _find_library()
    found = None if library is None else await library.read(timeout)
    if found is None:
        found = await _ask_tool(timeout)
    return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


async def gpu_processes() -> dict[int, Mapping[int, int]]:
    """Bytes that processes hold, by GPU and by pid: only what NVML reports."""
    return {number: gpu.processes for number, gpu in (await read_gpus()).items()}


async def _ask_tool(timeout: float) -> list[Gpu]:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        _, output = await output_of(command, timeout, quiet=True)
    except OSError:  # TimeoutError is one of them
        return []
    return parse(output.decode(errors="replace"))


def parse(output: str) -> list[Gpu]:
    gpus = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 6:
            use, memory_use, used, total = map(_number, fields[2:])
            gpus.append(Gpu(fields[0], fields[1], use, memory_use, used, total))
    return gpus


def visible(gpus: list[Gpu], setting: str | None) -> dict[int, Gpu]:
    """`CUDA_VISIBLE_DEVICES` chooses and orders them, by index or by the beginning of the UUID; it
    ends at the first unknown one.
    """
    if setting is None:
        return dict(enumerate(gpus))
    chosen: dict[int, Gpu] = {}
    for position, entry in enumerate(part.strip() for part in setting.split(",")):
        found = next(
            (
                gpu
                for gpu in gpus
                if gpu.number == entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
            ),
            None,
        )
        if found is None:
            break
        chosen[position] = found
    return chosen


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]"


def _whole(value: float | None) -> str:
    return "N/A" if value is None else str(int(value))


def gpu_metrics(gpu: Gpu) -> list[tuple[str, str, float]]:
    """TorchServe's three of each GPU: name, unit, value; less those that the device does not
    report.
    """
    share = (
        100 * gpu.memory_used / gpu.memory_total
        if gpu.memory_used is not None and gpu.memory_total
        else None
    )
    named = (
        ("GPUUtilization", "Percent", gpu.utilization),
        ("GPUMemoryUsed", "Megabytes", gpu.memory_used),
        ("GPUMemoryUtilization", "Percent", share),
    )
    return [(name, unit, value) for name, unit, value in named if value is not None]


def own_gpu_metrics(gpu: Gpu) -> list[tuple[str, str, float]]:
    """The same in the units that Prometheus is used to: name, text, value."""
    named = (
        (
            "tsx_gpu_memory_used_bytes",
            "memory of a GPU that is in use, by any process",
            gpu.memory_used,
            MEGA,
        ),
        ("tsx_gpu_memory_total_bytes", "memory of a GPU", gpu.memory_total, MEGA),
        (
            "tsx_gpu_utilization_ratio",
            "share of the time in which a GPU was busy",
            gpu.utilization,
            0.01,
        ),
        (
            "tsx_gpu_memory_utilization_ratio",
            "share of the time in which a GPU read or wrote its memory",
            gpu.memory_utilization,
            0.01,
        ),
    )
    return [(name, text, value * unit) for name, text, value, unit in named if value is not None]


class Nvml:
    """Asks in a thread of its own, one at a time: a driver that hangs must hang neither an answer
    nor the end of the process.
    """

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self._begun = False
        self._threads = DaemonThreads(1, "NVML")
        self._pending: asyncio.Future[list[Gpu] | None] | None = None

    async def read(self, timeout: float) -> list[Gpu] | None:
        """None where the library does not work here; empty where the driver takes longer than
        `timeout` seconds.
        """
        if self._pending is None or self._pending.done():
            self._pending = asyncio.ensure_future(self._threads.call(self._rows))
        try:
            return await asyncio.wait_for(asyncio.shield(self._pending), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            return []

    def _rows(self) -> list[Gpu] | None:
        nvml = self._library
        try:
            if not self._begun:
                nvml.nvmlInit()
                self._begun = True
            return [self._row(number) for number in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:  # no driver, or one that has lost its device
            return None

    def _row(self, number: int) -> Gpu:
        nvml = self._library
        device = nvml.nvmlDeviceGetHandleByIndex(number)
        uuid = nvml.nvmlDeviceGetUUID(device)
        rates = self._get(nvml.nvmlDeviceGetUtilizationRates, device)
        memory = self._get(nvml.nvmlDeviceGetMemoryInfo, device)
        running = self._get(nvml.nvmlDeviceGetComputeRunningProcesses, device) or ()
        return Gpu(
            str(number),
            uuid if isinstance(uuid, str) else uuid.decode(),
            None if rates is None else float(rates.gpu),
            None if rates is None else float(rates.memory),
            None if memory is None else memory.used / MEGA,
            None if memory is None else memory.total / MEGA,
            {
                each.pid: int(each.usedGpuMemory)
                for each in running
                if each.usedGpuMemory is not None
            },
        )

    def _get(self, ask: Any, device: Any) -> Any:
        """None where this device does not report it, as a MIG instance does not report its use."""
        try:
            return ask(device)
        except self._library.NVMLError:
            return None


@lru_cache(maxsize=1)
def _find_library() -> Nvml | None:
    """None where the extra is not installed."""
    try:
        import pynvml  # here, because it is an extra
    except ImportError:
        return None
    return Nvml(pynvml)
