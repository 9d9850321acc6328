"""When a connection sends: once it is answered (closed), or when a request is due (open)."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import cycle

from tsx_cli.bench.generator.alarm import PreciseTimer, clock
from tsx_cli.bench.generator.load import Connect, Load, LoadClient

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
