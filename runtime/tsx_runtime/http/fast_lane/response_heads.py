"""The cache of the fast lane's response heads, as bytes by status and header block."""

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
MAX_REMEMBERED = 256  # pairs of status and header block
MAX_REMEMBERED_BYTES = 4096  # size of an error whose form for another protocol is remembered


@lru_cache(maxsize=64)
def _convert_error(form: Callable[[bytes], bytes], body: bytes) -> bytes:
    return form(body)


class ResponseHeadCache:
    """A cache of response heads, which begin with uvicorn's headers such as the date.

    uvicorn renews these each second, and with them the cache.
    """

    def __init__(
        self, server_state: ServerState, cors: tuple[Pair, ...] = (), *, confined: bool = False
    ) -> None:
        """Create a cache whose responses get the headers `cors`, unless they have them.

        `answer_headers` describes `confined`.
        """
        self._confined = confined
        self.server_state = server_state
        self.cors = cors
        # Known heads by status, and by the block of a handler or the pairs of an error.
        self._known: dict[tuple[int, bytes | tuple[Pair, ...]], tuple[bytes, bytes]] = {}
        self.renew()

    def renew(self) -> None:
        """Forget all heads, because uvicorn has renewed its headers."""
        self.default = self.server_state.default_headers
        self._known.clear()
        # Plain responses have status 200 and no header, or the one of JSON.
        self.before, after = _split_around_request_id(self.default, 200, self._pairs(200, b""))
        self.tails = TailCache(after)
        self.json_tails = TailCache(
            _split_around_request_id(self.default, 200, self._pairs(200, JSON_HEADER))[1]
        )

    def split_around_request_id(self, status: int, block: bytes) -> tuple[bytes, bytes]:
        """Return the head of a response before the request id, and after it.

        Raises:
            PredictionFailed: The status or the headers of the handler are invalid.
        """
        if self.server_state.default_headers is not self.default:  # A new second has begun.
            self.renew()
        known = self._known.get((status, block))
        if known is None:
            check_status(status)
            known = self._remember(status, block, self._pairs(status, block))
        return known

    def refusal(
        self,
        request_id: bytes,
        error: TsxError,
        keep_alive: bool,
        form: Callable[[bytes], bytes] | None = None,
        added: bytes = b"",
    ) -> tuple[int, bytes]:
        """Return the status and the bytes of a response with an error.

        Args:
            request_id: The id of the request.
            error: The error.
            keep_alive: Whether the connection stays open.
            form: A function that turns the error JSON into that of another protocol.
            added: Further lines of the head.
        """
        status, pairs, body = errors.error_response(error)
        if form is not None:
            body = _convert_error(form, body) if len(body) <= MAX_REMEMBERED_BYTES else form(body)
        if self.server_state.default_headers is not self.default:
            self.renew()
        before, after = self._known.get((status, pairs)) or self._remember(
            status, pairs, (*pairs, *self.cors)
        )
        close = b"" if keep_alive else CLOSE
        return status, b"%b%b%b%bcontent-length: %d\r\n%b\r\n%b" % (
            before,
            request_id,
            after,
            added,
            len(body),
            close,
            body,
        )

    def _remember(
        self, status: int, key: bytes | tuple[Pair, ...], pairs: tuple[Pair, ...]
    ) -> tuple[bytes, bytes]:
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[status, key] = known = _split_around_request_id(self.default, status, pairs)
        return known

    def _pairs(self, status: int, block: bytes) -> tuple[Pair, ...]:
        pairs = answer_headers(status, handler_headers(block), confined=self._confined)
        return (*pairs, *missing_cors_headers(pairs, self.cors))


class TailCache(dict[int, bytes]):
    """The ends of plain response heads behind the request id, by the length of the body."""

    def __init__(self, start: bytes) -> None:
        super().__init__()
        self._start = start

    def __missing__(self, length: int) -> bytes:
        line = b"%bcontent-length: %d\r\n\r\n" % (self._start, length)
        if len(self) < MAX_REMEMBERED:
            self[length] = line
        return line


def _split_around_request_id(
    default: list[Pair], status: int, pairs: tuple[Pair, ...]
) -> tuple[bytes, bytes]:
    before = b"".join(
        [status_line(status), *(b"%b: %b\r\n" % pair for pair in default), b"x-request-id: "]
    )
    return before, b"\r\n" + b"".join([b"%b: %b\r\n" % pair for pair in pairs])


def status_line(status: int) -> bytes:
    """Return the first line of a response."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())
