"""Wraps a service's methods: authorization first, and every exception becomes a status."""

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

TRACED = frozenset(
    {"Predictions", "StreamPredictions", "StreamPredictions2", "ModelInfer", "ModelStreamInfer"}
)
# Codes that OpenTelemetry counts as the server's errors: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED,
# INTERNAL, UNAVAILABLE, DATA_LOSS.
FAULTS = frozenset({2, 4, 12, 13, 14, 15})
TOO_SLOW = "The client read nothing of the answer for {:g} s (write_timeout)."
UNEXPECTED = "The server failed unexpectedly; its log has the traceback."

logger = logging.getLogger("tsx.grpc")


class Ledger(NamedTuple):
    """Records how each call ended: the counters that REST has, the access log, and the spans of
    those that are traced.
    """

    counts: ResponseCounts
    log: AccessLog | None = None
    tracer: Tracer | None = None
    clients: ClientLimits | None = None  # how much each of them may send


class Service(grpc.GenericRpcHandler):
    """One service under its full name, as a server takes it. `unary` and `stream` add its methods.

    Tokens and the number of calls are looked at before a message is received: a client that may not
    call sends no bodies.
    """

    def __init__(
        self,
        name: str,
        guard: Guard | None,
        ledger: Ledger,
        admissions: Admissions,
        most: int | None = None,
    ) -> None:
        """`most`: bytes of one message, where that is less than `max_request_size`."""
        self.name = name
        self._admissions = admissions
        self._most = (
            admissions.calls.largest if most is None else min(most, admissions.calls.largest)
        )
        self._guard = guard
        self._ledger = ledger
        self._methods: dict[str, _Method] = {}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by gRPC in the task of each call, once its metadata is there."""
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
            return self._refusing(method.name, error)
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
        """`open_to_all`: it asks for no token, as what probes ask by REST."""

        async def guarded(raw: bytes, context: Context) -> Any:
            own = current_call.get()
            own.arrived()
            async with self._answered(method, context) as ended:
                self._count(context)
                message = await read_message(request, raw, self._most)
                ended.model = getattr(message, "model_name", "")
                data = (await call(message, context)).SerializeToString()
                own.take(len(data))
                own.finish()
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
        """`call` yields the responses.

        With `both_ways` it gets an iterator of requests in place of one.
        """

        async def guarded(raw: Any, context: Context) -> None:
            current_call.get().arrived()
            async with self._answered(method, context) as ended:
                self._count(context)
                message = (
                    self._each(request, raw)
                    if both_ways
                    else await read_message(request, raw, self._most)
                )
                ended.model = getattr(message, "model_name", "")
                # A client that leaves ends the responses here, not when they are collected.
                async with aclosing(call(message, context)) as responses:
                    async for response in responses:
                        await self._write(context, response)
                current_call.get().finish()

        made = (
            grpc.stream_stream_rpc_method_handler
            if both_ways
            else grpc.unary_stream_rpc_method_handler
        )
        self._add(method, made(guarded))

    def _add(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any], *, open_to_all: bool = False
    ) -> None:
        admission = self._admissions.probes if open_to_all else self._admissions.calls
        self._methods[f"/{self.name}/{method}"] = _Method(method, handler, admission, open_to_all)

    def _refusing(self, method: str, error: Exception) -> grpc.RpcMethodHandler[Any, Any]:
        """Ends the call without its message.

        To the client a method of one message and one of many are the same.
        """

        async def refuse(_: Any, context: Context) -> None:
            async with self._answered(method, context):
                self._count(context, error)
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _each(self, request: Any, raws: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
        async for raw in raws:
            yield await read_message(request, raw, self._most)

    async def _write(self, context: Context, response: Any) -> None:
        """Write one response.

        A client that reads nothing holds up the worker, and all requests that wait for it. Raises
        `CallRefused` and Unavailable.
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
                Refusal(grpc.StatusCode.ABORTED, TOO_SLOW.format(timeout_s), status=408)
            ) from None
        call.give(len(data))  # else once the call has ended

    def _count(self, context: Context, error: Exception | None = None) -> None:
        """Raises TooManyRequests where the client has sent too many calls, or, as `error` says,
        wrong tokens.
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
    async def _answered(self, method: str, context: Context) -> AsyncGenerator[_CallEnd, None]:
        """End the call with a status, whatever is raised within."""
        with self._logged(method, context) as ended:
            try:
                yield ended
                ended.code, ended.status = grpc.StatusCode.OK, 200
            except Exception as error:  # the boundary of a call
                reason = self._reason(method, error, context)
                ended.code, ended.status = reason.code, reason.status
                await _end(context, reason)

    def _reason(self, method: str, error: Exception, context: Context) -> Refusal:
        if isinstance(error, TsxError):
            return refusal(error)
        if isinstance(error, CallRefused):
            return error.refusal
        about = {"request_id": _request_id(context)}
        logger.error("%s/%s failed unexpectedly", self.name, method, exc_info=error, extra=about)
        return Refusal(grpc.StatusCode.INTERNAL, UNEXPECTED)

    @contextmanager
    def _logged(self, method: str, context: Context) -> Generator[_CallEnd, None, None]:
        """The call is counted, and has a line of the access log in TorchServe's form: the status
        there is gRPC's number.
        """
        ended, began = _CallEnd(), time.monotonic()
        span = (
            None
            if self._ledger.tracer is None
            else self._span(self._ledger.tracer, method, context, began)
        )
        current.set(span)  # of the call's own task
        try:
            yield ended
        finally:
            if span is not None:
                span.attributes |= {
                    "rpc.grpc.status_code": ended.code.value[0],
                    "tsx.request.id": _request_id(context),
                }
                span.finish(
                    time.monotonic(), ended.code.name if ended.code.value[0] in FAULTS else ""
                )
            if ended.status:
                self._ledger.counts.add(ended.status)
            if self._ledger.log is not None and self._ledger.log.wants():
                line = f"gRPC {self.name}/{method} HTTP/2.0"
                request_id = _request_id(context).encode()
                self._ledger.log.add(
                    _peer(context),
                    line,
                    ended.code.value[0],
                    began,
                    time.monotonic(),
                    request_id,
                    ended.model,
                )

    def _span(self, tracer: Tracer, method: str, context: Context, began: float) -> OpenSpan | None:
        """Of a call of a model; of another one it says nothing."""
        if method not in TRACED:
            return None
        parent = parent_of(as_headers(context.invocation_metadata() or ()))
        if not tracer.wants(parent):
            return None
        span = tracer.begin(parent, began)
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
    """How a call ended."""

    code = grpc.StatusCode.CANCELLED  # unless it is set: its client has left
    model = ""  # that its message names
    status = (
        0  # as REST would answer it; a client that has left gets no answer that could be counted
    )


def _request_id(context: Context) -> str:
    return next(
        (str(value) for key, value in context.trailing_metadata() or () if key == "x-request-id"),
        "",
    )


def _peer(context: Context) -> tuple[str, str] | None:
    """Host and port of the client: gRPC says `ipv4:127.0.0.1:50258`."""
    _, _, address = context.peer().partition(":")
    host, colon, port = address.rpartition(":")
    return (host, port) if colon else None


async def _end(context: Context, reason: Refusal) -> None:
    if (call := current_call.get(None)) is not None:
        call.finish()
    await context.abort(
        reason.code, reason.details, (*(context.trailing_metadata() or ()), *reason.metadata)
    )
