"""uvicorn's own protocol, which also keeps the original case of header names, and answers bytes
that are not HTTP with the error JSON.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tsx_runtime.api.headers import new_request_id
from tsx_runtime.api.messages import HEADER_NAMES
from tsx_runtime.errors import BadRequest, TsxError
from tsx_runtime.http.fast_lane.response_heads import ResponseHeadCache

SHOWN = 64  # bytes of what is not HTTP that are looked at
METHODS = (b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"OPTIONS")

_TLS = b"\x16"  # the type of a handshake record
_HTTP_2 = "PRI"  # in the parser's words for the preface of HTTP/2
_METHOD = re.compile(rb"([A-Za-z-]{1,20}) \S+ HTTP/\d")

logger = logging.getLogger("tsx.http")


class CasedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also tells how the names of headers were written: see `as_sent`.

    It serves by itself where the fast lane does not support the installed uvicorn.
    """

    _received = b""  # the first bytes of what the parser got last

    def data_received(self, data: bytes) -> None:
        self._received = data[:SHOWN]
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # a TypedDict, which takes further keys all the same
        scope[HEADER_NAMES] = self._names = list[bytes]()

    def on_header(self, name: bytes, value: bytes) -> None:
        # A head that is complete has its method: trailers are discarded (RFC 9110, 6.5.1).
        if "method" not in self.scope:
            super().on_header(name, value)
            self._names.append(name)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it where the parser raises, and would send `msg` as plain text."""
        error = not_http(self._received, sys.exc_info()[1] or ValueError(msg))
        logger.warning(
            "a request of %s was refused: %s",
            self.client[0] if self.client else "a client",
            error.message,
        )
        self._give_up(error)

    def _give_up(self, error: TsxError) -> None:
        """Answer what is no complete request, unless an answer has begun, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            heads = ResponseHeadCache(self.server_state)
            self.transport.write(heads.refusal(new_request_id(), error, keep_alive=False)[1])
        self.transport.close()


def not_http(begun: bytes, error: BaseException) -> BadRequest:
    """What to answer to bytes that are no HTTP/1.1.

    `begun`: the first of them; `error`: the parser's.
    """
    reason = str(error)
    if isinstance(
        error, httptools.HttpParserCallbackError
    ):  # uvicorn reads the URL when the head is complete
        if begun.startswith(b"CONNECT "):
            return BadRequest(
                "This server is no proxy, and does not know the method CONNECT. Do not use its"
                " address as one."
            )
        reason = "the URL of the request cannot be read"
    if _HTTP_2 in reason:
        ports = "those of grpc_inference_port and grpc_management_port"
        return BadRequest(
            "This port speaks HTTP/1.1, and the client began HTTP/2. Use HTTP/1.1; the ports for"
            f" gRPC are {ports}."
        )
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        if begun.startswith(_TLS):
            return BadRequest(
                "This port speaks plain HTTP, and the client began a TLS connection. Use http://"
                " instead of https://."
            )
        if line := _METHOD.match(begun):
            use = (
                "Write it in upper case."
                if line[1].upper() in METHODS
                else "Use GET, POST, PUT or DELETE."
            )
            return BadRequest(f"The method {line[1].decode()} of the request is not known. {use}")
    return BadRequest(
        f"What the client sent is not valid HTTP/1.1: {reason[:1].lower()}{reason[1:]}."
    )
