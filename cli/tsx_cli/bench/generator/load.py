"""Closed and open loops over connections, and the outcome of each request."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from tsx_cli.bench.generator.alarm import clock
from tsx_cli.bench.generator.streams import StreamedAnswer

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
