"""A gRPC service that authorizes its calls, and converts every exception to a status."""

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
from tsx_runtime.features.grpc.admission import Admission, Admissions, Call, current_call
from tsx_runtime.features.grpc.calls import Context
from tsx_runtime.features.grpc.messages import metadata_to_headers, read_message
from tsx_runtime.features.grpc.statuses import CallRefused, Refusal, refusal
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
    """The records of calls: response counts, the access log, spans, and limits per client."""

    counts: ResponseCounts
    log: AccessLog | None = None
    tracer: Tracer | None = None
    clients: ClientLimits | None = None


class Service(grpc.GenericRpcHandler):
    """One service under its full name; `unary` and `stream` add its methods.

    The token and the number of calls are checked before a message is received. A client without a
    valid token therefore cannot use memory by sending messages.
    """

    def __init__(
        self,
        name: str,
        guard: Guard | None,
        ledger: Ledger,
        admissions: Admissions,
        max_size: int | None = None,
    ) -> None:
        """Create a service without methods; messages have at most `max_size` bytes."""
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
        """Return the handler of a call; gRPC calls this in the call's task, with its metadata."""
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        try:
            method.admission.check()
            headers = metadata_to_headers(handler_call_details.invocation_metadata or ())
            if self._guard is not None and not method.is_probe:
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
        is_probe: bool = False,
    ) -> None:
        """Add a method with one response; a probe needs no token, as in REST."""

        async def run_call(raw: bytes, context: Context) -> Any:
            admitted_call = current_call.get()
            admitted_call.stop_message_timeout()
            async with self._ending_call(method, context) as call_end:
                self._count_request(context)
                message = await read_message(request, raw, self._max_size)
                call_end.model = getattr(message, "model_name", "")
                data = (await call(message, context)).SerializeToString()
                admitted_call.take(len(data))
                admitted_call.start_read_timeout()
                return data

        self._add(method, grpc.unary_unary_rpc_method_handler(run_call), is_probe=is_probe)

    def stream(
        self,
        method: str,
        call: Callable[[Any, Context], AsyncGenerator[Any, None]],
        request: Any,
        response: Any,
        *,
        is_bidirectional: bool = False,
    ) -> None:
        """Add a method whose `call` yields the responses.

        With `is_bidirectional`, `call` gets an iterator of requests.
        """

        async def run_call(raw: Any, context: Context) -> None:
            current_call.get().stop_message_timeout()
            async with self._ending_call(method, context) as call_end:
                self._count_request(context)
                message = (
                    self._messages(request, raw)
                    if is_bidirectional
                    else await read_message(request, raw, self._max_size)
                )
                call_end.model = getattr(message, "model_name", "")
                # If the client leaves, the generator is closed here, not by the garbage collector.
                async with aclosing(call(message, context)) as responses:
                    async for response in responses:
                        await self._write(context, response)
                current_call.get().start_read_timeout()

        new_handler = (
            grpc.stream_stream_rpc_method_handler
            if is_bidirectional
            else grpc.unary_stream_rpc_method_handler
        )
        self._add(method, new_handler(run_call))

    def _add(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any], *, is_probe: bool = False
    ) -> None:
        admission = self._admissions.probes if is_probe else self._admissions.calls
        self._methods[f"/{self.name}/{method}"] = _Method(method, handler, admission, is_probe)

    def _refusing_handler(self, method: str, error: Exception) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that ends the call before its message is read.

        It may be a stream handler for any method, because the wire format is the same.
        """

        async def refuse(_: Any, context: Context) -> None:
            async with self._ending_call(method, context):
                self._count_request(context, error)
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _messages(
        self, request: Any, raw_messages: AsyncIterator[bytes]
    ) -> AsyncGenerator[Any, None]:
        async for raw in raw_messages:
            yield await read_message(request, raw, self._max_size)

    async def _write(self, context: Context, response: Any) -> None:
        """Write one response.

        Raises:
            CallRefused: The client has read nothing for `write_timeout`.
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
        call.give(len(data))  # After an error, the bytes are given back when the call ends.

    def _count_request(self, context: Context, error: Exception | None = None) -> None:
        """Count a client's request, and its wrong token if `error` is an InvalidToken.

        Raises:
            TooManyRequests: The client exceeds its limits.
        """
        clients = self._ledger.clients
        if clients is None or (peer := _peer(context)) is None:
            return
        client = clients.caller(
            unquote(peer[0]).strip("[]"), metadata_to_headers(context.invocation_metadata() or ())
        )
        clients.count_request(client)
        if isinstance(error, InvalidToken) and error.has_token:
            clients.count_failure(client)

    @asynccontextmanager
    async def _ending_call(self, method: str, context: Context) -> AsyncGenerator[_CallEnd, None]:
        """End the call with a status, for any exception in the `with` block."""
        with self._record_call(method, context) as call_end:
            try:
                yield call_end
                call_end.code, call_end.status = grpc.StatusCode.OK, 200
            except Exception as error:  # the boundary of a call
                call_refusal = self._refusal_of_error(method, error, context)
                call_end.code, call_end.status = call_refusal.code, call_refusal.status
                await _abort(context, call_refusal)

    def _refusal_of_error(self, method: str, error: Exception, context: Context) -> Refusal:
        if isinstance(error, TsxError):
            return refusal(error)
        if isinstance(error, CallRefused):
            return error.refusal
        extra = {"request_id": _request_id(context)}
        logger.error("%s/%s failed unexpectedly", self.name, method, exc_info=error, extra=extra)
        return Refusal(grpc.StatusCode.INTERNAL, UNEXPECTED_TEXT)

    @contextmanager
    def _record_call(self, method: str, context: Context) -> Generator[_CallEnd, None, None]:
        """Count the call, trace it, and log it in TorchServe's format with its gRPC status code."""
        call_end, start_time = _CallEnd(), time.monotonic()
        span = (
            None
            if self._ledger.tracer is None
            else self._span(self._ledger.tracer, method, context, start_time)
        )
        current.set(span)  # set only in the context of the call's task
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
        parent = parent_of(metadata_to_headers(context.invocation_metadata() or ()))
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
    is_probe: bool


class _CallEnd:
    """The outcome of a call; by default, its client has left."""

    code = grpc.StatusCode.CANCELLED
    model = ""  # the model's name in the message
    status = 0  # REST's status; 0 if the client has left, because then no response is counted


def _request_id(context: Context) -> str:
    return next(
        (str(value) for key, value in context.trailing_metadata() or () if key == "x-request-id"),
        "",
    )


def _peer(context: Context) -> tuple[str, str] | None:
    """Return the client's host and port, from gRPC's format `ipv4:127.0.0.1:50258`."""
    _, _, address = context.peer().partition(":")
    host, colon, port = address.rpartition(":")
    return (host, port) if colon else None


async def _abort(context: Context, call_refusal: Refusal) -> None:
    if (call := current_call.get(None)) is not None:
        call.start_read_timeout()
    await context.abort(
        call_refusal.code,
        call_refusal.details,
        (*(context.trailing_metadata() or ()), *call_refusal.metadata),
    )
