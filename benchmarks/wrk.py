"""One round of load: wrk with one thread, which posts seven bytes over and over."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("post.lua")
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


class Round(NamedTuple):
    rate: float  # requests/s
    p50: float  # ms
    p99: float  # ms


def load(url: str, connections: int, seconds: float) -> Round:
    """Raises RuntimeError where an answer was not 2xx, or a connection failed: such a round says nothing about speed."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency", "-s", str(SCRIPT), url]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"not all requests were answered:\n{output}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    assert rate is not None, output
    return Round(float(rate[1]), percentile(output, 50), percentile(output, 99))


def percentile(output: str, which: int) -> float:
    match = re.search(rf"^\s+{which}%\s+([\d.]+)(us|ms|s|m)", output, re.MULTILINE)
    assert match is not None, output
    return float(match[1]) * UNITS[match[2]]
