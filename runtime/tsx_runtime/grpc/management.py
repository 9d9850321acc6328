"""TorchServe's management service: what the REST API does, under the names of gRPC (contract sections 1.3 and 2)."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Response

from tsx_runtime.api.auth import Guard
from tsx_runtime.api.describe import PAGE
from tsx_runtime.api.schemas import RegisterParameters, ScaleParameters
from tsx_runtime.errors import BadRequest
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
from tsx_runtime.http.routes.management import Management, parameters_of

REPLACE = "x-tsx-replace"  # of RegisterModel: whether it takes the place of a version (`replace` of REST)
NAME = "org.pytorch.serve.grpc.management.ManagementAPIsService"


class ManagementCalls:
    """Fields that are empty or zero are not given. `synchronous` is false unless it is asked for, unlike in REST."""

    def __init__(self, management: Management) -> None:
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
        return _text(await self.management.describe(_name(request), request.model_version or None, request.customized))

    async def list_models(self, request: ListModelsRequest, context: Context) -> ManagementResponse:
        return _text(await self.management.list(request.limit or PAGE, request.next_page_token))

    async def register(self, request: RegisterModelRequest, context: Context) -> ManagementResponse:
        """TorchServe's message has no field for `replace`, so it comes as metadata."""
        replace = dict(context.invocation_metadata() or ()).get(REPLACE, "false")
        wanted = parameters_of(RegisterParameters, _given(request), synchronous=request.synchronous, replace=replace)
        return _status(await self.management.register_as(wanted))

    async def scale(self, request: ScaleWorkerRequest, context: Context) -> ManagementResponse:
        given = _given(request)
        for ignored in ("model_name", "model_version", "number_gpu", "timeout"):
            given.pop(ignored, None)
        wanted = parameters_of(ScaleParameters, given, synchronous=request.synchronous)
        return _status(await self.management.change(_name(request), request.model_version or None, wanted, ()))

    async def set_default(self, request: SetDefaultRequest, context: Context) -> ManagementResponse:
        if not request.model_version:
            raise BadRequest("Parameter model_version is required.")
        return _status(await self.management.set_default(_name(request), request.model_version))

    async def unregister(self, request: UnregisterModelRequest, context: Context) -> ManagementResponse:
        return _status(await self.management.unregister(_name(request), request.model_version or None))


def _given(request: Any) -> dict[str, Any]:
    """Fields that are neither empty nor zero."""
    return {field.name: value for field, value in request.ListFields()}


def _name(request: Any) -> str:
    name: str = request.model_name
    if not name:
        raise BadRequest("Parameter model_name is required.")
    return name


def _text(response: Response) -> ManagementResponse:
    return ManagementResponse(msg=bytes(response.body).decode().rstrip())


def _status(response: Response) -> ManagementResponse:
    """The text alone, of an answer that is `{"status": text}`."""
    return ManagementResponse(msg=json.loads(bytes(response.body))["status"])
