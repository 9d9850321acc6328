"""Detects the devices of this machine without torch, and assigns them to workers."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger("tsx.devices")


def gpu_count() -> int:
    """CUDA devices that are visible: `CUDA_VISIBLE_DEVICES` where it is set, else what the NVIDIA driver, or AMD's, lists."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = os.environ.get(variable)
        if visible is not None:
            return count_visible(visible)
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else _amd_count(Path("/sys/class/kfd/kfd/topology/nodes"))


def has_mps() -> bool:
    """Whether this is a machine whose one GPU torch names mps. A model has to ask for it: not all that runs on a CPU runs there."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def gpus_for(device_type: str | None, gpus: int) -> int:
    """How many a model may use. One that asks by name for a device that is not looked for here is given one: the worker's torch decides."""
    if device_type == "cpu":
        return 0
    asked = device_type == "xpu" or (device_type in ("gpu", "mps") and has_mps())
    return gpus or int(asked)


def count_visible(value: str) -> int:
    """The CUDA rule: the list ends at the first entry that names no device."""
    return len(_named(value))


def visible_devices(setting: str | None, numbers: Iterable[int]) -> str:
    """What `CUDA_VISIBLE_DEVICES` has to be for a process that is to see these of the server's devices only."""
    named = None if setting is None else _named(setting)
    return ",".join(str(number) if named is None else named[number] for number in numbers)


def candidates(device_ids: Sequence[int], gpus: int, need: int = 1) -> list[int]:
    """The GPUs that a model's workers are spread over: those it names, or all where it names one that is not there, or too few."""
    if not device_ids:
        return list(range(gpus))
    chosen = list(dict.fromkeys(device_ids))
    if gpus and (len(chosen) < need or any(number >= gpus for number in chosen)):
        text = "deviceIds %s: the server has GPUs 0 to %d, and a worker takes %d; the model's workers are spread over all of them"
        logger.warning(text, chosen, gpus - 1, need)
        return list(range(gpus))
    return chosen if gpus else []


def least_used(among: Sequence[int], used: Mapping[int, int], need: int = 1) -> tuple[int, ...]:
    """The GPUs for one more worker: those with the fewest workers, in their order. Workers that are only added go round by this."""
    chosen = sorted(among, key=lambda number: (used.get(number, 0), among.index(number)))[:need]
    return tuple(sorted(chosen, key=among.index))


def _named(value: str) -> list[str]:
    named = []
    for entry in value.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        named.append(entry.strip())
    return named


def _amd_count(nodes: Path) -> int:
    """Nodes of AMD's compute driver that have SIMD units; the others are processors."""
    count = 0
    for properties in nodes.glob("*/properties"):
        try:
            fields = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line)
        except OSError:  # not for this user
            continue
        count += int(fields.get("simd_count", "0")) > 0
    return count
