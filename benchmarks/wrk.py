"""A round of load: wrk with one thread, which posts the same body repeatedly."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("post.lua")
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
RESPONSE_TIMEOUT_S = 10
BYTES = "application/octet-stream"


class Round(NamedTuple):
    rate: float  # requests/s
    p50: float  # ms
    p99: float  # ms
    requests: int


class NotAnswered(RuntimeError):
    """A response was not 2xx, or a connection failed, so the round does not measure speed."""


def load(
    url: str, connections: int, seconds: float, body: Path, content_type: str = BYTES
) -> Round:
    """Measure a round of load.

    Raises:
        NotAnswered: A request failed.
    """
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds:g}s",
        f"--timeout={RESPONSE_TIMEOUT_S}s",
        "--latency",
        "-s",
        str(SCRIPT),
        url,
    ]
    variables = os.environ | {"BODY": str(body), "CONTENT_TYPE": content_type}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if finished.returncode:
        raise NotAnswered(finished.stderr.strip() or finished.stdout.strip())
    return parse(finished.stdout)


def parse(output: str) -> Round:
    for line in output.splitlines():
        if "Non-2xx" in line or "Socket errors" in line:
            raise NotAnswered(line.strip())
    total = re.search(r"(\d+) requests in", output)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    if total is None or rate is None or int(total[1]) == 0:
        raise NotAnswered("not one request was answered")
    return Round(float(rate[1]), percentile(output, 50), percentile(output, 99), int(total[1]))


def percentile(output: str, percent: int) -> float:
    match = re.search(rf"^\s+{percent}%\s+([\d.]+)(us|ms|s|m)", output, re.MULTILINE)
    assert match is not None, output
    return float(match[1]) * UNITS[match[2]]
