"""Cold starts: how long requests waited for an unloaded model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from tsx_runtime.wire import Buffer, Frame

COLD_START = "x-tsx-cold-start"  # a header; its value is in seconds


class Arrival(Protocol):
    arrived: float


class ColdStarts:
    """The cold start of a model: requests that came before `until` have waited for it.

    `until` is inf while the model loads, and 0 once all requests that waited are answered.
    """

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = 0.0

    @property
    def is_waking(self) -> bool:
        return self.until == math.inf

    def begin(self) -> None:
        self.until = math.inf

    def end(self, now: float) -> None:
        """Note that a worker serves."""
        if self.is_waking:
            self.until = now

    def with_header(self, job: Arrival, headers: Buffer) -> Buffer:
        wait_seconds = self.until - job.arrived
        return (
            headers
            if wait_seconds <= 0
            else bytes(headers) + f"{COLD_START}: {wait_seconds:.3f}\r\n".encode()
        )

    def with_headers(self, jobs: Sequence[Arrival], frame: Frame) -> Frame:
        if all(job.arrived >= self.until for job in jobs):
            self.until = 0.0
            return frame
        pairs = zip(jobs, frame.items, strict=True)
        return frame._replace(
            items=[
                (status, self.with_header(job, headers), body)
                for job, (status, headers, body) in pairs
            ]
        )


def without_cold_start(headers: bytes) -> bytes:
    """Return the headers of a cacheable answer without the cold start, which comes last."""
    return headers.partition(f"{COLD_START}: ".encode())[0]
