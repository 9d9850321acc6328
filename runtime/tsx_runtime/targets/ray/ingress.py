"""The ingress of an application, which forwards requests to replicas.

It repeats a request whose replica is lost, and forwards some requests to a canary. Ray Serve's
proxy itself would answer "Internal Server Error" if a replica dies. An ingress runs on the same
node as its proxy and has no model. If the node of a replica is lost, the ingress can therefore
repeat the request on another node.
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

from tsx_runtime.api.errors import error_event, error_response
from tsx_runtime.api.headers import Pair
from tsx_runtime.api.messages import (
    COUNTED_BYTES,
    REQUEST_ID,
    ClientGone,
    CountedBytes,
    Message,
    Receive,
    Scope,
    Send,
    read_body,
    request_id_of,
    send_whole,
    unread_body_of,
)
from tsx_runtime.api.openai import split_name
from tsx_runtime.api.urls import find_target, is_form, model_in_body, model_in_form
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.errors import TsxError, Unavailable
from tsx_runtime.targets.ray.config import MODEL, Routing
from tsx_runtime.targets.ray.grpc_bridge import MODEL_METHODS, GrpcAnswer, error_answer, read_model

MAX_REPEATS = 3  # limit for a request that loses one replica after the other
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})  # RFC 9110, section 9.2.2
LOST_ERRORS = (RayActorError, ObjectLostError, WorkerCrashedError, NodeDiedError)
_SCOPE_KEYS = (
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
    """The replica that had the request has died, possibly with its node."""

    def __init__(self, *, is_repeatable: bool) -> None:
        reason = (
            f"and so were {MAX_REPEATS} others that it was repeated on"
            if is_repeatable
            else "and it was not repeated, because it may have run"
        )
        text = (
            "Repeat it if running it twice does no harm; with repeat = all (ray.repeat of tsx"
            " deploy) the cluster repeats each request."
        )
        super().__init__(
            f"The replica that had this request was lost, {reason}. {text}",
            retry_after=1 if is_repeatable else None,
        )


class EncodedMessage:
    """A gRPC answer as bytes, with the interface of a protobuf message for Ray Serve."""

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
    """The deployment that Ray Serve's proxies call; it forwards bodies without parsing them."""

    def __init__(
        self, max_body_bytes: int, max_bytes_in_flight: int, models: list[str], model: Handle
    ) -> None:
        """Prepare to forward requests.

        Args:
            max_body_bytes: The limit for one body.
            max_bytes_in_flight: The limit for all bodies together.
            models: The names of models that share replicas; empty for a single model.
            model: The deployment of the models.
        """
        self._max_body_bytes, self._budget = max_body_bytes, ByteBudget(max_bytes_in_flight)
        self._shared_models = frozenset(models)
        self._model = model.options(stream=True)
        self._canary: Handle | None = None
        self._routing = Routing.model_validate({})

    def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Apply a `user_config` without a restart; Ray Serve calls this.

        Raises:
            RayServeException: The canary is unknown.
        """
        self._routing = routing = Routing.model_validate(config)
        self._canary = (
            None
            if routing.canary is None
            else serve.get_deployment_handle(MODEL, routing.canary.app).options(stream=True)
        )

    async def forward(
        self, method: str, *args: Any, model: str, is_idempotent: bool
    ) -> AsyncGenerator[Any, None]:
        """Yield the parts of a replica's answer.

        Raises:
            ReplicaLost: The replica died, and the request cannot be repeated.
            Unavailable: Replicas cannot start.
        """
        is_repeatable = is_idempotent or self._routing.repeat == "all"
        has_begun = False
        is_done = False
        losses = 0
        target = self._choose_handle()
        while True:
            handle = target.options(method_name=method)
            answers: Any = (handle.options(multiplexed_model_id=model) if model else handle).remote(
                *args, model
            )
            try:
                async for answer in answers:
                    has_begun = True
                    yield answer
                is_done = True
                return
            except DeploymentUnavailableError as error:
                if target is self._model:
                    raise Unavailable(
                        "The model's replicas do not start; the status of its Ray Serve application"
                        " says why."
                    ) from error
                target = (
                    self._model
                )  # This is safe, because the canary has not begun with the request.
            except LOST_ERRORS as error:
                if isinstance(
                    error, RayTaskError
                ):  # The error was raised in a replica, so the replica is alive.
                    raise
                if has_begun or not is_repeatable or losses == MAX_REPEATS:
                    raise ReplicaLost(is_repeatable=is_repeatable and not has_begun) from error
                losses += 1
                target = self._choose_handle()
                logger.warning(
                    "a replica was lost, and its request is repeated on another one: %s",
                    type(error).__name__,
                )
            finally:
                if not is_done:
                    answers.cancel()

    def _choose_handle(self) -> Handle:
        canary = self._routing.canary
        is_canary = canary is not None and random.random() * 100 < canary.percent
        return self._canary if is_canary and self._canary is not None else self._model

    # HTTP

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = next(
            (value for name, value in scope["headers"] if name == b"x-request-id"), b""
        )
        if _REQUEST_ID.fullmatch(request_id):
            scope[REQUEST_ID] = request_id
        scope[COUNTED_BYTES] = counted_bytes = CountedBytes(self._budget)
        try:
            await self._answer(scope, receive, send)
        except ClientGone:
            return
        except TsxError as error:
            status, headers, body = error_response(
                error, scope["path"].removeprefix(scope.get("root_path", ""))
            )
            await send_whole(
                _without_id(scope, send),
                scope,
                status,
                headers,
                request_id_of(scope),
                body,
                unread_body_of(error, receive),
            )
        finally:
            counted_bytes.give_back()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._max_body_bytes)
        scope_parts = {name: scope[name] for name in (*_SCOPE_KEYS, REQUEST_ID) if name in scope}
        send_message, is_idempotent = _without_id(scope, send), scope["method"] in IDEMPOTENT
        start_message: Message | None = None
        try:
            async for messages in self.forward(
                "http",
                scope_parts,
                body,
                model=self._model_of(scope, body),
                is_idempotent=is_idempotent,
            ):
                for message in messages:
                    start_message = start_message or message
                    await send_message(message)
        except ReplicaLost as error:
            if start_message is None:
                raise
            # The client has a part of the answer, so only closing the connection helps.
            if not _is_event_stream(start_message["headers"]):
                raise RuntimeError(error.message) from error
            await send_message({"type": "http.response.body", "body": error_event(error.message)})

    def _model_of(self, scope: Scope, body: bytes) -> str:
        """Return the model that a request names, or an empty string; only for shared replicas."""
        if not self._shared_models:
            return ""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        parts, model_name = path.split("/"), None
        with suppress(TsxError):  # The replica will report the error.
            if (target := find_target(path, scope["query_string"])) is None:
                # These are paths of KServe's and OpenAI's APIs that run no model.
                if len(parts) > 3 and parts[2] == "models":
                    model_name = split_name(parts[3]).name if parts[1] == "v1" else parts[3]
            elif target.in_body:
                model_name = model_in_body(target, scope["headers"], body).name or None
            elif (model_name := target.name) is None and is_form(scope["headers"]):
                model_name = model_in_form(scope["headers"], body)
        return model_name if model_name in self._shared_models else ""

    # gRPC. Ray Serve calls the method that has the name of the RPC.

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
        _raise_failure(grpc_context)

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[bytes], grpc_context: Any
    ) -> AsyncGenerator[EncodedMessage, None]:
        """Answer one request after the other, as tsx's own gRPC server does."""
        async for request in requests:
            async for body in self.call("ModelStreamInfer", request, grpc_context):
                yield EncodedMessage(body)
            _raise_failure(grpc_context)

    async def call(self, method: str, request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        """Yield the messages of an answer, and set the context's status and metadata."""
        metadata = list(context.invocation_metadata())
        final_answer, model = GrpcAnswer(None), read_model(request) if self._shared_models else ""
        model = model if model in self._shared_models else ""
        try:
            async for answer in self.forward(
                "grpc",
                method,
                metadata,
                request,
                model=model,
                is_idempotent=method not in MODEL_METHODS,
            ):
                if answer.body is None:
                    final_answer = answer
                else:
                    yield answer.body
        except TsxError as error:
            final_answer = error_answer(error)
        context.set_trailing_metadata([*final_answer.metadata])
        if final_answer.code != "OK":
            context.set_code(grpc.StatusCode[final_answer.code])
            context.set_details(final_answer.details)


def _raise_failure(context: Any) -> None:
    """Raise an error if a stream has failed; otherwise Ray Serve would not send the status."""
    if context.code():
        raise RuntimeError(context.details())


def _is_event_stream(headers: list[Pair]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def _without_id(scope: Scope, send: Send) -> Send:
    """Return a `send` that omits the request id, because Ray Serve's proxy adds it."""
    if REQUEST_ID not in scope:
        return send

    async def send_message(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {
                **message,
                "headers": [pair for pair in message["headers"] if pair[0] != b"x-request-id"],
            }
        await send(message)

    return send_message


def asgi_app() -> Any:
    """Return the ASGI application that Ray Serve runs in the process of the ingress."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            ingress: Any = serve.get_replica_context().servable_object
            await ingress.answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:  # lifespan messages: `startup` and `shutdown`
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return

    return app
