"""Predictions by gRPC, as transports of httpx: retries, deadlines, errors and streams are those of HTTP. All but predictions stays HTTP."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import httpx

METHOD = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions"
PREFIX = "/predictions/"
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
_NOT_SENT = re.compile("failed to connect|resolution failed", re.IGNORECASE)  # in its words for UNAVAILABLE; else it may have run
_OWN = {"host", "content-length", "content-type", "connection", "accept", "accept-encoding", "user-agent"}  # of HTTP


def over(
    target: str, transport: Any, url: str, verify: ssl.SSLContext | bool, *, is_async: bool
) -> httpx.BaseTransport | httpx.AsyncBaseTransport:
    """`transport`: of all that is no prediction. Encrypted where the URL is https."""
    kind: Any = grpc.aio if is_async else grpc
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    if url.startswith("https:"):
        roots = None
        if isinstance(verify, ssl.SSLContext):  # gRPC takes files of certificates, and no context
            roots = "".join(ssl.DER_cert_to_PEM_cert(each) for each in verify.get_ca_certs(binary_form=True)).encode() or None
        channel = kind.secure_channel(target, grpc.ssl_channel_credentials(roots), options)
    else:
        channel = kind.insecure_channel(target, options)
    if is_async:
        return AsyncGrpcTransport(channel, transport or httpx.AsyncHTTPTransport(verify=verify))
    return GrpcTransport(channel, transport or httpx.HTTPTransport(verify=verify))


class GrpcTransport(httpx.BaseTransport):
    def __init__(self, channel: grpc.Channel, other: httpx.BaseTransport) -> None:
        self._channel, self._other = channel, other
        self._begin: Any = channel.unary_stream(METHOD)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.startswith(PREFIX):
            return self._other.handle_request(request)
        call = self._begin(_message(request, request.read()), **_options(request))
        try:
            first = next(call, None)
        except grpc.RpcError as error:
            return _failure(error, error.trailing_metadata(), request)
        return httpx.Response(
            _status(call.initial_metadata()), headers=_headers(call.initial_metadata()), stream=_Pieces(first, call), request=request
        )

    def close(self) -> None:
        self._channel.close()
        self._other.close()


class AsyncGrpcTransport(httpx.AsyncBaseTransport):
    def __init__(self, channel: Any, other: httpx.AsyncBaseTransport) -> None:
        self._channel, self._other = channel, other
        self._begin = channel.unary_stream(METHOD)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.startswith(PREFIX):
            return await self._other.handle_async_request(request)
        call = self._begin(_message(request, await request.aread()), **_options(request))
        try:
            first = await call.read()
            initial = await call.initial_metadata()
        except grpc.RpcError as error:
            return _failure(error, error.trailing_metadata(), request)
        stream = _AsyncPieces(None if first is grpc.aio.EOF else first, call)
        return httpx.Response(_status(initial), headers=_headers(initial), stream=stream, request=request)

    async def aclose(self) -> None:
        await self._channel.close()
        await self._other.aclose()


class _Pieces(httpx.SyncByteStream):
    def __init__(self, first: bytes | None, call: Any) -> None:
        self._first, self._call = first, call

    def __iter__(self) -> Iterator[bytes]:
        try:
            if self._first is not None:
                yield _prediction(self._first)
                yield from map(_prediction, self._call)
        except grpc.RpcError as error:
            raise httpx.RemoteProtocolError(str(error)) from error

    def close(self) -> None:
        self._call.cancel()


class _AsyncPieces(httpx.AsyncByteStream):
    def __init__(self, first: bytes | None, call: Any) -> None:
        self._first, self._call = first, call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        message: Any = self._first
        try:
            while message is not None and message is not grpc.aio.EOF:
                yield _prediction(message)
                message = await self._call.read()
        except grpc.RpcError as error:
            raise httpx.RemoteProtocolError(str(error)) from error

    async def aclose(self) -> None:
        self._call.cancel()


def _message(request: httpx.Request, body: bytes) -> bytes:
    """A `PredictionsRequest`: the model's name is field 1, its version field 2, and field 3 a map of names to bytes."""
    name, _, version = request.url.raw_path.decode()[len(PREFIX) :].partition("?")[0].partition("/")
    fields: Mapping[str, bytes] = request.extensions.get("tsx_fields") or {"body": body}
    inputs = b"".join(_field(3, _field(1, key.encode()) + _field(2, value)) for key, value in fields.items())
    return _field(1, unquote(name).encode()) + (_field(2, unquote(version).encode()) if version else b"") + inputs


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _prediction(message: bytes) -> bytes:
    """Field 1 of a `PredictionResponse`, in which the others are not set."""
    if not message:
        return b""
    at = 1
    while message[at] > 127:
        at += 1
    size = sum((byte & 127) << 7 * place for place, byte in enumerate(message[1 : at + 1]))
    return message[at + 1 : at + 1 + size]


def _options(request: httpx.Request) -> dict[str, Any]:
    metadata = [(name, value) for name, value in request.headers.items() if name not in _OWN]
    return {"metadata": metadata, "timeout": (request.extensions.get("timeout") or {}).get("read")}


def _headers(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _status(metadata: Any) -> int:
    return int(_headers(metadata).get("x-http-status", 200))


def _failure(error: Any, trailing: Any, request: httpx.Request) -> httpx.Response:
    headers, code = _headers(trailing), error.code()
    message, _, kind = str(error.details() or code.name).rpartition("\n")
    if not kind.startswith("org.pytorch.serve."):  # the server has not answered
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise httpx.ReadTimeout(str(error.details()), request=request)
        if code is grpc.StatusCode.UNAVAILABLE:
            why = str(error.details())
            raise (httpx.ConnectError if _NOT_SENT.search(why) else httpx.ReadError)(why, request=request)
    type = kind.rpartition(".")[2]
    status = 404 if type.endswith("NotFoundException") else STATUSES.get(code, 500)  # TorchServe's own status is INTERNAL
    body = json.dumps({"code": status, "type": type, "message": message or kind})
    return httpx.Response(status, headers=headers, content=body, request=request)
