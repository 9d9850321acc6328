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
MAX_UNREAD_BYTES = 1 << 20  # The worker waits while a streamed answer has more unread bytes.


class Flow(Protocol):
    """The source of a streamed answer, which can wait for a slow client."""

    def hold(self, job: Job) -> None:
        """Read no more from the worker until `release`, or until the client has left."""

    def release(self, job: Job) -> None: ...


class Job:
    """A request on its way to a worker and back.

    Exactly one of `answer` and `refuse` is called, and only once. Here they do nothing; a subclass
    passes the result on.

    Attributes:
        meta: The id, query and headers of the request; see `wire.request_meta`.
        arrived: `time.monotonic()` when the request was complete.
        deadline: When its answer becomes useless, by the same clock. If the job is still waiting
            at that time, it is refused.
        priority: Jobs with a greater one are served first.
        patience: The longest wait for a worker, in seconds, of a job with a deadline.
        gone: Whether the client has left.
        late: Whether the job was refused while it ran.
        destination: The route to which the protocol's code submitted it.
        routed: The version to which a splitter sent it.
        watched: The observed job that a splitter sent in its place.
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
        """Set `routed`, and add the server's own header lines to the answer."""

    def consumes(self, item: Item) -> bool:
        """Tell whether a worker's answer ends here, so that it is neither passed on nor counted."""
        return self.late

    def give_up(self) -> None:
        """Release the body of a job that was refused, although a worker still runs it."""
        self.late = self.gone = True
        self.body = Parts([], len(self.body))

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        """Pass on the handler's answer; the buffers are valid only during the call.

        Args:
            status: The HTTP status.
            headers: A header block, see `wire`.
            body: The body, or the last part of a stream.
            batch: The times of the batch, see `batch_times`.
        """

    def refuse(self, error: TsxError) -> None:
        """Pass on an error of the server itself."""

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        """Pass on a part of a streamed answer; `answer` follows with the last part.

        Only the headers of the first part are used.
        """


class Answer:
    """The answer to a `WaitingJob`.

    A streamed answer exists from its first part on; `parts()` yields all of them.
    """

    __slots__ = ("_stream", "body", "headers", "status")

    def __init__(
        self, status: int, headers: bytes, body: bytes, stream: _PendingParts | None = None
    ) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self._stream = stream

    @property
    def is_streamed(self) -> bool:
        return self._stream is not None

    def leave(self) -> None:
        """Note that the client reads no more parts."""
        if self._stream is not None:
            self._stream.leave()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield all parts in order.

        Raises:
            TsxError: The worker failed in the middle.
        """
        yield self.body
        while self._stream is not None:
            part = await self._stream.get()
            if part is None:
                return
            if isinstance(part, TsxError):
                raise part
            yield part

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the whole body, after all parts of a streamed answer have come.

        Raises:
            TsxError: The worker failed in the middle, or the parts exceed `max_bytes`.
        """
        if self._stream is None:
            return self.body
        parts, size = [], 0
        async for part in self.parts():
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                text = (
                    f"The parts of the answer have more than {max_bytes} bytes together"
                    " (max_response_size)."
                )
                raise PredictionFailed(
                    f"{text} Request it as a stream, or raise max_response_size."
                )
        return b"".join(parts)


class _PendingParts:
    """The parts of a streamed answer that its client has not read yet.

    If they exceed `MAX_UNREAD_BYTES`, the worker waits.
    """

    def __init__(self, job: Job, flow: Flow) -> None:
        self._job = job
        self._flow = flow
        self._queue: asyncio.Queue[bytes | TsxError | None] = asyncio.Queue()
        self._size = 0
        self._is_held = False

    def put(self, part: bytes | TsxError | None) -> None:
        self._queue.put_nowait(part)
        if isinstance(part, bytes):
            self._size += len(part)
            if self._size > MAX_UNREAD_BYTES and not self._is_held and not self._job.gone:
                self._is_held = True
                self._flow.hold(self._job)

    async def get(self) -> bytes | TsxError | None:
        part = await self._queue.get()
        if isinstance(part, bytes):
            self._size -= len(part)
            if self._size <= MAX_UNREAD_BYTES // 2:
                self.leave()
        return part

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
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
        # Returns header lines with the times of an answer.
        self.on_times: Callable[[Job, int, Batch], bytes] | None = None
        self._added = b""
        self._trace: JobTrace | None = None
        self._stream: _PendingParts | None = None

    def route(self, version: Any, added: bytes) -> None:
        self.routed, self._added = version, added

    def trace(self, parent_span: OpenSpan, route: Any) -> None:
        """Trace the job with spans below `parent_span`."""
        self.destination, self._trace = route, JobTrace(parent_span)
        self.meta = self._trace.with_traceparent(self.meta)

    async def read_all(self, max_bytes: int) -> Answer:
        """Wait for the answer with all its parts; after an error, nothing more is read.

        Raises:
            TsxError: As in `Answer.read_all`.
        """
        answer = await self.done
        try:
            return Answer(answer.status, answer.headers, await answer.read_all(max_bytes))
        except BaseException:
            self.gone = True
            answer.leave()
            raise

    def answer(self, status: int, headers: Buffer, body: Buffer, batch: Batch) -> None:
        if self._trace is not None:
            version = self.routed or self.destination
            self._trace.on_answer(version, self.arrived, status, headers, batch)
        if self.on_times is not None:
            self._added += self.on_times(self, status, batch)
        # An error in the middle of a stream is raised instead of being sent as a part.
        if self._stream is not None and status >= 400:
            self._stream.put(PredictionFailed(str(body, "utf-8", "replace")))
        elif self._stream is not None:
            self._stream.put(bytes(body))
            self._stream.put(None)
        elif not self.done.done():  # It is done if the waiter was cancelled.
            self.done.set_result(Answer(status, bytes(headers) + self._added, bytes(body)))

    def refuse(self, error: TsxError) -> None:
        if self._trace is not None:
            self._trace.on_refusal(self.routed or self.destination, self.arrived, error)
        if self._stream is not None:
            self._stream.put(error)
        elif not self.done.done():
            self.done.set_exception(error)

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        if self._stream is not None:
            if not self.gone:  # Otherwise nobody would read it.
                self._stream.put(bytes(body))
        elif not self.done.done():
            self._stream = _PendingParts(self, flow)
            self.done.set_result(
                Answer(200, bytes(headers) + self._added, bytes(body), self._stream)
            )


class ObservedAnswer(NamedTuple):
    """The answer to a job, for an observer."""

    status: int
    headers: bytes = b""
    body: bytes | None = None  # None for a refusal or a long body
    error: TsxError | None = None


class ObservedJob(Job):
    """A job that replaces another one: an observer gets its answer, after the client."""

    def __init__(
        self, job: Job, observe: Callable[[ObservedAnswer], None], max_bytes: float
    ) -> None:
        """Call `observe` with the answer, without its body if that exceeds `max_bytes`."""
        self.meta, self.request_id, self.body = job.meta, job.request_id, job.body
        self.arrived, self.deadline, self.priority = job.arrived, job.deadline, job.priority
        self.job = job
        self._observe = observe
        self._remaining_bytes = max_bytes
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
        complete = b"".join(self._parts) if self._remaining_bytes >= 0 else None
        self._end(ObservedAnswer(status, self._headers or b"", complete))

    def refuse(self, error: TsxError) -> None:
        self.job.refuse(error)
        self._end(ObservedAnswer(error.status, error=error))

    def piece(self, headers: Buffer, body: Buffer, flow: Flow) -> None:
        self._flow = flow
        self.job.piece(headers, body, self)
        if not self.late:
            self._add(headers, body)

    def _end(self, answer: ObservedAnswer) -> None:
        self.job.watched = None  # Otherwise only the garbage collection would release both jobs.
        self._observe(answer)

    def _add(self, headers: Buffer, body: Buffer) -> None:
        if self._headers is None:
            self._headers = bytes(headers)
        self._remaining_bytes -= len(body)
        if self._remaining_bytes >= 0:
            self._parts.append(bytes(body))
        else:
            self._parts.clear()

    # The worker's channel knows this job, and the client knows the inner one.

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
        """The timeout in seconds; 0: none, or the timeout of the version that a splitter picks."""

    def route_for_headers(self, headers: Headers) -> Route:
        """Return the route for a request with these headers; the job is submitted to it."""

    @property
    def submit(self) -> Callable[[Job], None]: ...

    @property
    def leave(self) -> Callable[[Job], None]: ...
