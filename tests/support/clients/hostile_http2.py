"""A client of HTTP/2 that can break its rules and reads only when a test says so."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    2,
    3,
    4,
    6,
    7,
    8,
    9,
)
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4  # a parameter of SETTINGS
ENHANCE_YOUR_CALM = 11
TIMEOUT = 60.0  # seconds, on a busy machine


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes, *, indexed: bool = False) -> bytes:
    """Encode an HPACK field with a literal name and value.

    If `indexed`, the receiver also adds it to its dynamic table.
    """
    return (b"\x40" if indexed else b"\x00") + _length(name) + name + _length(value) + value


def call_headers(path: bytes, extra: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Encode the header block of a gRPC call."""
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"))
    grpc = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"".join(literal(*pair) for pair in (*fields, *grpc, *extra))


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """Encode a gRPC message: the compression flag, the length and the data."""
    return struct.pack(">BI", compressed, len(data)) + data


class HostileConnection:
    """A connection that sends arbitrary frames.

    The server's frames are read during sending and waiting, and counted in `frames`.
    """

    def __init__(self, target: str, settings: bytes = b"") -> None:
        host, _, port = target.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), TIMEOUT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames: Counter[int] = Counter()
        self.reset: Counter[int] = Counter()  # streams that the server has reset, by error code
        self.data: Counter[int] = Counter()  # bytes of DATA by stream
        self.headers: dict[int, bytes] = {}  # encoded header blocks of responses by stream
        self.finished: set[int] = set()  # streams that the server has ended
        self.max_streams: int | None = None  # the server's limit
        self.goaway: tuple[int, bytes] | None = None  # the server's error code and text
        self.closed = False
        self._buffer = b""
        self._acknowledge = False  # True until the server's settings are acknowledged
        self.send(PREFACE + frame(SETTINGS, 0, 0, settings))

    def __enter__(self) -> HostileConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes, deadline: float = TIMEOUT) -> bool:
        """Send bytes; return False if the server has closed or stopped reading."""
        if self._acknowledge:  # here, since it must not split a frame
            self._acknowledge, data = False, frame(SETTINGS, ACK, 0) + data
        view, end_time = memoryview(data), time.monotonic() + deadline
        while view and not self.closed and time.monotonic() < end_time:
            readable, writable, _ = select.select([self.sock], [self.sock], [], 1.0)
            if readable:
                self._receive()
            if writable and not self.closed:
                try:
                    view = view[self.sock.send(view[: 1 << 16]) :]
                except OSError:
                    self.closed = True
        return not view

    def read_until_closed(self, deadline: float = TIMEOUT) -> bool:
        end_time = time.monotonic() + deadline
        while not self.closed and (seconds := end_time - time.monotonic()) > 0:
            self.read(seconds)
        return self.closed

    def settle(self) -> bool:
        """Wait until the server has read everything; return False if it closes."""
        pings_before = self.frames[PING]
        self.send(frame(PING, 0, 0, b"settled?"))
        end_time = time.monotonic() + TIMEOUT
        while not self.closed and self.frames[PING] == pings_before:
            assert time.monotonic() < end_time
            self.read(1.0)
        return not self.closed

    def status(self, stream: int) -> int | None:
        """Return the gRPC status of the first stream; later streams use the HPACK table."""
        _, separator, value = self.headers.get(stream, b"").partition(b"grpc-status")
        return int(value[1 : 1 + value[0]]) if separator else None

    def wait_end(self, stream: int) -> None:
        """Wait until the server has ended the stream or the connection."""
        self.send(b"")
        end_time = time.monotonic() + TIMEOUT
        while not self.closed and stream not in self.finished:
            assert time.monotonic() < end_time
            self.read(1.0)

    def read(self, seconds: float) -> None:
        """Read the frames that arrive within that time.

        This also acknowledges the server's settings, for which it waits only a few seconds.
        """
        if select.select([self.sock], [], [], seconds)[0]:
            self._receive()
        if self._acknowledge and not self.closed:
            self.send(b"")

    def _receive(self) -> None:
        try:
            data = self.sock.recv(1 << 16)
        except OSError:
            data = b""
        self.closed = not data
        self._buffer += data
        while len(self._buffer) >= 9:
            end = 9 + int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < end:
                break
            kind, flags, stream = struct.unpack(">BBI", self._buffer[3:9])
            self._note(kind, flags, stream, self._buffer[9:end])
            self._buffer = self._buffer[end:]

    def _note(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.frames[kind] += 1
        if kind == RST_STREAM:
            self.reset[int.from_bytes(payload, "big")] += 1
            self.finished.add(stream)
        elif kind == HEADERS:
            self.headers[stream] = self.headers.get(stream, b"") + payload
        elif kind == DATA:
            self.data[stream] += len(payload)
        elif kind == GOAWAY:
            self.goaway = int.from_bytes(payload[4:8], "big"), payload[8:]
        elif kind == SETTINGS and not flags & ACK:
            settings_by_id = {
                int.from_bytes(payload[position : position + 2], "big"): payload[
                    position + 2 : position + 6
                ]
                for position in range(0, len(payload), 6)
            }
            if 3 in settings_by_id:
                self.max_streams = int.from_bytes(settings_by_id[3], "big")
            self._acknowledge = True
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            self.finished.add(stream)


def _length(text: bytes) -> bytes:
    """Encode an HPACK integer with a prefix of seven bits."""
    count = len(text)
    if count < 127:
        return bytes([count])
    out, count = bytearray([127]), count - 127
    while count >= 128:
        out.append(count & 127 | 128)
        count >>= 7
    return bytes([*out, count])
