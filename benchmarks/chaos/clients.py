"""What clients can do to a server, by malice or by accident, while others use it."""

from __future__ import annotations

import asyncio
import socket

import psutil

from .trial import Scenario, Trial

HEAD = b"POST /predictions/victim HTTP/1.1\r\nhost: 127.0.0.1\r\n"


async def slow_clients(trial: Trial) -> None:
    """Many connections that say nothing, or one byte of a request now and then, while the others are served."""
    sockets = await _connect(trial, trial.scale.slow_clients)
    for byte in HEAD[:5]:
        for sock in sockets[::2]:
            sock.send(bytes([byte]))
        await asyncio.gather(*(tally.good(2 * trial.scale.clients) for tally in trial.tallies.values()))
    for sock in sockets:
        sock.close()


async def half_a_body(trial: Trial) -> None:
    """Clients that leave in the middle of their request: there is nothing to answer."""
    for sock in await _connect(trial, 50):
        sock.send(HEAD + b"content-length: 1000\r\n\r\nhalf")
        sock.close()


async def leave_before_the_answer(trial: Trial) -> None:
    """Clients that ask and go; by a reset, as those do that are killed."""
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


async def _connect(trial: Trial, count: int) -> list[socket.socket]:
    sockets = []
    for _ in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", trial.server.ports["inference"]))
        sockets.append(sock)
    return sockets


async def never_read_answers(trial: Trial) -> None:
    """A megabyte is answered to each, and one client asks for many on one connection."""
    trial.unanswered += 64
    trial.tallies["victim"].sent += 64
    front_end = psutil.Process(trial.server.process.pid)
    before = front_end.memory_info().rss
    (sock,) = await _connect(trial, 1)
    body = b"0 large 1"
    sock.send((HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)) * 64)
    most = 0
    for _ in range(10):
        await trial.tallies["bystander"].good(2 * trial.scale.clients)
        most = max(most, front_end.memory_info().rss)
    grown = (most - before) >> 20
    trial.check(grown < 24, f"the front end grew by {grown} MiB for a client that asks for 64 MiB and does not read")
    sock.close()


SCENARIOS = (
    Scenario("many slow clients", slow_clients),
    Scenario("clients leave in the middle of their requests", half_a_body),
    Scenario("clients leave before they are answered", leave_before_the_answer),
    Scenario("clients leave in the middle of their answers", leave_in_the_answer),
    Scenario("a client asks for much and never reads", never_read_answers),
)
