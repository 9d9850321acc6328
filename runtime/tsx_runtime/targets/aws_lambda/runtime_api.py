"""Lambda's Runtime API on one connection, by asyncio: the next invocation, its answer whole or in
parts, its error.

https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html and, for answers in parts,
runtimes-custom.html#runtimes-custom-streaming
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tsx_runtime.version import __version__

VERSION = "2018-06-01"
ERROR_TYPE = "Lambda-Runtime-Function-Error-Type"
ERROR_BODY = "Lambda-Runtime-Function-Error-Body"
LONGEST_HEAD = 256 << 10  # bytes; a client context and a trace are in it
_ASCII = dict.fromkeys(range(32), "?") | {0x7F: "?"}


class ConnectionLost(Exception):
    """The Runtime API is gone, or does not follow its documentation: the environment has to end."""


class RequestRefused(Exception):
    """The Runtime API refused an answer or an error report."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"Lambda answered {status}: {body[:300].decode('utf-8', 'replace')}")
        self.status = status


class Invocation:
    """One invocation; the names are those of the context of AWS's own client."""

    def __init__(self, headers: dict[str, str], body: bytes) -> None:
        self.body = body
        self.aws_request_id = headers["lambda-runtime-aws-request-id"]
        self.invoked_function_arn = headers.get("lambda-runtime-invoked-function-arn", "")
        self.trace_id = headers.get("lambda-runtime-trace-id", "")
        self._deadline = int(headers.get("lambda-runtime-deadline-ms", 0)) / 1000

    def get_remaining_time_in_millis(self) -> int:
        return max(0, int((self._deadline - time.time()) * 1000))


class ApiReply(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class RuntimeApiConnection:
    """A connection of one poller, which takes an invocation, answers it and takes the next."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._host, _, port = address.partition(":")
        self._port = int(port or 80)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def next(self) -> Invocation:
        """Waits until there is an invocation. Raises ConnectionLost."""
        reply = await self._model_request("GET", "invocation/next")
        if reply.status != 200 or "lambda-runtime-aws-request-id" not in reply.headers:
            raise ConnectionLost(
                f"Lambda answered {reply.status} to the request for the next invocation:"
                f" {reply.body[:300]!r}"
            )
        return Invocation(reply.headers, reply.body)

    async def answer(self, id: str, body: bytes) -> None:
        """Raises RequestRefused, ConnectionLost."""
        _check(await self._model_request("POST", f"invocation/{id}/response", body))

    async def fail(self, id: str, kind: str, message: str, trace: list[str]) -> None:
        """Report the error of an invocation, or without an `id` that of the start."""
        path = f"invocation/{id}/error" if id else "init/error"
        report, headers = _error(kind, message, trace, id), {ERROR_TYPE: kind.translate(_ASCII)}
        _check(await self._model_request("POST", path, report, headers))

    def parts(self, id: str) -> StreamedReply:
        return StreamedReply(self, id)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _model_request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> ApiReply:
        defaults = (
            {"Content-Type": "application/json", "Content-Length": str(len(body))}
            if method == "POST"
            else {}
        )
        with _or_lost():
            await self.begin(method, path, defaults | (headers or {}), body)
            return await self.reply()

    async def begin(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, limit=LONGEST_HEAD
            )
        lines = [
            f"{method} /{VERSION}/runtime/{path} HTTP/1.1",
            f"Host: {self._address}",
            f"User-Agent: tsx/{__version__}",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
        await self.write(head, body)

    async def write(self, *pieces: bytes) -> None:
        assert self._writer is not None
        self._writer.writelines(pieces)
        await self._writer.drain()

    async def reply(self) -> ApiReply:
        assert self._reader is not None
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        pairs = [line.partition(":") for line in head[1:] if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        body = await self._body(headers)
        if headers.get("connection", "").lower() == "close":
            self.close()
            self._writer = None
        return ApiReply(status, headers, body)

    async def _body(self, headers: dict[str, str]) -> bytes:
        assert self._reader is not None
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await self._reader.readexactly(int(headers.get("content-length", 0)))
        parts = []
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        while await self._reader.readuntil(b"\r\n") != b"\r\n":
            pass
        return b"".join(parts)


class StreamedReply:
    """A streamed answer. Nothing is sent before its first part."""

    def __init__(self, connection: RuntimeApiConnection, id: str) -> None:
        self._connection = connection
        self._id = id
        self.begun = False

    async def write(self, part: bytes) -> None:
        if not part:  # an empty chunk would end the answer
            return
        chunk = b"%x\r\n%b\r\n" % (len(part), part)
        with _or_lost():
            if not self.begun:
                self.begun = True
                headers = {
                    "Content-Type": "application/vnd.awslambda.http-integration-response",
                    "Lambda-Runtime-Function-Response-Mode": "streaming",
                    "Transfer-Encoding": "chunked",
                    "Trailer": f"{ERROR_TYPE}, {ERROR_BODY}",
                }
                await self._connection.begin("POST", f"invocation/{self._id}/response", headers)
            await self._connection.write(chunk)

    async def end(self, kind: str = "", message: str = "") -> None:
        """With a `kind` the answer was interrupted, and the trailers carry the error."""
        trailers = b""
        if kind:
            details = base64.b64encode(_error(kind, message, [], self._id)).decode()
            trailers = (
                f"{ERROR_TYPE}: {kind.translate(_ASCII)}\r\n{ERROR_BODY}: {details}\r\n".encode(
                    "latin-1", "replace"
                )
            )
        with _or_lost():
            await self._connection.write(b"0\r\n" + trailers + b"\r\n")
            _check(await self._connection.reply())


@contextmanager
def _or_lost() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
        raise ConnectionLost(f"the connection to the Runtime API is lost: {error!r}") from error


def _check(reply: ApiReply) -> None:
    if reply.status >= 300:
        raise RequestRefused(reply.status, reply.body)


def _error(kind: str, message: str, trace: list[str], id: str = "") -> bytes:
    report: dict[str, Any] = {
        "errorMessage": message,
        "errorType": kind,
        "requestId": id,
        "stackTrace": trace,
    }
    return json.dumps(report).encode()
