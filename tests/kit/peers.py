"""The worker's end of a dispatcher's channel, and helpers for tests of dispatchers."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TypeVar

from tests.kit.jobs import TIMEOUT, a_waiting_job, answer_of, refusal_of
from tsx_runtime import wire
from tsx_runtime.core.scheduling.channel import Channel, SentBatch
from tsx_runtime.core.scheduling.dispatcher import Dispatcher
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.errors import QueueFull

AnyDispatcher = TypeVar("AnyDispatcher", bound=Dispatcher)


class Peer:
    """The worker's end of a channel, controlled by the test."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self) -> wire.Frame:
        header = wire.decode_header(await self._exactly(wire.HEADER.size))
        return wire.decode(header, await self._exactly(header.size))

    async def write(self, *buffers: wire.Buffer) -> None:
        await self._loop.sock_sendall(self._sock, b"".join(bytes(buffer) for buffer in buffers))

    async def answer(self, frame: wire.Frame, *items: wire.Item) -> None:
        """Answer a batch with these statuses, headers and bodies."""
        await self.write(*wire.encode(wire.Kind.REPLY, frame.batch, items))

    async def reply(self, frame: wire.Frame, extra: bytes = b"") -> None:
        """Answer each request of a batch with its own body."""
        items = [(200, b"x-n: 1\r\n", body) for _, _, body in frame.items]
        await self.write(*wire.encode(wire.Kind.REPLY, frame.batch, items, extra))

    async def serve(self) -> list[bytes]:
        """Read a batch, answer each request with its own body, and return the bodies."""
        frame = await self.read()
        await self.reply(frame)
        return bodies(frame)

    async def stream(self, frame: wire.Frame, body: bytes, headers: bytes = b"", index: int = 0):
        """Send a piece of the answer to one request of a batch."""
        await self.write(*wire.encode(wire.Kind.PIECE, frame.batch, [(index, headers, body)]))

    def close(self) -> None:
        self._sock.close()

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await asyncio.wait_for(
                self._loop.sock_recv(self._sock, size - len(data)), TIMEOUT
            )
            assert part, "the channel was closed"
            data += part
        return data


async def connect(dispatcher: Dispatcher) -> tuple[Channel, Peer]:
    """Open a channel that does not belong to the dispatcher yet."""
    front, back = socket.socketpair()
    front.setblocking(False)
    back.setblocking(False)
    channel = dispatcher.new_channel()
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=front)
    return channel, Peer(back)


async def add_worker(dispatcher: Dispatcher) -> tuple[Channel, Peer]:
    channel, peer = await connect(dispatcher)
    dispatcher.add(channel)
    return channel, peer


async def serve(dispatcher: AnyDispatcher) -> tuple[AnyDispatcher, Channel, Peer]:
    """Accept requests with one worker, and return the dispatcher and both ends of its channel."""
    dispatcher.accept(True)
    return dispatcher, *await add_worker(dispatcher)


async def kill(channel: Channel, peer: Peer) -> SentBatch:
    """End a worker, and return its oldest unanswered batch."""
    peer.close()
    await asyncio.wait_for(channel.closed, TIMEOUT)
    return channel.sent.popleft()


def submit(dispatcher: Dispatcher, *requests: bytes | WaitingJob) -> list[WaitingJob]:
    """Submit jobs, which may be given as bodies, and return them."""
    jobs = [
        request if isinstance(request, WaitingJob) else a_waiting_job(request)
        for request in requests
    ]
    for job in jobs:
        dispatcher.submit(job)
    return jobs


async def send(
    dispatcher: Dispatcher, peer: Peer, *requests: bytes | WaitingJob
) -> tuple[list[WaitingJob], wire.Frame]:
    """Submit requests, and return their jobs and the batch that reaches the worker."""
    jobs = submit(dispatcher, *requests)
    return jobs, await peer.read()


async def overflow(
    dispatcher: Dispatcher, match: str | None = None, body: bytes = b"x"
) -> QueueFull:
    """Submit a request that a full queue refuses, and return the error."""
    return await refusal_of(submit(dispatcher, body)[0], QueueFull, match)


async def answer(job: WaitingJob) -> bytes:
    """Wait for the answer to a job, and return its body."""
    return (await answer_of(job)).body


async def wait_idle(dispatcher: Dispatcher) -> None:
    await asyncio.wait_for(dispatcher.wait_idle(), TIMEOUT)


def bodies(frame: wire.Frame) -> list[bytes]:
    return [bytes(body) for _, _, body in frame.items]


def counts(dispatcher: Dispatcher) -> tuple[int, dict[int, int], dict[str, int]]:
    """Return the number of requests, the responses by status, and the refusals by type."""
    stats = dispatcher.stats
    return stats.requests, dict(stats.answers), dict(stats.refusals)


def soon() -> float:
    """Return a deadline that passes while the test runs."""
    return time.monotonic() + 0.3
