"""The management API of HTTP and gRPC: register, list, describe, scale, set default, unregister
(contract 1.3).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from tsx_archiver import load_json
from tsx_archiver.metadata.model_limits import BY_KEY, CHANGEABLE
from tsx_runtime import wire
from tsx_runtime.api.headers import new_request_id
from tsx_runtime.api.management.describe import PAGE, describe_version, list_models, memory_of
from tsx_runtime.api.management.schemas import (
    DescribedModels,
    ModelList,
    RegisterParameters,
    ScaleParameters,
    Status,
)
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.errors import (
    BadRequest,
    LoadFailed,
    MethodNotAllowed,
    NoWorker,
    PredictionFailed,
    TsxError,
    read_error,
)
from tsx_runtime.metrics.gpu import read_gpus
from tsx_runtime.shared.suggestions import suggestion

RUNTIMES = (
    "python",
    "python3",
    "python2",
    "lsp",
)  # what archives name; all run in this server's own Python
LARGEST_DESCRIPTION = (
    1 << 20
)  # bytes of a handler's description that are parsed; a larger one is shown as text
MOST_VALUES = 20_000  # of a JSON body of the management API: parsed and checked in about 20 ms
PROCESSING = Status(status="Processing worker updates..."), 202


class ManagementService:
    """Where a method returns a status code beside its model, it is 200, or 202 for work that goes
    on.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def check_model_api(self, *others: str) -> None:
        """`others`: the methods that the path allows even so.

        Raises MethodNotAllowed where `enable_model_api` is false.
        """
        if not self.registry.settings.enable_model_api:
            raise MethodNotAllowed(allowed=others)

    async def register(self, parameters: RegisterParameters) -> tuple[Status, int]:
        self.check_model_api("GET")
        order = _order(parameters)
        try:
            version = await self.registry.register(order, wait=parameters.synchronous)
        except LoadFailed as error:
            raise _start_failed(error.model, error.version, error) from error
        if version.min_workers and not parameters.synchronous:
            return PROCESSING
        done = f"registered with {version.min_workers} initial workers"
        if version.replaced is not None:
            done = (
                f"has taken the place of version {version.replaced} with {version.min_workers}"
                " workers"
            )
        text = f'Model "{version.name}" Version: {version.version} {done}'
        return (
            Status(
                status=(
                    text
                    if version.min_workers
                    else f"{text}. Use scale workers API to add workers for the model."
                )
            ),
            200,
        )

    def list(self, limit: int = PAGE, next_page_token: int = 0) -> ModelList:
        return list_models(self.registry.models.values(), limit, next_page_token)

    async def describe(self, model: str, version: str | None, customized: bool) -> DescribedModels:
        number = None if version == "all" else version
        try:
            default = self.registry.find(model, number)
        except TsxError as error:
            unloaded = self.registry.unloaded_of(model, number).items()
            text = (
                "could not be loaded at the start; the next one tries again, unless it is"
                " unregistered"
            )
            raise type(error)(
                error.message
                + "".join(f"; version {key[1]} {text}: {reason}" for key, reason in unloaded)
            ) from error
        versions = (
            list(self.registry.models[model].versions.values()) if version == "all" else [default]
        )
        workers = [worker for found in versions for worker in found.workers]
        gpus = await read_gpus() if any(worker.gpu_id is not None for worker in workers) else {}
        memory = await asyncio.to_thread(memory_of, workers)
        described = [describe_version(found, gpus, memory) for found in versions]
        # of `all`, the versions that are ready: TorchServe calls no handler then, and fails for
        # none
        if customized:
            ready = [
                pair
                for pair in zip(described, versions, strict=True)
                if version != "all" or pair[1].ready
            ]
            answers = await asyncio.gather(*(ask_handler(found) for _, found in ready))
            for (one, _), answer in zip(ready, answers, strict=True):
                one.customized_metadata = answer
        return DescribedModels(described)

    async def change(
        self, model: str, version: str | None, wanted: ScaleParameters, given: Iterable[str]
    ) -> tuple[Status, int]:
        """Limits, workers or both; `given` are all parameters' names. With neither, TorchServe
        scales to one worker, and so does this.
        """
        _check_names(given)
        changes = {
            name: value
            for name in (*CHANGEABLE, "slo")
            if (value := getattr(wanted, name)) is not None
        }
        scales = not changes or wanted.min_worker is not None or wanted.max_worker is not None
        if not scales:
            found = self.registry.change(model, version, changes)
            text = ", ".join(f"{name} = {value}" for name, value in changes.items())
            return (
                Status(status=f'Changed for model "{model}" Version: {found.version}: {text}'),
                200,
            )
        least = 1 if wanted.min_worker is None else wanted.min_worker
        try:
            await self.registry.scale(
                model, version, least, wanted.max_worker, wait=wanted.synchronous, changes=changes
            )
        except LoadFailed as error:
            raise _start_failed(model, version, error) from error
        if not wanted.synchronous:
            return PROCESSING
        text = f"Workers scaled to {least} for model: {model}"
        return Status(status=f"{text}, version: {version}" if version else text), 200

    async def set_default(self, model: str, version: str) -> Status:
        self.registry.set_default(model, version)
        await self.registry.state.written()
        return Status(
            status=f'Default version successfully updated for model "{model}" to "{version}"'
        )

    async def unregister(self, model: str, version: str | None) -> Status:
        self.check_model_api("GET", "PUT")
        await self.registry.unregister(model, version)
        return Status(status=f'Model "{model}" unregistered')


async def ask_handler(version: ModelVersion) -> Any:
    """The answer of the handler's `describe_handle`, from a request with the header `describe`:
    JSON where it is JSON, else text.
    """
    if not version.ready:
        text = (
            f'Model "{version.name}" has no worker to serve describe request. Please use scale'
            " workers API to add workers."
        )
        text += f" `tsx models scale {version.name} 1 --version {version.version}` adds one."
        raise NoWorker(text, retry_after=version.retry_after())
    meta = wire.request_meta(new_request_id().decode(), b"", [(b"describe", b"True")])
    job = WaitingJob(meta, b"", time.monotonic())
    version.submit(job)
    answer = await job.done
    try:
        body = await answer.read_all(version.max_response_size)
    except BaseException:
        version.leave(job)  # of a stream, no further part is read
        answer.leave()
        raise
    if answer.status >= 400:
        text = f'The handler of model "{version.name}" could not describe it: {_message(body)}'
        raise PredictionFailed(text, status=max(answer.status, 500))
    try:
        return load_json(body, most_bytes=LARGEST_DESCRIPTION, most_values=MOST_VALUES)
    except ValueError:
        return body.decode(errors="replace")


def _message(body: bytes) -> str:
    """The text of a worker's error JSON, or of whatever else the handler sent."""
    error = read_error(body)
    return str(error["message"]) if error else body[:1000].decode(errors="replace")


def _order(parameters: RegisterParameters) -> RegisterOrder:
    if parameters.runtime is not None and parameters.runtime.lower() not in RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {parameters.runtime}")
    return RegisterOrder(
        url=parameters.url or "",
        model_name=parameters.model_name,
        handler=parameters.handler,
        runtime=parameters.runtime,
        initial_workers=parameters.initial_workers,
        max_workers=parameters.max_workers,
        archive_first=not parameters.replace,
        s3_sse_kms=parameters.s3_sse_kms,
        replaces=parameters.replace,
        slo=parameters.slo,
        **{name: getattr(parameters, name) for name in CHANGEABLE},
    )


def _check_names(given: Iterable[str]) -> None:
    """TorchServe passes over parameters that it does not know, and so must this; but not over a
    slip in one that it knows.
    """
    for name in given:
        if (
            name not in ScaleParameters.model_fields
            and name not in BY_KEY
            and (hint := suggestion(name, ScaleParameters.model_fields))
        ):
            raise BadRequest(f"Parameter {name} is not known{hint}")


def _start_failed(model: str, version: str | None, error: LoadFailed) -> LoadFailed:
    """TorchServe's words, which its clients look for, then the worker's own."""
    words = f"Failed to start workers for model {model} version: {version or 'null'}"
    return type(error)(f"{words}. {error.message}", traceback=error.traceback)
