"""Faults of clients, malicious or accidental, while others use the server."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress

import psutil

from .load import MAX_WAIT_S
from .trial import Scenario, Trial

MAX_GROWTH_BYTES = 24 << 20  # allowed growth of the front end if clients do not read
HEAD = b"POST /predictions/victim HTTP/1.1\r\nhost: 127.0.0.1\r\n"


async def slow_clients(trial: Trial) -> None:
    """Send nothing, or headers or a body byte by byte; the server must end each connection."""
    sockets: list[socket.socket] = []
    for number in range(trial.scale.slow_clients):
        sockets += await _connect(trial, 1)
        if number % 3:
            sockets[-1].send(
                HEAD[:1] if number % 3 == 1 else HEAD + b"content-length: 1000\r\n\r\nh"
            )
    for byte in HEAD[1:9]:
        for sock in sockets[1::3]:
            _try_to_send(sock, bytes([byte]))
        for sock in sockets[2::3]:
            _try_to_send(sock, b"h")
        await asyncio.gather(
            *(tally.good(2 * trial.scale.clients) for tally in trial.tallies.values())
        )
    responses = Counter(
        await asyncio.wait_for(asyncio.gather(*map(_read_to_end, sockets)), MAX_WAIT_S)
    )
    silent_count = len(sockets[::3])
    expected = {b"": silent_count, b"HTTP/1.1 408": len(sockets) - silent_count}
    trial.check(
        responses == expected, f"slow clients were ended with {dict(responses)}, not {expected}"
    )


def _try_to_send(sock: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # The server has already ended the connection.
        sock.send(data)


async def _read_to_end(sock: socket.socket) -> bytes:
    """Read until the connection ends; return the first bytes."""
    loop = asyncio.get_running_loop()
    first_bytes = b""
    with sock, suppress(ConnectionError):
        while data := await loop.sock_recv(sock, 4096):
            first_bytes = first_bytes or data[:12]
    return first_bytes


async def half_a_body(trial: Trial) -> None:
    """Leave in the middle of a request's body."""
    for sock in await _connect(trial, 50):
        sock.send(HEAD + b"content-length: 1000\r\n\r\nhalf")
        sock.close()


async def leave_before_the_answer(trial: Trial) -> None:
    """Send requests and leave with a reset, like a killed client."""
    trial.unanswered += 50
    trial.tallies["victim"].sent += 50
    for sock in await _connect(trial, 50):
        sock.send(HEAD + b"content-length: 4\r\n\r\ngone")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()


async def leave_in_the_answer(trial: Trial) -> None:
    trial.unanswered += 4
    trial.tallies["victim"].sent += 4
    for sock in await _connect(trial, 4):
        body = b"0 stream 100 64"
        sock.send(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await asyncio.get_running_loop().sock_recv(sock, 1000)
        sock.close()


async def never_read_streams(trial: Trial) -> None:
    """Ask for streams that are far larger than a socket's buffers, and read nothing."""
    await _not_read(trial, await _connect(trial, 2), f"stream {trial.scale.megabytes * 8} 128", 1)


async def never_read_answers(trial: Trial) -> None:
    """Send many requests on one connection, each with an answer of a megabyte."""
    await _not_read(trial, await _connect(trial, 1), "large 1", 64)


async def _not_read(trial: Trial, sockets: list[socket.socket], command: str, count: int) -> None:
    """Send requests on each connection and read nothing; the server's memory must not fill."""
    trial.unanswered += len(sockets) * count
    trial.tallies["victim"].sent += len(sockets) * count
    front_end = psutil.Process(trial.server.process.pid)
    start_bytes = peak_bytes = front_end.memory_info().rss
    body = f"0 {command}".encode()
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.send((HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)) * count)
    for _ in range(10):
        await trial.tallies["bystander"].good(3 * trial.scale.clients)
        peak_bytes = max(peak_bytes, front_end.memory_info().rss)
    trial.check(
        peak_bytes - start_bytes < MAX_GROWTH_BYTES,
        f"the front end grew by {(peak_bytes - start_bytes) >> 20} MiB for what is not read",
    )
    for sock in sockets:
        sock.close()


async def _connect(trial: Trial, count: int) -> list[socket.socket]:
    sockets = []
    for _ in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(
            sock, ("127.0.0.1", trial.server.ports["inference"])
        )
        sockets.append(sock)
    return sockets


SCENARIOS = (
    Scenario(
        "many slow clients",
        slow_clients,
        settings=dict.fromkeys(("header_timeout", "body_timeout", "keep_alive_timeout"), 2),
    ),
    Scenario("clients leave in the middle of their requests", half_a_body),
    Scenario("clients leave before they are answered", leave_before_the_answer),
    Scenario("clients leave in the middle of their answers", leave_in_the_answer),
    Scenario("clients never read their streams", never_read_streams),
    Scenario("a client asks for much and never reads", never_read_answers),
)
