"""Steady load over keep-alive connections; each answer must repeat the number of its request."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_WAIT_S = 60.0  # A request without an answer after this time counts as lost.
_numbers = itertools.count(1)


class Answer(NamedTuple):
    status: int
    body: bytes


@dataclass
class _Waiter:
    since: float
    remaining: int
    done: asyncio.Future[float]


@dataclass
class Tally:
    """Counts of the requests of one model's clients; each ends in `statuses` or in `lost`."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    # Requests whose connection or time ended before the answer.
    lost: list[str] = field(default_factory=list)
    # Answers that belong to another request or are not valid, and second answers.
    wrong: list[str] = field(default_factory=list)
    _waiters: list[_Waiter] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return sum(self.statuses.values())

    @property
    def errors(self) -> dict[int, int]:
        return {status: count for status, count in sorted(self.statuses.items()) if status != 200}

    async def good(self, count: int = 1) -> float:
        """Wait for `count` good answers to requests sent from now on; return the seconds."""
        waiter = _Waiter(time.monotonic(), count, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        return await asyncio.wait_for(waiter.done, MAX_WAIT_S)

    def add(self, number: bytes, sent_at: float, answer: Answer) -> None:
        self.statuses[answer.status] += 1
        if answer.status == 200 and answer.body == number:
            self._notify_waiters(sent_at)
        elif answer.status == 200:
            self.wrong.append(f"request {number.decode()} was answered {answer.body[:60]!r}")
        elif not _is_error(answer):
            self.wrong.append(
                f"request {number.decode()} got {answer.status} with {answer.body[:60]!r}, which is"
                " not the error JSON"
            )

    def _notify_waiters(self, sent_at: float) -> None:
        if not self._waiters:
            return
        for waiter in self._waiters:
            waiter.remaining -= sent_at >= waiter.since
            if waiter.remaining <= 0 and not waiter.done.done():
                waiter.done.set_result(time.monotonic() - waiter.since)
        self._waiters = [waiter for waiter in self._waiters if not waiter.done.done()]


def _is_error(answer: Answer) -> bool:
    try:
        return bool(json.loads(answer.body)["code"] == answer.status)
    except (ValueError, KeyError, TypeError):
        return False


class Client:
    """A keep-alive connection with one request at a time, opened when it is needed.

    `default_command` is the default command for the handler.
    """

    def __init__(self, port: int, model: str, tally: Tally, default_command: str = "") -> None:
        self.port = port
        self.path = f"/predictions/{model}"
        self.tally = tally
        self.default_command = default_command
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.drop()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self._reader, self._writer

    async def ask(self, command: str = "") -> Answer | None:
        """Send a request with a command for the handler; count and return its answer, if any."""
        command = command or self.default_command
        reader, writer = await self.connect()
        number = b"%d" % next(_numbers)
        body = number + (b" " + command.encode() if command else b"")
        self.tally.sent += 1
        sent_at = time.monotonic()
        try:
            writer.write(
                b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%s"
                % (self.path.encode(), len(body), body)
            )
            answer, stays_open = await asyncio.wait_for(read_answer(reader), MAX_WAIT_S)
        except (OSError, EOFError, asyncio.TimeoutError, TimeoutError) as error:
            self.tally.lost.append(
                f"request {body.decode()!r} of {self.path}: {type(error).__name__} {error}"
            )
            self.drop()
            return None
        except (ValueError, asyncio.LimitOverrunError) as error:
            self.tally.wrong.append(
                f"request {body.decode()!r} of {self.path} was answered by what is not HTTP:"
                f" {error}"
            )
            self.drop()
            return None
        self.tally.add(number, sent_at, answer)
        if not stays_open:
            await self.close()
        return answer

    async def close(self) -> None:
        """Close the connection; anything that the server still sends is wrong."""
        if self._reader is None or self._writer is None:
            return
        try:
            self._writer.write_eof()
            if extra_bytes := await asyncio.wait_for(self._reader.read(), MAX_WAIT_S):
                self.tally.wrong.append(f"a second answer: {extra_bytes[:60]!r}")
        except OSError:
            pass  # The server closed the connection first.
        self.drop()

    def drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None


async def read_answer(reader: asyncio.StreamReader) -> tuple[Answer, bool]:
    """Read an answer; return it, and whether the connection stays open.

    Raises:
        EOFError: The connection ended before the answer did.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"\r\ntransfer-encoding: chunked\r\n" in head:
        body = b"".join([chunk async for chunk in _chunks(reader)])
    else:
        length = head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
        body = await reader.readexactly(int(length or 0))
    return Answer(int(head[9:12]), body), b"\r\nconnection: close\r\n" not in head


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:size]
    await reader.readexactly(2)


class Load:
    """Clients that each send a request per interval, or after each answer if that is later."""

    def __init__(self, clients: Sequence[Client], interval: float) -> None:
        self.clients = clients
        self.interval = interval
        self._stop_event = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._ask(client, number)) for number, client in enumerate(clients)
        ]

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; if a client fails meanwhile, cancel it and raise the client's error."""
        task = asyncio.create_task(work)
        await asyncio.wait([task, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(*(task for task in self._tasks if task.done()))
        await task

    async def stop(self) -> None:
        """Wait for the running requests, then close all connections."""
        self._stop_event.set()
        await asyncio.wait(self._tasks)
        for client in self.clients:
            await client.close()

    async def _ask(self, client: Client, number: int) -> None:
        next_time = time.monotonic() + self.interval * number / len(self.clients)
        while not self._stop_event.is_set():
            await asyncio.sleep(next_time - time.monotonic())
            await client.ask()
            next_time = max(next_time + self.interval, time.monotonic())
