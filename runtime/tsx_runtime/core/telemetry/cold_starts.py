"""Which requests waited for an unloaded model to be loaded, and for how long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from tsx_runtime.wire import Buffer, Frame

COLD_START = "x-tsx-cold-start"  # the header with the seconds


class Arrival(Protocol):
    arrived: float


class ColdStarts:
    """`until`: requests that came before it have waited; inf while the model is loaded, 0 where no
    answer is missing that did.
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
        """A worker serves."""
        if self.is_waking:
            self.until = now

    def with_header(self, job: Arrival, headers: Buffer) -> Buffer:
        waited = self.until - job.arrived
        return (
            headers if waited <= 0 else bytes(headers) + f"{COLD_START}: {waited:.3f}\r\n".encode()
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
    """As an answer is kept for others. The header stands last."""
    return headers.partition(f"{COLD_START}: ".encode())[0]
