"""The hardware of this machine, found without torch, and the limit of open files."""

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
LOW_FILE_LIMIT = 4096  # A connection needs one file, and a worker four.
UNBOUNDED_FILE_LIMIT = 1 << 20  # used if the hard limit is infinite

logger = logging.getLogger("tsx.descriptors")


class Hardware(NamedTuple):
    """The hardware on which measured speeds depend."""

    cpu: str
    cores: int  # cores that this process may use
    gpus: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A digest that is equal on machines with equal hardware."""
        return hashlib.sha256(
            "\0".join([self.cpu, str(self.cores), *self.gpus]).encode()
        ).hexdigest()[:16]

    def __str__(self) -> str:
        return describe(self.cpu, self.cores, self.gpus)


def describe(cpu: str, cores: int, gpus: tuple[str, ...] = ()) -> str:
    gpu_texts = [
        f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name
        for name in dict.fromkeys(gpus)
    ]
    return ", ".join(
        [f"{cores} core{'s' if cores != 1 else ''} of {cpu or 'an unknown processor'}", *gpu_texts]
    )


@lru_cache(maxsize=1)
def hardware() -> Hardware:
    """Return this machine's hardware, as it was at the first call."""
    return Hardware(_cpu(), cpu_count(), _gpus(_NVIDIA, gpu_count()))


def gpu_count() -> int:
    """Return the number of visible GPUs.

    `CUDA_VISIBLE_DEVICES` decides. If it is not set, the driver of NVIDIA or AMD lists the GPUs.
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
    """Tell whether torch can use this machine's GPU as the device type mps.

    A model has to request it explicitly, because some CPU operations do not exist there.
    """
    return sys.platform == "darwin" and platform.machine() == "arm64"


def visible_names(value: str) -> list[str]:
    """Return the devices in a CUDA_VISIBLE_DEVICES; the list ends at the first empty entry."""
    names = []
    for entry in value.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        names.append(entry.strip())
    return names


def raise_file_limit() -> int | None:
    """Raise the soft limit of open files to the hard one.

    Returns:
        The former soft limit, for programs that cannot handle as many files. None on Windows.
    """
    if sys.platform == "win32":
        return None
    import resource  # Windows lacks this module.

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = UNBOUNDED_FILE_LIMIT if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        except (OSError, ValueError) as error:  # macOS has another, lower limit.
            logger.warning("the limit of %d open files stays as it is: %s", soft, error)
            new_limit = soft
    if new_limit < LOW_FILE_LIMIT:
        text = (
            "at most %d files and connections can be open at once; for more clients raise the limit"
            " (`ulimit -Hn`, LimitNOFILE=)"
        )
        logger.warning(text, new_limit)
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
        result = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return result.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _gpus(driver: Path, count: int) -> tuple[str, ...]:
    """Return the names of the visible GPUs from NVIDIA's driver; a GPU without a name is "GPU"."""
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
    """Count the nodes of AMD's compute driver that have SIMD units; other nodes are CPUs."""
    count = 0
    for properties in nodes.glob("*/properties"):
        try:
            fields = dict(
                line.split(maxsplit=1)
                for line in properties.read_text().splitlines()
                if " " in line
            )
        except OSError:  # This user may not read the file.
            continue
        count += int(fields.get("simd_count", "0")) > 0
    return count
