"""uvicorn's protocol, extended by original header names and JSON errors for invalid HTTP."""

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

INSPECTED_BYTES = 64  # bytes that are stored for the error if they are not HTTP
METHODS = (b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"OPTIONS")

_TLS = b"\x16"  # the type of a TLS handshake record
_HTTP_2 = "PRI"  # part of the parser's error for the preface of HTTP/2
_METHOD = re.compile(rb"([A-Za-z-]{1,20}) \S+ HTTP/\d")

logger = logging.getLogger("tsx.http")


class CasedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also stores the case of header names (see `cased_headers`).

    The server uses it in place of `FastLane` if that does not support the installed uvicorn.
    """

    _received = b""  # the first bytes of the parser's last input

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and remember the first ones for an error."""
        self._received = data[:INSPECTED_BYTES]
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # The cast allows a further key, which a TypedDict accepts at run time.
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[HEADER_NAMES] = self._names = list[bytes]()

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head, this would be a trailer (RFC 9110, section 6.5.1), which is dropped.
        if "method" not in self.scope:
            super().on_header(name, value)
            self._names.append(name)

    def send_400_response(self, msg: str) -> None:
        """Send the error JSON after an error of the parser; uvicorn sends `msg` as plain text."""
        error = describe_invalid_http(self._received, sys.exc_info()[1] or ValueError(msg))
        logger.warning(
            "a request of %s was refused: %s",
            self.client[0] if self.client else "a client",
            error.message,
        )
        self._give_up(error)

    def _give_up(self, error: TsxError) -> None:
        """Send an error for an incomplete request, unless its response has begun, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            heads = ResponseHeadCache(self.server_state)
            self.transport.write(heads.refusal(new_request_id(), error, keep_alive=False)[1])
        self.transport.close()


def describe_invalid_http(first_bytes: bytes, error: BaseException) -> BadRequest:
    """Return the error for bytes that are not HTTP/1.1.

    Args:
        first_bytes: The beginning of the bytes.
        error: The error of the parser.
    """
    reason = str(error)
    # uvicorn's callback raises this if the URL of a complete head is invalid.
    if isinstance(error, httptools.HttpParserCallbackError):
        if first_bytes.startswith(b"CONNECT "):
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
        if first_bytes.startswith(_TLS):
            return BadRequest(
                "This port speaks plain HTTP, and the client began a TLS connection. Use http://"
                " instead of https://."
            )
        if line := _METHOD.match(first_bytes):
            advice = (
                "Write it in upper case."
                if line[1].upper() in METHODS
                else "Use GET, POST, PUT or DELETE."
            )
            return BadRequest(
                f"The method {line[1].decode()} of the request is not known. {advice}"
            )
    return BadRequest(
        f"What the client sent is not valid HTTP/1.1: {reason[:1].lower()}{reason[1:]}."
    )
