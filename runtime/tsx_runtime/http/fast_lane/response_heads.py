"""The cache of the fast lane's response heads, by status and header block."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING

from tsx_runtime.api import errors
from tsx_runtime.api.access.origins import missing_cors_headers
from tsx_runtime.api.headers import Pair, answer_headers, check_status, handler_headers
from tsx_runtime.errors import TsxError
from tsx_runtime.wire import JSON_HEADER

if TYPE_CHECKING:
    from uvicorn.server import ServerState

CLOSE = b"connection: close\r\n"
MAX_CACHED = 256  # cached heads, and cached tails of heads
MAX_CACHED_BYTES = 4096  # largest error whose conversion is cached


@lru_cache(maxsize=64)
def _convert_error(convert: Callable[[bytes], bytes], body: bytes) -> bytes:
    return convert(body)


class ResponseHeadCache:
    """A cache of response heads, which begin with uvicorn's headers such as the date.

    uvicorn renews its headers each second, and then the cache is cleared.
    """

    def __init__(
        self, server_state: ServerState, cors: tuple[Pair, ...] = (), *, is_confined: bool = False
    ) -> None:
        """Create a cache; responses get the headers of `cors` that they lack.

        `answer_headers` describes `is_confined`.
        """
        self._is_confined = is_confined
        self.server_state = server_state
        self.cors = cors
        # Cached heads by status, and by a handler's header block or an error's headers.
        self._entries: dict[tuple[int, bytes | tuple[Pair, ...]], tuple[bytes, bytes]] = {}
        self.renew()

    def renew(self) -> None:
        """Clear the cache, because uvicorn has renewed its headers."""
        self.default = self.server_state.default_headers
        self._entries.clear()
        # Plain responses have status 200, and no header or only the content type of JSON.
        self.plain_start, head_end = _split_around_request_id(
            self.default, 200, self._pairs(200, b"")
        )
        self.tails = TailCache(head_end)
        self.json_tails = TailCache(
            _split_around_request_id(self.default, 200, self._pairs(200, JSON_HEADER))[1]
        )

    def split_around_request_id(self, status: int, block: bytes) -> tuple[bytes, bytes]:
        """Return the parts of a response's head before the request id and after its line.

        Raises:
            PredictionFailed: The status or the headers of the handler are invalid.
        """
        if (
            self.server_state.default_headers is not self.default
        ):  # uvicorn has renewed its headers.
            self.renew()
        entry = self._entries.get((status, block))
        if entry is None:
            check_status(status)
            entry = self._store(status, block, self._pairs(status, block))
        return entry

    def refusal(
        self,
        request_id: bytes,
        error: TsxError,
        keep_alive: bool,
        convert: Callable[[bytes], bytes] | None = None,
        extra_lines: bytes = b"\r\n",
    ) -> tuple[int, bytes]:
        """Return the status and the bytes of a response with an error.

        Args:
            request_id: The id of the request.
            error: The error.
            keep_alive: Whether the connection stays open.
            convert: A function that converts the error JSON for another protocol.
            extra_lines: The end of the request id's line, and further header lines.
        """
        status, pairs, body = errors.error_response(error)
        if convert is not None:
            body = _convert_error(convert, body) if len(body) <= MAX_CACHED_BYTES else convert(body)
        if self.server_state.default_headers is not self.default:
            self.renew()
        head_start, head_end = self._entries.get((status, pairs)) or self._store(
            status, pairs, (*pairs, *self.cors)
        )
        close = b"" if keep_alive else CLOSE
        return status, b"%b%b%b%bcontent-length: %d\r\n%b\r\n%b" % (
            head_start,
            request_id,
            extra_lines,
            head_end,
            len(body),
            close,
            body,
        )

    def _store(
        self, status: int, key: bytes | tuple[Pair, ...], pairs: tuple[Pair, ...]
    ) -> tuple[bytes, bytes]:
        if len(self._entries) >= MAX_CACHED:
            self._entries.clear()
        self._entries[status, key] = entry = _split_around_request_id(self.default, status, pairs)
        return entry

    def _pairs(self, status: int, block: bytes) -> tuple[Pair, ...]:
        pairs = answer_headers(status, handler_headers(block), is_confined=self._is_confined)
        return (*pairs, *missing_cors_headers(pairs, self.cors))


class TailCache(dict[int, bytes]):
    """The parts of plain response heads after the request id's line, by the length of the body."""

    def __init__(self, start: bytes) -> None:
        super().__init__()
        self._start = start

    def __missing__(self, length: int) -> bytes:
        line = b"%bcontent-length: %d\r\n\r\n" % (self._start, length)
        if len(self) < MAX_CACHED:
            self[length] = line
        return line


def _split_around_request_id(
    default: list[Pair], status: int, pairs: tuple[Pair, ...]
) -> tuple[bytes, bytes]:
    head_start = b"".join(
        [status_line(status), *(b"%b: %b\r\n" % pair for pair in default), b"x-request-id: "]
    )
    return head_start, b"".join([b"%b: %b\r\n" % pair for pair in pairs])


def status_line(status: int) -> bytes:
    """Return the first line of a response."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())
