"""Predictions by gRPC behind the interface of httpx.

Therefore retries, deadlines, errors and streams work as with HTTP.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx

METHOD = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions"
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Texts of gRPC's status UNAVAILABLE for a request that cannot have run.
_UNSENT_TEXTS = re.compile("failed to connect|resolution failed", re.IGNORECASE)
_HTTP_ONLY_HEADERS = {
    "host",
    "content-length",
    "content-type",
    "connection",
    "accept",
    "accept-encoding",
    "user-agent",
}


class GrpcCalls:
    """A transport that sends predictions by gRPC, and everything else by `http`.

    The gRPC connection is encrypted if the URL begins with https.
    """

    def __init__(
        self, target: str, http: Any, url: str, verify: ssl.SSLContext | bool, *, is_async: bool
    ) -> None:
        self._http, self.build_request, self._is_async = http, http.build_request, is_async
        kind: Any = grpc.aio if is_async else grpc
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        if url.startswith("https:"):
            roots = None
            # gRPC takes certificates, not an SSLContext.
            if isinstance(verify, ssl.SSLContext):
                certificates = map(ssl.DER_cert_to_PEM_cert, verify.get_ca_certs(binary_form=True))
                roots = "".join(certificates).encode() or None
            self._channel = kind.secure_channel(
                target, grpc.ssl_channel_credentials(roots), options
            )
        else:
            self._channel = kind.insecure_channel(target, options)
        self._start_call = self._channel.unary_stream(METHOD)

    async def send(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        """Send a request, and return the response before its body is read."""
        if "tsx" not in request.extensions:
            response: httpx.Response = await self._http.send(request, stream=stream)
            return response
        metadata = [
            (name, value)
            for name, value in request.headers.items()
            if name not in _HTTP_ONLY_HEADERS
        ]
        seconds = request.extensions.get("timeout", {}).get("read")
        message = _message(*request.extensions["tsx"])
        call = self._start_call(message, metadata=metadata, timeout=seconds)
        try:
            first, metadata_result = await _next(call), call.initial_metadata()
            headers = _headers(await metadata_result if self._is_async else metadata_result)
        except grpc.RpcError as error:
            return _failure(error, request)
        status = headers.get("x-http-status", "200")[:3]
        return httpx.Response(
            int(status) if status.isdecimal() else 502,
            headers=headers,
            stream=_Messages(first, call),
            request=request,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        close_result = self._channel.close()
        if self._is_async:
            await close_result
        await self._http.aclose()


class _Messages(httpx.AsyncByteStream):
    def __init__(self, first: bytes | None, call: Any) -> None:
        self._first, self._call = first, call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        message = self._first
        try:
            while message is not None:
                yield _prediction(message)
                message = await _next(self._call)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise httpx.ReadTimeout(str(error)) from error
            raise httpx.RemoteProtocolError(str(error)) from error

    async def aclose(self) -> None:
        self._call.cancel()


async def _next(call: Any) -> bytes | None:
    is_async = hasattr(call, "read")
    message = await call.read() if is_async else next(call, None)
    return None if message is grpc.aio.EOF else message


def _message(name: str, version: str | None, fields: dict[str, bytes]) -> bytes:
    """Encode a `PredictionsRequest`: 1 is the model, 2 its version, 3 a map of inputs."""
    inputs = b"".join(
        _field(3, _field(1, key.encode()) + _field(2, value)) for key, value in fields.items()
    )
    return _field(1, name.encode()) + (_field(2, version.encode()) if version else b"") + inputs


def _field(number: int, value: bytes) -> bytes:
    size_bytes, length = [], len(value)
    while length > 127:
        size_bytes.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size_bytes, length]) + value


def _prediction(message: bytes) -> bytes:
    """Decode field 1 of a `PredictionResponse`, which is the only field that a server sets."""
    end = 1
    while end < len(message) and message[end] > 127:
        end += 1
    return message[end + 1 :]


def _headers(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _failure(error: Any, request: httpx.Request) -> httpx.Response:
    code, details = error.code(), str(error.details() or error.code().name)
    message, _, kind = details.rpartition("\n")
    if not kind.startswith("org.pytorch.serve."):  # The error comes from gRPC itself.
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise httpx.ReadTimeout(details, request=request)
        if code is grpc.StatusCode.UNAVAILABLE:
            raise (httpx.ConnectError if _UNSENT_TEXTS.search(details) else httpx.ReadError)(
                details, request=request
            )
    type = kind.rpartition(".")[2]
    # TorchServe's gRPC status for an unknown model is INTERNAL.
    status = 404 if type.endswith("NotFoundException") else STATUSES.get(code, 500)
    if type == "ServiceUnavailableException":
        status = 503
    body = json.dumps({"code": status, "type": type, "message": message or kind})
    return httpx.Response(
        status, headers=_headers(error.trailing_metadata()), content=body, request=request
    )
