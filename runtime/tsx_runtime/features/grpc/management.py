"""TorchServe's management service: the calls of the REST API over gRPC."""

from __future__ import annotations

from typing import Any

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.management.describe import PAGE
from tsx_runtime.api.management.schemas import (
    RegisterParameters,
    ScaleParameters,
    dump_json,
    parameters_of,
)
from tsx_runtime.api.management.service import ManagementService
from tsx_runtime.errors import BadRequest, ModelNotFound, ModelVersionNotFound
from tsx_runtime.features.grpc.admission import Admissions
from tsx_runtime.features.grpc.calls import Context
from tsx_runtime.features.grpc.messages import SMALL_MESSAGE_BYTES
from tsx_runtime.features.grpc.service import Ledger, Service
from tsx_runtime.grpc.protos.management_pb2 import (
    DescribeModelRequest,
    ListModelsRequest,
    ManagementResponse,
    RegisterModelRequest,
    ScaleWorkerRequest,
    SetDefaultRequest,
    UnregisterModelRequest,
)

REPLACE_KEY = "x-tsx-replace"  # metadata of RegisterModel for the parameter `replace` of REST
SERVICE_NAME = "org.pytorch.serve.grpc.management.ManagementAPIsService"


class ManagementCalls:
    """The calls of the management service; empty and zero fields count as absent.

    `synchronous` is false by default, unlike in REST.
    """

    def __init__(self, management: ManagementService) -> None:
        self.management = management

    def service(self, guard: Guard | None, ledger: Ledger, admissions: Admissions) -> Service:
        service = Service(SERVICE_NAME, guard, ledger, admissions, SMALL_MESSAGE_BYTES)
        for method, call, request in (
            ("DescribeModel", self.describe, DescribeModelRequest),
            ("ListModels", self.list_models, ListModelsRequest),
            ("RegisterModel", self.register, RegisterModelRequest),
            ("ScaleWorker", self.scale, ScaleWorkerRequest),
            ("SetDefault", self.set_default, SetDefaultRequest),
            ("UnregisterModel", self.unregister, UnregisterModelRequest),
        ):
            service.unary(method, call, request, ManagementResponse)
        return service

    async def describe(self, request: DescribeModelRequest, context: Context) -> ManagementResponse:
        description = await self.management.describe(
            _required_name(request), request.model_version or None, request.customized
        )
        return ManagementResponse(msg=dump_json(description))

    async def list_models(self, request: ListModelsRequest, context: Context) -> ManagementResponse:
        return ManagementResponse(
            msg=dump_json(self.management.list(request.limit or PAGE, request.next_page_token))
        )

    async def register(self, request: RegisterModelRequest, context: Context) -> ManagementResponse:
        """Register a model; `replace` is read from metadata, because the message lacks it."""
        replace = dict(context.invocation_metadata() or ()).get(REPLACE_KEY, "false")
        parameters = parameters_of(
            RegisterParameters,
            _set_fields(request),
            synchronous=request.synchronous,
            replace=replace,
        )
        result, _ = await self.management.register(parameters)
        return ManagementResponse(msg=result.status)

    async def scale(self, request: ScaleWorkerRequest, context: Context) -> ManagementResponse:
        fields = _set_fields(request)
        for name in ("model_name", "model_version", "number_gpu", "timeout"):
            fields.pop(name, None)
        parameters = parameters_of(ScaleParameters, fields, synchronous=request.synchronous)
        result, _ = await self.management.change(
            _required_name(request), request.model_version or None, parameters, ()
        )
        return ManagementResponse(msg=result.status)

    async def set_default(self, request: SetDefaultRequest, context: Context) -> ManagementResponse:
        name = _required_name(request)
        if not request.model_version:
            raise ModelVersionNotFound(
                f"Model version  does not exist for model {name}. The request names no version: set"
                " model_version."
            )
        result = await self.management.set_default(name, request.model_version)
        return ManagementResponse(msg=result.status)

    async def unregister(
        self, request: UnregisterModelRequest, context: Context
    ) -> ManagementResponse:
        self.management.check_model_api()
        if not request.model_name:
            raise BadRequest("Parameter model_name is required.")
        result = await self.management.unregister(request.model_name, request.model_version or None)
        return ManagementResponse(msg=result.status)


def _set_fields(request: Any) -> dict[str, Any]:
    """Return the fields that are neither empty nor zero."""
    return {field.name: value for field, value in request.ListFields()}


def _required_name(request: Any) -> str:
    """Return the model's name; as in TorchServe, a missing name is an unknown model."""
    name: str = request.model_name
    if not name:
        raise ModelNotFound("Model not found: . The request names no model: set model_name.")
    return name
