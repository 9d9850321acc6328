"""The replica: an actor of Ray Serve with a registry, workers, and routes for its models."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.metrics import Gauge

from tsx_archiver import ArchiveError
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_runtime.api.errors import error_response
from tsx_runtime.api.management.describe import is_given_up
from tsx_runtime.api.messages import (
    Message,
    Scope,
    never,
    request_id_of,
    send_whole,
    with_body,
)
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import InvalidModel, TsxError
from tsx_runtime.http.build import build_apps
from tsx_runtime.metrics.sinks import metric_tasks
from tsx_runtime.plugins.api import MetricsSink, Sample
from tsx_runtime.server.logging_setup import set_up_logging
from tsx_runtime.targets.ray.archives import open_model
from tsx_runtime.targets.ray.config import RayApplication, parse_application
from tsx_runtime.targets.ray.grpc_bridge import GrpcAnswer, GrpcBridge, Metadata, error_answer
from tsx_runtime.targets.ray.replica_settings import read_replica_settings

# time for a model's accepted requests before it is unloaded in favour of another model
UNLOADING_S = 30.0

Messages = list[Message]


class RayMetrics:
    """A metrics sink that passes samples to Ray.

    Prometheus reads them from Ray's nodes as `ray_NAME`, with labels for the application and the
    replica. Every sample becomes a gauge with the total, because Ray's counters and histograms can
    only be incremented.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, tuple[Gauge, tuple[str, ...]]] = {}

    def __call__(self, samples: list[Sample]) -> None:
        for sample in samples:
            if sample.name not in self._gauges:
                # Ray's type annotation wrongly allows only one key.
                keys: Any = tuple(sample.labels)
                self._gauges[sample.name] = (
                    Gauge(sample.name, f"a {sample.kind} of tsx", keys),
                    keys,
                )
            gauge, keys = self._gauges[sample.name]
            gauge.set(sample.value, {key: sample.labels.get(key, "") for key in keys})


class SharedModel:
    """A loaded model in a replica that several models share."""

    def __init__(self, registry: Registry, name: str) -> None:
        self._registry, self._name = registry, name
        # Ray Serve awaits `__del__` to unload the model. It is an attribute, because a method
        # would also run at deletion.
        self.__del__ = self._unload
        self._requests: set[asyncio.Task[Any] | None] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def track_request(self) -> Generator[None, None, None]:
        """Count the current task as a request of the model."""
        task = (
            asyncio.current_task()
        )  # `finally` may run in another task, so the task is stored here.
        self._requests.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._requests.discard(task)
            if not self._requests:
                self._idle.set()

    async def _unload(self) -> None:
        await wait_for_event(self._idle, UNLOADING_S)
        # An endless stream would otherwise prevent other models from being loaded.
        for task in self._requests:
            if task is not None:
                task.cancel()
        await self._registry.unregister(self._name)


class ModelReplica:
    """The deployment of one model, or of several of which a replica has some at a time."""

    # Ray Serve awaits an async constructor.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        """Load the model of `args`, which is a `RayApplication` as JSON.

        Raises:
            SettingError: Arguments or settings are invalid. Loading a model raises other errors.
        """
        application = parse_application(args)
        self._models = {model.name: model for model in application.models}
        if os.environ.get("OMP_NUM_THREADS") == str(max(1, int(application.replica.num_cpus))):
            # Ray sets this to all CPUs of the replica, but the workers must share them.
            del os.environ["OMP_NUM_THREADS"]
        async with contextlib.AsyncExitStack() as resources:
            await self._start(application, resources)
            if application.multiplexed is None:
                await self._register(application.models[0].name)
            self._resources = resources.pop_all()
        self._load_model: Any = None
        if application.multiplexed is not None:
            self._registry.loaded_on_request = list(self._models)

            async def load(name: str) -> SharedModel:
                return await self._register(name)

            self._load_model = serve.multiplexed(
                load, max_num_models_per_replica=application.multiplexed
            )

    async def _start(
        self, application: RayApplication, resources: contextlib.AsyncExitStack
    ) -> None:
        """Start the registry, the inference routes, gRPC and the metrics."""
        state = resources.enter_context(
            tempfile.TemporaryDirectory(prefix="tsx-ray-", dir=temporary_directory())
        )
        settings = read_replica_settings(
            application.settings, application.replica, os.environ, Path(state)
        )
        set_up_logging(settings)
        self._registry = registry = Registry(settings)
        resources.push_async_callback(registry.close)
        for feature in registry.features:
            resources.enter_context(feature.serving())
        registry.warm_up()
        [self._app] = build_apps(registry, settings, [("inference",)])
        counts, system = self._app.counts, self._app.context.system
        self._grpc = GrpcBridge(registry, settings, Path(state), counts)
        resources.push_async_callback(self._grpc.close)
        sinks: dict[str, MetricsSink] = {**registry.plugins.metrics_sinks, "ray": RayMetrics()}
        await resources.enter_async_context(metric_tasks(registry, counts, system, sinks))
        await resources.enter_async_context(registry.running())

    async def http(self, scope: Scope, body: bytes, model: str) -> AsyncGenerator[Messages, None]:
        """Yield the ASGI messages of an answer; a cancellation withdraws the request.

        `model` is loaded first, if several models share the replica.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        task = asyncio.create_task(self._answer(scope, body, model, messages))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        start: Messages = []
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    # The message is sent with the next one, because each object takes a round trip.
                    start = [message]
                else:
                    yield [*start, message]
                    start = []
            task.result()
        finally:
            task.cancel()

    async def grpc(
        self, method: str, metadata: Metadata, request: bytes, model: str
    ) -> AsyncGenerator[GrpcAnswer, None]:
        """Yield the messages of the answer to a call; the last item has the status."""
        try:
            with await self._use_model(model):
                async for answer in self._grpc.call(method, metadata, request):
                    yield answer
        except TsxError as error:
            yield error_answer(error)

    def check_health(self) -> None:
        """Raise an error if the replica must be replaced; Ray Serve calls this."""
        versions = [
            version
            for model in self._registry.models.values()
            for version in model.versions.values()
        ]
        if versions and all(map(is_given_up, versions)):
            names = ", ".join(
                f"{version.name}: {version.last_error or 'its workers kept dying'}"
                for version in versions
            )
            raise RuntimeError(f"no worker is restarted any more. {names}")

    async def __del__(self) -> None:
        """Stop the replica; Ray Serve awaits this after the last accepted request."""
        if hasattr(self, "_resources"):
            self._registry.stop()
            await self._resources.aclose()

    async def _answer(
        self, scope: Scope, body: bytes, model: str, messages: asyncio.Queue[Message | None]
    ) -> None:
        try:
            with await self._use_model(model):
                await self._app(scope, with_body(body, never), messages.put)
        except TsxError as error:
            status, headers, reason = error_response(error, scope["path"])
            await send_whole(messages.put, scope, status, headers, request_id_of(scope), reason)

    async def _use_model(self, model: str) -> contextlib.AbstractContextManager[None]:
        if self._load_model is None or model not in self._models:
            return contextlib.nullcontext()
        shared_model: SharedModel = await self._load_model(model)
        return shared_model.track_request()

    async def _register(self, name: str) -> SharedModel:
        # The model's worker may not have ended in time when it was unloaded.
        if name in self._registry.models:
            return SharedModel(self._registry, name)
        model, settings = self._models[name], self._registry.settings
        try:
            archive = await asyncio.to_thread(open_model, model, settings)
        except ArchiveError as error:
            raise InvalidModel(
                f"model {name} cannot be loaded from {model.source}: {error}"
            ) from error
        order = RegisterOrder(url=model.source, model_name=name, loaded_at_startup=True)
        await self._registry.register_archive(archive, order)
        return SharedModel(self._registry, name)
