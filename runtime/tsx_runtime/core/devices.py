"""What this machine has to compute with, told without torch."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_count() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(Path("/sys/fs/cgroup/cpu.max"), cores)))


def gpu_count() -> int:
    """CUDA devices that are visible: `CUDA_VISIBLE_DEVICES` where it is set, else what the NVIDIA driver lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return count_visible(visible)
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def count_visible(value: str) -> int:
    """The CUDA rule: the list ends at the first entry that names no device."""
    count = 0
    for entry in value.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return count


def _cgroup_cores(file: Path, otherwise: int) -> int:
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return otherwise
    return otherwise if quota == "max" else max(1, int(quota) // int(period))
