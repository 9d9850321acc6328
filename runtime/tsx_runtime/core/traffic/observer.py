"""Observers of requests: an observing job wraps the client's job in the queue, and sees the answer."""

from __future__ import annotations

from typing import Protocol

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.scheduling.job import Flow, Job
from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.errors import TsxError
from tsx_runtime.wire import Body, Buffer


class Observer(Protocol):
    """Sees some of the requests that a splitter sends on, with their answers."""

    def wants(self, draw: float) -> bool:
        """`draw` is random, from 0 up to but not including 1, and another one for each observer."""

    def watch(self, job: Job, version: ModelVersion) -> Job:
        """What is submitted to the version in the job's place."""


class ObservedJob:
    """The base of what an observer makes of a job. The client comes first: what is seen is seen once it has been answered."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.meta = job.meta
        self.body: Body = job.body
        self.arrived = job.arrived
        self.deadline = job.deadline
        self.priority = job.priority

    def seen_answer(self, status: int, headers: Buffer, body: Buffer) -> None:
        """The answer, or the last part of one that streamed. The buffers are valid during the call."""

    def seen_piece(self, headers: Buffer, body: Buffer) -> None:
        """A part of an answer that streams."""

    def seen_refusal(self, error: TsxError) -> None:
        """There is no answer, and why."""

    @property
    def request_id(self) -> bytes:
        return self.job.request_id

    @property
    def gone(self) -> bool:
        return self.job.gone

    @gone.setter
    def gone(self, gone: bool) -> None:
        self.job.gone = gone

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        self.job.answer(status, headers, body, batch)
        self.seen_answer(status, headers, body)

    def refuse(self, error: TsxError) -> None:
        self.job.refuse(error)
        self.seen_refusal(error)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        self.job.piece(headers, body, _Flow(flow, self))
        self.seen_piece(headers, body)


class _Flow:
    """The worker's end knows the watched job, the client's end the one inside."""

    def __init__(self, flow: Flow, watched: ObservedJob) -> None:
        self._flow = flow
        self._watched = watched

    def hold(self, job: Job) -> None:
        self._flow.hold(self._watched)

    def release(self, job: Job) -> None:
        self._flow.release(self._watched)
