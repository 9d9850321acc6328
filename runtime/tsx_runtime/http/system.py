"""The machine's own numbers, taken when somebody reads the metrics."""

from __future__ import annotations

from typing import NamedTuple

import psutil

MEGA, GIGA = 1 << 20, 1 << 30


class SystemMetric(NamedTuple):
    name: str
    unit: str
    value: float


def read_system() -> list[SystemMetric]:
    """TorchServe's system metrics. The processor's use is measured since the last call; the first one yields 0."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage("/")
    return [
        SystemMetric("CPUUtilization", "Percent", psutil.cpu_percent()),
        SystemMetric("MemoryUsed", "Megabytes", memory.used / MEGA),
        SystemMetric("MemoryAvailable", "Megabytes", memory.available / MEGA),
        SystemMetric("MemoryUtilization", "Percent", memory.percent),
        SystemMetric("DiskUsage", "Gigabytes", disk.used / GIGA),
        SystemMetric("DiskAvailable", "Gigabytes", disk.free / GIGA),
        SystemMetric("DiskUtilization", "Percent", disk.percent),
    ]
