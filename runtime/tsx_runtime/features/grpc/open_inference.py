"""The Open Inference Protocol, version 2, under its standard name and TorchServe's name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.headers import Pair
from tsx_runtime.api.management.describe import unready_versions
from tsx_runtime.api.management.schemas import ServerMetadata
from tsx_runtime.core.hidden_credentials import HiddenHeaders
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Answer, Route
from tsx_runtime.errors import BadRequest, TsxError
from tsx_runtime.features.grpc import tensors
from tsx_runtime.features.grpc.admission import Admissions
from tsx_runtime.features.grpc.calls import Context, PendingRequest, answer_parts, complete_answer
from tsx_runtime.features.grpc.service import Ledger, Service
from tsx_runtime.features.grpc.statuses import (
    CallRefused,
    Refusal,
    code_for_status,
    details_text,
    refusal,
)
from tsx_runtime.grpc.pool import copy_under_package, load_messages
from tsx_runtime.grpc.protos import grpc_predict_v2_pb2
from tsx_runtime.wire import TENSORS_HEAD

# TorchServe's package name of the protocol.
_TORCHSERVE = "org.pytorch.serve.grpc.openinference"
_messages: dict[str, Any] = {}
load_messages(
    _messages, [(f"{_TORCHSERVE}.proto", copy_under_package("grpc_predict_v2.proto", _TORCHSERVE))]
)
MESSAGES_BY_SERVICE = {
    "inference.GRPCInferenceService": grpc_predict_v2_pb2,
    f"{_TORCHSERVE}.GRPCInferenceService": SimpleNamespace(**_messages),
}


class OpenInference:
    """The service under one of its two names; the messages differ only in the package."""

    def __init__(self, registry: Registry, messages: Any) -> None:
        self.registry = registry
        self.messages = messages

    def service(
        self, name: str, guard: Guard | None, ledger: Ledger, admissions: Admissions
    ) -> Service:
        service, messages = Service(name, guard, ledger, admissions), self.messages
        for method, call in (
            ("ServerLive", self.server_live),
            ("ServerReady", self.server_ready),
            ("ModelReady", self.model_ready),
            ("ServerMetadata", self.server_metadata),
            ("ModelMetadata", self.model_metadata),
            ("ModelInfer", self.infer),
        ):
            is_probe = method in ("ServerLive", "ServerReady")
            service.unary(
                method,
                call,
                getattr(messages, f"{method}Request"),
                getattr(messages, f"{method}Response"),
                is_probe=is_probe,
            )
        service.stream(
            "ModelStreamInfer",
            self.stream_infer,
            messages.ModelInferRequest,
            messages.ModelStreamInferResponse,
            is_bidirectional=True,
        )
        return service

    async def server_live(self, request: Any, context: Context) -> Any:
        return self.messages.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any, context: Context) -> Any:
        ready = not self.registry.stopping and not unready_versions(self.registry)
        return self.messages.ServerReadyResponse(ready=ready)

    async def model_ready(self, request: Any, context: Context) -> Any:
        return self.messages.ModelReadyResponse(
            ready=self._find_version(request.name, request.version, "name").ready
        )

    async def server_metadata(self, request: Any, context: Context) -> Any:
        metadata = ServerMetadata()
        extensions = [*metadata.extensions, "binary_tensor_data"]
        return self.messages.ServerMetadataResponse(
            name=metadata.name, version=metadata.version, extensions=extensions
        )

    async def model_metadata(self, request: Any, context: Context) -> Any:
        """Return a model's versions, without tensors, because archives do not describe them."""
        version = self._find_version(request.name, request.version, "model_name")
        versions = (
            [version.version]
            if request.version
            else list(self.registry.models[version.name].versions)
        )
        return self.messages.ModelMetadataResponse(
            name=version.name, versions=versions, platform=""
        )

    async def infer(self, request: Any, context: Context) -> Any:
        route = self._find_route(request.model_name, request.model_version)
        with _submit(context, route, request, self.registry.hidden_headers) as pending:
            answer, body = await complete_answer(context, pending)
        return self._response(request, pending.version, answer, body)

    async def stream_infer(
        self, requests: AsyncIterator[Any], context: Context
    ) -> AsyncGenerator[Any, None]:
        """Answer a stream's requests one after the other; each part of an answer is a message."""
        has_sent = False
        async for request in requests:
            try:
                route = self._find_route(request.model_name, request.model_version)
                with _submit(context, route, request, self.registry.hidden_headers) as pending:
                    parts = answer_parts(context, pending, has_sent=has_sent)
                    async for answer, body in parts:
                        response = self._response(request, pending.version, answer, body)
                        yield self.messages.ModelStreamInferResponse(infer_response=response)
            except (TsxError, CallRefused) as error:
                reason = refusal(error) if isinstance(error, TsxError) else error.refusal
                failed_response = self.messages.ModelInferResponse(
                    id=request.id, model_name=request.model_name
                )
                yield self.messages.ModelStreamInferResponse(
                    error_message=reason.details, infer_response=failed_response
                )
            has_sent = True

    def _find_version(self, name: str, version: str, parameter: str) -> ModelVersion:
        _check_name(name, parameter)
        return self.registry.find(name, version or None)

    def _find_route(self, name: str, version: str) -> Route:
        _check_name(name)
        return self.registry.route(name, version or None)

    def _response(self, request: Any, version: ModelVersion, answer: Answer, body: bytes) -> Any:
        """Return a worker's response as a message.

        Raises:
            CallRefused: The handler has set an error status, so its body has no tensors.
        """
        if answer.status >= 400:
            raise CallRefused(
                Refusal(
                    code_for_status(answer.status),
                    details_text(body.decode(errors="replace")),
                    status=answer.status,
                )
            )
        response = self.messages.ModelInferResponse(
            model_name=version.name, model_version=version.version, id=request.id
        )
        tensors.unpack(
            response,
            _json_length(answer.headers),
            body,
            use_contents=not request.raw_input_contents,
        )
        return response


def _check_name(name: str, parameter: str = "model_name") -> None:
    """Raise BadRequest with TorchServe's text for a request without a model's name."""
    if not name:
        raise BadRequest(f"Parameter {parameter} is required.")


def _submit(context: Context, route: Route, request: Any, hidden: HiddenHeaders) -> PendingRequest:
    head, body = tensors.pack(request)
    head_length: Pair = (TENSORS_HEAD, b"%d" % head)
    return PendingRequest(context, route, (head_length,), body, hidden)


def _json_length(headers: bytes) -> int | None:
    """Return the length of the JSON before the tensors of a response, or None without tensors."""
    for line in headers.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name.lower() == TENSORS_HEAD and value.isdigit():
            return int(value)
    return None
