"""A replica: an actor of Ray Serve that holds tsx's registry, its workers, and the routes that
answer for its models.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.metrics import Gauge

from tsx_archiver import ArchiveError
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_runtime.api.errors import fault
from tsx_runtime.api.management.describe import is_given_up
from tsx_runtime.api.messages import Message, Scope, request_id_of, send_whole
from tsx_runtime.core.concurrency.events import wait_for_event
from tsx_runtime.core.concurrency.periodic import repeat, running
from tsx_runtime.core.elastic.decision import INTERVAL_S
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import InvalidModel, TsxError
from tsx_runtime.http.app import build_apps
from tsx_runtime.metrics.collection import reader
from tsx_runtime.metrics.gpu import gpu_processes
from tsx_runtime.metrics.torchserve_log import feed_once, metric_tasks
from tsx_runtime.plugins.api import PUSH_INTERVAL_S, Sample
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.targets.image.environment import DEFAULTS
from tsx_runtime.targets.observability.logging_setup import set_up_logging
from tsx_runtime.targets.observability.otlp import tracing
from tsx_runtime.targets.ray.archives import open_model
from tsx_runtime.targets.ray.config import RayApplication, ReplicaResources, parse_application
from tsx_runtime.targets.ray.grpc_bridge import GrpcAnswer, GrpcBridge, Metadata, refused

# seconds in which a model that makes room answers what it has accepted; then it gives up the rest
UNLOADING = 30.0

Messages = list[Message]


class RayMetrics:
    """A metrics sink: Ray's nodes show Prometheus the samples as `ray_NAME`, with the application
    and the replica.

    Ray's own counters and histograms only grow by steps, so all samples are gauges there, with the
    totals.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, tuple[Gauge, tuple[str, ...]]] = {}

    def __call__(self, samples: list[Sample]) -> None:
        for sample in samples:
            if sample.name not in self._gauges:
                keys: Any = tuple(sample.labels)  # of any length, whatever Ray's annotation says
                self._gauges[sample.name] = (
                    Gauge(sample.name, f"a {sample.kind} of tsx", keys),
                    keys,
                )
            gauge, keys = self._gauges[sample.name]
            gauge.set(sample.value, {key: sample.labels.get(key, "") for key in keys})


class SharedModel:
    """A model of a replica that several share."""

    def __init__(self, registry: Registry, name: str) -> None:
        self._registry, self._name = registry, name
        # What Ray Serve awaits to make room; of the class, the interpreter would call it as well.
        self.__del__ = self._unload
        self._requests: set[asyncio.Task[Any] | None] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def in_use(self) -> Generator[None, None, None]:
        task = asyncio.current_task()  # which may not be the one that closes a generator
        self._requests.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._requests.discard(task)
            if not self._requests:
                self._idle.set()

    async def _unload(self) -> None:
        await wait_for_event(self._idle, UNLOADING)
        # A stream without an end must not keep all other models from being loaded.
        for task in self._requests:
            if task is not None:
                task.cancel()
        await self._registry.unregister(self._name)


class ModelReplica:
    """The deployment of one model, or of several of which each replica holds some."""

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]  # which Ray Serve awaits
        """`args`: see `RayApplication`. Raises SettingError, and what loading a model raises."""
        application = parse_application(args)
        self._models = {model.name: model for model in application.models}
        if os.environ.get("OMP_NUM_THREADS") == str(max(1, int(application.replica.num_cpus))):
            del os.environ[
                "OMP_NUM_THREADS"
            ]  # Ray's: all CPUs of the replica for each worker, which are to share them
        async with contextlib.AsyncExitStack() as held:
            await self._start(application, held)
            if application.multiplexed is None:
                await self._register(application.models[0].name)
            self._held = held.pop_all()
        self._load: Any = None
        if application.multiplexed is not None:
            self._registry.loaded_on_request = list(self._models)

            async def load(name: str) -> SharedModel:
                return await self._register(name)

            self._load = serve.multiplexed(load, max_num_models_per_replica=application.multiplexed)

    async def _start(self, application: RayApplication, held: contextlib.AsyncExitStack) -> None:
        """Of what `tsx serve` has: the registry, the inference routes, gRPC and the metrics."""
        state = held.enter_context(
            tempfile.TemporaryDirectory(prefix="tsx-ray-", dir=temporary_directory())
        )
        settings = replica_settings(
            application.settings, application.replica, os.environ, Path(state)
        )
        set_up_logging(settings)
        self._registry = registry = Registry(settings, gpu_processes=gpu_processes)
        held.push_async_callback(registry.close)
        registry.tracer = held.enter_context(tracing(settings, os.environ))
        registry.warm_up()
        [self._app] = build_apps(registry, settings, [("inference",)])
        counts, system = self._app.counts, self._app.system
        self._grpc = GrpcBridge(registry, settings, Path(state), counts)
        held.push_async_callback(self._grpc.close)
        await held.enter_async_context(metric_tasks(registry, counts, system, settings))
        pushing = partial(feed_once, "ray", RayMetrics(), reader(registry, counts, system))
        works = (
            repeat(1.0, registry.cores.share),
            repeat(INTERVAL_S, registry.elastic.adjust),
            repeat(PUSH_INTERVAL_S, pushing),
        )
        await held.enter_async_context(
            running("cores are not shared again, or Ray gets no metrics,", *works)
        )

    async def http(self, scope: Scope, body: bytes, model: str) -> AsyncGenerator[Messages, None]:
        """The messages of the answer, as ASGI has them.

        Cancelled, it gives the request up. `model`: which to load, where several share.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        answering = asyncio.create_task(self._answer(scope, body, model, sent))
        answering.add_done_callback(lambda _: sent.put_nowait(None))
        start: Messages = []
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    start = [message]  # in one object with what comes next: each costs a round trip
                else:
                    yield [*start, message]
                    start = []
            answering.result()
        finally:
            answering.cancel()

    async def grpc(
        self, method: str, metadata: Metadata, request: bytes, model: str
    ) -> AsyncGenerator[GrpcAnswer, None]:
        """The messages of the answer to a call, the last one with its status."""
        try:
            with await self._loaded(model):
                async for answer in self._grpc.call(method, metadata, request):
                    yield answer
        except TsxError as error:
            yield refused(error)

    def check_health(self) -> None:
        """Ray Serve replaces a replica that raises."""
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
        """Ray Serve awaits it once every accepted request is answered."""
        if hasattr(self, "_held"):
            self._registry.stop()
            await self._held.aclose()

    async def _answer(
        self, scope: Scope, body: bytes, model: str, sent: asyncio.Queue[Message | None]
    ) -> None:
        rest = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if rest:
                return rest.pop()
            return await asyncio.Future()  # a client that leaves cancels the call

        try:
            with await self._loaded(model):
                await self._app(scope, receive, sent.put)
        except TsxError as error:
            status, headers, reason = fault(error, scope["path"])
            await send_whole(sent.put, scope, status, headers, request_id_of(scope), reason)

    async def _loaded(self, model: str) -> contextlib.AbstractContextManager[None]:
        if self._load is None or model not in self._models:
            return contextlib.nullcontext()
        loaded: SharedModel = await self._load(model)
        return loaded.in_use()

    async def _register(self, name: str) -> SharedModel:
        if name in self._registry.models:  # it was to make room, and its worker did not end in time
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


def replica_settings(
    given: Mapping[str, Any], replica: ReplicaResources, env: Mapping[str, str], state: Path
) -> Settings:
    """The application's settings, over the node's TSX_* variables, over what Ray has given the
    replica. Raises SettingError.
    """
    own: dict[str, Any] = {
        **DEFAULTS,
        "cpus": max(1, math.ceil(replica.num_cpus)),
        "state_dir": str(state),
    }
    if not replica.num_gpus:
        own["number_of_gpu"] = 0  # otherwise the GPUs that Ray has named in CUDA_VISIBLE_DEVICES
    _, origins = load_settings(given, env, None)
    missing = {name: value for name, value in own.items() if origins[name] == "default"}
    return load_settings({**missing, **given}, env, None)[0]
