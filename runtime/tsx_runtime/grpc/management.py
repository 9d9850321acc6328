"""TorchServe's management service: the REST API's calls over gRPC (contract sections 1.3 and 2)."""

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
from tsx_runtime.grpc.admission import Admissions
from tsx_runtime.grpc.calls import Context
from tsx_runtime.grpc.messages import SMALL
from tsx_runtime.grpc.protos.management_pb2 import (
    DescribeModelRequest,
    ListModelsRequest,
    ManagementResponse,
    RegisterModelRequest,
    ScaleWorkerRequest,
    SetDefaultRequest,
    UnregisterModelRequest,
)
from tsx_runtime.grpc.service import Ledger, Service

REPLACE = (  # of RegisterModel: whether it takes the place of a version (`replace` of REST)
    "x-tsx-replace"
)
NAME = "org.pytorch.serve.grpc.management.ManagementAPIsService"


class ManagementCalls:
    """Fields that are empty or zero are not given.

    `synchronous` is false by default, unlike in REST.
    """

    def __init__(self, management: ManagementService) -> None:
        self.management = management

    def service(self, guard: Guard | None, ledger: Ledger, admissions: Admissions) -> Service:
        service = Service(NAME, guard, ledger, admissions, SMALL)
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
        found = await self.management.describe(
            _found(request), request.model_version or None, request.customized
        )
        return ManagementResponse(msg=dump_json(found))

    async def list_models(self, request: ListModelsRequest, context: Context) -> ManagementResponse:
        return ManagementResponse(
            msg=dump_json(self.management.list(request.limit or PAGE, request.next_page_token))
        )

    async def register(self, request: RegisterModelRequest, context: Context) -> ManagementResponse:
        """TorchServe's message has no field for `replace`, so it comes as metadata."""
        replace = dict(context.invocation_metadata() or ()).get(REPLACE, "false")
        wanted = parameters_of(
            RegisterParameters, _given(request), synchronous=request.synchronous, replace=replace
        )
        done, _ = await self.management.register(wanted)
        return ManagementResponse(msg=done.status)

    async def scale(self, request: ScaleWorkerRequest, context: Context) -> ManagementResponse:
        given = _given(request)
        for ignored in ("model_name", "model_version", "number_gpu", "timeout"):
            given.pop(ignored, None)
        wanted = parameters_of(ScaleParameters, given, synchronous=request.synchronous)
        done, _ = await self.management.change(
            _found(request), request.model_version or None, wanted, ()
        )
        return ManagementResponse(msg=done.status)

    async def set_default(self, request: SetDefaultRequest, context: Context) -> ManagementResponse:
        name = _found(request)
        if not request.model_version:
            raise ModelVersionNotFound(
                f"Model version  does not exist for model {name}. The request names no version: set"
                " model_version."
            )
        done = await self.management.set_default(name, request.model_version)
        return ManagementResponse(msg=done.status)

    async def unregister(
        self, request: UnregisterModelRequest, context: Context
    ) -> ManagementResponse:
        self.management.check_model_api()
        if not request.model_name:
            raise BadRequest("Parameter model_name is required.")
        done = await self.management.unregister(request.model_name, request.model_version or None)
        return ManagementResponse(msg=done.status)


def _given(request: Any) -> dict[str, Any]:
    """Fields that are neither empty nor zero."""
    return {field.name: value for field, value in request.ListFields()}


def _found(request: Any) -> str:
    """The model's name. TorchServe looks for a model without a name where there is none."""
    name: str = request.model_name
    if not name:
        raise ModelNotFound("Model not found: . The request names no model: set model_name.")
    return name
