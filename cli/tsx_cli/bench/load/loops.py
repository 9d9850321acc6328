"""Closed and open loops over connections, and the precise timer of an open loop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import time
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle
from typing import NamedTuple, Protocol

from tsx_cli.bench.load.streams import StreamedAnswer

# struct itimerspec: the interval and the value, each in seconds and nanoseconds.
_ITIMERSPEC = struct.Struct("@qqqq")
_MONOTONIC, _NONBLOCK_CLOEXEC, _TIMER_ABSOLUTE = 1, 0o2004000, 1
_PR_SET_TIMERSLACK = 29

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux


class PreciseTimer:
    """A timer that calls `callback` at the time that was set last, in seconds of `clock`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = _open_timer() if sys.platform == "linux" else -1
        if self._descriptor >= 0:
            loop.add_reader(self._descriptor, self._on_ready)

    def set(self, moment: float) -> None:
        if self._descriptor < 0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(max(0.0, moment - clock()), self._callback)
            return
        seconds = int(moment)
        value = _ITIMERSPEC.pack(0, 0, seconds, max(1, int((moment - seconds) * 1e9)))
        assert _libc is not None
        _libc.timerfd_settime(self._descriptor, _TIMER_ABSOLUTE, value, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _on_ready(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:  # The timer was set again after it expired.
            return
        self._callback()


def _open_timer() -> int:
    """Open a Linux timer; return its file descriptor, or -1 if the system has no such timer."""
    if _libc is None or not hasattr(_libc, "timerfd_create"):
        return -1
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # By default, Linux wakes up to 50 us late.
    return int(_libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC))


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

SLOT_S = 0.1
MIN_GAP_S = 0.01  # shortest recorded time without answers; accounting.py selects the stalls
REFUSALS = ("429", "503")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.01, 1.0  # pauses between attempts to connect
MAX_CONCURRENT_CONNECTS = 64  # The accept queue of the server may be short.
TIMEOUT = "timeout"


class LoadClient(Protocol):
    """A connection that carries one request at a time."""

    latency_start: float
    send_time: float
    payload_index: int
    is_closed: bool

    def send(self, request: bytes) -> None: ...

    def end(self, reason: str, now: float) -> None:
        """Give up the request, and report this to the load."""

    def close(self) -> None: ...


Connect = Callable[["Load"], Awaitable[LoadClient]]  # The call may raise OSError.


class SlotCounts(NamedTuple):
    """The counts from the start to the end of a slot, and the errors during the slot."""

    time: float
    accepted: int
    refused: int
    answers: int
    errors: Counter[str]


class Load(ABC):
    """The base class of both loops, which decide when a free connection sends.

    Times are values of `clock`. Latencies are in seconds, in the order of the answers.
    """

    def __init__(self, connect: Connect, connections: int, timeout: float) -> None:
        self.connect, self.connections, self.timeout = connect, connections, timeout
        self.accepted, self.refused, self.send_delays = array("f"), array("f"), array("f")
        self.payload_indexes = array("I")  # the payloads of the accepted answers
        self.streams: list[StreamedAnswer] = []  # accepted answers that were event streams
        self.errors: Counter[str] = Counter()
        self.marks: list[SlotCounts] = []
        self.gaps: list[tuple[float, float]] = []  # start and end of times without answers
        self.answers = self.open_requests = self.unanswered = self.unsent = self.waited = 0
        self.iteration_time = 0.0  # start of this iteration of the event loop; 0 if it is unknown
        self.start = self.last_answer_time = 0.0
        self.has_begun = self.is_stopped = False
        self.clients: set[LoadClient] = set()
        self._reconnects: set[asyncio.Task[None]] = set()
        self.loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()

    # Called by connections:

    def stamp(self) -> float:
        """Return the time at which this iteration of the event loop began.

        All data of an iteration had arrived by then. The time that it waits for other data to be
        processed is not part of its latency.
        """
        if not self.iteration_time:
            self.iteration_time = clock()
            self.loop.call_soon(self._reset_iteration_time)
        return self.iteration_time

    def accept(self, client: LoadClient, now: float) -> None:
        self.accepted.append(now - client.latency_start)
        self.payload_indexes.append(client.payload_index)
        if now - self.last_answer_time > MIN_GAP_S:
            self.gaps.append((self.last_answer_time, now))
        self.last_answer_time = now
        self.answers += 1
        self.open_requests -= 1
        self.on_free(client)

    def on_answer(self, client: LoadClient, status: str, now: float) -> None:
        """Record an answer of any status, or a similar end of a request.

        If the connection ended with the answer, `client.is_closed` is set.
        """
        latency = now - client.latency_start
        if status.startswith("2"):
            self.accepted.append(latency)
            self.payload_indexes.append(client.payload_index)
        elif status in REFUSALS:
            self.refused.append(latency)
        else:
            self.errors[status] += 1
        if now - self.last_answer_time > MIN_GAP_S:
            self.gaps.append((self.last_answer_time, now))
        self.last_answer_time = now
        self.answers += 1
        self.open_requests -= 1
        if client.is_closed:
            self._replace(client)
        else:
            self.on_free(client)

    def on_broken(self, client: LoadClient, reason: str, now: float) -> None:
        """Record the end of a connection; if it carried a request, the request is an error."""
        if client.latency_start:
            self.errors[reason] += 1
            self.open_requests -= 1
        self._replace(client)

    # Defined by subclasses:

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def on_free(self, client: LoadClient) -> None:
        """Use a connection that can send."""

    @abstractmethod
    def on_connect_failure(self) -> None:
        """Handle a failed attempt to connect."""

    # Called by the generator:

    async def open(self) -> None:
        """Open the connections.

        Raises:
            OSError: One of the first attempts fails.
        """
        for begin in range(0, self.connections, MAX_CONCURRENT_CONNECTS):
            count = min(MAX_CONCURRENT_CONNECTS, self.connections - begin)
            clients = await asyncio.gather(
                *(self.connect(self) for _ in range(count)), return_exceptions=True
            )
            for client in clients:
                if isinstance(client, BaseException):
                    raise client
                self.clients.add(client)
                if client.is_closed:  # The server closed the connection immediately.
                    self._replace(client)

    async def run(self, slots: int, grace: float, tick: Callable[[int], None]) -> None:
        """Run the load; `tick` is called with the number of each slot at its end."""
        self.start = self.last_answer_time = clock()
        self.has_begun = True
        self.begin()
        for number in range(1, slots + 1):
            await asyncio.sleep(max(0.0, self.start + number * SLOT_S - clock()))
            if number == slots:
                self.finish()
            self._add_mark()
            tick(number)
            self._end_timed_out_requests()
        end = clock() + grace
        while self.open_requests and clock() < end:
            self._idle.clear()
            try:
                await asyncio.wait_for(
                    self._idle.wait(), min(max(0.0, end - clock()), self._next_timeout())
                )
            except asyncio.TimeoutError:
                self._end_timed_out_requests()
        self.unanswered = self.open_requests
        if self.open_requests and clock() - self.last_answer_time > MIN_GAP_S:
            self.gaps.append((self.last_answer_time, clock()))
        self._add_mark()

    def finish(self) -> None:
        """Stop sending."""
        self.is_stopped = True

    async def close(self) -> None:
        self.is_stopped = True
        for task in self._reconnects:
            task.cancel()
        await asyncio.gather(*self._reconnects, return_exceptions=True)
        for client in self.clients:
            client.close()

    def set_idle(self, client: LoadClient) -> None:
        """Mark a connection as having no request."""
        client.latency_start = 0.0
        if not self.open_requests:
            self._idle.set()

    def _replace(self, client: LoadClient) -> None:
        # A client that is not listed yet is handled by the task that connects it.
        was_listed = client in self.clients
        self.clients.discard(client)
        self.set_idle(client)
        if was_listed and not self.is_stopped:
            task = self.loop.create_task(self._reconnect())
            self._reconnects.add(task)
            task.add_done_callback(self._reconnects.discard)

    async def _reconnect(self) -> None:
        pause = FIRST_PAUSE_S
        while not self.is_stopped:
            try:
                client = await self.connect(self)
                if client.is_closed:
                    raise ConnectionResetError
            except OSError:
                self.on_connect_failure()
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
                continue
            self.clients.add(client)
            if self.has_begun:
                self.on_free(client)
            return

    def _add_mark(self) -> None:
        errors, self.errors = self.errors, Counter()
        self.marks.append(
            SlotCounts(clock(), len(self.accepted), len(self.refused), self.answers, errors)
        )

    def _reset_iteration_time(self) -> None:
        self.iteration_time = 0.0

    def _end_timed_out_requests(self) -> None:
        now = clock()
        for client in [
            client
            for client in self.clients
            if client.latency_start and now - client.send_time > self.timeout
        ]:
            client.end(TIMEOUT, now)

    def _next_timeout(self) -> float:
        now = clock()
        return max(
            0.001,
            min(
                (
                    client.send_time + self.timeout - now
                    for client in self.clients
                    if client.latency_start
                ),
                default=self.timeout,
            )
            + 0.001,
        )


NO_CONNECTION = "connect"


class ClosedLoop(Load):
    """A loop in which each connection sends its next request after the previous answer."""

    def __init__(
        self, connect: Connect, requests: Sequence[bytes], connections: int, timeout: float
    ) -> None:
        super().__init__(connect, connections, timeout)
        self._next = cycle(enumerate(requests)).__next__

    def begin(self) -> None:
        for client in list(self.clients):
            self.on_free(client)

    def on_free(self, client: LoadClient) -> None:
        if self.is_stopped:
            self.set_idle(client)
            return
        self.open_requests += 1
        client.payload_index, request = self._next()
        client.latency_start = client.send_time = clock()
        client.send(request)

    def on_connect_failure(self) -> None:
        """Count a request that reached no server."""
        self.errors[NO_CONNECTION] += 1


class OpenLoop(Load):
    """A loop that sends each request when it is due, on a free connection.

    The latency counts from the due time, even if no connection is free then.
    """

    def __init__(
        self,
        connect: Connect,
        requests: Sequence[bytes],
        connections: int,
        timeout: float,
        due: array[float],
    ) -> None:
        super().__init__(connect, connections, timeout)
        self._requests, self._due_times, self._next = requests, due, 0
        self._free_clients: deque[LoadClient] = deque()
        self._blocked = 0  # Requests before this position had to wait for a connection.
        self._due_timer = PreciseTimer(self.loop, self._send_due)

    def begin(self) -> None:
        self._free_clients.extend(self.clients)
        self._send_due()

    def on_free(self, client: LoadClient) -> None:
        client.latency_start = 0.0
        if self.is_stopped:
            self.set_idle(client)
            return
        self._free_clients.append(client)
        if self._next < self._blocked:  # Otherwise the timer is set.
            self._send_due()

    def on_connect_failure(self) -> None:
        """Do nothing: a due request waits for another connection, or stays unsent."""

    def finish(self) -> None:
        self._send_due()
        super().finish()
        self.unsent = len(self._due_times) - self._next

    async def close(self) -> None:
        self._due_timer.close()
        await super().close()

    def _send_due(self) -> None:
        due, free, start, count = (
            self._due_times,
            self._free_clients,
            self.start,
            len(self._due_times),
        )
        now = clock()
        while free and self._next < count and start + due[self._next] <= now:
            client = free.popleft()
            if client.is_closed:
                continue
            number, self._next = self._next, self._next + 1
            client.latency_start, client.send_time = start + due[number], now
            if number < self._blocked:
                self.waited += 1
            else:
                self.send_delays.append(now - client.latency_start)
            if not self.open_requests:
                self.last_answer_time = now  # No answer could come earlier.
            self.open_requests += 1
            client.payload_index = number % len(self._requests)
            client.send(self._requests[client.payload_index])
            now = clock()
        if self._next == count:
            return
        if free:
            self._due_timer.set(start + due[self._next])
        else:
            self._block(now)

    def _block(self, now: float) -> None:
        """Let all due requests wait for a free connection.

        The timer is set for the next request, so that it starts to wait when it is due.
        """
        self._blocked = max(
            self._blocked, bisect_right(self._due_times, now - self.start, self._next)
        )
        first_due = max(self._blocked, self._next)
        if first_due < len(self._due_times):
            self._due_timer.set(self.start + self._due_times[first_due])
