"""Clients that attack a server from outside, each in its own process.

Usage: `python benchmarks/attackers.py NAME HOST:PORT SECONDS`. The docstring of an attack describes
it. Each attacker stops after SECONDS, and prints how many requests and bytes it sent.
"""

from __future__ import annotations

import base64
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat, takewhile
from typing import NamedTuple

RECEIVE_BYTES = 1 << 16
HOST = b"Host: 127.0.0.1\r\n"
HANDSHAKE = (
    b"GET /predictions/busy HTTP/1.1\r\n%bUpgrade: websocket\r\nConnection: Upgrade\r\n" % HOST
)
HANDSHAKE += b"Sec-WebSocket-Key: %b\r\nSec-WebSocket-Version: 13\r\n\r\n" % base64.b64encode(
    bytes(16)
)
CHUNKED = b"POST /predictions/busy HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n" % HOST
SOURCE = "127.0.0.2"  # differs from the other clients' address
Sent = tuple[int, int]  # numbers of requests and bytes


class Attack(NamedTuple):
    does: str
    role: str  # the role of the attacked address
    run: Callable[[tuple[str, int], float], Sent]


def request(line: bytes, body: bytes = b"", *headers: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    framing = b"Content-Length: %d\r\n" % size if size else b""
    return b"%b HTTP/1.1\r\n%b%b%b\r\n%b" % (
        line,
        HOST,
        b"".join(header + b"\r\n" for header in headers),
        framing,
        body,
    )


def connect(address: tuple[str, int], head: bytes = b"") -> socket.socket:
    """Connect, and send `head`; if it asks for a WebSocket, wait for the response."""
    sock = socket.create_connection(address, 10, (SOURCE, 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(head)
    if b"Upgrade: websocket" in head:
        sock.recv(RECEIVE_BYTES)
    return sock


def frame(opcode: int, body: bytes = b"") -> bytes:
    """Return a frame of a WebSocket client with a mask of zeros (RFC 6455, section 5.2)."""
    return bytes([opcode, 0x80 | len(body), 0, 0, 0, 0]) + body


def push(
    address: tuple[str, int],
    seconds: float,
    connections: int,
    repeated_bytes: bytes,
    *,
    reads_responses: bool,
    max_bytes: int = 1 << 62,
    head: bytes = b"",
) -> Sent:
    """Send `head`, then `endless` repeatedly, on each connection, without waiting for responses."""
    end, sent_bytes = time.monotonic() + seconds, 0
    selector = selectors.DefaultSelector()
    socks = [connect(address, head) for _ in range(connections)]
    for sock in socks:
        sock.setblocking(False)
        selector.register(
            sock, selectors.EVENT_WRITE | (selectors.EVENT_READ if reads_responses else 0), [0]
        )
    while (remaining_s := end - time.monotonic()) > 0 and selector.get_map():
        for key, events in selector.select(min(remaining_s, 0.5)):
            sock, offset = key.fileobj, key.data
            assert isinstance(sock, socket.socket)
            try:
                if events & selectors.EVENT_READ and not sock.recv(RECEIVE_BYTES):
                    raise ConnectionError
                if events & selectors.EVENT_WRITE and sent_bytes < max_bytes:
                    count = sock.send(memoryview(repeated_bytes)[offset[0] :])
                    offset[0] = (offset[0] + count) % len(repeated_bytes)
                    sent_bytes += count
            except BlockingIOError:
                continue
            except OSError:
                selector.unregister(sock)
                sock.close()
                with suppress(OSError):  # A real attacker would connect again.
                    replacement = connect(address, head)
                    replacement.setblocking(False)
                    selector.register(
                        replacement,
                        selectors.EVENT_WRITE | (selectors.EVENT_READ if reads_responses else 0),
                        [0],
                    )
                    socks.append(replacement)
        if sent_bytes >= max_bytes:
            time.sleep(0.05)
    for sock in socks:
        sock.close()
    return sent_bytes // len(repeated_bytes), sent_bytes


def ask(
    address: tuple[str, int], seconds: float, connections: int, requests: Iterator[bytes]
) -> Sent:
    """Send requests on each connection; the next one when the previous response begins."""
    end, request_count, sent_bytes = time.monotonic() + seconds, 0, 0
    selector = selectors.DefaultSelector()
    for _ in range(connections):
        selector.register(connect(address), selectors.EVENT_READ)
    ready_socks = [key.fileobj for key in selector.get_map().values()]
    while (remaining_s := end - time.monotonic()) > 0:
        broken_socks = []
        for sock in ready_socks:
            assert isinstance(sock, socket.socket)
            data = next(requests)
            try:
                sock.settimeout(min(10, remaining_s))
                sock.sendall(data)
                request_count, sent_bytes = request_count + 1, sent_bytes + len(data)
            except OSError:
                broken_socks.append(sock)
        ready_socks = []
        for key, _ in selector.select(0 if broken_socks else min(remaining_s, 0.5)):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            with suppress(OSError):
                if sock in broken_socks or sock.recv(RECEIVE_BYTES):
                    ready_socks.append(sock)
                    continue
            broken_socks.append(sock)
        ready_socks = [sock for sock in ready_socks if sock not in broken_socks]
        for sock in broken_socks:
            selector.unregister(sock)
            sock.close()
            with suppress(OSError):  # A real attacker would connect again.
                replacement = connect(address)
                selector.register(replacement, selectors.EVENT_READ)
                ready_socks.append(replacement)
    return request_count, sent_bytes


def hold(address: tuple[str, int], seconds: float, connections: int, data: bytes) -> Sent:
    """Open connections, send the beginning of a request on each, and wait."""
    end, socks, sent_bytes = time.monotonic() + seconds, [], 0
    for _ in range(connections):
        with suppress(OSError):
            sock = connect(address)
            socks.append(sock)
            sock.settimeout(5)
            sock.sendall(data)
            sent_bytes += len(data)
    time.sleep(max(0.0, end - time.monotonic()))
    for sock in socks:
        sock.close()
    return len(socks), sent_bytes


def pipelined_livez(address: tuple[str, int], seconds: float) -> Sent:
    """Send `GET /livez` on 40 connections without reading the responses."""
    return push(address, seconds, 40, request(b"GET /livez") * 4000, reads_responses=False)


def pipelined_predictions(address: tuple[str, int], seconds: float) -> Sent:
    """Send 50 MB of small predictions on a connection without waiting, and read the responses."""
    return push(
        address,
        seconds,
        1,
        request(b"POST /predictions/busy", b"1") * 4000,
        reads_responses=True,
        max_bytes=50 << 20,
    )


def parts(address: tuple[str, int], seconds: float) -> Sent:
    """Send forms of 100,000 parts to /invocations on 4 connections."""
    part = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    form = request(
        b"POST /invocations",
        part * 100_000 + b"--b--\r\n",
        b"Content-Type: multipart/form-data; boundary=b",
    )
    return ask(address, seconds, 4, repeat(form))


def fields(address: tuple[str, int], seconds: float) -> Sent:
    """Send forms of 500,000 fields to /invocations on 4 connections."""
    form = request(
        b"POST /invocations", b"a=1&" * 500_000, b"Content-Type: application/x-www-form-urlencoded"
    )
    return ask(address, seconds, 4, repeat(form))


def traffic(address: tuple[str, int], seconds: float) -> Sent:
    """Set the traffic of a model to 400,000 versions on 4 connections."""
    document = b'{"weights": {%b}}' % b",".join(b'"%d": 1' % number for number in range(400_000))
    return ask(
        address,
        seconds,
        4,
        repeat(request(b"PUT /models/quiet/traffic", document, b"Content-Type: application/json")),
    )


def silent_bodies(address: tuple[str, int], seconds: float) -> Sent:
    """Send 6.4 MB of a body of 6.5 MB on 200 connections, and then nothing."""
    return hold(
        address,
        seconds,
        200,
        request(b"POST /predictions/busy", bytes(6_400_000), length=6_500_000),
    )


def unread_answers(address: tuple[str, int], seconds: float) -> Sent:
    """Ask for responses of 4 MB on 100 connections, and read none."""
    return hold(address, seconds, 100, request(b"POST /predictions/busy", b"4000000"))


def unknown_model(address: tuple[str, int], seconds: float) -> Sent:
    """Ask for an unknown model on 64 connections, as fast as they are answered."""
    return ask(address, seconds, 64, repeat(request(b"POST /predictions/none", b"1")))


def full_queue(address: tuple[str, int], seconds: float) -> Sent:
    """Ask a busy model with a full queue on 256 connections, as fast as they are refused."""
    return ask(address, seconds, 256, repeat(request(b"POST /predictions/busy", b"slow")))


def many_connections(address: tuple[str, int], seconds: float) -> Sent:
    """Send half a request head on each of 3,000 connections."""
    return hold(address, seconds, 3000, b"POST /predictions/quiet HTTP/1.1\r\n" + HOST)


def websocket_pongs(address: tuple[str, int], seconds: float) -> Sent:
    """Send unsolicited pongs on 4 WebSocket connections."""
    return push(address, seconds, 4, frame(0x8A) * 10_000, reads_responses=True, head=HANDSHAKE)


def websocket_pings(address: tuple[str, int], seconds: float) -> Sent:
    """Send pings on 4 WebSocket connections, and read no pongs."""
    return push(address, seconds, 4, frame(0x89) * 10_000, reads_responses=False, head=HANDSHAKE)


def websocket_empty_fragments(address: tuple[str, int], seconds: float) -> Sent:
    """Send messages of endless empty fragments on 4 WebSocket connections."""
    return push(
        address,
        seconds,
        4,
        frame(0x00) * 10_000,
        reads_responses=True,
        head=HANDSHAKE + frame(0x02),
    )


def websocket_small_fragments(address: tuple[str, int], seconds: float) -> Sent:
    """Send messages in fragments of one byte on 4 WebSocket connections."""
    return push(
        address,
        seconds,
        4,
        frame(0x00, b"1") * 10_000,
        reads_responses=True,
        head=HANDSHAKE + frame(0x02, b"1"),
    )


def websocket_messages(address: tuple[str, int], seconds: float) -> Sent:
    """Send small messages on 4 WebSocket connections without waiting, and read the responses."""
    return push(
        address, seconds, 4, frame(0x82, b"1") * 10_000, reads_responses=True, head=HANDSHAKE
    )


def small_chunks(address: tuple[str, int], seconds: float) -> Sent:
    """Send chunked bodies in chunks of one byte on 4 connections."""
    return push(address, seconds, 4, b"1\r\n1\r\n" * 10_000, reads_responses=True, head=CHUNKED)


def trailers(address: tuple[str, int], seconds: float) -> Sent:
    """Send endless trailers after a chunked body on 4 connections."""
    return push(
        address,
        seconds,
        4,
        b"a:b\r\n" * 10_000,
        reads_responses=True,
        head=CHUNKED + b"1\r\n1\r\n0\r\n",
    )


def header_lines(address: tuple[str, int], seconds: float) -> Sent:
    """Send heads of 10,000 lines on 4 connections."""
    return ask(
        address, seconds, 4, repeat(request(b"POST /predictions/busy", b"1", *[b"a:"] * 10_000))
    )


def streams(address: tuple[str, int], seconds: float) -> Sent:
    """Ask for responses of 100,000 small parts on 4 connections, and read them."""
    return ask(address, seconds, 4, repeat(request(b"POST /predictions/busy", b"stream")))


def grpc_messages(address: tuple[str, int], seconds: float) -> Sent:
    """Send small requests for an unknown model on 4 gRPC streams, as fast as they are accepted."""
    import grpc  # only for this attack

    from tsx_runtime.grpc.protos import grpc_predict_v2_pb2

    message = grpc_predict_v2_pb2.ModelInferRequest(model_name="none").SerializeToString()
    end = time.monotonic() + seconds
    answers = [0] * 4

    def attack(number: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"{address[0]}:{address[1]}", options) as channel:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            requests = takewhile(lambda _: time.monotonic() < end, repeat(message))
            for _ in call(requests, timeout=seconds + 5):
                answers[number] += 1

    with ThreadPoolExecutor(len(answers)) as pool:
        list(pool.map(attack, range(len(answers))))
    return sum(answers), sum(answers) * len(message)


ATTACKS = {
    run.__name__.replace("_", "-"): Attack((run.__doc__ or "").strip(), role, run)
    for run, role in [
        (pipelined_livez, "inference"),
        (pipelined_predictions, "inference"),
        (parts, "inference"),
        (fields, "inference"),
        (traffic, "management"),
        (silent_bodies, "inference"),
        (unread_answers, "inference"),
        (unknown_model, "inference"),
        (full_queue, "inference"),
        (many_connections, "inference"),
        (websocket_pongs, "inference"),
        (websocket_pings, "inference"),
        (websocket_empty_fragments, "inference"),
        (websocket_small_fragments, "inference"),
        (websocket_messages, "inference"),
        (small_chunks, "inference"),
        (trailers, "inference"),
        (header_lines, "inference"),
        (streams, "inference"),
        (grpc_messages, "grpc"),
    ]
}


def main() -> None:
    name, address, seconds = sys.argv[1:]
    host, _, port = address.rpartition(":")
    if hasattr(os, "SCHED_IDLE"):
        # The attacker gets only the time that other processes on its core leave idle.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    requests, sent_bytes = ATTACKS[name].run((host, int(port)), float(seconds))
    print(f"{requests} requests, {sent_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
