"""What the numbers were made on, and how steady it was meanwhile."""

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
STEADY = 1.2  # times the least


def describe() -> str:
    return (
        f"{date.today().isoformat()}, {os.cpu_count()} cores, {processor()}, {platform.system()},"
        f" Python {platform.python_version()}"
    )


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


def busy_before() -> str | None:
    """What else the machine does before anything was started; None where it idles."""
    share = psutil.cpu_percent(1.0)
    return (
        f"{share:.0f} % of the cores were at work before anything was started"
        if share > BUSY_PERCENT
        else None
    )


class Noise:
    """Times a fixed piece of work between the rounds: on a quiet machine it always takes the same
    time.
    """

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.loads: list[float] = []

    def sample(self) -> None:
        started = time.perf_counter()
        sum(number * number for number in range(1_000_000))
        self.samples.append(time.perf_counter() - started)
        self.loads.append(os.getloadavg()[0])

    def disturbed(self) -> list[str]:
        """What says that something else was at work meanwhile; empty on a quiet machine."""
        least, typical = min(self.samples), sorted(self.samples)[len(self.samples) * 9 // 10]
        return (
            [f"a fixed computation took {typical / least - 1:.0%} longer in a tenth of its runs"]
            if typical > STEADY * least
            else []
        )

    def __str__(self) -> str:
        least, most = min(self.samples), max(self.samples)
        return (
            f"noise: a fixed computation took {least * 1000:.0f} to {most * 1000:.0f} ms"
            f" ({most / least - 1:.0%} apart), load average {min(self.loads):.1f} to"
            f" {max(self.loads):.1f}"
        )


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
