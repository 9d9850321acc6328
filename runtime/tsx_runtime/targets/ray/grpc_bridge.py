"""gRPC through Ray Serve: the services for its proxies, and the server in a replica.

Ray Serve's proxy normally parses a request, and forwards it with the name of its method. Here it
forwards the request's bytes. The replica calls tsx's own gRPC server over a unix socket, so that
answers, statuses and metadata are the same as without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from tsx_runtime.api.access.tokens import build_keys
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import TsxError
from tsx_runtime.features.grpc.feature import INSTALL
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings

if TYPE_CHECKING:
    from tsx_runtime.features.grpc.server import GrpcServer

INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
OPEN_INFERENCE = "inference.GRPCInferenceService"
UNARY_METHODS = {
    INFERENCE: ("Ping", "Predictions"),
    OPEN_INFERENCE: (
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelInfer",
    ),
}
SERVICE_BY_METHOD = {
    method: service for service, methods in UNARY_METHODS.items() for method in methods
} | {"StreamPredictions": INFERENCE, "ModelStreamInfer": OPEN_INFERENCE}
MODEL_METHODS = frozenset({"Predictions", "StreamPredictions", "ModelInfer", "ModelStreamInfer"})
_TRANSPORT_HEADERS = frozenset({"content-type", "te", "user-agent"})

Metadata = list[tuple[str, str | bytes]]


def add_services_to_server(servicer: Any, server: Any) -> None:
    """Add TorchServe's inference service and the Open Inference Protocol to a proxy.

    Ray Serve's option `grpc_options.grpc_servicer_functions` names this function.
    """
    handlers: dict[str, dict[str, Any]] = {
        INFERENCE: {"StreamPredictions": grpc.unary_stream_rpc_method_handler(_placeholder)},
        OPEN_INFERENCE: {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(_placeholder)},
    }
    for service, methods in UNARY_METHODS.items():
        handlers[service] |= {
            method: grpc.unary_unary_rpc_method_handler(_placeholder) for method in methods
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, handlers[service]),)
        )


def _placeholder(request: Any, context: Any) -> Any:
    """Stand in for a handler, which Ray Serve's proxy replaces by its own."""
    raise NotImplementedError


class GrpcAnswer(NamedTuple):
    """A message of an answer, or the end of the answer, which has None as its `body`."""

    body: bytes | None
    code: str = "OK"
    details: str = ""
    metadata: Metadata = []


class GrpcBridge:
    """A replica's gRPC server and its client; both start at the first call."""

    def __init__(
        self, registry: Registry, settings: Settings, directory: Path, counts: ResponseCounts
    ) -> None:
        """Prepare a server with a socket in `directory`."""
        self._registry, self._settings, self._counts = registry, settings, counts
        self._target = f"unix:{directory / 'grpc.sock'}"
        self._start_lock = asyncio.Lock()
        self._server: GrpcServer | None = None
        self._channel: grpc.aio.Channel | None = None

    async def call(
        self, method: str, metadata: Metadata, request: bytes
    ) -> AsyncGenerator[GrpcAnswer, None]:
        """Yield the messages of the answer, and then the end of the answer."""
        channel = await self._connect()
        forwarded_metadata = [
            (key, value)
            for key, value in metadata
            if key not in _TRANSPORT_HEADERS and not key.startswith("grpc-")
        ]
        # This also works for a single answer, which is a stream of one message in gRPC's protocol.
        start_call: Any = channel.unary_stream(f"/{SERVICE_BY_METHOD[method]}/{method}")
        call = start_call(request, metadata=forwarded_metadata)
        try:
            async for message in call:
                yield GrpcAnswer(message)
            code, details = grpc.StatusCode.OK, ""
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        finally:
            call.cancel()
        headers = [*(await call.initial_metadata() or ()), *(await call.trailing_metadata() or ())]
        yield GrpcAnswer(
            None, code.name, details, list({key: (key, value) for key, value in headers}.values())
        )

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        if self._server is not None:
            await self._server.stop(0)

    async def _connect(self) -> grpc.aio.Channel:
        async with self._start_lock:
            if self._channel is None:
                try:
                    # The extra `grpc` is optional.
                    from tsx_runtime.features.grpc.server import GrpcServer
                except ImportError as error:
                    raise TsxError(
                        f"The nodes of the Ray cluster lack the packages for gRPC ({error.name})."
                        f" Install them: {INSTALL}"
                    ) from error

                keys, roles = build_keys(self._settings), ["grpc_inference"]
                self._server = GrpcServer(
                    self._registry, self._settings, keys, roles, self._target, None, self._counts
                )
                await self._server.start()
                limits = [
                    ("grpc.max_receive_message_length", -1),
                    ("grpc.max_send_message_length", -1),
                    ("grpc.max_metadata_size", 1 << 20),
                ]
                self._channel = grpc.aio.insecure_channel(self._target, limits)
        return self._channel


def error_answer(error: TsxError) -> GrpcAnswer:
    """Return the answer to a call that has failed before it reached the server."""
    # The extra `grpc` is optional.
    from tsx_runtime.features.grpc.statuses import refusal

    status = refusal(error)
    return GrpcAnswer(None, status.code.name, status.details, list(status.metadata))


def read_model(request: bytes) -> str:
    """Return the name of the model, which is the first field of every message that has one."""
    # The extra `grpc` is optional.
    from google.protobuf.message import DecodeError

    from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelReadyRequest

    try:
        name: str = ModelReadyRequest.FromString(request).name
    except DecodeError:
        return ""  # A replica will refuse the request.
    return name
