"""The ingress of an application: forwards each request to a replica, repeats it where its replica
is lost, and splits off a canary's share.

Ray Serve's proxy answers "Internal Server Error" where the replica that it called dies. Ingresses
run beside the proxies and hold no model, so that a node lost with its replicas does not take the
requests with it.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import grpc
from ray import serve
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from tsx_runtime.api.errors import error_event, fault
from tsx_runtime.api.headers import Pair
from tsx_runtime.api.messages import (
    COUNTED,
    REQUEST_ID,
    ClientGone,
    CountedBytes,
    Message,
    Receive,
    Scope,
    Send,
    read_body,
    request_id_of,
    rest_of,
    send_whole,
)
from tsx_runtime.api.openai import split_name
from tsx_runtime.api.urls import find_target, is_form, model_in_body, model_in_form
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.errors import TsxError, Unavailable
from tsx_runtime.targets.ray.config import MODEL, Routing
from tsx_runtime.targets.ray.grpc_bridge import RUNS_MODEL, GrpcAnswer, model_of, refused

MOST_REPEATS = 3  # of a request that loses one replica after the other
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})  # RFC 9110, section 9.2.2
LOST = (RayActorError, ObjectLostError, WorkerCrashedError, NodeDiedError)
_SENT = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")

Handle: TypeAlias = "DeploymentHandle[Any]"

logger = logging.getLogger("tsx.ray")


class ReplicaLost(Unavailable):
    """The replica that had the request died, and so may have its node."""

    def __init__(self, *, repeats: bool) -> None:
        why = (
            f"and so were {MOST_REPEATS} others that it was repeated on"
            if repeats
            else "and it was not repeated, because it may have run"
        )
        text = (
            "Repeat it if running it twice does no harm; with repeat = all (ray.repeat of tsx"
            " deploy) the cluster repeats each request."
        )
        super().__init__(
            f"The replica that had this request was lost, {why}. {text}",
            retry_after=1 if repeats else None,
        )


class EncodedMessage:
    """An answer of gRPC as Ray Serve takes it: something that gives its bytes."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        return self._body


def _unary(method: str) -> Any:
    async def call(self: Ingress, request: bytes, grpc_context: Any) -> EncodedMessage:
        body = b""
        async for answer in self.call(method, request, grpc_context):
            body = answer
        return EncodedMessage(body)

    return call


class Ingress:
    """The deployment that Ray Serve's proxies call. It parses nothing of a body."""

    def __init__(self, largest: int, in_flight: int, models: list[str], model: Handle) -> None:
        """Bytes of one request's body, and of all at a time.

        `models`: those that share replicas; none where there is one.
        """
        self._largest, self._budget = largest, ByteBudget(in_flight)
        self._shared = frozenset(models)
        self._model = model.options(stream=True)
        self._canary: Handle | None = None
        self._routing = Routing.model_validate({})

    def reconfigure(self, given: Mapping[str, Any]) -> None:
        """Ray Serve calls it with the `user_config`, in place: nothing is restarted.

        Raises RayServeException for an unknown canary.
        """
        self._routing = routing = Routing.model_validate(given)
        self._canary = (
            None
            if routing.canary is None
            else serve.get_deployment_handle(MODEL, routing.canary.app).options(stream=True)
        )

    async def forward(
        self, method: str, *args: Any, model: str, is_idempotent: bool
    ) -> AsyncGenerator[Any, None]:
        """What a replica answers. Raises ReplicaLost, Unavailable."""
        repeats, begun, done, losses = (
            is_idempotent or self._routing.repeat == "all",
            False,
            False,
            0,
        )
        chosen = self._chosen()
        while True:
            handle = chosen.options(method_name=method)
            answers: Any = (handle.options(multiplexed_model_id=model) if model else handle).remote(
                *args, model
            )
            try:
                async for answer in answers:
                    begun = True
                    yield answer
                done = True
                return
            except DeploymentUnavailableError as error:
                if chosen is self._model:
                    raise Unavailable(
                        "The model's replicas do not start; the status of its Ray Serve application"
                        " says why."
                    ) from error
                chosen = self._model  # of a canary: nothing of it has run
            except LOST as error:
                if isinstance(error, RayTaskError):  # raised in a replica, which is alive
                    raise
                if begun or not repeats or losses == MOST_REPEATS:
                    raise ReplicaLost(repeats=repeats and not begun) from error
                losses += 1
                chosen = self._chosen()
                logger.warning(
                    "a replica was lost, and its request is repeated on another one: %s",
                    type(error).__name__,
                )
            finally:
                if not done:
                    answers.cancel()

    def _chosen(self) -> Handle:
        canary = self._routing.canary
        takes_it = canary is not None and random.random() * 100 < canary.percent
        return self._canary if takes_it and self._canary is not None else self._model

    # HTTP

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        if _REQUEST_ID.fullmatch(given):
            scope[REQUEST_ID] = given
        scope[COUNTED] = counted = CountedBytes(self._budget)
        try:
            await self._answer(scope, receive, send)
        except ClientGone:
            return
        except TsxError as error:
            status, headers, body = fault(
                error, scope["path"].removeprefix(scope.get("root_path", ""))
            )
            await send_whole(
                _without_id(scope, send),
                scope,
                status,
                headers,
                request_id_of(scope),
                body,
                rest_of(error, receive),
            )
        finally:
            counted.give_back()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._largest)
        sent = {name: scope[name] for name in (*_SENT, REQUEST_ID) if name in scope}
        sending, is_idempotent = _without_id(scope, send), scope["method"] in IDEMPOTENT
        start: Message | None = None
        try:
            async for messages in self.forward(
                "http", sent, body, model=self._model_of(scope, body), is_idempotent=is_idempotent
            ):
                for message in messages:
                    start = start or message
                    await sending(message)
        except ReplicaLost as error:
            if start is None:
                raise
            if not _is_event_stream(
                start["headers"]
            ):  # half an answer is out: only closing the connection tells the client
                raise RuntimeError(error.message) from error
            await sending({"type": "http.response.body", "body": error_event(error.message)})

    def _model_of(self, scope: Scope, body: bytes) -> str:
        """Which of the models that share replicas the request is for; empty where there is one, or
        none is named.
        """
        if not self._shared:
            return ""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        parts, named = path.split("/"), None
        with suppress(TsxError):  # the replica says what is wrong
            if (target := find_target(path, scope["query_string"])) is None:
                # What KServe's and OpenAI's clients ask of a model.
                if len(parts) > 3 and parts[2] == "models":
                    named = split_name(parts[3]).name if parts[1] == "v1" else parts[3]
            elif target.in_body:
                named = model_in_body(target, scope["headers"], body).name or None
            elif (named := target.name) is None and is_form(scope["headers"]):
                named = model_in_form(scope["headers"], body)
        return named if named in self._shared else ""

    # gRPC: Ray Serve calls the method that has the RPC's name

    Ping, Predictions, ServerLive, ServerReady = map(
        _unary, ("Ping", "Predictions", "ServerLive", "ServerReady")
    )
    ModelReady, ServerMetadata, ModelMetadata, ModelInfer = map(
        _unary, ("ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
    )

    async def StreamPredictions(  # noqa: N802
        self, request: bytes, grpc_context: Any
    ) -> AsyncGenerator[EncodedMessage, None]:
        async for body in self.call("StreamPredictions", request, grpc_context):
            yield EncodedMessage(body)
        _check(grpc_context)

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[bytes], grpc_context: Any
    ) -> AsyncGenerator[EncodedMessage, None]:
        """One request after the other, as tsx's own does it."""
        async for request in requests:
            async for body in self.call("ModelStreamInfer", request, grpc_context):
                yield EncodedMessage(body)
            _check(grpc_context)

    async def call(self, method: str, request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        """The messages of the answer. Its status and metadata go to the context."""
        metadata = list(context.invocation_metadata())
        end, model = GrpcAnswer(None), model_of(request) if self._shared else ""
        model = model if model in self._shared else ""
        try:
            async for answer in self.forward(
                "grpc",
                method,
                metadata,
                request,
                model=model,
                is_idempotent=method not in RUNS_MODEL,
            ):
                if answer.body is None:
                    end = answer
                else:
                    yield answer.body
        except TsxError as error:
            end = refused(error)
        context.set_trailing_metadata([*end.metadata])
        if end.code != "OK":
            context.set_code(grpc.StatusCode[end.code])
            context.set_details(end.details)


def _check(context: Any) -> None:
    """Ray Serve sends the status of a stream only where it ends by an exception."""
    if context.code():
        raise RuntimeError(context.details())


def _is_event_stream(headers: list[Pair]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def _without_id(scope: Scope, send: Send) -> Send:
    """Ray Serve's proxy adds the request's id to the answer itself."""
    if REQUEST_ID not in scope:
        return send

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {
                **message,
                "headers": [pair for pair in message["headers"] if pair[0] != b"x-request-id"],
            }
        await send(message)

    return sending


def asgi_app() -> Any:
    """What Ray Serve takes for the ASGI application of the ingress in whose process it runs."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            ingress: Any = serve.get_replica_context().servable_object
            await ingress.answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:  # lifespan: `startup` and `shutdown`
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return

    return app
