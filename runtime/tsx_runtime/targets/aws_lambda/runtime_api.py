"""A connection to Lambda's Runtime API: the next invocation, its answer, its error.

See https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html. For streamed answers, see
runtimes-custom.html#runtimes-custom-streaming there.
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
MAX_HEAD_BYTES = 256 << 10  # large, because a head may have a client context and a trace
_NO_CONTROLS = dict.fromkeys(range(32), "?") | {0x7F: "?"}  # table for `str.translate`


class ConnectionLost(Exception):
    """The Runtime API is lost, or its reply is invalid, so the environment must end."""


class RequestRefused(Exception):
    """The Runtime API has refused an answer or an error report."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"Lambda answered {status}: {body[:300].decode('utf-8', 'replace')}")
        self.status = status


class Invocation:
    """One invocation, with the same names as the context of AWS's client."""

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
    headers: dict[str, str]  # keys in lower case
    body: bytes


class RuntimeApiConnection:
    """The connection of one poller, which handles one invocation after the other."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._host, _, port = address.partition(":")
        self._port = int(port or 80)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def next(self) -> Invocation:
        """Wait for the next invocation.

        Raises:
            ConnectionLost: The Runtime API is lost, or returns an error.
        """
        reply = await self._call("GET", "invocation/next")
        if reply.status != 200 or "lambda-runtime-aws-request-id" not in reply.headers:
            raise ConnectionLost(
                f"Lambda answered {reply.status} to the request for the next invocation:"
                f" {reply.body[:300]!r}"
            )
        return Invocation(reply.headers, reply.body)

    async def answer(self, request_id: str, body: bytes) -> None:
        """Send the answer to an invocation.

        Raises:
            RequestRefused: The Runtime API refused the answer.
            ConnectionLost: The Runtime API is lost.
        """
        _check(await self._call("POST", f"invocation/{request_id}/response", body))

    async def report_failure(
        self, request_id: str, kind: str, message: str, trace: list[str]
    ) -> None:
        """Report the failure of an invocation; raise the same errors as `answer`."""
        _check(
            await self._call(
                "POST",
                f"invocation/{request_id}/error",
                _error(kind, message, trace, request_id),
                {ERROR_TYPE: kind.translate(_NO_CONTROLS)},
            )
        )

    async def report_init_failure(self, kind: str, message: str, trace: list[str]) -> None:
        """Report that the function could not start; raise the same errors as `answer`."""
        _check(
            await self._call(
                "POST",
                "init/error",
                _error(kind, message, trace),
                {ERROR_TYPE: kind.translate(_NO_CONTROLS)},
            )
        )

    def start_stream(self, request_id: str) -> StreamedReply:
        return StreamedReply(self, request_id)

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
            await self.send_request(method, path, defaults | (headers or {}), body)
            return await self.reply()
        except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise ConnectionLost(
                f"the Runtime API at {self._address} does not answer: {error!r}"
            ) from error

    async def send_request(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> None:
        """Send a request's head, and its body if given; connect first if necessary."""
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
    """A streamed answer; nothing is sent before its first part."""

    def __init__(self, connection: RuntimeApiConnection, request_id: str) -> None:
        self._connection = connection
        self._id = request_id
        self.has_begun = False

    async def write(self, part: bytes) -> None:
        """Send a part.

        Raises:
            ConnectionLost: The Runtime API is lost.
        """
        if not part:  # An empty chunk would mean the end of the answer.
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
                await self._connection.send_request(
                    "POST", f"invocation/{self._id}/response", headers
                )
            await self._connection.write(chunk)
        except OSError as error:
            raise ConnectionLost(f"the connection to the Runtime API is lost: {error!r}") from error

    async def end(self, kind: str = "", message: str = "") -> None:
        """End the answer; if a `kind` of error is given, trailers report it.

        Raises:
            RequestRefused: The Runtime API refused the answer.
            ConnectionLost: The Runtime API is lost.
        """
        trailers = b""
        if kind:
            details = base64.b64encode(_error(kind, message, [], self._id)).decode()
            type_line = f"{ERROR_TYPE}: {kind.translate(_NO_CONTROLS)}\r\n"
            trailers = f"{type_line}{ERROR_BODY}: {details}\r\n".encode("latin-1", "replace")
        try:
            await self._connection.write(b"0\r\n" + trailers + b"\r\n")
            _check(await self._connection.reply())
        except (OSError, EOFError, ValueError, IndexError) as error:
            raise ConnectionLost(f"the connection to the Runtime API is lost: {error!r}") from error


def _check(reply: ApiReply) -> None:
    if reply.status >= 300:
        raise RequestRefused(reply.status, reply.body)


def _error(kind: str, message: str, trace: list[str], request_id: str = "") -> bytes:
    report: dict[str, Any] = {
        "errorMessage": message,
        "errorType": kind,
        "requestId": request_id,
        "stackTrace": trace,
    }
    return json.dumps(report).encode()
