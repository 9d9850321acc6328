"""A job: one accepted request on its way to a worker and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, Protocol

from tsx_runtime.core.telemetry.batch_times import Batch
from tsx_runtime.core.telemetry.tracing import JobTrace, OpenSpan
from tsx_runtime.errors import PredictionFailed, TsxError
from tsx_runtime.wire import Body, Buffer, Item, Parts

Headers = Collection[tuple[bytes, bytes]]  # names in lower case
AHEAD = 1 << 20  # bytes of one streamed answer that may wait for its client


class Flow(Protocol):
    """Where a streamed answer comes from: it can be held while its client is slower than the
    handler.
    """

    def hold(self, job: Job) -> None:
        """Take no more from the worker until `release`, or until the job is gone."""

    def release(self, job: Job) -> None: ...


class Job(Protocol):
    """A request, as the core sees it. Exactly one of `answer` and `refuse` is called, exactly
    once.
    """

    meta: bytes  # see `wire.request_meta`
    body: Body
    arrived: float  # time.monotonic() when the request was complete
    deadline: (
        float | None
        # the same clock: when its answer is of no use any more; a job that waits for too long is
        # refused
    )
    priority: int  # greater goes first; 0 where the request names none
    gone: bool  # set by `Dispatcher.leave` once the client has left

    @property
    def request_id(self) -> bytes:
        """The first line of `meta`."""

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        """The handler's answer: an HTTP status, a header block (see `wire`), the body, and the
        times of its batch (see `batch_times`).

        The buffers are valid during the call.
        """

    def refuse(self, error: TsxError) -> None:
        """An error of tsx's own."""

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        """A part of a streamed answer; `answer` brings the last part. Only the first piece's
        headers count.
        """


class ClientJob(Job, Protocol):
    """A job that came from a client, and may be sent on by a `Splitter`."""

    routed: Any  # the version that it was sent to; None where it came to its version straight
    watched: Job | None  # what was sent on in its place

    def route(self, version: Any, added: bytes) -> None:
        """Set `routed`, and have header lines of the server's own go out with the answer."""


class UncountedJob:
    """In the place of another job: its answer may be that of no request."""

    def __init__(self, job: Job) -> None:
        self.meta = job.meta
        self.body: Body = job.body
        self.arrived = job.arrived
        self.deadline = job.deadline
        self.priority = job.priority
        self.gone = False

    @property
    def request_id(self) -> bytes:
        return self.meta.partition(b"\r")[0]

    def takes(self, item: Item) -> bool:
        """Whether the answer goes no further, and is not counted."""
        return True


class LateJob(UncountedJob):
    """Takes the place of a running request that was refused at its deadline: what its worker
    answers goes nowhere.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.body, self.deadline, self.gone = (
            Parts([], len(job.body)),
            None,
            True,
        )  # of the body, its size

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        pass

    def refuse(self, error: TsxError) -> None:
        pass

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        pass


class Answer:
    """What a `WaitingJob` yields.

    A streamed answer is there from its first piece on; its parts come from `parts()`.
    """

    __slots__ = ("_rest", "body", "headers", "status")

    def __init__(self, status: int, headers: bytes, body: bytes, rest: _Rest | None = None) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self._rest = rest

    @property
    def streamed(self) -> bool:
        return self._rest is not None

    def leave(self) -> None:
        """The client takes no further parts."""
        if self._rest is not None:
            self._rest.leave()

    async def parts(self) -> AsyncIterator[bytes]:
        """All parts in order; raises `TsxError` where the worker failed in the middle."""
        yield self.body
        while self._rest is not None:
            part = await self._rest.get()
            if part is None:
                return
            if isinstance(part, TsxError):
                raise part
            yield part

    async def whole(self, most: int) -> bytes:
        """The body; of a streamed answer, once all its parts are there.

        Raises as `parts` does, and for more than so many bytes of them.
        """
        if self._rest is None:
            return self.body
        parts, size = [], 0
        async for part in self.parts():
            parts.append(part)
            size += len(part)
            if size > most:
                text = (
                    f"The parts of the answer have more than {most} bytes together"
                    " (max_response_size)."
                )
                raise PredictionFailed(
                    f"{text} Request it as a stream, or raise max_response_size."
                )
        return b"".join(parts)


class _Rest:
    """The parts of a streamed answer that its client has not taken yet.

    Beyond `AHEAD` bytes the worker is held.
    """

    def __init__(self, job: Job, flow: Flow) -> None:
        self._job = job
        self._flow = flow
        self._queue: asyncio.Queue[bytes | TsxError | None] = asyncio.Queue()
        self._size = 0
        self._held = False

    def put(self, part: bytes | TsxError | None) -> None:
        self._queue.put_nowait(part)
        if isinstance(part, bytes):
            self._size += len(part)
            if self._size > AHEAD and not self._held and not self._job.gone:
                self._held = True
                self._flow.hold(self._job)

    async def get(self) -> bytes | TsxError | None:
        part = await self._queue.get()
        if isinstance(part, bytes):
            self._size -= len(part)
            if self._size <= AHEAD // 2:
                self.leave()
        return part

    def leave(self) -> None:
        if self._held:
            self._held = False
            self._flow.release(self._job)


class WaitingJob:
    """A job for a coroutine: `answer = await job.done` (raises `TsxError`)."""

    __slots__ = (
        "_added",
        "_rest",
        "_route",
        "_trace",
        "arrived",
        "body",
        "deadline",
        "done",
        "gone",
        "meta",
        "priority",
        "routed",
        "watched",
    )

    def __init__(
        self,
        meta: bytes,
        body: Body,
        arrived: float,
        deadline: float | None = None,
        priority: int = 0,
    ) -> None:
        self.meta = meta
        self.body: Body = body
        self.arrived = arrived
        self.deadline = deadline
        self.priority = priority
        self.gone = False
        self.routed: Any = None
        self.watched: Job | None = None
        self._added = b""
        self._trace: JobTrace | None = None
        self._route: Any = None
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._rest: _Rest | None = None

    def route(self, version: Any, added: bytes) -> None:
        self.routed, self._added = version, added

    @property
    def request_id(self) -> bytes:
        return self.meta.partition(b"\r")[0]

    def trace(self, above: OpenSpan, route: Any) -> None:
        """Have spans made of it, below this one."""
        self._route, self._trace = route, JobTrace(above)
        self.meta = self._trace.with_traceparent(self.meta)

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        if self._trace is not None:
            self._trace.answered(self.routed or self._route, self.arrived, status, batch)
        if (
            self._rest is not None and status >= 400
        ):  # the handler failed in the middle: its error is no part of the answer
            self._rest.put(PredictionFailed(str(body, "utf-8", "replace")))
        elif self._rest is not None:
            self._rest.put(bytes(body))
            self._rest.put(None)
        elif not self.done.done():  # a cancelled waiter leaves a cancelled future behind
            self.done.set_result(Answer(status, bytes(headers) + self._added, bytes(body)))

    def refuse(self, error: TsxError) -> None:
        if self._trace is not None:
            self._trace.refused(self.routed or self._route, self.arrived, error)
        if self._rest is not None:
            self._rest.put(error)
        elif not self.done.done():
            self.done.set_exception(error)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        if self._rest is not None:
            if not self.gone:  # it would never be taken out again
                self._rest.put(bytes(body))
        elif not self.done.done():
            self._rest = _Rest(self, flow)
            self.done.set_result(Answer(200, bytes(headers) + self._added, bytes(body), self._rest))


class ObservedJob:
    """Stands in a queue in place of a job, and sees its answer, once the client has got it: the
    base of what observers make of a job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.meta = job.meta
        self.body: Body = job.body
        self.arrived = job.arrived
        self.deadline = job.deadline
        self.priority = job.priority

    def seen_answer(self, status: int, headers: Buffer, body: Buffer) -> None:
        """The answer, or the last part of one that streamed. The buffers are valid during the
        call.
        """

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


class Route(Protocol):
    """A version, or the splitter that picks one."""

    @property
    def name(self) -> str: ...

    @property
    def client_timeout(self) -> float:
        """Seconds; 0 where there is no limit, or where the version that a splitter picks sets
        it.
        """

    def by_head(self, headers: Headers) -> Route:
        """What is left to decide once the headers of a request are known: that is submitted to."""

    @property
    def submit(self) -> Callable[[ClientJob], None]: ...

    @property
    def leave(self) -> Callable[[ClientJob], None]: ...
