"""HTTP as bytes: a connection that sends arbitrary pieces and reads the responses."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

TIMEOUT = 120.0  # seconds, on a busy machine
MASKED_HEADERS = {b"date": b"-", b"x-request-id": b"-"}


@dataclass
class Answer:
    line: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = True  # False if the connection ended within the response

    @property
    def status(self) -> int:
        return int(self.line.split(b" ")[1])

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


class RawConnection:
    """A connection from the address `source`; `turn` is called after each piece."""

    def __init__(
        self, address: tuple[str, int], turn: Callable[[], object] = lambda: None, source: str = ""
    ) -> None:
        self.sock = socket.create_connection(address, TIMEOUT, (source, 0) if source else None)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._turn = turn
        self._buffer = b""
        self.ended = False

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *pieces: bytes) -> None:
        """Send pieces; if the server has closed, only the next read reports it."""
        for piece in pieces:
            try:
                self.sock.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                return
            self._turn()

    def read_all(self) -> bytes:
        """Read until the server closes."""
        while self._more():
            pass
        return self._buffer

    def answer(self, method: bytes = b"POST") -> Answer | None:
        """Return the next response to a request of this method, or None if there is none."""
        while b"\r\n\r\n" not in self._buffer:
            if not self._more():
                return Answer(self._buffer, complete=False) if self._buffer else None
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        pairs = [entry.partition(b": ")[::2] for entry in lines]
        answer = Answer(line, [(name, MASKED_HEADERS.get(name, value)) for name, value in pairs])
        if method == b"HEAD" or answer.status < 200 or answer.status in (204, 304):
            return answer
        if answer.header(b"transfer-encoding") == b"chunked":
            self._read_chunks(answer)
        elif (length := answer.header(b"content-length")) is not None:
            answer.body = self._take(int(length), answer)
        else:
            answer.body, self._buffer = self.read_all(), b""
        return answer

    def _read_chunks(self, answer: Answer) -> None:
        while answer.complete:
            while b"\r\n" not in self._buffer:
                if not self._more():
                    answer.complete = False
                    return
            size, _, self._buffer = self._buffer.partition(b"\r\n")
            answer.body += self._take(int(size, 16), answer)
            self._take(2, answer)
            if size == b"0":
                return

    def _take(self, count: int, answer: Answer) -> bytes:
        while len(self._buffer) < count:
            if not self._more():
                answer.complete = False
                break
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def _more(self) -> bool:
        try:
            data = b"" if self.ended else self.sock.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        self._buffer += data
        self.ended = not data
        return bool(data)


def request(
    method: bytes = b"POST",
    target: bytes = b"/",
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes | None = None,
    version: bytes = b"1.1",
) -> bytes:
    """Encode a request, which has a Content-Length only if there is a body."""
    lines = [
        b"%b %b HTTP/%b" % (method, target, version),
        b"Host: 127.0.0.1",
        *(b"%b: %b" % pair for pair in headers),
    ]
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


def chunked(chunks: Iterable[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """Encode a chunked body."""
    return (
        b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks if chunk)
        + b"0\r\n%b\r\n" % trailer
    )
