"""Closed and open loops over connections, the outcome of each request, and the precise timer that an
open loop sends by.
"""

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

_TIMES = struct.Struct(
    "@qqqq"
)  # struct itimerspec: interval and value, each of seconds and nanoseconds
_MONOTONIC, _NONBLOCK_CLOEXEC, _ABSOLUTE = 1, 0o2004000, 1
_PR_SET_TIMERSLACK = 29

clock = time.perf_counter  # CLOCK_MONOTONIC, where this matters


class PreciseTimer:
    """Calls `ring` at the last set time, in seconds of `clock`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = _open() if sys.platform == "linux" else -1
        if self._descriptor >= 0:
            loop.add_reader(self._descriptor, self._rings)

    def set(self, moment: float) -> None:
        if self._descriptor < 0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(max(0.0, moment - clock()), self._ring)
            return
        seconds = int(moment)
        value = _TIMES.pack(0, 0, seconds, max(1, int((moment - seconds) * 1e9)))
        assert _libc is not None
        _libc.timerfd_settime(self._descriptor, _ABSOLUTE, value, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _rings(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:  # it was set again in between
            return
        self._ring()


def _open() -> int:
    """-1 where there is no such timer."""
    if _libc is None or not hasattr(_libc, "timerfd_create"):
        return -1
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # wake when it is time, not up to 50 us later
    return int(_libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC))


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

SLOT = 0.1  # seconds
# seconds without an answer that are noted; which of them are stalls is for `result` to say
GAP = 0.01
REFUSALS = ("429", "503")
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two tries to connect
AT_A_TIME = 64  # connections that are made together: a listener's queue may be short
TIMEOUT = "timeout"


class LoadClient(Protocol):
    """A connection that carries one request at a time."""

    since: float
    sent: float
    number: int  # of the payload it carries
    gone: bool

    def send(self, request: bytes) -> None: ...

    def end(self, reason: str, now: float) -> None:
        """Give the request up, and tell the load so."""

    def close(self) -> None: ...


Connect = Callable[["Load"], Awaitable[LoadClient]]  # raises OSError


class SlotCounts(NamedTuple):
    """The counts so far at the end of a slot; `errors` are those of the slot alone."""

    at: float
    accepted: int
    refused: int
    answers: int
    errors: Counter[str]


class Load(ABC):
    """The base of both loops.

    Times are those of `clock`; latencies are seconds, in the order of the answers.

    `loops` says when a connection that is free is to send.
    """

    def __init__(self, connect: Connect, connections: int, timeout: float) -> None:
        self.connect, self.connections, self.timeout = connect, connections, timeout
        self.accepted, self.refused, self.late = array("f"), array("f"), array("f")
        self.numbers = array("I")  # of the payloads whose answers were accepted
        self.streams: list[StreamedAnswer] = []  # of the accepted answers that were event streams
        self.errors: Counter[str] = Counter()
        self.marks: list[SlotCounts] = []
        self.gaps: list[tuple[float, float]] = []  # (from, to)
        self.answers = self.busy = self.unanswered = self.unsent = self.waited = 0
        self.now = 0.0  # of this turn of the event loop; 0 before anybody asked
        self.start = self.last = 0.0
        self.begun = self.stopped = False
        self.clients: set[LoadClient] = set()
        self._lost: set[asyncio.Task[None]] = set()
        self.loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()

    # What connections tell

    def stamp(self) -> float:
        """When this turn of the loop began: what came in it was there by then, and is not late for
        waiting behind others.
        """
        if not self.now:
            self.now = clock()
            self.loop.call_soon(self._forget)
        return self.now

    def accept(self, client: LoadClient, now: float) -> None:
        self.accepted.append(now - client.since)
        self.numbers.append(client.number)
        if now - self.last > GAP:
            self.gaps.append((self.last, now))
        self.last = now
        self.answers += 1
        self.busy -= 1
        self.freed(client)

    def answered(self, client: LoadClient, status: str, now: float) -> None:
        """The slower way, for every status of HTTP, or its like; `asker.gone` where its connection
        ended with the answer.
        """
        latency = now - client.since
        if status.startswith("2"):
            self.accepted.append(latency)
            self.numbers.append(client.number)
        elif status in REFUSALS:
            self.refused.append(latency)
        else:
            self.errors[status] += 1
        if now - self.last > GAP:
            self.gaps.append((self.last, now))
        self.last = now
        self.answers += 1
        self.busy -= 1
        if client.gone:
            self._replace(client)
        else:
            self.freed(client)

    def broken(self, client: LoadClient, reason: str, now: float) -> None:
        """The connection is of no more use; what it carried, if anything, is an error."""
        if client.since:
            self.errors[reason] += 1
            self.busy -= 1
        self._replace(client)

    # What the loops say

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def freed(self, client: LoadClient) -> None:
        """It can send."""

    @abstractmethod
    def not_connected(self) -> None:
        """Another try to connect has failed."""

    # The run

    async def open(self) -> None:
        """Raises OSError where the first connections cannot be made."""
        for begin in range(0, self.connections, AT_A_TIME):
            count = min(AT_A_TIME, self.connections - begin)
            made = await asyncio.gather(
                *(self.connect(self) for _ in range(count)), return_exceptions=True
            )
            for each in made:
                if isinstance(each, BaseException):
                    raise each
                self.clients.add(each)
                if each.gone:  # the server has closed it at once
                    self._replace(each)

    async def run(self, slots: int, grace: float, tick: Callable[[int], None]) -> None:
        """`tick` is called at the end of each slot, with its number."""
        self.start = self.last = clock()
        self.begun = True
        self.begin()
        for number in range(1, slots + 1):
            await asyncio.sleep(max(0.0, self.start + number * SLOT - clock()))
            if number == slots:
                self.finish()
            self._mark()
            tick(number)
            self._end_late()
        end = clock() + grace
        while self.busy and clock() < end:
            self._idle.clear()
            try:
                await asyncio.wait_for(
                    self._idle.wait(), min(max(0.0, end - clock()), self._next_timeout())
                )
            except asyncio.TimeoutError:
                self._end_late()
        self.unanswered = self.busy
        if self.busy and clock() - self.last > GAP:
            self.gaps.append((self.last, clock()))
        self._mark()

    def finish(self) -> None:
        """Nothing more is sent."""
        self.stopped = True

    async def close(self) -> None:
        self.stopped = True
        for task in self._lost:
            task.cancel()
        await asyncio.gather(*self._lost, return_exceptions=True)
        for client in self.clients:
            client.close()

    def rest(self, client: LoadClient) -> None:
        """Nothing more is to be sent by it."""
        client.since = 0.0
        if not self.busy:
            self._idle.set()

    def _replace(self, client: LoadClient) -> None:
        known = client in self.clients  # or the task that connects sees that it is gone
        self.clients.discard(client)
        self.rest(client)
        if known and not self.stopped:
            task = self.loop.create_task(self._connect_again())
            self._lost.add(task)
            task.add_done_callback(self._lost.discard)

    async def _connect_again(self) -> None:
        pause = FIRST_PAUSE
        while not self.stopped:
            try:
                client = await self.connect(self)
                if client.gone:
                    raise ConnectionResetError
            except OSError:
                self.not_connected()
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            self.clients.add(client)
            if self.begun:
                self.freed(client)
            return

    def _mark(self) -> None:
        errors, self.errors = self.errors, Counter()
        self.marks.append(
            SlotCounts(clock(), len(self.accepted), len(self.refused), self.answers, errors)
        )

    def _forget(self) -> None:
        self.now = 0.0

    def _end_late(self) -> None:
        now = clock()
        for client in [
            each for each in self.clients if each.since and now - each.sent > self.timeout
        ]:
            client.end(TIMEOUT, now)

    def _next_timeout(self) -> float:
        now = clock()
        return max(
            0.001,
            min(
                (each.sent + self.timeout - now for each in self.clients if each.since),
                default=self.timeout,
            )
            + 0.001,
        )


NO_CONNECTION = "connect"


class ClosedLoop(Load):
    """Each connection sends its next request as soon as it is answered."""

    def __init__(
        self, connect: Connect, requests: Sequence[bytes], connections: int, timeout: float
    ) -> None:
        super().__init__(connect, connections, timeout)
        self._next = cycle(enumerate(requests)).__next__

    def begin(self) -> None:
        for client in list(self.clients):
            self.freed(client)

    def freed(self, client: LoadClient) -> None:
        if self.stopped:
            self.rest(client)
            return
        self.busy += 1
        client.number, request = self._next()
        client.since = client.sent = clock()
        client.send(request)

    def not_connected(self) -> None:
        """A request that found no server."""
        self.errors[NO_CONNECTION] += 1


class OpenLoop(Load):
    """Sends each request when it is due, on a free connection; latency counts from the due time,
    even if no connection is free.
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
        self._requests, self._due, self._next = requests, due, 0
        self._free: deque[LoadClient] = deque()
        self._blocked = 0  # requests before this one found no free connection when they were due
        self._alarm = PreciseTimer(self.loop, self._send_due)

    def begin(self) -> None:
        self._free.extend(self.clients)
        self._send_due()

    def freed(self, client: LoadClient) -> None:
        client.since = 0.0
        if self.stopped:
            self.rest(client)
            return
        self._free.append(client)
        if self._next < self._blocked:  # else an alarm is set
            self._send_due()

    def not_connected(self) -> None:
        """What is due then waits for another connection, or stays unsent."""

    def finish(self) -> None:
        self._send_due()
        super().finish()
        self.unsent = len(self._due) - self._next

    async def close(self) -> None:
        self._alarm.close()
        await super().close()

    def _send_due(self) -> None:
        due, free, start, total = self._due, self._free, self.start, len(self._due)
        now = clock()
        while free and self._next < total and start + due[self._next] <= now:
            client = free.popleft()
            if client.gone:
                continue
            number, self._next = self._next, self._next + 1
            client.since, client.sent = start + due[number], now
            if number < self._blocked:
                self.waited += 1
            else:
                self.late.append(now - client.since)
            if not self.busy:
                self.last = now  # there was nothing to answer until then
            self.busy += 1
            client.number = number % len(self._requests)
            client.send(self._requests[client.number])
            now = clock()
        if self._next == total:
            return
        if free:
            self._alarm.set(start + due[self._next])
        else:
            self._block(now)

    def _block(self, now: float) -> None:
        """All that is due has to wait, until `freed`; what becomes due meanwhile too, which the
        alarm tells.
        """
        self._blocked = max(self._blocked, bisect_right(self._due, now - self.start, self._next))
        ahead = max(self._blocked, self._next)
        if ahead < len(self._due):
            self._alarm.set(self.start + self._due[ahead])
