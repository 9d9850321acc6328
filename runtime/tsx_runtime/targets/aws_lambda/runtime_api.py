"""Lambda's Runtime API on one connection: the next invocation, its answer, its error.

https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html and, for answers in parts,
runtimes-custom.html#runtimes-custom-streaming
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from typing import Any, NamedTuple

from tsx_runtime.version import __version__

VERSION = "2018-06-01"
ERROR_TYPE = "Lambda-Runtime-Function-Error-Type"
ERROR_BODY = "Lambda-Runtime-Function-Error-Body"
MAX_HEAD_BYTES = 256 << 10  # A head contains a client context and a trace.
_ASCII = dict.fromkeys(range(32), "?") | {0x7F: "?"}


class ConnectionLost(Exception):
    """The Runtime API is gone, or violates its documentation: the environment must end."""


class RequestRefused(Exception):
    """The Runtime API refused an answer or an error report."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"Lambda answered {status}: {body[:300].decode('utf-8', 'replace')}")
        self.status = status


class Invocation:
    """One invocation; the names are those of the context of AWS's client."""

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
    headers: dict[str, str]  # The names are in lower case.
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
        """Wait for the next invocation.

        Raises:
            ConnectionLost: The Runtime API is gone, or refuses.
        """
        reply = await self._call("GET", "invocation/next")
        if reply.status != 200 or "lambda-runtime-aws-request-id" not in reply.headers:
            raise ConnectionLost(
                f"Lambda answered {reply.status} to the request for the next invocation:"
                f" {reply.body[:300]!r}"
            )
        return Invocation(reply.headers, reply.body)

    async def answer(self, id: str, body: bytes) -> None:
        """Send the answer to an invocation.

        Raises:
            RequestRefused: The Runtime API refused the answer.
            ConnectionLost: The Runtime API is gone.
        """
        _check(await self._call("POST", f"invocation/{id}/response", body))

    async def fail(self, id: str, kind: str, message: str, trace: list[str]) -> None:
        """Report the failure of an invocation, with the errors of `answer`."""
        _check(
            await self._call(
                "POST",
                f"invocation/{id}/error",
                _error(kind, message, trace, id),
                {ERROR_TYPE: kind.translate(_ASCII)},
            )
        )

    async def fail_init(self, kind: str, message: str, trace: list[str]) -> None:
        """Report the failure of the start, with the errors of `answer`."""
        _check(
            await self._call(
                "POST",
                "init/error",
                _error(kind, message, trace),
                {ERROR_TYPE: kind.translate(_ASCII)},
            )
        )

    def parts(self, id: str) -> StreamedReply:
        return StreamedReply(self, id)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _call(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> ApiReply:
        defaults = (
            {"Content-Type": "application/json", "Content-Length": str(len(body))}
            if method == "POST"
            else {}
        )
        try:
            await self.begin(method, path, defaults | (headers or {}), body)
            return await self.reply()
        except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise ConnectionLost(
                f"the Runtime API at {self._address} does not answer: {error!r}"
            ) from error

    async def begin(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> None:
        """Send the head of a request, and the body if there is one; connect first if needed."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, limit=MAX_HEAD_BYTES
            )
            self._writer.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )
        lines = [
            f"{method} /{VERSION}/runtime/{path} HTTP/1.1",
            f"Host: {self._address}",
            f"User-Agent: tsx/{__version__}",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
        await self.write(
            head + body if len(body) < MAX_HEAD_BYTES else head,
            body if len(body) >= MAX_HEAD_BYTES else b"",
        )

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
        self.has_begun = False

    async def write(self, part: bytes) -> None:
        """Send a part.

        Raises:
            ConnectionLost: The Runtime API is gone.
        """
        if not part:  # An empty chunk would end the answer.
            return
        chunk = b"%x\r\n%b\r\n" % (len(part), part)
        try:
            if not self.has_begun:
                self.has_begun = True
                headers = {
                    "Content-Type": "application/vnd.awslambda.http-integration-response",
                    "Lambda-Runtime-Function-Response-Mode": "streaming",
                    "Transfer-Encoding": "chunked",
                    "Trailer": f"{ERROR_TYPE}, {ERROR_BODY}",
                }
                await self._connection.begin("POST", f"invocation/{self._id}/response", headers)
            await self._connection.write(chunk)
        except OSError as error:
            raise ConnectionLost(f"the connection to the Runtime API is lost: {error!r}") from error

    async def end(self, kind: str = "", message: str = "") -> None:
        """End the answer; with a `kind` it was interrupted, and trailers carry the error.

        Raises:
            RequestRefused: The Runtime API refused the answer.
            ConnectionLost: The Runtime API is gone.
        """
        trailers = b""
        if kind:
            details = base64.b64encode(_error(kind, message, [], self._id)).decode()
            trailers = (
                f"{ERROR_TYPE}: {kind.translate(_ASCII)}\r\n{ERROR_BODY}: {details}\r\n".encode(
                    "latin-1", "replace"
                )
            )
        try:
            await self._connection.write(b"0\r\n" + trailers + b"\r\n")
            _check(await self._connection.reply())
        except (OSError, EOFError, ValueError, IndexError) as error:
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
