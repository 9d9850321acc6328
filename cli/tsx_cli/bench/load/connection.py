"""Connections of the generator over TCP, TLS and unix sockets: each sends a request and reads its
answer, with a fast path for plain, complete answers.
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
from tsx_cli.bench.load.streams import CONTENT_TYPE, FAILED, answer_of, read_stream
from tsx_cli.common.server_address import trusting

CLOSED, MALFORMED = "closed", "malformed"
_LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_SIZE = len(_LENGTHS[0])


class LoadConnection(asyncio.Protocol):
    """`since` is when the latency of its request counts from, and `sent` when it left, both 0 while
    it has none.
    """

    __slots__ = ("_answer", "gone", "load", "number", "sent", "since", "transport")

    transport: asyncio.Transport

    def __init__(self, load: Load) -> None:
        self.load = load
        self.since = self.sent = 0.0
        self.number = 0
        self.gone = False  # it is of no more use
        self._answer: _Answer | None = None  # one that comes in pieces, or is not plain

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # it is one of TCP

    def send(self, request: bytes) -> None:
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        load = self.load
        now = load.now or load.stamp()
        if self._answer is None and self.since and _plain_ok(data):
            load.accept(self, now)
            return
        if not self.since:  # no request is open
            self.drop()
            return
        if self._answer is None:
            self._answer = _Answer()
        self._take(self._answer, data, now)

    def _take(self, answer: _Answer, data: bytes, now: float) -> None:
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
        if answer.begun > 1:
            self._end_malformed(now)
        elif answer.keeps:
            self.load.answered(self, self._outcome(answer), now)
        else:
            self.close()
            self.load.answered(self, self._outcome(answer), now)

    def _outcome(self, answer: _Answer) -> str:
        """Its status; of an event stream that failed after its head that it did, and of any other
        the load keeps the tokens.
        """
        if answer.events is None or not answer.status.startswith("2"):
            return answer.status
        record = read_stream(answer.events)
        if record.failed:
            return FAILED
        self.load.streams.append(answer_of(len(self.load.accepted), self.since, record))
        return answer.status

    def connection_lost(self, error: Exception | None) -> None:
        if self.gone:
            return
        self.gone = True
        answer, now = self._answer, self.load.stamp()
        if (
            answer is not None and answer.until_end
        ):  # neither a length nor chunks: the end of the connection is the answer's
            self.load.answered(self, self._outcome(answer), now)
        else:
            self.load.broken(self, CLOSED, now)

    def drop(self) -> None:
        """What it carried has come to nothing."""
        self.end(CLOSED, self.load.stamp())

    def end(self, reason: str, now: float) -> None:
        self.close()
        self.load.broken(self, reason, now)

    def close(self) -> None:
        self.gone = True
        self.transport.abort()

    def _end_malformed(self, now: float) -> None:
        self.end(MALFORMED, now)


class _Answer:
    """One answer, as the parser finds it."""

    __slots__ = ("_ends", "begun", "complete", "events", "headed", "keeps", "now", "parser")

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.begun = 0
        self.complete = self.keeps = self.headed = False
        self._ends = False  # it says how long it is
        self.events: list[tuple[float, bytes]] | None = (
            None  # the pieces of an event stream, each with its time
        )
        self.now = 0.0  # of what the parser is given

    @property
    def status(self) -> str:
        return str(self.parser.get_status_code())

    @property
    def until_end(self) -> bool:
        return self.headed and not self._ends

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self._ends |= name.lower() in (b"content-length", b"transfer-encoding")
        if name.lower() == b"content-type" and value.lower().startswith(CONTENT_TYPE):
            self.events = []

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, body: bytes) -> None:
        if self.events is not None:
            self.events.append((self.now, body))

    def on_message_complete(self) -> None:
        if self.status.startswith("1"):  # 100 Continue and its kin: the answer is still to come
            self.begun, self.headed, self._ends = 0, False, False
            return
        self.complete = True
        self.keeps = self.parser.should_keep_alive()


def _plain_ok(data: bytes) -> bool:
    """Whether this is one whole 2xx with a length, on a connection that goes on.

    What this does not know, the parser looks at.
    """
    end = data.find(b"\r\n\r\n", 12)
    if end < 0 or not data.startswith(b"HTTP/1.1 2"):
        return False
    at = data.find(_LENGTHS[0], 12, end)
    if at < 0:
        at = data.find(_LENGTHS[1], 12, end)
        if at < 0:
            return False
    digits = data[at + _SIZE : data.find(b"\r", at + _SIZE)]
    return (
        digits.isdigit()
        and end + 4 + int(digits) == len(data)
        and data.find(b"onnection: ", 12, end) < 0
        and data.find(CONTENT_TYPE, 12, end) < 0
    )


PATIENCE = 10.0  # seconds to wait for a connection


def rendered(plan: LoadPlan) -> Sequence[bytes]:
    return [
        render(plan.protocol, plan.url, plan.model, payload, plan.token, version=plan.version)
        for payload in plan.payloads
    ]


def context_of(plan: LoadPlan, spoken: str) -> ssl.SSLContext:
    """Who is trusted, and which protocol is to be spoken.

    Raises OSError where the certificate is none.
    """
    trusted = trusting(plan.certificate)
    trusted.set_alpn_protocols([spoken])
    return trusted


def connector(plan: LoadPlan) -> Connect:
    place, loop = read_target(plan.url), asyncio.get_running_loop()
    trusted = context_of(plan, "http/1.1") if place.secure else None

    async def connect(load: Load) -> LoadClient:
        made: tuple[asyncio.BaseTransport, LoadConnection]
        if place.socket:
            opening = loop.create_unix_connection(lambda: LoadConnection(load), place.socket)
        else:
            opening = loop.create_connection(
                lambda: LoadConnection(load), place.host, place.port, ssl=trusted
            )
        try:
            made = await asyncio.wait_for(opening, PATIENCE)
        except asyncio.TimeoutError as error:
            raise OSError(f"no connection within {PATIENCE:g} seconds") from error
        raw = made[0].get_extra_info("socket")
        if not place.socket and raw is not None:
            with suppress(OSError):  # the server has closed it already
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made[1]

    return connect
