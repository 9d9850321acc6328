"""The generator's connections over TCP, TLS and Unix sockets.

Each sends a request and reads the answer. Plain, complete answers take a fast path.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress

import httptools

from tsx_cli.bench.load.loops import Connect, Load, LoadClient
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.protocols import read_target, render
from tsx_cli.bench.load.streams import CONTENT_TYPE, FAILED, read_stream, streamed_answer
from tsx_cli.common.server_address import trusting

CLOSED, MALFORMED = "closed", "malformed"
_LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_LENGTH_HEAD_BYTES = len(_LENGTHS[0])


class LoadConnection(asyncio.Protocol):
    """A connection that carries one request at a time.

    The latency of a request counts from `latency_start`, which in an open loop is its due time.
    `send_time` is the time when it was sent. Both are 0 if there is no request.
    """

    __slots__ = (
        "_answer",
        "is_closed",
        "latency_start",
        "load",
        "payload_index",
        "send_time",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, load: Load) -> None:
        self.load = load
        self.latency_start = self.send_time = 0.0
        self.payload_index = 0
        self.is_closed = False  # set as soon as the connection cannot be used any more
        self._answer: _Answer | None = None  # an answer that the parser is reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # It is a TCP transport.

    def send(self, request: bytes) -> None:
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        load = self.load
        now = load.iteration_time or load.stamp()
        if self._answer is None and self.latency_start and _plain_ok(data):
            load.accept(self, now)
            return
        if not self.latency_start:  # No request is open.
            self.drop()
            return
        if self._answer is None:
            self._answer = _Answer()
        self._feed(self._answer, data, now)

    def _feed(self, answer: _Answer, data: bytes, now: float) -> None:
        answer.piece_time = now
        try:
            answer.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            answer.complete = False
            self._end_malformed(now)
            return
        except httptools.HttpParserError:
            self._end_malformed(now)
            return
        if not answer.complete:
            return
        self._answer = None
        if answer.message_count > 1:
            self._end_malformed(now)
        elif answer.is_kept_open:
            self.load.on_answer(self, self._outcome(answer), now)
        else:
            self.close()
            self.load.on_answer(self, self._outcome(answer), now)

    def _outcome(self, answer: _Answer) -> str:
        """Return the status of an answer.

        An event stream that failed after its head has a status of its own. For any other event
        stream, the tokens are recorded.
        """
        if answer.events is None or not answer.status.startswith("2"):
            return answer.status
        record = read_stream(answer.events)
        if record.failed:
            return FAILED
        self.load.streams.append(
            streamed_answer(len(self.load.accepted), self.latency_start, record)
        )
        return answer.status

    def connection_lost(self, error: Exception | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        answer, now = self._answer, self.load.stamp()
        # An answer with neither a length nor chunks ends with the connection.
        if answer is not None and answer.ends_with_connection:
            self.load.on_answer(self, self._outcome(answer), now)
        else:
            self.load.on_broken(self, CLOSED, now)

    def drop(self) -> None:
        """Close the connection, and record an error for its request."""
        self.end(CLOSED, self.load.stamp())

    def end(self, reason: str, now: float) -> None:
        self.close()
        self.load.on_broken(self, reason, now)

    def close(self) -> None:
        self.is_closed = True
        self.transport.abort()

    def _end_malformed(self, now: float) -> None:
        self.end(MALFORMED, now)


class _Answer:
    """An answer that the parser fills in."""

    __slots__ = (
        "_has_length",
        "complete",
        "events",
        "has_head",
        "is_kept_open",
        "message_count",
        "parser",
        "piece_time",
    )

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.message_count = 0
        self.complete = self.is_kept_open = self.has_head = False
        self._has_length = False
        # The times and pieces of an event stream; None for other answers.
        self.events: list[tuple[float, bytes]] | None = None
        self.piece_time = 0.0  # arrival time of the bytes that are parsed

    @property
    def status(self) -> str:
        return str(self.parser.get_status_code())

    @property
    def ends_with_connection(self) -> bool:
        return self.has_head and not self._has_length

    def on_message_begin(self) -> None:
        self.message_count += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")
        if name.lower() == b"content-type" and value.lower().startswith(CONTENT_TYPE):
            self.events = []

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        if self.events is not None:
            self.events.append((self.piece_time, body))

    def on_message_complete(self) -> None:
        if self.status.startswith(
            "1"
        ):  # The final answer follows an interim one such as 100 Continue.
            self.message_count, self.has_head, self._has_length = 0, False, False
            return
        self.complete = True
        self.is_kept_open = self.parser.should_keep_alive()


def _plain_ok(data: bytes) -> bool:
    """Tell whether the data is one complete 2xx answer with a length.

    Its connection must stay open. The parser handles all other data.
    """
    end = data.find(b"\r\n\r\n", 12)
    if end < 0 or not data.startswith(b"HTTP/1.1 2"):
        return False
    position = data.find(_LENGTHS[0], 12, end)
    if position < 0:
        position = data.find(_LENGTHS[1], 12, end)
        if position < 0:
            return False
    digits = data[position + _LENGTH_HEAD_BYTES : data.find(b"\r", position + _LENGTH_HEAD_BYTES)]
    return (
        digits.isdigit()
        and end + 4 + int(digits) == len(data)
        and data.find(b"onnection: ", 12, end) < 0
        and data.find(CONTENT_TYPE, 12, end) < 0
    )


CONNECT_TIMEOUT_S = 10.0


def render_requests(plan: LoadPlan) -> Sequence[bytes]:
    return [
        render(plan.protocol, plan.url, plan.model, payload, plan.token, version=plan.version)
        for payload in plan.payloads
    ]


def tls_context(plan: LoadPlan, protocol: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the plan's certificate and offers one protocol.

    Raises:
        OSError: The certificate is not valid.
    """
    context = trusting(plan.certificate)
    context.set_alpn_protocols([protocol])
    return context


def connector(plan: LoadPlan) -> Connect:
    target, loop = read_target(plan.url), asyncio.get_running_loop()
    context = tls_context(plan, "http/1.1") if target.secure else None

    async def connect(load: Load) -> LoadClient:
        connection: tuple[asyncio.BaseTransport, LoadConnection]
        if target.socket:
            connecting = loop.create_unix_connection(lambda: LoadConnection(load), target.socket)
        else:
            connecting = loop.create_connection(
                lambda: LoadConnection(load), target.host, target.port, ssl=context
            )
        try:
            connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} seconds") from error
        tcp_socket = connection[0].get_extra_info("socket")
        if not target.socket and tcp_socket is not None:
            with suppress(OSError):  # The server may already have closed the connection.
                tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection[1]

    return connect
