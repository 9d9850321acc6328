"""A description of this machine, and of its noise during a run."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import psutil

BUSY_PERCENT = 10
MAX_SPREAD = 1.2  # allowed ratio of the longest to the shortest time


def describe() -> str:
    return (
        f"{date.today().isoformat()}, {os.cpu_count()} cores, {processor()}, {platform.system()},"
        f" Python {platform.python_version()}"
    )


def processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in cpu_info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if cpu_info.exists()
        else []
    )
    return names[0] if names else platform.machine()


def busy_before() -> str | None:
    """Return a text about the load before anything is started, or None on an idle machine."""
    share = psutil.cpu_percent(1.0)
    return (
        f"{share:.0f} % of the cores were at work before anything was started"
        if share > BUSY_PERCENT
        else None
    )


class Noise:
    """The times of a fixed computation between the rounds; on a quiet machine they are equal."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.loads: list[float] = []

    def sample(self) -> None:
        start = time.perf_counter()
        sum(number * number for number in range(1_000_000))
        self.samples.append(time.perf_counter() - start)
        self.loads.append(os.getloadavg()[0])

    def disturbed(self) -> list[str]:
        """Return the signs of other activity; none on a quiet machine."""
        shortest, ninth_decile = (
            min(self.samples),
            sorted(self.samples)[len(self.samples) * 9 // 10],
        )
        return (
            [
                f"a fixed computation took {ninth_decile / shortest - 1:.0%} longer in a tenth of its runs"
            ]
            if ninth_decile > MAX_SPREAD * shortest
            else []
        )

    def __str__(self) -> str:
        shortest, longest = min(self.samples), max(self.samples)
        return (
            f"noise: a fixed computation took {shortest * 1000:.0f} to {longest * 1000:.0f} ms"
            f" ({longest / shortest - 1:.0%} apart), load average {min(self.loads):.1f} to"
            f" {max(self.loads):.1f}"
        )


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
