"""Sends every sample to a StatsD server as a gauge, one datagram for each.

EXAMPLE_STATSD has its host and port; the default is 127.0.0.1:8125.
"""

from __future__ import annotations

import os
import re
import socket

from tsx_runtime.plugins import Sample


def send(samples: list[Sample]) -> None:
    host, _, port = os.environ.get("EXAMPLE_STATSD", "127.0.0.1:8125").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for sample in samples:
            out.sendto(line(sample).encode(), (host, int(port)))


def line(sample: Sample) -> str:
    """Return `tsx.NAME.LABEL.LABEL:VALUE|g`, with the labels' values by the order of names."""
    parts = [re.sub(r"[^A-Za-z0-9_-]", "_", sample.labels[name]) for name in sorted(sample.labels)]
    return f"{'.'.join(['tsx', sample.name, *parts])}:{sample.value}|g"
