"""Jobs that do not belong to a connection."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

import pytest

from tsx_runtime.core.scheduling.job import Answer, Flow, Job, WaitingJob
from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.errors import TsxError
from tsx_runtime.wire import Body, Buffer, request_meta

NOW = 100.0
TIMEOUT = 90.0  # seconds, enough for a machine that is busy with other tests
Error = TypeVar("Error", bound=TsxError)


class FakeJob(Job):
    """A job that records its responses, pieces and errors."""

    def __init__(
        self,
        meta: bytes = b"",
        body: Body = b"x",
        arrived: float = NOW,
        deadline: float | None = None,
        priority: int = 0,
        gone: bool = False,
    ) -> None:
        super().__init__(meta, body, arrived, deadline, priority)
        self.gone = gone
        self.answers: list[tuple[int, bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.refusals: list[TsxError] = []

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        self.answers.append((status, bytes(headers), bytes(body)))

    def refuse(self, error: TsxError) -> None:
        self.refusals.append(error)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        self.pieces.append(bytes(body))


def a_waiting_job(
    body: Body = b"x",
    deadline: float | None = None,
    priority: int = 0,
    meta: bytes = request_meta("id", b"", []),
) -> WaitingJob:
    """Make a job that has just arrived; its error need not be read by anyone."""
    job = WaitingJob(meta, body, time.monotonic(), deadline, priority)
    job.done.add_done_callback(lambda done: done.cancelled() or done.exception())
    return job


async def answer_of(job: WaitingJob) -> Answer:
    """Wait for the response to a job, or raise the error with which it was refused."""
    return await asyncio.wait_for(job.done, TIMEOUT)


async def refusal_of(job: WaitingJob, error: type[Error], match: str | None = None) -> Error:
    """Wait until a job is refused with this type of error, and return the error."""
    with pytest.raises(error, match=match) as caught:
        await answer_of(job)
    return caught.value
