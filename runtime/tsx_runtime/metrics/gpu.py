"""The utilization and memory of the GPUs, read on demand.

A reading by NVML (the extra `gpu`) takes a millisecond, and one by `nvidia-smi` hundreds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.metrics.host import MEGA, run_program

QUERY = "index,uuid,utilization.gpu,utilization.memory,memory.used,memory.total"
TIMEOUT_S = 5.0  # limits how long a hung driver delays a response


class Gpu(NamedTuple):
    number: str  # the index in nvidia-smi
    uuid: str
    utilization: float | None  # percent; None if the device does not report it
    memory_utilization: float | None  # percent of the time that memory was read or written
    memory_used: float | None  # MiB
    memory_total: float | None  # MiB
    processes: Mapping[int, int] = {}  # bytes of each process, by its pid; only with NVML

    def usage(self, gpu_id: int) -> str:
        """Return the GPU's state as TorchServe writes it into the description of a worker."""
        return (
            f"gpuId::{gpu_id} utilization.gpu [%]::{_integer_text(self.utilization)} %"
            f" utilization.memory [%]::{_integer_text(self.memory_utilization)} % memory.used"
            f" [MiB]::{_integer_text(self.memory_used)} MiB"
        )


async def read_gpus(timeout_s: float = TIMEOUT_S) -> dict[int, Gpu]:
    """Return the visible GPUs by CUDA's device number; empty without NVML and nvidia-smi."""
    library = _find_library()
    gpus = None if library is None else await library.read(timeout_s)
    if gpus is None:
        gpus = await _run_nvidia_smi(timeout_s)
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


async def gpu_processes() -> dict[int, Mapping[int, int]]:
    """Return the GPU memory of processes in bytes, by GPU and pid; only NVML reports it."""
    return {number: gpu.processes for number, gpu in (await read_gpus()).items()}


async def _run_nvidia_smi(timeout_s: float) -> list[Gpu]:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        _, output = await run_program(command, timeout_s, drop_stderr=True)
    except OSError:  # includes TimeoutError
        return []
    return parse(output.decode(errors="replace"))


def parse(output: str) -> list[Gpu]:
    gpus = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 6:
            utilization, memory_utilization, memory_used, memory_total = map(_number, fields[2:])
            gpus.append(
                Gpu(
                    fields[0], fields[1], utilization, memory_utilization, memory_used, memory_total
                )
            )
    return gpus


def visible(gpus: list[Gpu], setting: str | None) -> dict[int, Gpu]:
    """Choose and order GPUs as `CUDA_VISIBLE_DEVICES` does: by index or by the start of the UUID.

    The list ends at the first unknown entry.
    """
    if setting is None:
        return dict(enumerate(gpus))
    gpus_by_position: dict[int, Gpu] = {}
    for position, entry in enumerate(part.strip() for part in setting.split(",")):
        gpu_of_entry = next(
            (
                gpu
                for gpu in gpus
                if gpu.number == entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
            ),
            None,
        )
        if gpu_of_entry is None:
            break
        gpus_by_position[position] = gpu_of_entry
    return gpus_by_position


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]"


def _integer_text(value: float | None) -> str:
    return "N/A" if value is None else str(int(value))


def gpu_metrics(gpu: Gpu) -> list[tuple[str, str, float]]:
    """Return TorchServe's three metrics of a GPU: name, unit, value.

    Values that the device does not report are left out.
    """
    memory_percent = (
        100 * gpu.memory_used / gpu.memory_total
        if gpu.memory_used is not None and gpu.memory_total
        else None
    )
    rows = (
        ("GPUUtilization", "Percent", gpu.utilization),
        ("GPUMemoryUsed", "Megabytes", gpu.memory_used),
        ("GPUMemoryUtilization", "Percent", memory_percent),
    )
    return [(name, unit, value) for name, unit, value in rows if value is not None]


def prometheus_gpu_metrics(gpu: Gpu) -> list[tuple[str, str, float]]:
    """Return tsx's metrics of a GPU, in Prometheus's base units: name, text, value."""
    rows = (
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
    return [(name, text, value * unit) for name, text, value, unit in rows if value is not None]


class Nvml:
    """A reader of NVML with one thread.

    The thread is a daemon: a driver that hangs blocks neither responses nor the process's end.
    """

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self._is_initialized = False
        self._threads = DaemonThreads(1, "NVML")
        self._pending: asyncio.Future[list[Gpu] | None] | None = None

    async def read(self, timeout_s: float) -> list[Gpu] | None:
        """Return all GPUs, or None if the library does not work here.

        If the driver takes longer than `timeout_s`, the list is empty.
        """
        if self._pending is None or self._pending.done():
            self._pending = asyncio.ensure_future(self._threads.call(self._rows))
        try:
            return await asyncio.wait_for(asyncio.shield(self._pending), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return []

    def _rows(self) -> list[Gpu] | None:
        nvml = self._library
        try:
            if not self._is_initialized:
                nvml.nvmlInit()
                self._is_initialized = True
            return [self._row(number) for number in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:  # There is no driver, or the driver has lost the device.
            return None

    def _row(self, number: int) -> Gpu:
        nvml = self._library
        device = nvml.nvmlDeviceGetHandleByIndex(number)
        uuid = nvml.nvmlDeviceGetUUID(device)
        rates = self._get(nvml.nvmlDeviceGetUtilizationRates, device)
        memory = self._get(nvml.nvmlDeviceGetMemoryInfo, device)
        processes = self._get(nvml.nvmlDeviceGetComputeRunningProcesses, device) or ()
        return Gpu(
            str(number),
            uuid if isinstance(uuid, str) else uuid.decode(),
            None if rates is None else float(rates.gpu),
            None if rates is None else float(rates.memory),
            None if memory is None else memory.used / MEGA,
            None if memory is None else memory.total / MEGA,
            {
                process.pid: int(process.usedGpuMemory)
                for process in processes
                if process.usedGpuMemory is not None
            },
        )

    def _get(self, query: Any, device: Any) -> Any:
        """Return the result of a query, or None if the device does not report it.

        A MIG instance does not report its utilization.
        """
        try:
            return query(device)
        except self._library.NVMLError:
            return None


@lru_cache(maxsize=1)
def _find_library() -> Nvml | None:
    """Return the reader of NVML, or None if the extra is not installed."""
    try:
        import pynvml  # an optional dependency
    except ImportError:
        return None
    return Nvml(pynvml)
