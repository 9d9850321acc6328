"""The management routes: register, list, describe, scale, set default, unregister (contract 1.3)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, RootModel, ValidationError

from tsx_archiver import load_json
from tsx_runtime import wire
from tsx_runtime.api.describe import PAGE, describe_version, list_models, memory_of
from tsx_runtime.api.request_ids import new_request_id
from tsx_runtime.api.schemas import DescribedModel, Flag, ModelList, RegisterParameters, ScaleParameters, Status
from tsx_runtime.api.tokens import Keys
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.errors import BadRequest, LoadFailed, MethodNotAllowed, NoWorker, PredictionFailed, read_error
from tsx_runtime.http.routes import exception_handlers, openapi
from tsx_runtime.http.routes.responses import MOST_VALUES, read_given
from tsx_runtime.http.routes.responses import json_answer as _json
from tsx_runtime.http.routes.responses import status_answer as _status
from tsx_runtime.http.semantics import errors
from tsx_runtime.metrics.gpu import read_gpus
from tsx_runtime.settings.tunable import TUNABLE
from tsx_runtime.shared.suggestions import suggestion

RUNTIMES = ("python", "python3", "python2", "lsp")  # what archives name; all run in this server's own Python
LARGEST_DESCRIPTION = 1 << 20  # bytes of what a handler says of itself that are parsed; more is shown as text
PROCESSING = "Processing worker updates..."

ParametersT = TypeVar("ParametersT", bound=BaseModel)

ModelName = Annotated[str, Path(description="a registered model", examples=["digits"])]
VersionName = Annotated[str, Path(description="one of its versions", examples=["1.0"])]
Customized = Annotated[Flag, Query(description="ask the handler's describe_handle as well")]
Changes = Annotated[ScaleParameters, Query()]
Ignored = Annotated[str | None, Query(deprecated=True, description="accepted for TorchServe's clients; has no effect there or here")]


class Described(RootModel[list[DescribedModel]]):
    pass


class Management:
    """The routes' bodies; they hold nothing but the registry."""

    def __init__(self, registry: Registry, limit: int) -> None:
        self.registry = registry
        self.limit = limit

    async def register(self, request: Request) -> Response:
        self._check_model_api("GET")  # before the body, which would come for nothing
        return await self.register_as(await self._parameters(request))

    async def register_as(self, parameters: RegisterParameters) -> Response:
        self._check_model_api("GET")
        order = _order(parameters)
        try:
            version = await self.registry.register(order, wait=parameters.synchronous)
        except LoadFailed as error:
            raise _start_failed(order.model_name or order.url, None, error) from error
        if version.min_workers and not parameters.synchronous:
            return _status(PROCESSING, 202)
        if version.replaced is not None:
            text = f'Model "{version.name}" Version: {version.version} has taken the place of version {version.replaced}'
            return _status(f"{text} with {version.min_workers} workers")
        text = f'Model "{version.name}" Version: {version.version} registered with {version.min_workers} initial workers'
        return _status(text if version.min_workers else f"{text}. Use scale workers API to add workers for the model.")

    async def list(self, limit: int = PAGE, next_page_token: int = 0) -> Response:
        return _json(list_models(self.registry.models.values(), limit, next_page_token))

    async def describe(self, model: str, version: str | None, customized: bool) -> Response:
        default = self.registry.find(model, None if version == "all" else version)
        versions = list(self.registry.models[model].versions.values()) if version == "all" else [default]
        workers = [worker for found in versions for worker in found.workers]
        gpus = await read_gpus() if any(worker.gpu_id is not None for worker in workers) else {}
        memory = await asyncio.to_thread(memory_of, workers)
        described = [describe_version(found, gpus, memory) for found in versions]
        if customized:  # of all versions, those that can be asked: TorchServe asks none then, and fails for none
            asked = [pair for pair in zip(described, versions, strict=True) if version != "all" or pair[1].ready]
            answers = await asyncio.gather(*(ask_handler(found) for _, found in asked))
            for (one, _), answer in zip(asked, answers, strict=True):
                one.customized_metadata = answer
        return _json(Described(described))

    async def change(self, model: str, version: str | None, wanted: ScaleParameters, given: Iterable[str]) -> Response:
        """Limits, workers or both. With neither, TorchServe scales to one worker, and so does this."""
        _check_names(given)
        changes = {name: value for name in TUNABLE if (value := getattr(wanted, name)) is not None}
        scales = not changes or wanted.min_worker is not None or wanted.max_worker is not None
        if not scales:
            found = self.registry.change(model, version, changes)
            return _status(f'Changed for model "{model}" Version: {found.version}: {_told(changes)}')
        least = 1 if wanted.min_worker is None else wanted.min_worker
        try:
            await self.registry.scale(model, version, least, wanted.max_worker, wait=wanted.synchronous, changes=changes)
        except LoadFailed as error:
            raise _start_failed(model, version, error) from error
        if not wanted.synchronous:
            return _status(PROCESSING, 202)
        text = f"Workers scaled to {least} for model: {model}"
        return _status(f"{text}, version: {version}" if version else text)

    async def set_default(self, model: str, version: str) -> Response:
        self.registry.set_default(model, version)
        await self.registry.state.written()
        return _status(f'Default version successfully updated for model "{model}" to "{version}"')

    async def unregister(self, model: str, version: str | None) -> Response:
        self._check_model_api("GET", "PUT")
        await self.registry.unregister(model, version)
        return _status(f'Model "{model}" unregistered')

    def _check_model_api(self, *others: str) -> None:
        if not self.registry.settings.enable_model_api:
            raise MethodNotAllowed(errors.NOT_ALLOWED, allowed=others)

    async def _parameters(self, request: Request) -> RegisterParameters:
        return parameters_of(RegisterParameters, await read_given(request, self.limit))


def parameters_of(kind: type[ParametersT], given: dict[str, Any], **own: Any) -> ParametersT:
    """Raises BadRequest, which names the parameter."""
    try:
        return kind.model_validate(given | own)
    except ValidationError as error:
        raise exception_handlers.from_validation(error.errors(include_url=False), kind.model_fields) from error


async def ask_handler(version: ModelVersion) -> Any:
    """What the handler's `describe_handle` says: a request with the header `describe`. JSON where it is JSON, else text."""
    if not version.ready:
        text = f'Model "{version.name}" has no worker to serve describe request. Please use scale workers API to add workers.'
        raise NoWorker(text, retry_after=version.retry_after())
    meta = wire.request_meta(new_request_id().decode(), b"", [(b"describe", b"True")])
    job = WaitingJob(meta, b"", time.monotonic())
    version.submit(job)
    answer = await job.done
    try:
        body = await answer.whole(version.max_response_size)
    except BaseException:
        version.leave(job)  # of a stream, nobody takes further parts
        answer.leave()
        raise
    if answer.status >= 400:
        raise PredictionFailed(f'The handler of model "{version.name}" could not describe it: {_message(body)}')
    try:
        return load_json(body, most_bytes=LARGEST_DESCRIPTION, most_values=MOST_VALUES)
    except ValueError:
        return body.decode(errors="replace")


def _message(body: bytes) -> str:
    """The text of a worker's error JSON, or of whatever else the handler sent."""
    told = read_error(body)
    return str(told["message"]) if told else body[:1000].decode(errors="replace")


def _order(parameters: RegisterParameters) -> RegisterOrder:
    if parameters.runtime is not None and parameters.runtime.lower() not in RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {parameters.runtime}")
    return RegisterOrder(
        url=parameters.url or "",
        model_name=parameters.model_name,
        handler=parameters.handler,
        runtime=parameters.runtime,
        initial_workers=parameters.initial_workers,
        s3_sse_kms=parameters.s3_sse_kms,
        replaces=parameters.replace,
        **{name: getattr(parameters, name) for name in TUNABLE},
    )


def _check_names(given: Iterable[str]) -> None:
    """TorchServe passes over parameters that it does not know, and so must this; but not over a slip in one that it knows."""
    for name in given:
        if name not in ScaleParameters.model_fields and (hint := suggestion(name, ScaleParameters.model_fields)):
            raise BadRequest(f"Parameter {name} is not known{hint}")


def _told(changes: dict[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in changes.items())


def _start_failed(model: str, version: str | None, error: LoadFailed) -> LoadFailed:
    """TorchServe's words, which its clients look for, then the worker's own."""
    words = f"Failed to start workers for model {model} version: {version or 'null'}"
    return LoadFailed(f"{words}. {error.message}", traceback=error.traceback)


def build_router(registry: Registry, limit: int) -> APIRouter:
    router = APIRouter(tags=["management"])
    management = Management(registry, limit)
    _add_model_routes(router, management)
    _add_version_routes(router, management)
    return router


def build_token_router(keys: Keys) -> APIRouter:
    """A new token in place of the old one, by any verb; it is told in the key file alone."""
    router = APIRouter(tags=["management"])

    async def renew(type: Annotated[str, Query(description="management or inference", examples=["inference"])] = "") -> Response:
        keys.renew(type)
        return Response("\n", media_type="application/json")  # as TorchServe answers

    router.add_api_route("/token", renew, methods=["GET"], summary="Replace a token by a new one", responses=openapi.failures(400))
    router.add_api_route("/token", renew, methods=["POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    return router


def _add_model_routes(router: APIRouter, management: Management) -> None:
    @router.get("/models", summary="List the models", response_model=ModelList, responses=openapi.failures(400))
    async def list_(
        limit: Annotated[int, Query(description="models of one page, at most 100")] = PAGE,
        next_page_token: Annotated[int, Query(description="where the page begins")] = 0,
    ) -> Response:
        return await management.list(limit, next_page_token)

    @router.post(
        "/models",
        summary="Register a model from the model store, or from a URL",
        response_model=Status,
        responses=openapi.failures(400, 404, 405, 409, 500) | {202: {"model": Status, "description": "its workers are being started"}},
        openapi_extra=openapi.register_parameters(),
    )
    async def register(request: Request) -> Response:
        return await management.register(request)

    @router.get("/models/{model}", summary="Describe its default version", response_model=Described, responses=openapi.failures(404, 503))
    async def describe(model: ModelName, customized: Customized = False) -> Response:
        return await management.describe(model, None, customized)

    @router.put(
        "/models/{model}",
        summary="Scale its default version, or change its limits",
        response_model=Status,
        responses=openapi.failures(400, 404, 500) | {202: {"model": Status, "description": "under way"}},
    )
    async def scale(request: Request, model: ModelName, wanted: Changes) -> Response:
        return await management.change(model, wanted.model_version, wanted, request.query_params)

    @router.delete(
        "/models/{model}",
        summary="Unregister its default version",
        response_model=Status,
        responses=openapi.failures(403, 404, 405, 408, 409),
    )
    async def unregister(model: ModelName, synchronous: Ignored = None, timeout: Ignored = None) -> Response:
        return await management.unregister(model, None)


def _add_version_routes(router: APIRouter, management: Management) -> None:
    @router.get(
        "/models/{model}/{version}",
        summary="Describe one version, or with the version `all` every one",
        response_model=Described,
        responses=openapi.failures(404, 503),
    )
    async def describe(model: ModelName, version: VersionName, customized: Customized = False) -> Response:
        return await management.describe(model, version, customized)

    @router.put(
        "/models/{model}/{version}",
        summary="Scale one version, or change its limits",
        response_model=Status,
        responses=openapi.failures(400, 404, 500) | {202: {"model": Status, "description": "under way"}},
    )
    async def scale(request: Request, model: ModelName, version: VersionName, wanted: Changes) -> Response:
        return await management.change(model, version, wanted, request.query_params)

    @router.put(
        "/models/{model}/{version}/set-default", summary="Set the default version", response_model=Status, responses=openapi.failures(404)
    )
    async def set_default(model: ModelName, version: VersionName) -> Response:
        return await management.set_default(model, version)

    @router.delete(
        "/models/{model}/{version}",
        summary="Unregister one version",
        response_model=Status,
        responses=openapi.failures(403, 404, 405, 408, 409),
    )
    async def unregister(model: ModelName, version: VersionName, synchronous: Ignored = None, timeout: Ignored = None) -> Response:
        return await management.unregister(model, version)

    @router.options("/models/{model}", include_in_schema=False)
    async def options(model: ModelName) -> Response:
        management.registry.find(model)
        return Response(openapi.to_json(openapi.describe_management(model)), media_type="application/json")
