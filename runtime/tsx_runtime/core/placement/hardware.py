"""Describes this machine's hardware, in words and as a fingerprint: figures measured on other hardware may not apply."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tsx_runtime.core.placement.devices import gpu_count
from tsx_runtime.shared.cores import cpu_count

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/gpus")


class Hardware(NamedTuple):
    cpu: str
    cores: int  # that this process may use
    gpus: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Equal on machines that compute alike; the size of the memory and the name of the machine do not count."""
        return hashlib.sha256("\0".join([self.cpu, str(self.cores), *self.gpus]).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return describe(self.cpu, self.cores, self.gpus)


def describe(cpu: str, cores: int, gpus: tuple[str, ...] = ()) -> str:
    counted = [f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus)]
    return ", ".join([f"{cores} core{'s' if cores != 1 else ''} of {cpu or 'an unknown processor'}", *counted])


@lru_cache(maxsize=1)
def hardware() -> Hardware:
    """Of this machine, as it was when it was first asked for."""
    return Hardware(_cpu(), cpu_count(), _gpus(_NVIDIA, gpu_count()))


def _cpu() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    if sys.platform == "darwin":
        finished = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=10, check=False)
        return finished.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _gpus(driver: Path, count: int) -> tuple[str, ...]:
    """The names by NVIDIA's driver of as many as are visible; without them the count is all that is known."""
    names = []
    try:
        for device in sorted(driver.iterdir()):
            lines = (device / "information").read_text(encoding="utf-8", errors="replace").splitlines()
            names += [" ".join(line.partition(":")[2].split()) for line in lines if line.startswith("Model:")]
    except OSError:
        pass
    return tuple(names[:count]) + ("GPU",) * max(0, count - len(names))
