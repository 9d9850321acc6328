"""The heads of the fast lane's answers as bytes, cached by status and header block."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING

from tsx_runtime.api import errors
from tsx_runtime.api.access.origins import missing
from tsx_runtime.api.headers import Pair, answer_headers, check_status, handler_headers
from tsx_runtime.errors import TsxError
from tsx_runtime.wire import JSON_HEADER

if TYPE_CHECKING:
    from uvicorn.server import ServerState

CLOSE = b"connection: close\r\n"
REMEMBERED = 256  # pairs of status and header block
LONGEST = 4096  # bytes of an error whose form for another protocol is remembered


@lru_cache(maxsize=64)
def _formed(form: Callable[[bytes], bytes], body: bytes) -> bytes:
    return form(body)


class ResponseHeadCache:
    """Writes what uvicorn would: its own headers first (the date, renewed each second), then the
    answer's.
    """

    def __init__(
        self, server_state: ServerState, cors: tuple[Pair, ...] = (), *, confined: bool = False
    ) -> None:
        """Keep `cors` for answers that do not have its headers; `confined`: see
        `answer_headers`.
        """
        self._confined = confined
        self.server_state = server_state
        self.cors = cors
        self._known: dict[
            tuple[int, bytes | tuple[Pair, ...]], tuple[bytes, bytes]
        ] = {}  # by handlers' blocks, and by errors' pairs
        self.renew()

    def renew(self) -> None:
        """uvicorn has rewritten its own headers."""
        self.default = self.server_state.default_headers
        self._known.clear()
        # Of plain answers: 200, and no header of their own, or the one of JSON.
        self.before, behind = _split_around_request_id(self.default, 200, self._pairs(200, b""))
        self.tails = TailCache(behind)
        self.json_tails = TailCache(
            _split_around_request_id(self.default, 200, self._pairs(200, JSON_HEADER))[1]
        )

    def split_around_request_id(self, status: int, block: bytes) -> tuple[bytes, bytes]:
        """The head of an answer before the request id, and after it.

        Raises `PredictionFailed` as `handler_headers` does.
        """
        if self.server_state.default_headers is not self.default:  # a new second
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
        """Its status, and an error as the whole of an answer.

        `form`: of another protocol; `added`: further lines of its head.
        """
        status, pairs, body = errors.fault(error)
        if form is not None:
            body = _formed(form, body) if len(body) <= LONGEST else form(body)
        if self.server_state.default_headers is not self.default:
            self.renew()
        before, behind = self._known.get((status, pairs)) or self._remember(
            status, pairs, (*pairs, *self.cors)
        )
        close = b"" if keep_alive else CLOSE
        return status, b"%b%b%b%bcontent-length: %d\r\n%b\r\n%b" % (
            before,
            request_id,
            behind,
            added,
            len(body),
            close,
            body,
        )

    def _remember(
        self, status: int, key: bytes | tuple[Pair, ...], pairs: tuple[Pair, ...]
    ) -> tuple[bytes, bytes]:
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[status, key] = known = _split_around_request_id(self.default, status, pairs)
        return known

    def _pairs(self, status: int, block: bytes) -> tuple[Pair, ...]:
        pairs = answer_headers(status, handler_headers(block), confined=self._confined)
        return (*pairs, *missing(pairs, self.cors))


class TailCache(dict[int, bytes]):
    """The head of a plain answer after the request id, by the length of its body."""

    def __init__(self, start: bytes) -> None:
        super().__init__()
        self._start = start

    def __missing__(self, length: int) -> bytes:
        line = b"%bcontent-length: %d\r\n\r\n" % (self._start, length)
        if len(self) < REMEMBERED:
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
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())
