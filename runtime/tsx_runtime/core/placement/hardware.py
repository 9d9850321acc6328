"""This machine: its processor and GPUs, found without torch, and how many files a process may have
open.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tsx_runtime.shared.cores import cpu_count

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
FEW_FILES = 4096  # each connection takes one, each worker four
MOST_FILES = 1 << 20  # where the system sets no bound

logger = logging.getLogger("tsx.descriptors")


class Hardware(NamedTuple):
    """What figures of speed depend on: those of other hardware may not apply."""

    cpu: str
    cores: int  # that this process may use
    gpus: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Equal on machines that compute alike; the size of the memory and the name of the machine
        do not count.
        """
        return hashlib.sha256(
            "\0".join([self.cpu, str(self.cores), *self.gpus]).encode()
        ).hexdigest()[:16]

    def __str__(self) -> str:
        return describe(self.cpu, self.cores, self.gpus)


def describe(cpu: str, cores: int, gpus: tuple[str, ...] = ()) -> str:
    counted = [
        f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name
        for name in dict.fromkeys(gpus)
    ]
    return ", ".join(
        [f"{cores} core{'s' if cores != 1 else ''} of {cpu or 'an unknown processor'}", *counted]
    )


@lru_cache(maxsize=1)
def hardware() -> Hardware:
    """Of this machine, as it was when it was first asked for."""
    return Hardware(_cpu(), cpu_count(), _gpus(_NVIDIA, gpu_count()))


def gpu_count() -> int:
    """CUDA devices that are visible: `CUDA_VISIBLE_DEVICES` where it is set, else what the NVIDIA
    driver, or AMD's, lists.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = os.environ.get(variable)
        if visible is not None:
            return len(visible_names(visible))
    return (
        len(list(_NVIDIA.iterdir()))
        if _NVIDIA.is_dir()
        else _amd_count(Path("/sys/class/kfd/kfd/topology/nodes"))
    )


def has_mps() -> bool:
    """Whether this is a machine whose one GPU torch names mps.

    A model has to ask for it: not all that runs on a CPU runs there.
    """
    return sys.platform == "darwin" and platform.machine() == "arm64"


def visible_names(value: str) -> list[str]:
    """Return the devices that a CUDA_VISIBLE_DEVICES names: the list ends at the first entry that
    names none.
    """
    named = []
    for entry in value.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        named.append(entry.strip())
    return named


def raise_limit() -> int | None:
    """Raise the soft limit to the hard one.

    What it was, for programs that are not made for so many; None where there is no such thing.
    """
    if sys.platform == "win32":
        return None
    import resource  # here, because Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # macOS has a further limit of its own
            logger.warning("the limit of %d open files stays as it is: %s", soft, error)
            wanted = soft
    if wanted < FEW_FILES:
        text = (
            "at most %d files and connections can be open at once; for more clients raise the limit"
            " (`ulimit -Hn`, LimitNOFILE=)"
        )
        logger.warning(text, wanted)
    return soft


def _cpu() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    if sys.platform == "darwin":
        finished = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return finished.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _gpus(driver: Path, count: int) -> tuple[str, ...]:
    """The names by NVIDIA's driver of as many as are visible; without them the count is all that is
    known.
    """
    names = []
    try:
        for device in sorted(driver.iterdir()):
            lines = (
                (device / "information").read_text(encoding="utf-8", errors="replace").splitlines()
            )
            names += [
                " ".join(line.partition(":")[2].split())
                for line in lines
                if line.startswith("Model:")
            ]
    except OSError:
        pass
    return tuple(names[:count]) + ("GPU",) * max(0, count - len(names))


def _amd_count(nodes: Path) -> int:
    """Nodes of AMD's compute driver that have SIMD units; the others are processors."""
    count = 0
    for properties in nodes.glob("*/properties"):
        try:
            fields = dict(
                line.split(maxsplit=1)
                for line in properties.read_text().splitlines()
                if " " in line
            )
        except OSError:  # not for this user
            continue
        count += int(fields.get("simd_count", "0")) > 0
    return count
