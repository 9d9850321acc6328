"""The management API of HTTP and gRPC: register, list, describe, scale, set default, unregister."""

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

# Accepted runtimes of archives. All of them run in this server's own Python.
RUNTIMES = ("python", "python3", "python2", "lsp")
MAX_DESCRIPTION_BYTES = 1 << 20  # A handler's larger description is returned as text.
MAX_VALUES = 20_000  # values of a JSON body; as many take about 20 ms
PROCESSING = Status(status="Processing worker updates..."), 202


class ManagementService:
    """The operations; they return a status code of 200, or 202 if the work continues."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def check_model_api(self, *allowed: str) -> None:
        """Check that `enable_model_api` is on.

        Args:
            allowed: The methods that the path allows even if the setting is off.

        Raises:
            MethodNotAllowed: The setting is off.
        """
        if not self.registry.settings.enable_model_api:
            raise MethodNotAllowed(allowed=allowed)

    async def register(self, parameters: RegisterParameters) -> tuple[Status, int]:
        self.check_model_api("GET")
        order = _order(parameters)
        try:
            version = await self.registry.register(order, wait=parameters.synchronous)
        except LoadFailed as error:
            raise _start_failed(error.model, error.version, error) from error
        if version.min_workers and not parameters.synchronous:
            return PROCESSING
        result = f"registered with {version.min_workers} initial workers"
        if version.replaced_version is not None:
            result = (
                f"has taken the place of version {version.replaced_version} with"
                f" {version.min_workers} workers"
            )
        text = f'Model "{version.name}" Version: {version.version} {result}'
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
        """Describe one version, the default one, or all; `customized` asks the handlers too."""
        number = None if version == "all" else version
        try:
            default = self.registry.find(model, number)
        except TsxError as error:
            not_loaded = self.registry.not_loaded_of(model, number).items()
            text = (
                "could not be loaded at the start; the next one tries again, unless it is"
                " unregistered"
            )
            raise type(error)(
                error.message
                + "".join(f"; version {key[1]} {text}: {reason}" for key, reason in not_loaded)
            ) from error
        versions = (
            list(self.registry.models[model].versions.values()) if version == "all" else [default]
        )
        workers = [worker for shown_version in versions for worker in shown_version.workers]
        gpus = await read_gpus() if any(worker.gpu_id is not None for worker in workers) else {}
        memory = await asyncio.to_thread(memory_of, workers)
        described = [describe_version(shown_version, gpus, memory) for shown_version in versions]
        # TorchServe calls no handler for `all`. Versions that are not ready are skipped then.
        if customized:
            ready = [
                pair
                for pair in zip(described, versions, strict=True)
                if version != "all" or pair[1].ready
            ]
            answers = await asyncio.gather(
                *(ask_handler(shown_version) for _, shown_version in ready)
            )
            for (model_description, _), answer in zip(ready, answers, strict=True):
                model_description.customized_metadata = answer
        return DescribedModels(described)

    async def change(
        self, model: str, version: str | None, parameters: ScaleParameters, names: Iterable[str]
    ) -> tuple[Status, int]:
        """Change limits, workers or both; without either, there is one worker, as in TorchServe.

        `names` are the names of all parameters of the request.
        """
        _check_names(names)
        changes = {
            name: value
            for name in (*CHANGEABLE, "slo")
            if (value := getattr(parameters, name)) is not None
        }
        scales = (
            not changes or parameters.min_worker is not None or parameters.max_worker is not None
        )
        if not scales:
            shown_version = self.registry.change(model, version, changes)
            text = ", ".join(f"{name} = {value}" for name, value in changes.items())
            return (
                Status(
                    status=f'Changed for model "{model}" Version: {shown_version.version}: {text}'
                ),
                200,
            )
        min_workers = 1 if parameters.min_worker is None else parameters.min_worker
        try:
            await self.registry.scale(
                model,
                version,
                min_workers,
                parameters.max_worker,
                wait=parameters.synchronous,
                changes=changes,
            )
        except LoadFailed as error:
            raise _start_failed(model, version, error) from error
        if not parameters.synchronous:
            return PROCESSING
        text = f"Workers scaled to {min_workers} for model: {model}"
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
    """Return the result of the handler's `describe_handle`, as JSON if possible, else as text."""
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
        version.leave(job)  # The worker need not send further parts of a stream.
        answer.leave()
        raise
    if answer.status >= 400:
        text = f'The handler of model "{version.name}" could not describe it: {_message(body)}'
        raise PredictionFailed(text, status=max(answer.status, 500))
    try:
        return load_json(body, most_bytes=MAX_DESCRIPTION_BYTES, most_values=MAX_VALUES)
    except ValueError:
        return body.decode(errors="replace")


def _message(body: bytes) -> str:
    """Return the message of a worker's error JSON, or the beginning of another body."""
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


def _check_names(names: Iterable[str]) -> None:
    """Check for misspelt parameters; unknown ones are ignored, as in TorchServe."""
    for name in names:
        if (
            name not in ScaleParameters.model_fields
            and name not in BY_KEY
            and (hint := suggestion(name, ScaleParameters.model_fields))
        ):
            raise BadRequest(f"Parameter {name} is not known{hint}")


def _start_failed(model: str, version: str | None, error: LoadFailed) -> LoadFailed:
    """Return the error with TorchServe's text, which clients expect, before the worker's own."""
    text = f"Failed to start workers for model {model} version: {version or 'null'}"
    return type(error)(f"{text}. {error.message}", traceback=error.traceback)
