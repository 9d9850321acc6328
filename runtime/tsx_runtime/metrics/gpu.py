"""What the GPUs are doing, asked of NVML (the extra `gpu`), or else of `nvidia-smi`, when somebody wants to know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from tsx_runtime.metrics import nvml
from tsx_runtime.metrics.nvml import MEBI
from tsx_runtime.metrics.programs import output_of

QUERY = "index,uuid,utilization.gpu,utilization.memory,memory.used,memory.total"
TIMEOUT = 5.0  # seconds; a hung driver must not hang the answer


class Gpu(NamedTuple):
    number: str  # in nvidia-smi's counting
    uuid: str
    utilization: float | None  # percent; None where the device does not tell
    memory_utilization: float | None  # percent of the time that memory was read or written
    memory_used: float | None  # MiB
    memory_total: float | None  # MiB
    processes: Mapping[int, int] = {}  # bytes that each process holds, by its pid; only NVML tells

    def usage(self, gpu_id: int) -> str:
        """In the words of TorchServe's description of a worker."""
        return (
            f"gpuId::{gpu_id} utilization.gpu [%]::{_whole(self.utilization)} % "
            f"utilization.memory [%]::{_whole(self.memory_utilization)} % memory.used [MiB]::{_whole(self.memory_used)} MiB"
        )


async def read_gpus(timeout: float = TIMEOUT) -> dict[int, Gpu]:
    """The visible GPUs by the number that a worker knows them under; empty where neither NVML nor `nvidia-smi` is there."""
    rows = await nvml.read(timeout)
    found = await _ask_tool(timeout) if rows is None else [Gpu(*row) for row in rows]
    return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


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
    """`CUDA_VISIBLE_DEVICES` chooses and orders them, by index or by the beginning of the UUID; it ends at the first unknown one."""
    if setting is None:
        return dict(enumerate(gpus))
    chosen: dict[int, Gpu] = {}
    for position, entry in enumerate(part.strip() for part in setting.split(",")):
        found = next((gpu for gpu in gpus if gpu.number == entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))), None)
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
    """TorchServe's three of each GPU: name, unit, value; less those that the device does not tell."""
    share = 100 * gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else None
    named = (
        ("GPUUtilization", "Percent", gpu.utilization),
        ("GPUMemoryUsed", "Megabytes", gpu.memory_used),
        ("GPUMemoryUtilization", "Percent", share),
    )
    return [(name, unit, value) for name, unit, value in named if value is not None]


def own_gpu_metrics(gpu: Gpu) -> list[tuple[str, str, float]]:
    """The same in the units that Prometheus is used to: name, text, value."""
    named = (
        ("tsx_gpu_memory_used_bytes", "memory of a GPU that is in use, whoever uses it", gpu.memory_used, MEBI),
        ("tsx_gpu_memory_total_bytes", "memory of a GPU", gpu.memory_total, MEBI),
        ("tsx_gpu_utilization_ratio", "share of the time in which a GPU was at work", gpu.utilization, 0.01),
        ("tsx_gpu_memory_utilization_ratio", "share of the time in which a GPU read or wrote its memory", gpu.memory_utilization, 0.01),
    )
    return [(name, text, value * unit) for name, text, value, unit in named if value is not None]
