"""The generator's connections over TCP, TLS and Unix sockets.

Each sends a request and reads its answer, with a fast path for plain, complete answers.
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

    `since` is the time from which the latency of its request counts, and `sent` the time of its
    sending. Both are 0 without a request.
    """

    __slots__ = ("_answer", "gone", "load", "number", "sent", "since", "transport")

    transport: asyncio.Transport

    def __init__(self, load: Load) -> None:
        self.load = load
        self.since = self.sent = 0.0
        self.number = 0
        self.gone = False  # whether the connection is useless
        self._answer: _Answer | None = None  # an incomplete answer, or one that is not plain

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # It is a TCP transport.

    def send(self, request: bytes) -> None:
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        load = self.load
        now = load.now or load.stamp()
        if self._answer is None and self.since and _plain_ok(data):
            load.accept(self, now)
            return
        if not self.since:  # No request is open.
            self.drop()
            return
        if self._answer is None:
            self._answer = _Answer()
        self._feed(self._answer, data, now)

    def _feed(self, answer: _Answer, data: bytes, now: float) -> None:
        answer.now = now
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

        An event stream that failed after its head has a status of its own. The load records the
        tokens of any other stream.
        """
        if answer.events is None or not answer.status.startswith("2"):
            return answer.status
        record = read_stream(answer.events)
        if record.failed:
            return FAILED
        self.load.streams.append(streamed_answer(len(self.load.accepted), self.since, record))
        return answer.status

    def connection_lost(self, error: Exception | None) -> None:
        if self.gone:
            return
        self.gone = True
        answer, now = self._answer, self.load.stamp()
        # Without a length or chunks, the end of the connection ends the answer.
        if answer is not None and answer.until_end:
            self.load.on_answer(self, self._outcome(answer), now)
        else:
            self.load.on_broken(self, CLOSED, now)

    def drop(self) -> None:
        """End the connection, with an error of its request."""
        self.end(CLOSED, self.load.stamp())

    def end(self, reason: str, now: float) -> None:
        self.close()
        self.load.on_broken(self, reason, now)

    def close(self) -> None:
        self.gone = True
        self.transport.abort()

    def _end_malformed(self, now: float) -> None:
        self.end(MALFORMED, now)


class _Answer:
    """An answer, filled in by the parser."""

    __slots__ = (
        "_has_length",
        "complete",
        "events",
        "has_head",
        "is_kept_open",
        "message_count",
        "now",
        "parser",
    )

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.message_count = 0
        self.complete = self.is_kept_open = self.has_head = False
        self._has_length = False
        # The pieces of an event stream with their times.
        self.events: list[tuple[float, bytes]] | None = None
        self.now = 0.0  # the time of the parsed bytes

    @property
    def status(self) -> str:
        return str(self.parser.get_status_code())

    @property
    def until_end(self) -> bool:
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
            self.events.append((self.now, body))

    def on_message_complete(self) -> None:
        if self.status.startswith("1"):  # The final answer follows, for example after 100 Continue.
            self.message_count, self.has_head, self._has_length = 0, False, False
            return
        self.complete = True
        self.is_kept_open = self.parser.should_keep_alive()


def _plain_ok(data: bytes) -> bool:
    """Tell whether the data is one complete 2xx with a length, on a connection that goes on.

    The parser handles all other data.
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
            opening = loop.create_unix_connection(lambda: LoadConnection(load), target.socket)
        else:
            opening = loop.create_connection(
                lambda: LoadConnection(load), target.host, target.port, ssl=context
            )
        try:
            connection = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} seconds") from error
        raw = connection[0].get_extra_info("socket")
        if not target.socket and raw is not None:
            with suppress(OSError):  # The server has closed it already.
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection[1]

    return connect
