"""A service's methods behind its guard, and everything that they may raise as a status: the boundary of a call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc

from tsx_runtime.core.tracing import OpenSpan, Tracer, current, parent_of
from tsx_runtime.errors import TsxError
from tsx_runtime.grpc.calls import Context, Refused
from tsx_runtime.grpc.metadata import as_headers
from tsx_runtime.grpc.statuses import Refusal, refusal
from tsx_runtime.http.access import AccessLog
from tsx_runtime.http.asgi import Counts
from tsx_runtime.http.auth import Guard
from tsx_runtime.http.client_limits import Caller, ClientLimits, calling

TRACED = frozenset({"Predictions", "StreamPredictions", "StreamPredictions2", "ModelInfer", "ModelStreamInfer"})
# Codes that OpenTelemetry counts as the server's errors: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS.
FAULTS = frozenset({2, 4, 12, 13, 14, 15})
TOO_SLOW = "The client took nothing of the answer for {:g} s (write_timeout)."
UNEXPECTED = "The server failed unexpectedly; its log has the traceback."

logger = logging.getLogger("tsx.grpc")


class Ledger(NamedTuple):
    """Where it is told how each call ended: the counters that REST has, the access log, and the spans of those that are traced."""

    counts: Counts
    log: AccessLog | None = None
    tracer: Tracer | None = None
    clients: ClientLimits | None = None  # how much each of them may send


class Service:
    """One service under its full name. `unary` and `stream` add its methods; `handler` is what a server takes."""

    def __init__(self, name: str, guard: Guard | None, ledger: Ledger, write_timeout: float = 30.0) -> None:
        """`write_timeout`: seconds for which the client of a stream may take nothing of it."""
        self.name = name
        self._write_timeout = write_timeout
        self._guard = guard
        self._ledger = ledger
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def unary(
        self, method: str, call: Callable[[Any, Context], Awaitable[Any]], request: Any, response: Any, *, open_to_all: bool = False
    ) -> None:
        """`open_to_all`: it asks for no token, as what probes ask by REST."""

        async def guarded(message: Any, context: Context) -> Any:
            with self._logged(method, message, context) as ended:
                try:
                    if not open_to_all:
                        self._check(context)
                    answer = await call(message, context)
                except Exception as error:  # the boundary of a call
                    reason = self._reason(method, error, context)
                else:
                    ended.code, ended.status = grpc.StatusCode.OK, 200
                    return answer
                ended.code, ended.status = reason.code, reason.status
                return await _end(context, reason)

        self._methods[method] = grpc.unary_unary_rpc_method_handler(guarded, request.FromString, response.SerializeToString)

    def stream(
        self,
        method: str,
        call: Callable[[Any, Context], AsyncGenerator[Any, None]],
        request: Any,
        response: Any,
        *,
        both_ways: bool = False,
    ) -> None:
        """`call` yields the responses. With `both_ways` it gets an iterator of requests in place of one."""

        async def guarded(message: Any, context: Context) -> None:
            with self._logged(method, message, context) as ended:
                try:
                    self._check(context)
                    async with aclosing(call(message, context)) as responses:  # a client that leaves ends it here, not when it is collected
                        async for response in responses:
                            await self._write(context, response)
                except Exception as error:  # the boundary of a call
                    reason = self._reason(method, error, context)
                else:
                    ended.code, ended.status = grpc.StatusCode.OK, 200
                    return
                ended.code, ended.status = reason.code, reason.status
                await _end(context, reason)

        made = grpc.stream_stream_rpc_method_handler if both_ways else grpc.unary_stream_rpc_method_handler
        self._methods[method] = made(guarded, request.FromString, response.SerializeToString)

    async def _write(self, context: Context, response: Any) -> None:
        """A client that takes nothing holds the worker up, and with it all who wait for that. Raises `Refused`."""
        task, late = asyncio.current_task(), False
        assert task is not None

        def give_up() -> None:
            nonlocal late
            late = True
            task.cancel()

        timer = asyncio.get_running_loop().call_later(self._write_timeout, give_up)
        try:
            await context.write(response)
        except asyncio.CancelledError:
            if late:
                raise Refused(Refusal(grpc.StatusCode.ABORTED, TOO_SLOW.format(self._write_timeout), status=408)) from None
            raise
        finally:
            timer.cancel()

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(self.name, self._methods)

    def _check(self, context: Context) -> None:
        clients = self._ledger.clients
        if self._guard is None and clients is None:
            return
        headers = as_headers(context.invocation_metadata() or ())
        if clients is not None and (peer := _peer(context)) is not None:
            caller = Caller(clients, clients.caller(unquote(peer[0]).strip("[]"), headers))
            calling.set(caller)  # of the call's own task
            clients.count_request(caller.client)
        if self._guard is not None:
            self._guard.check(headers)

    def _reason(self, method: str, error: Exception, context: Context) -> Refusal:
        if isinstance(error, TsxError):
            return refusal(error)
        if isinstance(error, Refused):
            return error.refusal
        about = {"request_id": _request_id(context)}
        logger.error("%s/%s failed unexpectedly", self.name, method, exc_info=error, extra=about)
        return Refusal(grpc.StatusCode.INTERNAL, UNEXPECTED)

    @contextmanager
    def _logged(self, method: str, message: Any, context: Context) -> Generator[_Ended, None, None]:
        """The call is counted, and has a line of the access log in TorchServe's form: the status there is gRPC's number."""
        ended, began = _Ended(), time.monotonic()
        span = None if self._ledger.tracer is None else self._span(self._ledger.tracer, method, message, context, began)
        current.set(span)  # of the call's own task
        try:
            yield ended
        finally:
            if span is not None:
                span.attributes |= {"rpc.grpc.status_code": ended.code.value[0], "tsx.request.id": _request_id(context)}
                span.finish(time.monotonic(), ended.code.name if ended.code.value[0] in FAULTS else "")
            if ended.status:
                self._ledger.counts.add(ended.status)
            if self._ledger.log is not None and self._ledger.log.wants():
                line, model = f"gRPC {self.name}/{method} HTTP/2.0", getattr(message, "model_name", "")
                self._ledger.log.add(_peer(context), line, ended.code.value[0], began, _request_id(context), model)

    def _span(self, tracer: Tracer, method: str, message: Any, context: Context, began: float) -> OpenSpan | None:
        """Of a call of a model; that of another one would tell nothing."""
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


class _Ended:
    """How a call ended."""

    code = grpc.StatusCode.CANCELLED  # unless it is said otherwise: its client has left
    status = 0  # as REST would answer it; a client that has left gets no answer that could be counted


def _request_id(context: Context) -> str:
    return next((str(value) for key, value in context.trailing_metadata() or () if key == "x-request-id"), "")


def _peer(context: Context) -> tuple[str, str] | None:
    """Host and port of the client: gRPC says `ipv4:127.0.0.1:50258`."""
    _, _, address = context.peer().partition(":")
    host, colon, port = address.rpartition(":")
    return (host, port) if colon else None


async def _end(context: Context, reason: Refusal) -> None:
    await context.abort(reason.code, reason.details, (*(context.trailing_metadata() or ()), *reason.metadata))
