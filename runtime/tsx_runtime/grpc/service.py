"""A gRPC service: it authorizes calls first, and turns every exception into a status."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
from anyio import fail_after

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.client_limits import ClientLimits
from tsx_runtime.api.access_log import AccessLog
from tsx_runtime.api.headers import check_distinct
from tsx_runtime.core.telemetry.tracing import OpenSpan, Tracer, current, parent_of
from tsx_runtime.errors import InvalidToken, TsxError
from tsx_runtime.grpc.admission import Admission, Admissions, Call, current_call
from tsx_runtime.grpc.calls import Context
from tsx_runtime.grpc.messages import as_headers, read_message
from tsx_runtime.grpc.statuses import CallRefused, Refusal, refusal
from tsx_runtime.metrics.response_counts import ResponseCounts

TRACED_METHODS = frozenset(
    {"Predictions", "StreamPredictions", "StreamPredictions2", "ModelInfer", "ModelStreamInfer"}
)
# OpenTelemetry counts these codes as the server's errors: UNKNOWN, DEADLINE_EXCEEDED,
# UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS.
SERVER_ERROR_CODES = frozenset({2, 4, 12, 13, 14, 15})
SLOW_CLIENT_TEXT = "The client read nothing of the answer for {:g} s (write_timeout)."
UNEXPECTED_TEXT = "The server failed unexpectedly; its log has the traceback."

logger = logging.getLogger("tsx.grpc")


class Ledger(NamedTuple):
    """The records of ended calls: REST's counters, the access log, and spans of traced calls."""

    counts: ResponseCounts
    log: AccessLog | None = None
    tracer: Tracer | None = None
    clients: ClientLimits | None = None  # limits of single clients


class Service(grpc.GenericRpcHandler):
    """One service under its full name; `unary` and `stream` add its methods.

    Tokens and the number of calls are checked before a message is received, so a client without
    rights sends no bodies.
    """

    def __init__(
        self,
        name: str,
        guard: Guard | None,
        ledger: Ledger,
        admissions: Admissions,
        max_size: int | None = None,
    ) -> None:
        """Name a service; `max_size` lowers the largest message below `max_request_size`."""
        self.name = name
        self._admissions = admissions
        self._max_size = (
            admissions.calls.max_message_size
            if max_size is None
            else min(max_size, admissions.calls.max_message_size)
        )
        self._guard = guard
        self._ledger = ledger
        self._methods: dict[str, _Method] = {}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a call; gRPC calls this in the call's task after its metadata."""
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        try:
            method.admission.check()
            headers = as_headers(handler_call_details.invocation_metadata or ())
            if self._guard is not None and not method.open_to_all:
                self._guard.check(headers)
            check_distinct(headers)
        except Exception as error:  # the boundary of a call
            return self._refusing_handler(method.name, error)
        current_call.set(Call(method.admission))
        return method.handler

    def unary(
        self,
        method: str,
        call: Callable[[Any, Context], Awaitable[Any]],
        request: Any,
        response: Any,
        *,
        open_to_all: bool = False,
    ) -> None:
        """Add a method with one response; `open_to_all` needs no token, as for probes in REST."""

        async def guarded(raw: bytes, context: Context) -> Any:
            call_share = current_call.get()
            call_share.on_message()
            async with self._ending_call(method, context) as call_end:
                self._count(context)
                message = await read_message(request, raw, self._max_size)
                call_end.model = getattr(message, "model_name", "")
                data = (await call(message, context)).SerializeToString()
                call_share.take(len(data))
                call_share.finish()
                return data

        self._add(method, grpc.unary_unary_rpc_method_handler(guarded), open_to_all=open_to_all)

    def stream(
        self,
        method: str,
        call: Callable[[Any, Context], AsyncGenerator[Any, None]],
        request: Any,
        response: Any,
        *,
        both_ways: bool = False,
    ) -> None:
        """Add a method whose `call` yields the responses.

        With `both_ways`, `call` gets an iterator of requests.
        """

        async def guarded(raw: Any, context: Context) -> None:
            current_call.get().on_message()
            async with self._ending_call(method, context) as call_end:
                self._count(context)
                message = (
                    self._messages(request, raw)
                    if both_ways
                    else await read_message(request, raw, self._max_size)
                )
                call_end.model = getattr(message, "model_name", "")
                # A client that leaves ends the responses here, not when they are collected.
                async with aclosing(call(message, context)) as responses:
                    async for response in responses:
                        await self._write(context, response)
                current_call.get().finish()

        new_handler = (
            grpc.stream_stream_rpc_method_handler
            if both_ways
            else grpc.unary_stream_rpc_method_handler
        )
        self._add(method, new_handler(guarded))

    def _add(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any], *, open_to_all: bool = False
    ) -> None:
        admission = self._admissions.probes if open_to_all else self._admissions.calls
        self._methods[f"/{self.name}/{method}"] = _Method(method, handler, admission, open_to_all)

    def _refusing_handler(self, method: str, error: Exception) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that ends the call without its message.

        For a client, methods with one message and with many are the same.
        """

        async def refuse(_: Any, context: Context) -> None:
            async with self._ending_call(method, context):
                self._count(context, error)
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _messages(
        self, request: Any, raws: AsyncIterator[bytes]
    ) -> AsyncGenerator[Any, None]:
        async for raw in raws:
            yield await read_message(request, raw, self._max_size)

    async def _write(self, context: Context, response: Any) -> None:
        """Write one response.

        Raises:
            CallRefused: The client reads nothing, which would delay the worker.
            Unavailable: The budget has no room for the response.
        """
        data, call, timeout_s = (
            response.SerializeToString(),
            current_call.get(),
            self._admissions.calls.write_timeout,
        )
        call.take(len(data))
        try:
            with fail_after(timeout_s):
                await context.write(data)
        except TimeoutError:
            raise CallRefused(
                Refusal(grpc.StatusCode.ABORTED, SLOW_CLIENT_TEXT.format(timeout_s), status=408)
            ) from None
        call.give(len(data))  # After a failure, the end of the call does that.

    def _count(self, context: Context, error: Exception | None = None) -> None:
        """Count a request of a client, and a wrong token if `error` is one.

        Raises:
            TooManyRequests: The client exceeds its limits.
        """
        clients = self._ledger.clients
        if clients is None or (peer := _peer(context)) is None:
            return
        client = clients.caller(
            unquote(peer[0]).strip("[]"), as_headers(context.invocation_metadata() or ())
        )
        clients.count_request(client)
        if isinstance(error, InvalidToken) and error.has_token:
            clients.count_failure(client)

    @asynccontextmanager
    async def _ending_call(self, method: str, context: Context) -> AsyncGenerator[_CallEnd, None]:
        """End the call with a status, whatever is raised inside."""
        with self._recorded(method, context) as call_end:
            try:
                yield call_end
                call_end.code, call_end.status = grpc.StatusCode.OK, 200
            except Exception as error:  # the boundary of a call
                reason = self._reason(method, error, context)
                call_end.code, call_end.status = reason.code, reason.status
                await _end(context, reason)

    def _reason(self, method: str, error: Exception, context: Context) -> Refusal:
        if isinstance(error, TsxError):
            return refusal(error)
        if isinstance(error, CallRefused):
            return error.refusal
        extra = {"request_id": _request_id(context)}
        logger.error("%s/%s failed unexpectedly", self.name, method, exc_info=error, extra=extra)
        return Refusal(grpc.StatusCode.INTERNAL, UNEXPECTED_TEXT)

    @contextmanager
    def _recorded(self, method: str, context: Context) -> Generator[_CallEnd, None, None]:
        """Count the call, and log it in TorchServe's form with gRPC's number as the status."""
        call_end, start_time = _CallEnd(), time.monotonic()
        span = (
            None
            if self._ledger.tracer is None
            else self._span(self._ledger.tracer, method, context, start_time)
        )
        current.set(span)  # valid in the call's own task
        try:
            yield call_end
        finally:
            if span is not None:
                span.attributes |= {
                    "rpc.grpc.status_code": call_end.code.value[0],
                    "tsx.request.id": _request_id(context),
                }
                span.finish(
                    time.monotonic(),
                    call_end.code.name if call_end.code.value[0] in SERVER_ERROR_CODES else "",
                )
            if call_end.status:
                self._ledger.counts.add(call_end.status)
            if self._ledger.log is not None and self._ledger.log.wants():
                line = f"gRPC {self.name}/{method} HTTP/2.0"
                request_id = _request_id(context).encode()
                self._ledger.log.add(
                    _peer(context),
                    line,
                    call_end.code.value[0],
                    start_time,
                    time.monotonic(),
                    request_id,
                    call_end.model,
                )

    def _span(
        self, tracer: Tracer, method: str, context: Context, start_time: float
    ) -> OpenSpan | None:
        """Return the span of a call to a model, or None if it is not traced."""
        if method not in TRACED_METHODS:
            return None
        parent = parent_of(as_headers(context.invocation_metadata() or ()))
        if not tracer.should_trace(parent):
            return None
        span = tracer.begin(parent, start_time)
        span.name = f"{self.name}/{method}"
        span.attributes |= {"rpc.system": "grpc", "rpc.service": self.name, "rpc.method": method}
        peer = _peer(context)
        if peer is not None:
            span.attributes["client.address"] = peer[0]
        return span


class _Method(NamedTuple):
    name: str
    handler: grpc.RpcMethodHandler[Any, Any]
    admission: Admission
    open_to_all: bool


class _CallEnd:
    """The end of a call; without changes, its client has left."""

    code = grpc.StatusCode.CANCELLED
    model = ""  # name in the message
    status = 0  # REST's status; a client that has left gets no response to count


def _request_id(context: Context) -> str:
    return next(
        (str(value) for key, value in context.trailing_metadata() or () if key == "x-request-id"),
        "",
    )


def _peer(context: Context) -> tuple[str, str] | None:
    """Return host and port of the client; gRPC's form is `ipv4:127.0.0.1:50258`."""
    _, _, address = context.peer().partition(":")
    host, colon, port = address.rpartition(":")
    return (host, port) if colon else None


async def _end(context: Context, reason: Refusal) -> None:
    if (call := current_call.get(None)) is not None:
        call.finish()
    await context.abort(
        reason.code, reason.details, (*(context.trailing_metadata() or ()), *reason.metadata)
    )
