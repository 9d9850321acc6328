"""Reads the figures of a load from ts_metrics.log and model_metrics.log, which tsx writes like
TorchServe.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FILES = ("ts_metrics.log", "model_metrics.log")
_LINE = re.compile(r"[ -] ([A-Za-z_0-9]+)\.[A-Za-z/]+:(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\|#([^|]*)")
WANTED = {
    *("PredictionTime", "HandlerTime", "QueueTime", "WorkerThreadTime"),
    *("ts_handler_preprocess", "ts_handler_inference", "ts_handler_postprocess"),
    *(
        "CPUUtilization",
        "MemoryUtilization",
        "GPUUtilization",
        "GPUMemoryUtilization",
        "GPUMemoryUsed",
    ),
}


class LogPosition(NamedTuple):
    """The log files, and their lengths at the start of the load."""

    directory: Path
    sizes: Mapping[str, int]


def begin(directory: Path) -> LogPosition:
    return LogPosition(
        directory,
        {
            name: (directory / name).stat().st_size if (directory / name).is_file() else 0
            for name in FILES
        },
    )


def figures(place: LogPosition) -> dict[str, list[float]]:
    """The values by their metric, in order, of what was written since."""
    found: dict[str, list[float]] = defaultdict(list)
    for name in FILES:
        for metric, value in _read(place.directory / name, place.sizes.get(name, 0)):
            found[metric].append(value)
    return found


def _read(file: Path, start: int) -> list[tuple[str, float]]:
    try:
        if file.stat().st_size < start:  # the log was rotated
            start = 0
        with file.open("rb") as lines:
            lines.seek(start)
            text = lines.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [
        (found[1], float(found[2]))
        for found in map(_LINE.search, text.splitlines())
        if found and found[1] in WANTED
    ]


def at(values: Sequence[float], share: float) -> float:
    """As TorchServe takes percentiles: the value at that place in their order."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0
