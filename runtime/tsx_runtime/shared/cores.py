"""The number of cores that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # cgroup v2, then v1


def cpu_count() -> int:
    """Count the cores that affinity and the control group's quota leave to this process."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for names in QUOTAS:
        with suppress(OSError, ValueError):
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
            if quota.isdecimal():  # "max" or "-1" means no limit
                cores = max(1, min(cores, int(quota) // int(period)))
    return cores
