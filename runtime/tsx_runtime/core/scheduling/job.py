"""A job: one accepted request on its way to a worker and back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, NamedTuple, Protocol

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


class Job:
    """A request on its way to a worker and back. Exactly one of `answer` and `refuse` is called,
    exactly once; what is told here goes nowhere, so a subclass says where it goes.

    Attributes:
        meta: The head of the request, see `wire.request_meta`.
        arrived: `time.monotonic()` when the request was complete.
        deadline: When its answer is of no use any more, by the same clock; a job that waits for
            too long is refused.
        priority: Greater goes first.
        patience: Seconds that a job with a deadline may wait for a worker at most.
        gone: Whether the client has left.
        late: Whether the job was refused while it ran.
        destination: The route that the client's lane submitted it to.
        routed: The version that a splitter sent it to.
        watched: The job that a splitter sent on in its place.
    """

    deadline: float | None = None
    priority = 0
    patience = math.inf
    gone = False
    late = False
    destination: Any = None
    routed: Any = None
    watched: Job | None = None

    def __init__(
        self, meta: bytes, body: Body, arrived: float, deadline: float | None, priority: int
    ) -> None:
        self.meta = meta
        self.request_id = meta.partition(b"\r")[0]
        self.body = body
        self.arrived = arrived
        self.deadline = deadline
        self.priority = priority

    def route(self, version: Any, added: bytes) -> None:
        """Set `routed`, and have header lines of the server's own go out with the answer."""

    def takes(self, item: Item) -> bool:
        """Whether a worker's answer goes no further, and is not counted."""
        return self.late

    def give_up(self) -> None:
        """Let go of what a worker still runs, once the job is refused."""
        self.late = self.gone = True
        self.body = Parts([], len(self.body))

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


class WaitingJob(Job):
    """A job for a coroutine: `answer = await job.done` (raises `TsxError`)."""

    def __init__(
        self,
        meta: bytes,
        body: Body,
        arrived: float,
        deadline: float | None = None,
        priority: int = 0,
    ) -> None:
        super().__init__(meta, body, arrived, deadline, priority)
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        # makes header lines of the times of an answer
        self.on_times: Callable[[Job, int, Batch], bytes] | None = None
        self._added = b""
        self._trace: JobTrace | None = None
        self._rest: _Rest | None = None

    def route(self, version: Any, added: bytes) -> None:
        self.routed, self._added = version, added

    def trace(self, above: OpenSpan, route: Any) -> None:
        """Have spans made of it, below this one."""
        self.destination, self._trace = route, JobTrace(above)
        self.meta = self._trace.with_traceparent(self.meta)

    async def whole(self, most: int) -> Answer:
        """Wait for the answer with all its parts, of which nothing more is read after an error.

        Raises as `Answer.whole` does.
        """
        answer = await self.done
        try:
            return Answer(answer.status, answer.headers, await answer.whole(most))
        except BaseException:
            self.gone = True
            answer.leave()
            raise

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        if self._trace is not None:
            self._trace.answered(self.routed or self.destination, self.arrived, status, batch)
        if self.on_times is not None:
            self._added += self.on_times(self, status, batch)
        # An error in the middle of a stream is no part of the answer.
        if self._rest is not None and status >= 400:
            self._rest.put(PredictionFailed(str(body, "utf-8", "replace")))
        elif self._rest is not None:
            self._rest.put(bytes(body))
            self._rest.put(None)
        elif not self.done.done():  # a cancelled waiter leaves a cancelled future behind
            self.done.set_result(Answer(status, bytes(headers) + self._added, bytes(body)))

    def refuse(self, error: TsxError) -> None:
        if self._trace is not None:
            self._trace.refused(self.routed or self.destination, self.arrived, error)
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


class ObservedAnswer(NamedTuple):
    """What an observer gets."""

    status: int
    headers: bytes = b""
    body: bytes | None = None  # None where it is too long, and of a refusal
    error: TsxError | None = None


class ObservedJob(Job):
    """A job in place of another, whose answer is shown to an observer once the client has it."""

    def __init__(self, job: Job, seen: Callable[[ObservedAnswer], None], most: float) -> None:
        """`most`: bytes of a body that `seen` gets."""
        super().__init__(job.meta, job.body, job.arrived, job.deadline, job.priority)
        self.job = job
        self._seen = seen
        self._room = most
        self._headers: bytes | None = None
        self._parts: list[bytes] = []

    @property
    def gone(self) -> bool:
        return self.job.gone

    @gone.setter
    def gone(self, gone: bool) -> None:
        self.job.gone = gone

    def give_up(self) -> None:
        super().give_up()
        self.job.give_up()

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        self.job.answer(status, headers, body, batch)
        self._add(headers, body)
        whole = b"".join(self._parts) if self._room >= 0 else None
        self._seen(ObservedAnswer(status, self._headers or b"", whole))

    def refuse(self, error: TsxError) -> None:
        self.job.refuse(error)
        self._seen(ObservedAnswer(error.status, error=error))

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        self._flow = flow
        self.job.piece(headers, body, self)
        if not self.late:
            self._add(headers, body)

    def _add(self, headers: Buffer, body: Buffer) -> None:
        if self._headers is None:
            self._headers = bytes(headers)
        self._room -= len(body)
        if self._room >= 0:
            self._parts.append(bytes(body))
        else:
            self._parts.clear()

    # The worker's end knows this job, the client's end the one inside.

    def hold(self, job: Job) -> None:
        self._flow.hold(self)

    def release(self, job: Job) -> None:
        self._flow.release(self)


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
    def submit(self) -> Callable[[Job], None]: ...

    @property
    def leave(self) -> Callable[[Job], None]: ...
